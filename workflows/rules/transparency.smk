# Training on real images with and without the pipeline: losses, accuracies, gradients, running statistics.


rule transparency:
    """Tables, verdicts and figures of transparency on real data."""
    input:
        expand(
            "results/transparency{table}.csv",
            table=["", "_steps", "_layers", "_verdict", "_configurations"],
        ),
        PLAN.pictures("transparency"),


rule run_transparency:
    """Train every way to run one model, side by side, seed by seed."""
    output:
        ensure(TRANSPARENCY_PATTERN, non_empty=True),
    log:
        "logs/run_transparency/{workload}.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        changes=named_by("workload", PLAN.training_options),
        sources=source_digest("gpipe_bench.bench.transparency"),
        torch=version("torch"),
    shell:
        "python -m gpipe_bench transparency run {wildcards.workload} {params.changes:q}"
        " --key {params.sources:q}-{params.torch:q} --out {output:q} > {log:q} 2>&1"


rule collect_transparency:
    """Gather runs into rows, steps, layers and verdicts."""
    input:
        PLAN.transparency,
    output:
        rows=ensure("results/transparency.csv", non_empty=True),
        steps=ensure("results/transparency_steps.csv", non_empty=True),
        layers=ensure("results/transparency_layers.csv", non_empty=True),
        verdict=ensure("results/transparency_verdict.csv", non_empty=True),
        configurations=ensure("results/transparency_configurations.csv", non_empty=True),
    log:
        "logs/collect_transparency.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        margin=PLAN.margin,
        loss_margin=PLAN.loss_margin,
        sources=source_digest("gpipe_bench.bench.transparency.run"),
    shell:
        "python -m gpipe_bench transparency collect {input:q} --out {output.rows:q} --margin {params.margin:q}"
        " --loss-margin {params.loss_margin:q} > {log:q} 2>&1"
