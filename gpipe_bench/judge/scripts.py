"""The scripts of behaviours, and the checks of those that ask for more than the notes of the plain module."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_bench.judge.layers import Block, Noise, Probe, Typed
from gpipe_bench.judge.protocol import MSE, Case, Loss, Notes, Session

SUM = Loss(lambda out, target: ((out - target) ** 2).sum(), "sum")
LABELS = Loss(
    lambda out, target: functional.cross_entropy(out, target, reduction="sum") / max(1, int((target >= 0).sum())),
    lambda target: int((target >= 0).sum()),
)
TOTAL = Loss(lambda out, _: out.sum(), "sum")


def data(seed: int, *shape: int) -> Tensor:
    """Normal numbers, always the same of a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def batch(seed: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """Input and target, (rows, 6) each."""
    return data(2 * seed, rows, 6), data(2 * seed + 1, rows, 6)


# ------------------------------------------------------------------------------------------------------------- checks
def differs(name: str, want: Any, got: Any, tolerance: float = 1e-9) -> str | None:
    """How two notes differ by more than rounding, or None."""
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        kind = ["a tensor" if isinstance(each, Tensor) else repr(each) for each in (got, want)]
        return f"{name} is {kind[0]}, not {kind[1]}" if kind[0] != kind[1] else None
    if want.shape != got.shape:
        return f"{name} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if want.dtype != got.dtype and name.startswith(("grad", "weight")):
        return f"{name} is {got.dtype}, not {want.dtype}"
    if not want.numel():
        return None
    scale, error = float(want.double().abs().max()), float((want.double() - got.double()).abs().max().nan_to_num())
    if bool((want.isnan() != got.isnan()).any()) or error > tolerance * max(scale, 1e-3):
        return f"{name} is off by {error:.2g} of {scale:.2g}"
    return None


def same(case: Case, plain: Notes, got: Notes) -> str | None:
    """Every note of the plain module, equal up to rounding, in each replica and shard."""
    tolerance = 1e-9 if case.dtype is torch.float64 else 0.02
    for name, want in plain.items():
        if name not in got:
            return f"{name} is missing"
        for every in (name, *(f"copy {k} {name}" for k in range(1, case.setup.copies))):
            if found := differs(every, want, got.get(every), tolerance):
                return found
    return None


def same_masks(case: Case, plain: Notes, got: Notes) -> str | None:
    """Euler's theorem: the sum of w * dL/dw is L for each layer, if backward has the masks of the loss."""
    del case
    for name in plain:
        if name.startswith("euler"):
            value, found = float(got[f"value {name.split()[1]}"]), float(got[name])
            if abs(found - value) > 1e-9 * abs(value):
                return f"{name}: the gradient belongs to other masks: {found:.4g}, not {value:.4g}"
    return None


def same_bits(case: Case, plain: Notes, got: Notes) -> str | None:
    """With one micro-batch gradients are those of the plain module to the bit, and so is their norm."""
    del case
    wrong = [name for name in plain if not torch.equal(plain[name], got[name])]
    return f"{len(wrong)} of {len(plain)} norms have other last bits" if wrong else None


def hooks_fire(case: Case, plain: Notes, got: Notes) -> str | None:
    """A hook after accumulation fires once per batch, or once per micro-batch; gradients are those of the module."""
    for name in (name for name in plain if name.startswith("fired")):
        if got.get(name, 0) not in (1, case.setup.chunks):
            return f"{name} {got.get(name, 0)} times for {case.setup.chunks} micro-batches"
    return same(case, {name: value for name, value in plain.items() if not name.startswith("fired")}, got)


def forward_passes(case: Case, plain: Notes, got: Notes) -> str | None:
    """One forward pass per micro-batch, and one more where it is checkpointed."""
    m = case.setup.chunks
    allowed = m + {"never": 0, "always": m, "except_last": m - 1}[case.setup.checkpoint]
    return next((f"{name} is {got.get(name)}, not {allowed}" for name in plain if got.get(name) != allowed), None)


def backward_passes(case: Case, plain: Notes, got: Notes) -> str | None:
    """In each step every layer runs backward once per micro-batch, never more often than the layer behind it."""
    del plain
    for name in (name for name in got if name.startswith("backward")):
        seen: dict[int, int] = {}
        own, places = got[name]
        for place in places:
            seen[place] = seen.get(place, 0) + 1
            if place + 1 in own and seen[place] > seen.get(place + 1, 0):
                return f"{name}: layer {place} came before layer {place + 1}"
        for place, count in seen.items():
            if count != case.setup.chunks:
                return f"{name}: layer {place} ran {count} times for {case.setup.chunks} micro-batches"
    return None


def memory_bounds(case: Case, plain: Notes, got: Notes) -> str | None:
    """At most as many activations as micro-batches, one of those with a checkpoint; none after the step."""
    del plain
    m = case.setup.chunks
    bound = {"never": m, "always": 1, "except_last": 2}[case.setup.checkpoint]
    for name, count in got.items():
        if name.startswith("left") and count:
            return f"after the step {count} activations of layer {name.split()[-1]} are alive"
        if name.startswith("peak") and count > bound:
            return f"{count} micro-batches of layer {name.split()[-1]} keep activations at once, not {bound}"
    return None


def statistics(case: Case, plain: Notes, got: Notes) -> str | None:
    """The statistics of the batch, or those of its micro-batches one after the other."""
    torch.manual_seed(7)
    model = case.make().double()
    for x in plain["batch"].chunk(case.setup.chunks):
        model(x)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm1d):
            mean, count = f"mean {name}", got.get(f"count {name}")
            if count not in (1, case.setup.chunks):
                return f"{count} batches tracked for {case.setup.chunks} micro-batches"
            # torchgpipe adds up in float32.
            if all(differs(mean, want, got[mean], 1e-5) for want in (layer.running_mean, plain[mean])):
                return f"running {mean} is neither that of the batch nor that of the micro-batches"
    return None


