# What each component of the pipeline brings: every combination measured on this machine's devices.


rule ablation:
    """Table, figures, and timeline figure and trace of each published variant."""
    input:
        expand("results/ablation{table}.csv", table=["", "_devices", "_steps", "_events"]),
        expand("figures/ablation.{suffix}", suffix=["svg", "pdf", "png"]),
        expand(
            "figures/timeline_{variant}.{suffix}",
            variant=PLAN.published("ablation"),
            suffix=["svg", "pdf", "png"],
        ),
        expand(
            "results/traces/ablation/{variant}.json",
            variant=PLAN.published("ablation"),
        ),


rule figure_ablation:
    """Draw throughput and memory of every variant, with intervals."""
    input:
        rows="results/ablation.csv",
    output:
        svg=report(
            ensure("figures/ablation.svg", non_empty=True),
            caption="../report/ablation.rst",
            category="Ablation",
            labels={"figure": "throughput and memory", "evidence": "measured"},
        ),
        pdf=ensure("figures/ablation.pdf", non_empty=True),
        png=ensure("figures/ablation.png", non_empty=True),
    log:
        "logs/figure_ablation.log",
    conda:
        "../../environment.yml"
    params:
        stem=subpath(output.svg, strip_suffix=".svg"),
        sources=source_digest("gpipe_bench.figures"),
    shell:
        "python -m gpipe_bench figure ablation --rows {input.rows:q} --out {params.stem:q} > {log:q} 2>&1"


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
        "../../environment.yml"
    params:
        stem=subpath(output.svg, strip_suffix=".svg"),
        sources=source_digest("gpipe_bench.figures"),
    shell:
        "python -m gpipe_bench figure timeline --events {input.events:q} --rows {input.rows:q}"
        " --variant {wildcards.variant} --out {params.stem:q} > {log:q} 2>&1"
