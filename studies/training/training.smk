# Training on real images with and without the pipeline: losses, accuracies, gradients, running statistics.
import json
from importlib.metadata import version

from gpipe_bench.suite.storage.sources import source_digest
from gpipe_bench.data import REFERENCE_FOLDER

MACHINES = sorted(glob_wildcards(f"{REFERENCE_FOLDER}/measured/{{machine}}/transparency.csv").machine)
SETTINGS = json.dumps(config, sort_keys=True)


wildcard_constraints:
    model="amoebanet-d|unet",
    workload="amoebanet|unet",


rule transparency:
    """Tables, verdicts and figures of transparency on real data."""
    input:
        expand("results/transparency{table}.csv", table=["", "_steps", "_layers", "_verdict", "_configurations"]),
        expand(
            "figures/transparency_{model}_measured.{suffix}",
            model=["amoebanet-d", "unet"],
            suffix=["svg", "pdf", "png"],
        ),


rule run_transparency:
    """Train every way to run one model, seed by seed."""
    output:
        ensure("results/transparency/{workload}.json", non_empty=True),
    log:
        "logs/run_transparency/{workload}.log",
    conda:
        "../../workflow/envs/gpipe_bench.yaml"
    params:
        settings=SETTINGS,
        sources=source_digest("studies.training.train", "studies.training.tables"),
        torch=version("torch"),
    shell:
        "python -m studies.training train {wildcards.workload} --settings {params.settings:q} --out {output:q}"
        " > {log:q} 2>&1"


rule collect_transparency:
    """Gather runs into rows, steps, layers and verdicts."""
    input:
        expand("results/transparency/{workload}.json", workload=["amoebanet", "unet"]),
    output:
        rows=ensure("results/transparency.csv", non_empty=True),
        steps=ensure("results/transparency_steps.csv", non_empty=True),
        layers=ensure("results/transparency_layers.csv", non_empty=True),
        verdict=ensure("results/transparency_verdict.csv", non_empty=True),
        configurations=ensure("results/transparency_configurations.csv", non_empty=True),
    log:
        "logs/collect_transparency.log",
    conda:
        "../../workflow/envs/gpipe_bench.yaml"
    params:
        settings=SETTINGS,
        sources=source_digest("studies.training.tables"),
    shell:
        "python -m studies.training collect {input:q} --settings {params.settings:q} --out {output.rows:q}"
        " > {log:q} 2>&1"


rule figure_transparency:
    """Draw gradient differences, and losses and accuracies beside the plain model."""
    input:
        rows="results/transparency.csv",
        steps="results/transparency_steps.csv",
        layers="results/transparency_layers.csv",
        verdict="results/transparency_verdict.csv",
    output:
        ensure(multiext("figures/transparency_{model}_measured", ".svg", ".pdf", ".png"), non_empty=True),
    log:
        "logs/figure_transparency/{model}.log",
    conda:
        "../../workflow/envs/gpipe_bench.yaml"
    params:
        stem=subpath(output[0], strip_suffix=".svg"),
        sources=source_digest("studies.training.figure"),
    shell:
        "python -m studies.training figure --rows {input.rows:q} --model {wildcards.model} --out {params.stem:q}"
        " > {log:q} 2>&1"


rule redraw_transparency:
    """Draw the figures of the committed tables."""
    input:
        expand(
            "{folder}/measured/{machine}/transparency{table}.csv",
            folder=REFERENCE_FOLDER,
            machine=MACHINES,
            table=["", "_steps", "_layers", "_verdict"],
        ),
    output:
        ensure(
            expand(
                "figures/redrawn/measured-{machine}/transparency_{model}.{suffix}",
                machine=MACHINES,
                model=["amoebanet-d", "unet"],
                suffix=["svg", "pdf", "png"],
            ),
            non_empty=True,
        ),
    log:
        "logs/redraw_transparency.log",
    conda:
        "../../workflow/envs/gpipe_bench.yaml"
    params:
        folder=subpath(output[0], ancestor=2),
        sources=source_digest("studies.training.figure"),
    shell:
        "python -m studies.training reference --out {params.folder:q} > {log:q} 2>&1"
