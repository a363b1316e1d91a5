# From the configuration to tables, figures and traces: snakemake --cores 1 ablation
# What is run stands in config/, how in workflows/rules/, where in profiles/; functions live in the package.
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

from snakemake.exceptions import WorkflowError

from gpipe_bench.bench.cells import CELL_PATTERN, RAW_PATTERN
from gpipe_bench.bench.sources import source_digest
from gpipe_bench.bench.workflow import make_plan
from gpipe_bench.errors import GpipeBenchError


configfile: "config/config.yaml"


report: "workflows/report/suite.rst"


# Snakemake lists the files of --configfile first, and merges them last.
FILES = sorted(workflow.configfiles, key=workflow.overwrite_configfiles.count)

try:
    PLAN = make_plan(config, FILES)
except GpipeBenchError as error:
    raise WorkflowError("\n".join(getattr(error, "problems", None) or [str(error)])) from None

# The Python that runs Snakemake runs the jobs, whatever stands first in PATH.
shell.prefix(f'PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"; ')


wildcard_constraints:
    cell=CELL_PATTERN,
    repeat=r"\d+",
    experiment="|".join(PLAN.runs),
    variant=r"[a-z]+(-[a-z]+)*",


include: "workflows/rules/cells.smk"
include: "workflows/rules/ablation.smk"


onsuccess:
    if "ablation" in workflow.dag_settings.targets:
        shell("python -m gpipe_bench table --rows results/ablation.csv")
