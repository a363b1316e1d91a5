"""Make ``torch_traces/*.json.gz`` anew: ``python tests/schedules/torch_trace.py [NAME-pP ...]``.

Each file is a step of a schedule of ``torch.distributed.pipelining`` on p processes over gloo, whose stages sleep: 80
ms in a forward pass, 60 ms for the gradients of inputs, 60 ms for those of weights; in files named ``-uneven`` these
take 90 and 30 ms. So the truth is known. Files named ``-messages`` have messages outside of ranges, too. A file holds
``traces``, for each rank what its PyTorch profiler wrote of two steps, trimmed to the ranges of the pipeline and to the
operations that they call; and ``slept``, for each rank the sleeps of the last step as
``[kind, micro-batch, stage, start, end]`` in microseconds.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.profiler import ProfilerActivity, profile, record_function

FOLDER: Final = Path(__file__).parent / "torch_traces"
MS: Final = {"F": 80.0, "I": 60.0, "W": 60.0}
UNEVEN: Final = {"I": 90.0, "W": 30.0}
ONE_STAGE: Final = "GPipe", "1F1B"
OF_A_V: Final = "ZBVZeroBubble", "DualPipeV"
SPLIT: Final = "InterleavedZeroBubble", "ZBVZeroBubble"
NAMES: Final = (*ONE_STAGE, "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", *OF_A_V)
_SLEPT: list[tuple[str, int, int, float, float]] = []


def _sleep(kind: str, i: int, j: int) -> None:
    start = time.monotonic_ns()
    time.sleep(MS[kind] / 1000)
    _SLEPT.append((kind, i, j, start / 1000, time.monotonic_ns() / 1000))


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, i: int, j: int) -> Tensor:
        ctx.place = i, j
        _sleep("F", i, j)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _sleep("I", *ctx.place)
        return grad.clone(), None, None


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, i: int, j: int) -> Tensor:
        ctx.place = i, j
        return w.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _sleep("W", *ctx.place)
        return grad.clone(), None, None


class Stage(nn.Module):
    """Sleeps; the micro-batches of a step come in their order."""

    def __init__(self, j: int) -> None:
        super().__init__()
        self.w, self.j, self.i = nn.Parameter(torch.zeros(4)), j, 0

    def forward(self, x: Tensor) -> Tensor:
        i, self.i = self.i, self.i + 1
        return _Inputs.apply(x, i, self.j) + _Weights.apply(self.w, i, self.j)


def mark(stage: Any) -> None:
    """Mark the passes of a stage as PyTorch marks those of other schedules; ``Schedule1F1B`` marks none."""

    def marked(kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(i: int, *args: Any, **options: Any) -> Any:
            with record_function(f"PP:{stage.stage_index}{kind}{i}"):
                return run(i, *args, **options)

        return call

    stage.forward_one_chunk = marked("F", stage.forward_one_chunk)
    stage.backward_one_chunk = marked("B", stage.backward_one_chunk)


def work(rank: int, p: int, name: str, m: int, folder: Path) -> None:
    """One rank: a step to warm up, and two under the profiler, of which the sleeps of the second are kept."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=p)
    n = p if name in ONE_STAGE else 2 * p
    own = [rank] if n == p else [rank, n - 1 - rank] if name in OF_A_V else [rank, rank + p]
    modules = [Stage(j) for j in own]
    stages = [PipelineStage(module, j, n, torch.device("cpu")) for module, j in zip(modules, own, strict=True)]
    if name == "1F1B":
        mark(stages[0])
    given: Any = stages[0] if n == p else stages
    schedule = get_schedule_class(name)(given, m, loss_fn=nn.MSELoss())
    x, y = torch.randn(m, 4, requires_grad=True), torch.zeros(m, 4)

    def step() -> None:
        _SLEPT.clear()
        for module in modules:
            module.i = 0
        dist.barrier()
        schedule.step(*([x] if 0 in own else []), **({"target": y, "losses": []} if n - 1 in own else {}))

    step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
        step()
    seen.export_chrome_trace(str(folder / f"rank{rank}.json"))
    (folder / f"slept{rank}.json").write_text(json.dumps(_SLEPT))
    dist.barrier()
    dist.destroy_process_group()


def make(name: str, p: int, m: int, out: Path, suffix: str = "") -> None:
    """Run a schedule, and write its file."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (p, name, m, Path(folder)), nprocs=p, start_method="fork")
        traces = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(p)]
        slept = [json.loads((Path(folder) / f"slept{rank}.json").read_text()) for rank in range(p)]
    outside = ("c10d::",) if suffix == "-messages" else ()
    for trace in traces:
        rows = sorted((row for row in trace["traceEvents"] if row["ph"] == "X"), key=lambda row: float(row["ts"]))
        kept, range_end, end = [], -1.0, -1.0
        for row in rows:
            start = float(row["ts"])
            if row["name"].startswith(("PP:", "Forward ", "Backward ")):
                range_end = start + row["dur"]
            elif row["cat"] != "cpu_op" or start < end or (start > range_end and not row["name"].startswith(outside)):
                continue
            else:
                end = start + row["dur"]
            kept.append({key: row[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")})
        trace["traceEvents"] = kept
        del trace["traceName"], trace["trace_id"], trace["host_name"]
    zero = min(start for row in slept for *_, start, _ in row)
    sleeps = [[(*place, round(start - zero), round(end - zero)) for *place, start, end in row] for row in slept]
    found = {"schedule": name, "torch": torch.__version__, "slept": sleeps, "traces": traces}
    out.mkdir(exist_ok=True)
    data = gzip.compress(json.dumps(found, separators=(",", ":")).encode(), mtime=0)
    (out / f"{name}-p{p}{suffix}.json.gz").write_bytes(data)
    late = [(end - start) / 1000 - MS[kind] for row in sleeps for kind, _, _, start, end in row]
    lateness = f"sleeps late by {sum(late) / len(late):.2f} ms, at most {max(late):.2f}"
    print(f"{name}-p{p}{suffix}: {len(data)} bytes, {lateness}")


if __name__ == "__main__":
    # python torch_trace.py [NAME-pP ...]; with --awake DIR the stages do not sleep (but those of uneven files), and the
    # files come into DIR.
    chosen, folder = sys.argv[1:], FOLDER
    if chosen[:1] == ["--awake"]:
        chosen, folder = chosen[2:], Path(chosen[1])
        MS.update(dict.fromkeys(MS, 0.0))
    for name in NAMES:
        for p in (2, 4):
            if not chosen or f"{name}-p{p}" in chosen:
                make(name, p, 2 * p, folder)
    for p in (2, 4):
        if not chosen or f"1F1B-p{p}-messages" in chosen:
            make("1F1B", p, 2 * p, folder, "-messages")
    MS.update(UNEVEN)
    for name in SPLIT:
        for p in (2, 4):
            if not chosen or f"{name}-p{p}-uneven" in chosen:
                make(name, p, 2 * p, folder, "-uneven")
