"""Skips that many layers read: gradients are those of the plain module bit for bit, and nothing outlives its use."""

from __future__ import annotations

import copy
import pickle
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe_bench import Components, GPipe, is_recomputing
from gpipe_bench.autograd.nodes import nodes_behind
from gpipe_bench.errors import SkipUsageError
from gpipe_bench.skip import Namespace, peek, pop, skippable, stash
from gpipe_bench.skip.tracker import LocalTracker, use_tracker
from tests.engine.models import Product, in_turn
from tests.engine.steps import ALL, scheduled
from tests.engine.support import MODES, Peek, Pop, Stash, Watch, label, on_cpu
from tests.engine.test_aliases import REFUSED

WIDTH, ROWS = 6, 3
PORTALS = [Components(portals=portals, shared=shared) for portals in (True, False) for shared in (True, False)]
ONE_THREAD = Components(clock_cycle=False)


# --- layers with side effects -----------------------------------------------------------------------------------------


class Scaled(Product):
    """x w; writes the gradient of x over its own."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        of_weight = (grad * x).sum(0)
        return grad.mul_(w), of_weight


class Layer(nn.Module):
    """x -> x, with weights; notes the sum of the gradients of each tensor that it hooks, micro-batch by micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        # Each weight is used once, so that two micro-batches may be added up in any order.
        self.w, self.v = (nn.Parameter(torch.rand(WIDTH) + 0.5) for _ in range(2))
        self.noted: list[Tensor] = []

    def hooked(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: self.noted.append(grad.clone()))
        return x


@skippable(stash=["image"])
class Encode(Layer):
    """Stashes a tensor with a hook, which it uses twice itself."""

    def forward(self, x: Tensor) -> Any:
        image = self.hooked(torch.tanh(self.linear(x)))
        yield stash("image", image)
        return x + image * image.cos()


@skippable(stash=["image"])
class EncodeAndReturn(Layer):
    """The stashed tensor is the output, too."""

    def forward(self, x: Tensor) -> Any:
        image = torch.tanh(self.linear(x))
        yield stash("image", image)
        return image


@skippable(stash=["image"])
class Nothing(Layer):
    def forward(self, x: Tensor) -> Any:
        yield stash("image", None)
        return torch.tanh(self.linear(x))


def read(layer: Layer, x: Tensor, image: Tensor | None) -> Tensor:
    """Uses the image in a product, off the main path, and in a Function that writes to gradients."""
    if image is None:
        return torch.tanh(layer.linear(x))
    weights = torch.softmax(image * layer.w, 1)
    return torch.tanh(layer.linear(x)) + image * weights + 2 * Scaled.apply(image, layer.v)


@skippable(peek=["image"])
class Reads(Layer):
    def forward(self, x: Tensor) -> Any:
        image = yield peek("image")
        again = yield peek("image")
        assert again is image
        return read(self, x, image)


@skippable(peek=["image"])
class ReadsOnce(Layer):
    def forward(self, x: Tensor) -> Any:
        image = yield peek("image")
        return torch.tanh(self.linear(x)) + image * self.w


@skippable(pop=["image"])
class Takes(Layer):
    def forward(self, x: Tensor) -> Any:
        image = yield pop("image")
        return read(self, x, image)


@skippable(peek=["image"])
class Ignores(Layer):
    """Reads what it does not use."""

    def forward(self, x: Tensor) -> Any:
        yield peek("image")
        return torch.tanh(self.linear(x))


class Plain(Layer):
    """Reads nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Normalised(Layer):
    """Batch statistics, beside what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