def surfaces(case: Case, plain: Notes, got: Notes) -> str | None:
    """The error of a layer reaches the caller."""
    del case, plain
    raised = str(got.get("raised", "nothing"))
    return None if "boom" in raised else f"an error of a layer gave {raised}"


# ------------------------------------------------------------------------------------------------------------ scripts
def one_step(s: Session, seed: int) -> None:
    """A step, its loss and gradients."""
    x, target = batch(seed)
    s.step(x.to(s.dtype), target.to(s.dtype))
    s.grads()


def uneven(s: Session, seed: int) -> None:
    """10 rows in 4 micro-batches."""
    s.step(*batch(seed, 10))
    s.grads()


def shapes(s: Session, seed: int) -> None:
    """Batches of other sizes, and with another dimension."""
    for k, rows in enumerate((8, 4, 12)):
        s.step(*batch(seed + k, rows))
    s.step(data(seed, 8, 3, 6), data(seed + 1, 8, 3, 6))
    s.grads()


def sums(s: Session, seed: int) -> None:
    """A loss that is a sum."""
    s.step(*batch(seed), SUM)
    s.grads()


def labels(s: Session, seed: int, absent: tuple[int, ...] = (0, 1, 2, 5)) -> None:
    """A mean over labels, without some."""
    target = torch.arange(8) % 6
    target[list(absent)] = -100
    s.step(batch(seed)[0], target, LABELS)
    s.grads()


def no_labels(s: Session, seed: int) -> None:
    """The same; one micro-batch has no label."""
    labels(s, seed, (0, 1, 2, 3))


def euler(s: Session, seed: int) -> None:
    """What :func:`same_masks` asks for."""
    for k in range(2):
        s.zero()
        torch.manual_seed(seed + k)
        s.note(f"value {k}", s.pipe.step(data(seed, 8, 6) + 3, data(seed, 8, 6), TOTAL))
        for name, p in s.parameters:
            s.note(f"euler {k} {name}", (p * p.grad).sum() if p.grad is not None else torch.zeros(()))


