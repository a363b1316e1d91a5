"""`make test` runs every check also after one failed, and sums up."""

from __future__ import annotations

import pytest

from scripts import check, run_tests

PASSES = ("platform",)
FAILS = ("timeit", "--no-such-option")


@pytest.fixture
def _checks(monkeypatch):
    monkeypatch.setattr(check, "CHECKS", {"first": FAILS, "second": PASSES, "third": FAILS})


@pytest.mark.usefixtures("_checks")
def test_all_checks_run_and_failures_are_named(capfd):
    assert check.main([]) == 1
    summary = capfd.readouterr().out.split("=" * 78)[-1]
    assert sorted(line.split()[0] for line in summary.splitlines() if " s  " in line) == ["first", "second", "third"]
    assert "FAILED: first, third" in summary
    assert "FAILED, exit status 2" in summary


@pytest.mark.usefixtures("_checks")
def test_one_check_alone(capfd):
    assert check.main(["second"]) == 0
    assert "all passed" in capfd.readouterr().out


def test_an_unknown_check_is_refused(capsys):
    assert check.main(["mipy"]) == 2
    assert "check must be one of tests-engine, ruff, " in capsys.readouterr().err


def test_an_interruption_ends_the_checks(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "CHECKS", {"first": PASSES, "second": PASSES, "third": PASSES})
    monkeypatch.setattr(check.subprocess.Popen, "poll", interrupted)
    assert check.main([]) == 130
    summary = capsys.readouterr().out.split("=" * 78)[-1]
    assert summary.count("interrupted") == 2
    assert "third" not in summary


def test_the_output_of_every_check_is_shown_whole(monkeypatch, capfd):
    monkeypatch.setattr(check, "CHECKS", {"first": PASSES, "second": ("calendar", "2020", "4"), "third": PASSES})
    assert check.main([]) == 0
    found = capfd.readouterr().out
    assert found.count("Linux") >= 2
    assert "April 2020" in found


def test_every_tool_is_checked():
    commands = [" ".join(command) for command in check.CHECKS.values()]
    for wanted in (
        "ruff check",
        "ruff format --check",
        "mypy",
        "snakefmt --check",
        "snakemake --lint",
        "scripts.check_wheel",
        "scripts.run_tests engine",
        "scripts.run_tests suite",
        "scripts.check_native",
    ):
        assert any(command.startswith(wanted) for command in commands)


def test_each_folder_of_tests_runs_in_one_of_two_processes():
    first, second = run_tests.halves().values()
    folders = {path.parent.relative_to(check.ROOT).parts[1] for path in (check.ROOT / "tests").glob("**/test_*.py")}
    assert sorted(first + second) == sorted(f"tests/{name}" for name in folders)
    assert first
    assert second
