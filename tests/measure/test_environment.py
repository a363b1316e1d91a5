"""Facts of machine and software: columns of a row, and never an exception."""

import subprocess
from datetime import datetime

import pytest
import torch

from gpipe_bench.measure import environment
from gpipe_bench.measure.environment import environment_facts
from gpipe_bench.measure.host import checkout, host_facts, machine_slug
from gpipe_bench.rows import Row


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


def test_facts_are_columns_of_a_row():
    facts = environment_facts(["cpu", "cpu"])
    row = Row(**facts)
    assert row.device.startswith("cpu ")
    assert row.device_count == 1
    assert row.torch == torch.__version__
    assert row.python.count(".") == 2
    assert datetime.fromisoformat(row.started_utc).utcoffset().total_seconds() == 0


def test_facts_are_complete():
    expected = {"device", "device_count", "profile", "torch", "cuda", "driver", "python"}
    expected |= {"commit", "dirty", "started_utc"}
    assert set(environment_facts(["cpu"])) == expected


def test_distinct_devices_are_counted():
    assert environment_facts(["cuda:0", "cuda:0", "cuda:1"])["device_count"] == 2


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


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("Tesla P40", "4x-tesla-p40"),
        ("NVIDIA H100 80GB HBM3", "4x-nvidia-h100-80gb-hbm3"),
        ("Intel(R) Xeon(R) CPU E5-2650 v4 @ 2.20GHz", "4x-intel-xeon-e5-2650-v4"),
        ("AMD EPYC 7B13", "4x-amd-epyc-7b13"),
        ("", "4x-device"),
    ],
)
def test_the_machine_s_name_is_fit_for_a_folder(name, slug):
    assert machine_slug(name, 4) == slug


def test_without_pytorch_the_facts_of_the_host_are_the_same():
    facts, expected = host_facts(), environment_facts(["cpu"])
    assert {**facts, "started_utc": ""} == {name: expected[name] for name in facts} | {"started_utc": ""}


def test_a_device_that_this_build_cannot_reach_is_named_by_its_type(monkeypatch):
    def refuse(device):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "get_device_name", refuse)
    assert environment.device_name(torch.device("cuda", 0)) == "cuda"