def late(s: Session, seed: int) -> None:
    """Layers that first draw in the second step."""
    noises = [module for module in s.modules.values() if isinstance(module, Noise)]
    for module in noises:
        module.late = True
    s.pipe.step(*batch(seed), MSE)
    for module in noises:
        module.late = False
    euler(s, seed)


def repeated(s: Session, seed: int) -> None:
    """Whether a seed repeats the masks, and another does not."""
    x, values = torch.ones(8, 6).double(), []
    for k in (seed + 1, seed + 1, seed + 2):
        torch.manual_seed(k)
        values.append(s.pipe.step(x, x * 0, MSE))
    if values[0] is not None and values[1] is not None and values[2] is not None:
        s.note("a seed repeats", bool(values[0] == values[1]))
        s.note("another seed repeats", bool(values[0] == values[2]))


def masks(s: Session, seed: int) -> None:
    """How many of eight equal rows have other outputs."""
    torch.manual_seed(seed)
    seen: list[Tensor] = []

    def look(out: Tensor, target: Tensor) -> Tensor:
        seen.extend(out.detach().unbind())
        return functional.mse_loss(out, target)

    for _ in range(2):
        seen.clear()
        s.pipe.step(torch.ones(8, 6).double(), torch.zeros(8, 6).double(), Loss(look))
    if seen:
        s.note("rows with a mask of their own", len({tuple(row.tolist()) for row in seen}))


def generator(s: Session, seed: int) -> None:
    """Whether a step without random layers moves the generator."""
    s.pipe.step(*batch(seed), MSE)
    before = torch.get_rng_state()
    s.pipe.step(*batch(seed), MSE)
    s.note("generator moved", not torch.equal(before, torch.get_rng_state()))


def clipped(s: Session, seed: int) -> None:
    """The norm of all gradients, and gradients after clipping."""
    s.step(*batch(seed))
    s.note("norm", s.pipe.clip(0.01))
    s.grads()


def norms(s: Session, seed: int) -> None:
    """Norms of eight steps."""
    for k in range(8):
        s.zero()
        s.pipe.step(*batch(seed + k), MSE)
        s.note(f"norm {k}", s.pipe.clip(0.01))


def evaluated(s: Session, seed: int) -> None:
    """Evaluation before, between and after steps."""
    s.evaluate(batch(seed)[0])
    for k in range(2):
        s.step(*batch(seed + k))
        s.evaluate(batch(seed + k + 1, 4 + 4 * k)[0])
    s.grads()


def accumulated(s: Session, seed: int) -> None:
    """Three steps without zeroing gradients."""
    for k in range(3):
        s.step(*batch(seed + k))
    s.grads()


def optimized(s: Session, seed: int) -> None:
    """Three steps of AdamW."""
    optimizer = torch.optim.AdamW([p for _, p in s.parameters], lr=0.1, weight_decay=0.5)
    for k in range(3):
        s.step(*batch(seed + k))
        optimizer.step()
        optimizer.zero_grad()
    for name, p in s.parameters:
        s.note(f"weight {name}", p)


def flat_grads(s: Session, seed: int) -> None:
    """Gradients that live in buffers, as optimizers and data parallelism have them."""
    buffers = {}
    for name, p in s.parameters:
        buffers[name] = torch.zeros(p.numel(), dtype=p.dtype)
        p.grad = buffers[name].view_as(p)
    s.step(*batch(seed))
    for name, buffer in buffers.items():
        s.note(f"buffer {name}", buffer)


def main_grads(s: Session, seed: int) -> None:
    """What custom functions add to ``main_grad``."""
    s.step(*batch(seed))
    s.grads()
    for name, p in s.parameters:
        s.note(f"main_grad {name}", getattr(p, "main_grad", None))


def hooked(s: Session, seed: int) -> None:
    """Hooks on parameters, and after accumulation."""
    fired: dict[str, int] = {}
    for name, parameter in s.parameters:
        p: Any = parameter
        p.register_hook(lambda grad: grad * 2)
        if name.endswith("bias"):
            p.register_post_accumulate_grad_hook(lambda _, name=name: fired.update({name: fired.get(name, 0) + 1}))
    s.step(*batch(seed))
    s.grads()
    for name, count in fired.items():
        s.note(f"fired {name}", count)


