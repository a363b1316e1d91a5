# The race of peers: the engine, other pipelines and the plain module on the same work, in turns.


rule peers:
    """Host time, throughput, memory and gradients of the engine and its peers, and the figure."""
    input:
        expand("results/peers{table}.csv", table=["", "_steps", "_ratios", "_configurations"]),
        PLAN.pictures("peers"),


rule race_peers:
    """Run all contenders on all workloads, one at a time, in rounds."""
    output:
        rows=ensure("results/peers.csv", non_empty=True),
        steps=ensure("results/peers_steps.csv", non_empty=True),
        ratios=ensure("results/peers_ratios.csv", non_empty=True),
        configurations=ensure("results/peers_configurations.csv", non_empty=True),
    log:
        "logs/race_peers.log",
    conda:
        "../envs/gpipe_bench.yaml"
    resources:
        timing_slot=1,
        gpu=PLAN.racing_gpus,
    params:
        settings=PLAN.racing,
        sources=source_digest("gpipe_bench.bench.peers"),
        torch=version("torch"),
    shell:
        "python -m gpipe_bench peers run {params.settings:q} --out {output.rows:q} > {log:q} 2>&1"