MODELS = {
    "each partition reads": lambda: [Encode(), Reads(), Reads(), Reads(), Normalised(), Reads(), Reads(), Reads()],
    "a pop at the end": lambda: [Encode(), Plain(), Reads(), Normalised(), Plain(), Reads(), Plain(), Takes()],
    "several readers": lambda: [
        in_turn(Plain(), Encode(), Reads()), Reads(), in_turn(Reads(), Reads(), Plain()), Reads(),
        Reads(), Reads(), in_turn(Reads(), Reads()), Plain(),
    ],
    "partitions that do not read": lambda: [Plain(), Encode(), Plain(), Plain(), Reads(), Plain(), Ignores(), Takes()],
    "each layer reads once": lambda: [
        in_turn(Plain(), Encode(), ReadsOnce()), ReadsOnce(), in_turn(ReadsOnce(), ReadsOnce()), Plain(),
        ReadsOnce(), ReadsOnce(), in_turn(ReadsOnce(), ReadsOnce()), ReadsOnce(),
    ],
    "returned, too": lambda: [EncodeAndReturn(), Plain(), Reads(), Reads(), Ignores(), Reads(), Reads(), Takes()],
    "nothing": lambda: [Nothing(), Reads(), Reads(), Reads(), Plain(), Reads(), Reads(), Takes()],
}  # fmt: skip


def model(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*MODELS[name]())


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2 * torch.linspace(0.5, 1.5, WIDTH)).sum()


def data(m: int) -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, m * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_(), target


def noted(module: nn.Module) -> list[Tensor]:
    """The gradients that hooks saw, in an order of their own."""
    found = [tuple(grad.flatten().tolist()) for layer in module.modules() for grad in getattr(layer, "noted", ())]
    return sorted(found)


def alone(plain: nn.Sequential, m: int) -> tuple[dict[str, Tensor | None], Tensor]:
    """Gradients of the plain module, which runs micro-batch by micro-batch, and the gradient of the batch."""
    x, target = data(m)
    for rows, goal in zip(x.split(ROWS), target.split(ROWS), strict=True):
        loss(plain(rows), goal).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}, x.grad


def assert_equal(pipe: Any, plain: nn.Sequential, m: int, *, called: bool = False, exact: bool = True) -> None:
    """Bit for bit, or up to the order in which gradients are added."""

    def same(found: Any, wanted: Any) -> bool:
        return torch.equal(found, wanted) if exact else torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)

    x, target = data(m)
    if called:
        total = sum(loss(rows, goal) for rows, goal in zip(pipe(x).split(ROWS), target.split(ROWS), strict=True))
        total.backward()
    else:
        pipe.step(x, target, loss, reduction="sum")
    expected, of_batch = alone(plain, m)
    assert same(x.grad, of_batch)
    for name, parameter in pipe.named_parameters():
        found, wanted = (torch.zeros(()) if grad is None else grad for grad in (parameter.grad, expected[name]))
        assert same(found, wanted) or not (found.any() or wanted.any()), name
    assert len(noted(pipe)) == len(noted(plain))
    assert not exact or noted(pipe) == noted(plain)


# --- the plain module -------------------------------------------------------------------------------------------------


def test_many_layers_read_a_skip_of_the_plain_module():
    x = torch.rand(2, 3)
    module = nn.Sequential(Stash(), Peek(), nn.Sequential(Peek()), Pop())
    torch.testing.assert_close(module(x), x + 3 * x.cos())
    torch.testing.assert_close(nn.Sequential(Stash(), Peek(), Peek())(x), x + 2 * x.cos())
    torch.testing.assert_close(module(2 * x), 2 * x + 3 * (2 * x).cos())


# --- bit for bit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("components", PORTALS, ids=label)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_plain_module(name, schedule, checkpoint, components):
    """Where each reader has a copy of its own, a layer adds up all its gradients of the copy before they leave it."""
    exact = components.shared or name in ("each layer reads once", "nothing")
    for transfer, workers in (("direct", "always"), ("host", "always"), ("host", "never")):
        options = {"transfer": transfer, "workers": workers, "components": components}
        pipe = scheduled(model(name), [2] * 4, schedule, chunks=2, checkpoint=checkpoint, **options)
        assert_equal(pipe, model(name), 2, exact=exact)


@pytest.mark.parametrize("components", [*Components.factorial(shared=True)], ids=label)
@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_every_combination_of_components(components, checkpoint, schedule):
    for balance in ([2] * 4, [1] * 8, [8]):
        options = {"checkpoint": checkpoint, "components": components, "transfer": "host"}
        pipe = scheduled(model("each layer reads once"), balance, schedule, chunks=2, **options)
        assert_equal(pipe, model("each layer reads once"), 2, called=True)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", [None, "gpipe", "zb_v"])
