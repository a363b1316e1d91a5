# The published tables of speed and memory: printed values beside simulated and emulated ones, and measured where there
# are the GPUs.


rule speed:
    """Throughput of U-Net (5, 64) and AmoebaNet-D (18, 256): table and figure."""
    input:
        expand("results/speed{table}.csv", table=["", "_devices", "_steps", "_configurations"]),
        expand("figures/speed.{suffix}", suffix=["svg", "pdf", "png"]),


rule memory:
    """Memory of the largest models that fit: table and figure."""
    input:
        expand("results/memory{table}.csv", table=["", "_devices", "_steps", "_configurations"]),
        expand("figures/memory.{suffix}", suffix=["svg", "pdf", "png"]),


rule figure_speed:
    """Draw the published tables of throughput, a line per row of print."""
    input:
        rows="results/speed.csv",
    output:
        svg=report(
            ensure("figures/speed.svg", non_empty=True),
            caption="../report/speed.rst",
            category="Published tables",
            labels={"figure": "speed", "evidence": "published, simulated, emulated and measured"},
        ),
        pdf=ensure("figures/speed.pdf", non_empty=True),
        png=ensure("figures/speed.png", non_empty=True),
    log:
        "logs/figure_speed.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        stem=subpath(output.svg, strip_suffix=".svg"),
        sources=source_digest("gpipe_bench.figures"),
    shell:
        "python -m gpipe_bench figure tables --rows {input.rows:q} --out {params.stem:q} > {log:q} 2>&1"


rule figure_memory:
    """Draw the published tables of memory, a line per row of print."""
    input:
        rows="results/memory.csv",
    output:
        svg=report(
            ensure("figures/memory.svg", non_empty=True),
            caption="../report/memory.rst",
            category="Published tables",
            labels={"figure": "memory", "evidence": "published, simulated, emulated and measured"},
        ),
        pdf=ensure("figures/memory.pdf", non_empty=True),
        png=ensure("figures/memory.png", non_empty=True),
    log:
        "logs/figure_memory.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        stem=subpath(output.svg, strip_suffix=".svg"),
        sources=source_digest("gpipe_bench.figures"),
    shell:
        "python -m gpipe_bench figure tables --rows {input.rows:q} --out {params.stem:q} > {log:q} 2>&1"
