# The best balance, number of micro-batches and checkpoint mode for a model on a profile, and what other choices cost.


rule advice:
    """Every request of the configuration: all that was tried as a table, and the best of it as a figure."""
    input:
        expand("results/advice_{advice}.csv", advice=PLAN.advice),
        PLAN.pictures(*expand("advice_{advice}", advice=PLAN.advice)),


rule advise:
    """Simulate what could be chosen for one model and batch, and find the fastest that fits the memory."""
    output:
        rows=ensure("results/advice_{advice}.csv", non_empty=True),
        devices=ensure("results/advice_{advice}_devices.csv", non_empty=True),
        steps=ensure("results/advice_{advice}_steps.csv", non_empty=True),
        events=ensure("results/advice_{advice}_events.csv", non_empty=True),
        configurations=ensure("results/advice_{advice}_configurations.csv", non_empty=True),
    log:
        "logs/advise/{advice}.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        request=of_wildcard("advice", advice_settings(PLAN)),
        model=of_wildcard("advice", advice_models(PLAN)),
        sources=source_digest(
            "gpipe_bench.suite.advice.advice", "gpipe_bench.suite.running.simulated", "gpipe_bench.simulator"
        ),
        torch=version("torch"),
    shell:
        "python -m gpipe_bench advise --request {params.request:q} --rows {output.rows:q} > {log:q} 2>&1"