def test_without_gradients(schedule, checkpoint):
    x, plain = data(2)[0].detach(), model("a pop at the end").eval()
    pipe = scheduled(copy.deepcopy(plain), [2] * 4, schedule, chunks=2, checkpoint=checkpoint, transfer="host")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(pipe.eval()(x), plain(x))


# --- which way --------------------------------------------------------------------------------------------------------


def on_two_devices(checkpoint: str, components: Components | None = None) -> GPipe:
    """Four partitions of the paper's executor, on two devices in turn."""
    options = {"checkpoint": checkpoint, "components": components}
    pipe = on_cpu(model("each partition reads"), [2] * 4, transfer="host", **options)
    pipe._pipeline.ranks = (0, 1, 0, 1)
    return pipe


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_device_that_has_the_tensor_takes_no_other_copy_and_gradients_go_from_reader_to_reader(checkpoint):
    pipe = on_two_devices(checkpoint)
    with pipe.observe(watch := Watch()):
        assert_equal(pipe, model("each partition reads"), 1, called=True)
    assert watch.names("Pp") == ["P0,1", "p0,1", "p0,2", "p0,3"]


@pytest.mark.parametrize("checkpoint", MODES)
def test_where_copies_are_not_shared_each_reader_has_one_straight_from_the_stash(checkpoint):
    pipe = on_two_devices(checkpoint, Components(shared=False))
    with pipe.observe(watch := Watch()):
        assert_equal(pipe, model("each partition reads"), 1, called=True, exact=False)
    assert watch.names("Pp") == ["P0,1"] * 2 + ["P0,3"] * 2 + ["p0,1"] * 2 + ["p0,3"] * 2


@pytest.mark.parametrize("checkpoint", MODES)
def test_the_graph_shows_where_a_tensor_was_copied_and_where_it_was_there(checkpoint):
    pipe, kinds = on_two_devices(checkpoint), Counter()
    for node in nodes_behind([pipe(data(1)[0]).grad_fn]):
        kinds[type(node).__name__] += 1
    assert (kinds["PortalBackward"], kinds["ReturnBackward"]) == (1, 2)
    # three partitions take it in, and three give it out
    assert kinds["TogetherBackward"] == (0 if checkpoint == "always" else 6)


def test_a_schedule_copies_a_tensor_once_to_each_device():
    pipe = scheduled(model("each partition reads"), [2] * 4, "interleaved", chunks=2, transfer="host")
    with pipe.observe(watch := Watch()):
        assert_equal(pipe, model("each partition reads"), 2)
    assert watch.names("P") == ["P0,1", "P1,1"]
    assert watch.names("p") == ["p0,1", "p0,2", "p0,3", "p1,1", "p1,2", "p1,3"]


# --- how long ---------------------------------------------------------------------------------------------------------


class Looks(Plain):
    """Notes which of the tensors that were read so far are alive."""

    def __init__(self, seen: list[StorageWeakRef], lines: list[str]) -> None:
        super().__init__()
        self.seen, self.lines = seen, lines

    def forward(self, x: Tensor) -> Any:
        if not is_recomputing():
            self.lines.append("".join(str(int(not ref.expired())) for ref in self.seen))
        return super().forward(x)


@skippable(peek=["image"])
class LooksAndReads(Looks):
    def forward(self, x: Tensor) -> Any:
        image = yield peek("image")
        x = super().forward(x)
        if not is_recomputing():
            self.seen.append(StorageWeakRef(image.untyped_storage()))
        return x + image


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("components", [ONE_THREAD, Components(clock_cycle=False, portals=False)], ids=label)
@pytest.mark.parametrize(
    ("balance", "expected"),
    [
        # one tensor, which is alive until its last reader has ended
        ([7], ["", "1", "11", "000"]),
        # a copy for each partition, which is gone when the next one has its own
        ([2, 1, 1, 2, 1], ["", "0", "00", "000"]),
        # two readers have one copy
        ([2, 2, 2, 1], ["", "1", "00", "000"]),
    ],
)
def test_a_tensor_is_freed_after_its_last_reader(balance, expected, components, schedule):
    seen, lines = [], []
    looks = [LooksAndReads(seen, lines) for _ in range(3)]
    layers = nn.Sequential(Encode(), Plain(), looks[0], looks[1], Plain(), looks[2], Looks(seen, lines))
    pipe = on_cpu(layers, balance, components=components, transfer="host", schedule=schedule)
    # the first batch shows whether layers write to their inputs, and copies those to find out
    for _ in range(2):
        seen.clear()
        lines.clear()
        with torch.no_grad():
            pipe(data(1)[0])
    assert lines == expected


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", [None, "gpipe", "interleaved", "zb_v"])
def test_after_a_step_nothing_is_held(schedule, checkpoint):
    seen, lines = [], []
    layers = [Encode(), *(LooksAndReads(seen, lines) for _ in range(7))]
    pipe = scheduled(nn.Sequential(*layers), [2] * 4, schedule, chunks=2, checkpoint=checkpoint, transfer="host")
    x, target = data(2)
    pipe.step(x, target, loss)
    assert len(seen) == 14
    assert all(ref.expired() for ref in seen)


