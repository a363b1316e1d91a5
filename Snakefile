# From the configuration to tables, figures and traces: snakemake --cores 1 ablation
# What is run stands in config/, how in workflows/rules/, where in profiles/; functions live in the package.
import os
import sys
from importlib.metadata import version
from pathlib import Path

# The package lies beside this file, whatever folder the workflow runs in; jobs find it there, too.
HERE = str(workflow.current_basedir.get_path_or_uri(secret_free=True))
SEARCHED = "PYTHONPATH"
PLACES = os.environ.get(SEARCHED, "").split(os.pathsep)
if Path(HERE, "gpipe_bench").is_dir() and HERE not in PLACES:
    sys.path.insert(0, HERE)
    os.environ[SEARCHED] = os.pathsep.join(filter(None, [HERE, *PLACES]))

from gpipe_bench.bench.spec.cells import CELL_PATTERN, RAW_PATTERN
from gpipe_bench.bench.storage.sources import source_digest
from gpipe_bench.bench.experiments.plan import (
    EMULATED_PATTERN,
    GROUP_PATTERN,
    SIMULATED_PATTERN,
    TABLE_PATTERN,
    advice_models,
    advice_settings,
    make_plan,
    named_by,
)
from gpipe_bench.bench.experiments.config import base_config
from gpipe_bench.data import REFERENCE_FOLDER, TOLERANCES
from gpipe_bench.errors import GpipeBenchError
from gpipe_bench.util.processes import PROCESSES, usable_processes
from snakemake.utils import min_version
from studies.peers.settings import read_settings as race_settings
from studies.training.settings import read_settings as training_settings

min_version("9.14")


configfile: str(base_config())


# Snakemake lists the files of --configfile first, and merges them last.
FILES = sorted(workflow.configfiles, key=workflow.overwrite_configfiles.count)

try:
    PLAN = make_plan(config, FILES)
    race_settings(config.get("peers", {}))
    training_settings(config.get("transparency", {}))
except GpipeBenchError as error:
    # As on the command line: a line per problem and exit status 2, not Snakemake's frame around them and its status 1.
    for problem in getattr(error, "problems", None) or [str(error)]:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(2)

# Beside Snakemake's own notes, where two configurations keep two files.
CELLS = str(PLAN.write_cells(Path(".snakemake/gpipe_bench")))

# Jobs by the names of their files, which are wildcards of rules.
TIMED, VIRTUAL = PLAN.named("measured"), PLAN.named("simulated", "emulated")

# The Python that runs Snakemake runs the jobs, whatever stands first in PATH; with `--sdm conda` the environment of a
# rule comes before it. (A shell.prefix would stand after the activation of that environment, and hide its Python.)
# A job that is not timed may use its share of all processors, for results that are the same with one.
os.environ.update(
    {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        PROCESSES: str(usable_processes(workflow.resource_settings.cores or 1)),
    }
)


wildcard_constraints:
    advice="|".join(PLAN.advice),
    cell=CELL_PATTERN,
    evidence="emulated|simulated",
    experiment="|".join(PLAN.tables),
    figure="|".join(PLAN.figures),
    group=rf"(?!published-){GROUP_PATTERN}",
    table=r"[a-z0-9]+(-[a-z0-9]+)*",
    variant=r"[a-z]+(-[a-z]+)*",


module training:
    snakefile:
        "studies/training/training.smk"
    config:
        config.get("transparency", {})


use rule * from training


module peers:
    snakefile:
        "studies/peers/peers.smk"
    config:
        {"settings": config.get("peers", {}), "device": PLAN.machine.device, "gpus": PLAN.gpus}


use rule * from peers


include: "workflows/rules/cells.smk"
include: "workflows/rules/ablation.smk"
include: "workflows/rules/predictions.smk"
include: "workflows/rules/tables.smk"
include: "workflows/rules/sweep.smk"
include: "workflows/rules/schedules.smk"
include: "workflows/rules/residuals.smk"
include: "workflows/rules/advice.smk"
include: "workflows/rules/figures.smk"
include: "workflows/rules/verify.smk"
include: "workflows/rules/report.smk"


rule all:
    """Every experiment, its figures, the reference figures and the check of the results."""
    input:
        rules.ablation.input,
        rules.speed.input,
        rules.memory.input,
        rules.sweep.input,
        rules.advice.input,
        rules.timeline.input,
        rules.transparency.input,
        rules.figures.input,
        rules.verify.input,
        rules.report.output,


# Seconds each: on a cluster they run beside Snakemake, not as jobs.
localrules:
    collect,
    trace,
    trace_virtual,


onsuccess:
    # `make ablation` prints it also when nothing was to be done.
    if "ablation" in workflow.dag_settings.targets and "TABLE_FOLLOWS" not in os.environ:
        shell("python -m gpipe_bench table --brief --rows results/ablation.csv")
