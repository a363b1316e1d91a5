# Every figure, drawn from tables alone: those of this run, and those of the committed reference results.


rule figure:
    """Draw one figure of this run: of one table, and of one kind of evidence."""
    input:
        of_wildcard("figure", {name: str(figure.table) for name, figure in PLAN.figures.items()}),
    output:
        ensure(multiext("figures/{figure}", ".svg", ".pdf", ".png"), non_empty=True),
    log:
        "logs/figure/{figure}.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        kind=of_wildcard("figure", PLAN.figures, "kind"),
        evidence=of_wildcard("figure", PLAN.figures, "evidence"),
        stem=subpath(output[0], strip_suffix=".svg"),
        sources=source_digest("gpipe_bench.figures"),
    shell:
        "python -m gpipe_bench figure {params.kind:q} --rows {input:q} --evidence {params.evidence:q} --out {params.stem:q}"
        " > {log:q} 2>&1"


rule figures:
    """Redraw every committed figure from the reference tables."""
    input:
        PLAN.reference_figures,
        rules.redraw_peers.output,
        rules.redraw_transparency.output,


rule redraw:
    """Draw the figures of the reference tables, but those of studies, in one process."""
    input:
        PLAN.reference_tables,
    output:
        ensure(PLAN.reference_figures, non_empty=True),
    log:
        "logs/redraw.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        folder=subpath(output[0], ancestor=2),
        sources=source_digest("gpipe_bench.figures"),
    shell:
        "python -m gpipe_bench figure reference --out {params.folder:q} > {log:q} 2>&1"
