# What any pipeline engine must do: this project's engine, PyTorch's pipelines and other packages on one suite of behaviours.
from importlib.metadata import version

OWN = ["gpipe_bench", *("gpipe_bench:" + name for name in ["gpipe", "1f1b", "zb_h1", "interleaved", "zb_v"])]
PYTORCHS = ["gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zb", "zb_v", "dualpipe_v"]
JUDGED = [*OWN, "gpipe_bench_processes:1f1b", "torchgpipe", "fairscale"]
JUDGED += ["pipelining:" + name for name in PYTORCHS]


rule judge:
    """Verdicts on behaviours of every engine that has an adapter; `make peers` installs the others."""
    input:
        "results/judge.csv",


rule judge_engines:
    """Run every engine on every behaviour; a verdict is a row, whatever it says."""
    output:
        ensure("results/judge.csv", non_empty=True),
    log:
        "logs/judge_engines.log",
    conda:
        "../envs/gpipe_bench.yaml"
    params:
        engines=JUDGED,
        sources=source_digest("gpipe_bench.cli.judge"),
        torch=version("torch"),
    shell:
        "(python -m gpipe_bench judge {params.engines:q} --limit-s 120 --out {output:q} || test -s {output:q})"
        " > {log:q} 2>&1"
