# Figures of the committed reference results, redrawn from their tables alone: nothing is measured or simulated.


rule figures:
    """Redraw every committed figure from the reference tables."""
    input:
        PLAN.reference_figures,


rule redraw:
    """Draw all figures of the reference tables in one process."""
    input:
        PLAN.reference_tables,
    output:
        ensure(PLAN.reference_figures, non_empty=True),
    log:
        "logs/redraw.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        sources=source_digest("gpipe_bench.figures"),
    shell:
        "python -m gpipe_bench figure reference --out figures/redrawn > {log:q} 2>&1"
