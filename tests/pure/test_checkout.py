"""Commit and state of the checkout that runs, whatever git says."""

import subprocess

import pytest

from gpipe_bench.measure.host import checkout


def git(folder, *arguments):
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A checkout with the folder ``package``, clean."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text("one = 1\n")
    (tmp_path / ".gitignore").write_text("ignored/\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def test_a_clean_checkout(repository):
    assert checkout(repository / "package") == (git(repository, "rev-parse", "HEAD"), False)


def test_an_uncommitted_change_makes_it_dirty(repository):
    (repository / "package" / "module.py").write_text("one = 2\n")
    assert checkout(repository / "package")[1] is True


def test_a_new_source_makes_it_dirty_other_new_files_do_not(repository):
    (repository / "ignored").mkdir()
    (repository / "ignored" / "result.csv").write_text("")
    (repository / "my.yaml").write_text("")
    assert checkout(repository / "package")[1] is False
    (repository / "package" / "new.py").write_text("")
    assert checkout(repository / "package")[1] is True


def test_a_copy_installed_inside_another_checkout_has_no_commit(repository):
    (repository / "ignored" / "package").mkdir(parents=True)
    (repository / "ignored" / "package" / "module.py").write_text("")
    assert checkout(repository / "ignored" / "package") == ("", None)


def test_outside_a_checkout_there_is_no_commit(tmp_path):
    assert checkout(tmp_path) == ("", None)


def test_a_folder_that_is_not_there_has_no_commit(tmp_path):
    assert checkout(tmp_path / "nowhere") == ("", None)


def test_without_git_there_is_no_commit(repository, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert checkout(repository / "package") == ("", None)


def test_git_variables_of_a_hook_do_not_lead_astray(repository, monkeypatch):
    commit = git(repository, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "elsewhere")
    assert checkout(repository / "package") == (commit, False)
