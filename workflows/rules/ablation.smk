# What each component of the pipeline brings: every combination simulated and emulated on the devices of the published
# runs, and measured on the GPUs here; on a CPU, pipelines beside the plain loop.


rule timeline:
    """One step of each published variant as figure and trace: simulated on one axis of time, and measured here."""
    input:
        expand("figures/ablation_timelines.{suffix}", suffix=["svg", "pdf", "png"]),
        expand(
            "figures/timeline_{variant}.{suffix}",
            variant=PLAN.published("ablation"),
            suffix=["svg", "pdf", "png"],
        ),
        expand(
            "results/traces/ablation/{variant}.json",
            variant=PLAN.published("ablation"),
        ),
        expand(
            "results/traces/ablation/simulated_{variant}.json",
            variant=PLAN.published("ablation", "simulated"),
        ),
        expand(
            "results/traces/ablation/emulated_{variant}.json",
            variant=PLAN.published("ablation", "emulated"),
        ),


rule ablation:
    """Table, figures, and timeline figure and trace of each published variant."""
    input:
        expand(
            "results/ablation{table}.csv",
            table=["", "_devices", "_steps", "_events", "_configurations"],
        ),
        expand(
            "figures/ablation{figure}.{suffix}",
            figure=["", "_shares"],
            suffix=["svg", "pdf", "png"],
        ),
        rules.timeline.input,


rule figure_ablation:
    """Draw throughput and memory of every variant, with intervals."""
    input:
        rows="results/ablation.csv",
    output:
        svg=report(
            ensure("figures/ablation.svg", non_empty=True),
            caption="../report/ablation.rst",
            category="Ablation",
            labels={"figure": "throughput and memory", "evidence": "published, simulated, emulated and measured"},
        ),
        pdf=ensure("figures/ablation.pdf", non_empty=True),
        png=ensure("figures/ablation.png", non_empty=True),
    log:
        "logs/figure_ablation.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        stem=subpath(output.svg, strip_suffix=".svg"),
        sources=source_digest("gpipe_bench.figures"),
    shell:
        "python -m gpipe_bench figure ablation --rows {input.rows:q} --out {params.stem:q} > {log:q} 2>&1"


rule figure_shares:
    """Draw what each component contributes to speed and memory, whatever the order in which they are added."""
    input:
        rows="results/ablation.csv",
    output:
        svg=report(
            ensure("figures/ablation_shares.svg", non_empty=True),
            caption="../report/shares.rst",
            category="Ablation",
            labels={"figure": "share of each component", "evidence": "simulated and emulated"},
        ),
        pdf=ensure("figures/ablation_shares.pdf", non_empty=True),
        png=ensure("figures/ablation_shares.png", non_empty=True),
    log:
        "logs/figure_shares.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        stem=subpath(output.svg, strip_suffix=".svg"),
        sources=source_digest("gpipe_bench.figures"),
    shell:
        "python -m gpipe_bench figure shares --rows {input.rows:q} --out {params.stem:q} > {log:q} 2>&1"


rule figure_timelines:
    """Draw one simulated step of each published variant, above each other on one axis of time."""
    input:
        events="results/ablation_events.csv",
        rows="results/ablation.csv",
    output:
        svg=report(
            ensure("figures/ablation_timelines.svg", non_empty=True),
            caption="../report/timelines.rst",
            category="Ablation",
            labels={"figure": "timelines of the published variants", "evidence": "simulated"},
        ),
        pdf=ensure("figures/ablation_timelines.pdf", non_empty=True),
        png=ensure("figures/ablation_timelines.png", non_empty=True),
    log:
        "logs/figure_timelines.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        stem=subpath(output.svg, strip_suffix=".svg"),
        sources=source_digest("gpipe_bench.figures"),
    shell:
        "python -m gpipe_bench figure timelines --events {input.events:q} --rows {input.rows:q} --evidence simulated"
        " --out {params.stem:q} > {log:q} 2>&1"


rule figure_timeline:
    """Draw one measured step of a variant, every task on its device."""
    input:
        events="results/ablation_events.csv",
        rows="results/ablation.csv",
    output:
        svg=report(
            ensure("figures/timeline_{variant}.svg", non_empty=True),
            caption="../report/timeline.rst",
            category="Ablation",
            subcategory="Timelines",
            labels={"figure": "timeline of {variant}", "evidence": "measured"},
        ),
        pdf=ensure("figures/timeline_{variant}.pdf", non_empty=True),
        png=ensure("figures/timeline_{variant}.png", non_empty=True),
    log:
        "logs/figure_timeline/{variant}.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        stem=subpath(output.svg, strip_suffix=".svg"),
        sources=source_digest("gpipe_bench.figures"),
    shell:
        "python -m gpipe_bench figure timeline --events {input.events:q} --rows {input.rows:q}"
        " --variant {wildcards.variant} --out {params.stem:q} > {log:q} 2>&1"
