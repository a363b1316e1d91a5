# From cells to tables: each run in a process of its own, then one CSV per experiment.


rule run_cell:
    """Measure one repeat of one cell in a fresh process; out of memory and unsupported are results too."""
    output:
        ensure(RAW_PATTERN, non_empty=True),
    log:
        "logs/run_cell/{cell}/{repeat}.log",
    conda:
        "../../environment.yml"
    resources:
        timing_slot=1,
    params:
        arguments=lookup(dpath="{cell}", within=PLAN.arguments),
        sources=source_digest("gpipe_bench.bench.run"),
        torch=version("torch"),
    shell:
        "python -m gpipe_bench run {params.arguments:q} --repeat {wildcards.repeat} --out {output:q} > {log:q} 2>&1"


rule collect:
    """Gather the raw results of an experiment into one table of rows and its companions."""
    input:
        lookup(dpath="{experiment}", within=PLAN.raw),
    output:
        rows=ensure("results/{experiment}.csv", non_empty=True),
        devices=ensure("results/{experiment}_devices.csv", non_empty=True),
        steps=ensure("results/{experiment}_steps.csv", non_empty=True),
        events=ensure("results/{experiment}_events.csv", non_empty=True),
    log:
        "logs/collect/{experiment}.log",
    conda:
        "../../environment.yml"
    params:
        sources=source_digest("gpipe_bench.bench.collect"),
    shell:
        "python -m gpipe_bench collect --experiment {wildcards.experiment} --out {output.rows:q} {input:q} > {log:q} 2>&1"


rule trace:
    """Write the measured timeline of one variant as a Chrome trace, which Perfetto opens."""
    input:
        events="results/{experiment}_events.csv",
    output:
        ensure("results/traces/{experiment}/{variant}.json", non_empty=True),
    log:
        "logs/trace/{experiment}/{variant}.log",
    conda:
        "../../environment.yml"
    params:
        sources=source_digest("gpipe_bench.bench.trace"),
    shell:
        "python -m gpipe_bench trace --events {input.events:q} --variant {wildcards.variant} --out {output:q} > {log:q} 2>&1"
