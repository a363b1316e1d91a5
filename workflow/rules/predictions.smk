# Every published cell and its simulated value.


rule predictions:
    """Simulate every published cell of the tables: published value, simulated value and error."""
    input:
        REFERENCE_FOLDER / "published" / "published.csv",
        REFERENCE_FOLDER / "published" / "settings.csv",
    output:
        rows=ensure("results/predictions.csv", non_empty=True),
        configurations=ensure("results/predictions_configurations.csv", non_empty=True),
    log:
        "logs/predictions.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        sources=source_digest("gpipe_bench.suite.published.predictions", "gpipe_bench.simulator"),
        torch=version("torch"),
    shell:
        "python -m gpipe_bench predictions --out {output.rows:q} > {log:q} 2>&1"