def passes(s: Session, seed: int) -> None:
    """Forward passes of the second step."""
    s.pipe.step(*batch(seed), MSE)
    blocks = {name: module for name, module in s.modules.items() if isinstance(module, Block)}
    for module in blocks.values():
        module.calls = 0
    s.pipe.step(*batch(seed), MSE)
    for name, module in blocks.items():
        s.note(f"calls {name}", module.calls)


def backward(s: Session, seed: int) -> None:
    """Backward passes of two steps, in their order."""
    own = {int(name): module for name, module in s.modules.items() if isinstance(module, Probe)}
    seen: list[int] = []
    for place, module in own.items():
        module.place, module.seen = place, seen
    for k in range(2):
        seen.clear()
        s.pipe.step(*batch(seed), MSE)
        s.note(f"backward of step {k} from layer {min(own)}", ([*own], [*seen]))


def memory(s: Session, seed: int) -> None:
    """Activations alive in the second step, and after it."""
    probes = {name: module for name, module in s.modules.items() if isinstance(module, Probe)}
    for _ in range(2):
        gc.collect()
        for probe in probes.values():
            probe.peak = 0
        s.pipe.step(*batch(seed), MSE)
    gc.collect()
    for name, probe in probes.items():
        s.note(f"peak {name}", probe.peak)
        s.note(f"left {name}", probe.live)


def running(s: Session, seed: int) -> None:
    """Statistics of batch norm after a step."""
    s.step(*batch(seed))
    for name, module in s.norms:
        s.note(f"mean {name.removesuffix('.weight')}", module.running_mean)
        s.note(f"count {name.removesuffix('.weight')}", int(module.num_batches_tracked or 0))
    s.note("batch", batch(seed)[0])


def errors(s: Session, seed: int) -> None:
    """An error of a layer."""
    try:
        s.pipe.step(*batch(seed), MSE)
    except Exception as error:
        s.note("raised", "boom" if "boom" in f"{error!r} {error.__cause__!r}" else repr(error)[:80])
        raise


def _fail(*_: Any) -> Tensor:
    raise ArithmeticError("boom")


def after_error(s: Session, seed: int) -> None:
    """A step after one whose loss raised."""
    try:
        s.pipe.step(*batch(seed), Loss(_fail))
    except ArithmeticError:
        s.zero()
    s.step(*batch(seed))
    s.grads()


def nan(s: Session, seed: int) -> None:
    """NaN in one row."""
    x, target = batch(seed)
    x[5] = float("nan")
    s.step(x, target)
    s.grads()


def cast(s: Session, seed: int) -> None:
    """The type of matrix products under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        s.pipe.step(*batch(seed), MSE)
    for name, module in s.modules.items():
        if isinstance(module, Typed):
            s.note(f"dtype {name}", module.dtype)


def tuples(s: Session, seed: int) -> None:
    """A batch of several tensors, one of them of integers."""
    x, target = batch(seed)
    s.step((x, (data(seed + 9, 8, 6) > 0).double(), torch.arange(8)), target)
    s.grads()


def caller(s: Session, seed: int) -> None:
    """Whether the batch is as before."""
    x, target = batch(seed)
    before = x.clone()
    s.step(x, target)
    s.note("batch is untouched", bool(torch.equal(x, before)))
    s.grads()


def shared_batch(s: Session, seed: int) -> None:
    """Each replica trains on its share; gradients are those of the whole batch."""
    x, target = batch(seed)
    s.pipe.step(x.chunk(s.copies)[s.copy], target.chunk(s.copies)[s.copy], MSE)
    s.grads()


def sharded(s: Session, seed: int) -> None:
    """Two steps of layers of which each process has a shard; gradients are put together."""
    for k in range(2):
        s.step(*batch(seed + k))
    for name, p in s.parameters:
        layer: Any = s.model.get_submodule(name.rpartition(".")[0])
        s.note(f"grad {name}", layer.whole(name.rpartition(".")[2], p.grad))
