# From cells to tables: a job per cell, or for cells that take turns, each repeat in a fresh process; then one CSV per
# experiment.
# All cells stand in one file, from which jobs take theirs by key. A key changes with any setting of its cell, so that a
# job runs again where one of its cells has changed. The file is a resource, which is no reason to run a job again.


rule run_cell:
    """Measure the repeats of one cell, or of several in turns, each in a fresh process; a failure is a result too."""
    output:
        ensure(RAW_PATTERN, non_empty=True),
    log:
        "logs/run_cell/{cell}.log",
    conda:
        "../envs/gpipe_bench.yaml"
    resources:
        cells=CELLS,
        timing_slot=1,
        gpu=of_wildcard("cell", TIMED, "accelerators"),
        nodes=of_wildcard("cell", TIMED, "hosts"),
        tasks=of_wildcard("cell", TIMED, "hosts"),
    params:
        only=of_wildcard("cell", TIMED, "only"),
        repeats=of_wildcard("cell", TIMED, "repeats"),
        sources=source_digest("gpipe_bench.suite.running.run"),
        torch=version("torch"),
    shell:
        "python -m gpipe_bench run --cells {resources.cells:q} --only {params.only:q} --repeats {params.repeats:q}"
        " --turns --out {output:q} > {log:q} 2>&1"


rule simulate:
    """Simulate cells of one model in one process, in virtual time on other hardware, for all experiments that ask."""
    input:
        profile=of_wildcard("group", VIRTUAL, "profile"),
    output:
        ensure(SIMULATED_PATTERN, non_empty=True),
    log:
        "logs/simulate/{group}.log",
    conda:
        "../envs/gpipe_bench.yaml"
    resources:
        cells=CELLS,
    params:
        only=of_wildcard("group", VIRTUAL, "only"),
        timelines=of_wildcard("group", VIRTUAL, "kept"),
        sources=source_digest("gpipe_bench.suite.running.simulated", "gpipe_bench.simulator"),
        torch=version("torch"),
    shell:
        "python -m gpipe_bench simulate --cells {resources.cells:q} --only {params.only:q} --timelines {params.timelines:q}"
        " --out {output:q} > {log:q} 2>&1"


rule emulate:
    """Run cells of one model on virtual devices, in virtual time, in one process; skipped without a C++ compiler."""
    input:
        profile=of_wildcard("group", VIRTUAL, "profile"),
    output:
        ensure(EMULATED_PATTERN, non_empty=True),
    log:
        "logs/emulate/{group}.log",
    conda:
        "../envs/gpipe_bench.yaml"
    resources:
        cells=CELLS,
    params:
        only=of_wildcard("group", VIRTUAL, "only"),
        timelines=of_wildcard("group", VIRTUAL, "kept"),
        sources=source_digest("gpipe_bench.suite.running.emulated", "gpipe_bench.emulator", "gpipe_bench.simulator"),
        torch=version("torch"),
    shell:
        "python -m gpipe_bench emulate --cells {resources.cells:q} --only {params.only:q} --timelines {params.timelines:q}"
        " --out {output:q} > {log:q} 2>&1"


rule simulate_published:
    """Simulate the rows of a published table with the settings that they were run with."""
    input:
        REFERENCE_FOLDER / "published" / "published.csv",
        REFERENCE_FOLDER / "published" / "settings.csv",
    output:
        ensure(TABLE_PATTERN, non_empty=True),
    log:
        "logs/simulate_published/{table}.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        sources=source_digest("gpipe_bench.suite.published.simulations", "gpipe_bench.simulator"),
        torch=version("torch"),
    shell:
        "python -m gpipe_bench simulate-published {wildcards.table} --out {output:q} > {log:q} 2>&1"


rule collect:
    """Gather the raw results of an experiment, and published values of its settings, into one table and companions."""
    input:
        raw=of_wildcard("experiment", PLAN.tables, "raw"),
        published=REFERENCE_FOLDER / "published" / "published.csv",
        settings=REFERENCE_FOLDER / "published" / "settings.csv",
    output:
        rows=ensure("results/{experiment}.csv", non_empty=True),
        devices=ensure("results/{experiment}_devices.csv", non_empty=True),
        steps=ensure("results/{experiment}_steps.csv", non_empty=True),
        events=ensure("results/{experiment}_events.csv", non_empty=True),
        configurations=ensure("results/{experiment}_configurations.csv", non_empty=True),
    log:
        "logs/collect/{experiment}.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        cells=of_wildcard("experiment", PLAN.tables, "digests"),
        published=subpath(input.published, parent=True),
        sources=source_digest("gpipe_bench.suite.evaluation.collect"),
    shell:
        "python -m gpipe_bench collect --experiment {wildcards.experiment} --out {output.rows:q} {input.raw:q}"
        " --cells {params.cells:q} --published {params.published:q} > {log:q} 2>&1"


rule trace:
    """Write the measured timeline of one variant as a Chrome trace, which Perfetto opens."""
    input:
        events="results/{experiment}_events.csv",
    output:
        ensure("results/traces/{experiment}/{variant}.json", non_empty=True),
    log:
        "logs/trace/{experiment}/{variant}.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        sources=source_digest("gpipe_bench.results.timeline"),
    shell:
        "python -m gpipe_bench trace --events {input.events:q} --variant {wildcards.variant} --out {output:q} > {log:q} 2>&1"


rule trace_virtual:
    """Write the simulated or emulated timeline of one variant as a Chrome trace, which Perfetto opens."""
    input:
        events="results/{experiment}_events.csv",
    output:
        ensure("results/traces/{experiment}/{evidence}_{variant}.json", non_empty=True),
    log:
        "logs/trace_virtual/{experiment}/{evidence}_{variant}.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        sources=source_digest("gpipe_bench.results.timeline"),
    shell:
        "python -m gpipe_bench trace --events {input.events:q} --variant {wildcards.variant}"
        " --evidence {wildcards.evidence} --out {output:q} > {log:q} 2>&1"
