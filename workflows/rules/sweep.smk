# Numbers of partitions and micro-batches: simulated at scale, emulated at some points, measured as far as the devices of
# this machine go.


rule sweep:
    """Every sweep of the configuration: tables, maps of throughput, and why it is slower with more of either."""
    input:
        expand("results/sweep_{sweep}.csv", sweep=PLAN.sweeps),
        expand(
            "figures/{figure}_{sweep}.{suffix}",
            figure=["sweep", "why"],
            sweep=PLAN.sweeps,
            suffix=["svg", "pdf", "png"],
        ),


rule processes:
    """The sweep over processes: table and maps of throughput."""
    input:
        "results/sweep_processes.csv",
        expand("figures/sweep_processes.{suffix}", suffix=["svg", "pdf", "png"]),


rule figure_sweep:
    """Draw throughput over partitions and micro-batches, a map per checkpoint mode and kind of batch."""
    input:
        rows="results/sweep_{sweep}.csv",
    output:
        svg=report(
            ensure("figures/sweep_{sweep}.svg", non_empty=True),
            caption="../report/sweep.rst",
            category="Sweeps",
            subcategory="{sweep}",
            labels={"figure": "throughput", "evidence": "simulated and emulated, or measured on this machine"},
        ),
        pdf=ensure("figures/sweep_{sweep}.pdf", non_empty=True),
        png=ensure("figures/sweep_{sweep}.png", non_empty=True),
    log:
        "logs/figure_sweep/{sweep}.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        stem=subpath(output.svg, strip_suffix=".svg"),
        sources=source_digest("gpipe_bench.figures"),
    shell:
        "python -m gpipe_bench figure sweep --rows {input.rows:q} --out {params.stem:q} > {log:q} 2>&1"


rule figure_why:
    """Draw what the device time of a sample goes into, with more devices and with more chunks."""
    input:
        rows="results/sweep_{sweep}.csv",
    output:
        svg=report(
            ensure("figures/why_{sweep}.svg", non_empty=True),
            caption="../report/why.rst",
            category="Sweeps",
            subcategory="{sweep}",
            labels={"figure": "why is it slower?", "evidence": "simulated and emulated, or measured on this machine"},
        ),
        pdf=ensure("figures/why_{sweep}.pdf", non_empty=True),
        png=ensure("figures/why_{sweep}.png", non_empty=True),
    log:
        "logs/figure_why/{sweep}.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        stem=subpath(output.svg, strip_suffix=".svg"),
        sources=source_digest("gpipe_bench.figures"),
    shell:
        "python -m gpipe_bench figure why --rows {input.rows:q} --out {params.stem:q} > {log:q} 2>&1"
