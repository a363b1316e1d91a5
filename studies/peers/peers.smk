# The race of peers: the engine, other pipelines and the plain module on the same work, in turns.
import json
from importlib.metadata import version

from gpipe_bench.bench.storage.sources import source_digest


rule peers:
    """Host time, throughput and gradients of the engine and its peers, and the figures."""
    input:
        expand("results/peers{table}.csv", table=["", "_steps", "_ratios", "_configurations"]),
        expand("figures/peers{part}.{suffix}", part=["", "_host"], suffix=["svg", "pdf", "png"]),


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
        "../../workflows/envs/gpipe_bench.yaml"
    resources:
        timing_slot=1,
        gpu=config["gpus"],
    params:
        device=config["device"],
        settings=json.dumps(config["settings"], sort_keys=True),
        sources=source_digest("studies.peers"),
        torch=version("torch"),
    shell:
        "python -m studies.peers run --device {params.device:q} --settings {params.settings:q} --out {output.rows:q}"
        " > {log:q} 2>&1"


rule figure_peers:
    """Draw throughput beside the limit, and host time per cell."""
    input:
        rows="results/peers.csv",
    output:
        svg=report(
            ensure("figures/peers.svg", non_empty=True),
            caption="../../workflows/report/peers.rst",
            category="Peers",
            labels={"figure": "throughput of pipelines over the plain module", "evidence": "measured"},
        ),
        pdf=ensure("figures/peers.pdf", non_empty=True),
        png=ensure("figures/peers.png", non_empty=True),
        host=report(
            ensure("figures/peers_host.svg", non_empty=True),
            caption="../../workflows/report/peers_host.rst",
            category="Peers",
            labels={"figure": "host time of pipelines and the plain module", "evidence": "measured"},
        ),
        host_pdf=ensure("figures/peers_host.pdf", non_empty=True),
        host_png=ensure("figures/peers_host.png", non_empty=True),
    log:
        "logs/figure_peers.log",
    conda:
        "../../workflows/envs/gpipe_bench.yaml"
    params:
        stem=subpath(output.svg, strip_suffix=".svg"),
        sources=source_digest("studies.peers.figure"),
    shell:
        "python -m studies.peers figure --rows {input.rows:q} --out {params.stem:q} > {log:q} 2>&1"
