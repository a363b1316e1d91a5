# Results against published values and against the committed reference, with tolerances that are data.


rule verify:
    """Fails when a cell is outside its tolerance, and says which."""
    input:
        "results/verify.csv",


rule check_results:
    """Compare predictions and own rows with published and reference rows."""
    input:
        predictions="results/predictions.csv",
        rows=expand("results/{experiment}.csv", experiment=PLAN.verified),
        claims="results/transparency_verdict.csv",
        tolerances=TOLERANCES,
        reference=[*PLAN.reference_tables, *PLAN.reference_lines],
    output:
        ensure("results/verify.csv", non_empty=True),
    log:
        "logs/check_results.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        parts=PLAN.allowed_parts,
        sources=source_digest("gpipe_bench.suite.evaluation.verify"),
    shell:
        "python -m gpipe_bench verify --predictions {input.predictions:q} --claims {input.claims:q}"
        " --tolerances {input.tolerances:q} {params.parts:q} --out {output:q} {input.rows:q} > {log:q} 2>&1"
