# One page of everything that was run: tables, figures, interactive timelines, provenance.


rule report:
    """Write tables, figures, timelines and provenance of every experiment as one HTML file that needs no network."""
    input:
        rules.ablation.input,
        rules.speed.input,
        rules.memory.input,
        rules.sweep.input,
        rules.advice.input,
        rules.timeline.input,
        rules.transparency.input,
        rules.predictions.output,
    output:
        ensure("results/report.html", non_empty=True),
    log:
        "logs/report.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        folder=subpath(output[0], ancestor=2),
        sources=source_digest("gpipe_bench.report"),
    shell:
        "python -m gpipe_bench report --results {params.folder:q}/results --figures {params.folder:q}/figures"
        " --out {output:q} > {log:q} 2>&1"
