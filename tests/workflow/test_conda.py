"""With `--sdm conda`, the Python of a rule's environment runs its job.

The conda here is a shell script: an environment that it makes has a Python that says it was used, and runs this one.
"""

from __future__ import annotations

import os
import shutil
import sys

import pytest

CONDA = """\
#!/usr/bin/env bash
case "$*" in
  "info --json") echo '{{"conda_prefix": "{base}", "platform": "linux-64"}}' ;;
  --version) echo "conda 25.1.0" ;;
  "clean "*) ;;
  "config --get channel_priority --json") echo '{{"get": {{"channel_priority": "strict"}}}}' ;;
  "env create "*)
    mkdir -p "${{@: -1}}/bin"
    printf '#!/bin/sh\\necho used >> {base}/used\\nexec {python} "$@"\\n' > "${{@: -1}}/bin/python"
    chmod +x "${{@: -1}}/bin/python" ;;
  *) echo "unexpected: conda $*" >&2; exit 1 ;;
esac
"""
TARGET = "results/simulated/published-ablation.json"


@pytest.fixture
def conda(tmp_path_factory):
    """The folder of a conda: bin/ has the command, a file ``used`` says that the Python of an environment ran."""
    base = tmp_path_factory.mktemp("conda")
    (base / "bin").mkdir()
    (base / "bin" / "conda").write_text(CONDA.format(base=base, python=sys.executable))
    (base / "bin" / "conda").chmod(0o755)
    (base / "bin" / "activate").write_text('export PATH="$1/bin:$PATH"\n')
    return base


@pytest.mark.skipif(shutil.which("bash") is None, reason="Snakemake runs jobs in bash")
@pytest.mark.parametrize(
    ("options", "used"), [pytest.param((), False, marks=pytest.mark.slow), (("--sdm", "conda"), True)]
)
def test_the_environment_of_a_rule_is_used_if_asked_for(snakemake, conda, place, options, used):
    done = snakemake(TARGET, *options, PATH=f"{conda}/bin:{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout
    assert (conda / "used").exists() == used
    assert (place / TARGET).exists()