# --- writes -----------------------------------------------------------------------------------------------------------


@skippable(stash=["image"])
class Gives(Plain):
    """Stashes a tensor of which autograd keeps nothing."""

    def forward(self, x: Tensor) -> Any:
        yield stash("image", self.linear(x))
        return x


@skippable(peek=["image"])
class Writes(Plain):
    """Adds what it reads, which it writes to if it is told to."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.writes = writes

    def forward(self, x: Tensor) -> Any:
        image = yield peek("image")
        return x + (image.mul_(2) if self.writes else image)


@pytest.mark.parametrize("components", PORTALS, ids=label)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", [None, "1f1b", "zb_v"])
def test_a_write_to_a_tensor_that_other_partitions_read_is_refused(schedule, checkpoint, components):
    """Whether a partition on another device sees it would depend on where the model is cut."""
    for writer in (1, 2, 3):
        layers = nn.Sequential(Gives(), *(Writes(writes=j == writer) for j in (1, 2, 3)))
        pipe = scheduled(layers, [1] * 4, schedule, chunks=2, checkpoint=checkpoint, components=components)
        with pytest.raises(RuntimeError, match=f"{REFUSED} {writer}"):
            pipe.step(*data(2), loss)


def test_a_partition_that_reads_alone_may_write():
    plain = nn.Sequential(Gives(), Plain(), Writes(writes=True), Writes(writes=True))
    pipe = on_cpu(copy.deepcopy(plain), [1, 1, 2], chunks=2, checkpoint="never", schedule="gpipe")
    # Kernels of single precision round by where in memory a tensor lies, and with PyTorch 2.15 it lies elsewhere.
    assert_equal(pipe, plain, 2, exact=False)


# --- what is said of mistakes -----------------------------------------------------------------------------------------


@skippable(stash=["image"])
class Undeclared(Plain):
    def forward(self, x: Tensor) -> Any:
        yield peek("image")
        return x


def test_an_undeclared_peek_is_refused():
    with pytest.raises(SkipUsageError, match=re.escape("got peek('image') with peek declared as []; add 'image' to")):
        Undeclared()(torch.ones(1, WIDTH))


@skippable(peek=["image"])
class Lazy(Plain):
    def forward(self, x: Tensor) -> Any:
        return x


def test_a_peek_that_is_not_made_is_refused():
    with pytest.raises(SkipUsageError, match=re.escape("must peek every skip it declares, got none of ['image']")):
        Lazy()(torch.ones(1, WIDTH))


def test_a_peek_of_what_was_never_stashed_is_refused():
    with use_tracker(LocalTracker()), pytest.raises(SkipUsageError, match="'image' must be stashed before it is read"):
        Reads()(torch.ones(1, WIDTH))


def test_peeks_are_isolated_and_pickled():
    layer = Reads().isolate(space := Namespace())
    assert pickle.loads(pickle.dumps(layer)).peeks() == layer.peeks() == [(space, "image")]
    other = skippable(peek=["other"])(Undecorated)()
    assert pickle.loads(pickle.dumps(other)).peeks() == copy.deepcopy(other).peeks() == [(None, "other")]
    with pytest.raises(TypeError, match="peek must be a list of names, got the string 'abc'"):
        skippable(peek="abc")


class Undecorated(Plain):
    def forward(self, x: Tensor) -> Any:
        return x + (yield peek("other"))
