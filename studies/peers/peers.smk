# The race of peers: the engine, other pipelines and the plain module on the same work, in turns.
import json
from importlib.metadata import version

from gpipe_bench.suite.storage.sources import source_digest
from gpipe_bench.data import REFERENCE_FOLDER

MACHINES = sorted(glob_wildcards(f"{REFERENCE_FOLDER}/measured/{{machine}}/peers.csv").machine)


rule peers:
    """Host time, throughput and gradients of the engine and its peers, and the figure."""
    input:
        expand("results/peers{table}.csv", table=["", "_steps", "_configurations"]),
        multiext("figures/peers_measured", ".svg", ".pdf", ".png"),


rule race_peers:
    """Run all contenders on all workloads, one at a time, in rounds."""
    output:
        rows=ensure("results/peers.csv", non_empty=True),
        steps=ensure("results/peers_steps.csv", non_empty=True),
        configurations=ensure("results/peers_configurations.csv", non_empty=True),
    log:
        "logs/race_peers.log",
    conda:
        "../../workflow/envs/gpipe_bench.yaml"
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
        ensure(multiext("figures/peers_measured", ".svg", ".pdf", ".png"), non_empty=True),
    log:
        "logs/figure_peers.log",
    conda:
        "../../workflow/envs/gpipe_bench.yaml"
    params:
        stem=subpath(output[0], strip_suffix=".svg"),
        sources=source_digest("studies.peers.figure"),
    shell:
        "python -m studies.peers figure --rows {input.rows:q} --out {params.stem:q} > {log:q} 2>&1"


rule redraw_peers:
    """Draw the figures of the committed tables."""
    input:
        expand("{folder}/measured/{machine}/peers.csv", folder=REFERENCE_FOLDER, machine=MACHINES),
    output:
        ensure(
            expand(
                "figures/redrawn/measured-{machine}/peers.{suffix}",
                machine=MACHINES,
                suffix=["svg", "pdf", "png"],
            ),
            non_empty=True,
        ),
    log:
        "logs/redraw_peers.log",
    conda:
        "../../workflow/envs/gpipe_bench.yaml"
    params:
        folder=subpath(output[0], ancestor=2),
        sources=source_digest("studies.peers.figure"),
    shell:
        "python -m studies.peers reference --out {params.folder:q} > {log:q} 2>&1"
