# Every schedule on the same devices: simulated on two types of device, emulated and measured for some.


SCHEDULE_FIGURES = {
    "pareto": "results/schedules.csv",
    "scaling": "results/schedules.csv",
    "bubbles": "results/schedules.csv",
    "timelines": "results/schedules_timelines.csv",
}


rule schedules:
    """Throughput, memory, bubble and timelines of every schedule: tables and figures."""
    input:
        expand("results/schedules{table}.csv", table=["", "_devices", "_timelines", "_timelines_events"]),
        expand(
            "figures/schedules_{part}.{suffix}",
            part=SCHEDULE_FIGURES,
            suffix=["svg", "pdf", "png"],
        ),


rule figure_schedules:
    """Draw throughput over memory, over devices, the idle share, or a step of each schedule."""
    input:
        rows=named_by("part", SCHEDULE_FIGURES),
    output:
        svg=report(
            ensure("figures/schedules_{part}.svg", non_empty=True),
            caption="../report/schedules.rst",
            category="Schedules",
            labels={"figure": "{part}", "evidence": "simulated, emulated and measured"},
        ),
        pdf=ensure("figures/schedules_{part}.pdf", non_empty=True),
        png=ensure("figures/schedules_{part}.png", non_empty=True),
    log:
        "logs/figure_schedules/{part}.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        stem=subpath(output.svg, strip_suffix=".svg"),
        sources=source_digest("gpipe_bench.figures"),
    shell:
        "python -m gpipe_bench figure schedules --rows {input.rows:q} --part {wildcards.part} --out {params.stem:q}"
        " > {log:q} 2>&1"
