# From the configuration to tables, figures and traces: snakemake --cores 1 ablation
# What is run stands in config/, how in workflows/rules/, where in profiles/; functions live in the package.
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

from gpipe_bench.bench.cells import CELL_PATTERN, RAW_PATTERN
from gpipe_bench.bench.simulated_cells import SIMULATED_PATTERN
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
    # As on the command line: a line per problem and exit status 2, not Snakemake's frame around them and its status 1.
    for problem in getattr(error, "problems", None) or [str(error)]:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(2)

# The Python that runs Snakemake runs the jobs, whatever stands first in PATH.
shell.prefix(f'PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"; ')


wildcard_constraints:
    cell=CELL_PATTERN,
    repeat=r"\d+",
    experiment="|".join(PLAN.runs),
    variant=r"[a-z]+(-[a-z]+)*",


include: "workflows/rules/cells.smk"
include: "workflows/rules/ablation.smk"
include: "workflows/rules/predictions.smk"


onsuccess:
    if "ablation" in workflow.dag_settings.targets:
        shell("python -m gpipe_bench table --rows results/ablation.csv")
