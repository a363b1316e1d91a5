"""Wrong settings stop the workflow before anything runs, all of them named; right ones start it without PyTorch."""

from __future__ import annotations

import re

WRONG = """\
experimnets: {}
experiments:
  ablation:
    emulated:
      chunks: 0
      balance: 8-9-1
    cpu:
      modle: unet
"""


def made(place):
    """What a run leaves; the reference results were there before."""
    results = [path.name for path in (place / "results").iterdir() if path.name != "reference"]
    return results + [name for name in ("figures", "logs") if (place / name).exists()]


def test_all_problems_are_named_at_once(place, snakemake):
    (place / "wrong.yaml").write_text(WRONG)
    done = snakemake("ablation", "--configfile", "wrong.yaml")
    assert done.returncode == 2
    assert "Traceback" not in done.stdout
    lines = [line for line in done.stdout.splitlines() if "wrong.yaml: " in line]
    for key, got in (("experimnets", "experiments"), ("chunks", "0"), ("balance", "8-9-1"), ("modle", "model")):
        assert any(key in line and got in line for line in lines), done.stdout
    assert made(place) == []


def test_a_wrong_setting_of_the_command_line_is_named(place, snakemake):
    done = snakemake("ablation", "--config", "device=tpu")
    assert done.returncode == 2
    assert "device must be one of auto, cpu, cuda, got 'tpu'" in done.stdout
    assert made(place) == []


def test_a_key_that_is_no_text_is_refused(place, snakemake):
    (place / "wrong.yaml").write_text("experiments: {mine: {2020-01-01: 4}}")
    done = snakemake("--dry-run", "ablation", "--configfile", "wrong.yaml")
    assert done.returncode == 2
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("error: "))
    assert re.search(r"wrong\.yaml: line 1, column \d+: key \S+ must be text", line)
    assert "Traceback" not in done.stdout


def test_settings_of_a_file_replace_the_defaults_and_nothing_heavy_is_imported(place, snakemake, tmp_path_factory):
    """A dry run takes less than two seconds because of that."""
    shadow = tmp_path_factory.mktemp("shadow")
    # Not pandas: Snakemake loads every executor that is installed, and that for Slurm imports it.
    for name in ("torch", "matplotlib", "scipy"):
        (shadow / f"{name}.py").write_text(f"raise ImportError('{name} must not be imported here')")
    done = snakemake("--dry-run", "ablation", "--configfile", "tiny.yaml", PYTHONPATH=str(shadow))
    assert done.returncode == 0, done.stdout
    assert made(place) == []
    assert re.search(r"^run_cell +1$", done.stdout, re.MULTILINE)
    # With the autograd engine of the published runs, and with that of today.
    assert re.search(r"^simulate +2$", done.stdout, re.MULTILINE)
    assert re.search(r"^emulate +1$", done.stdout, re.MULTILINE)
