"""Messages between two processes: what is sent, when it is described, and when it is freed."""

from __future__ import annotations

import weakref

import pytest
import torch

from gpipe_bench.autograd.microbatch import MicroBatch
from gpipe_bench.distributed import messages
from gpipe_bench.distributed.failures import LostError
from gpipe_bench.distributed.links import Link
from gpipe_bench.distributed.staging import Staging
from tests.distributed.virtual import Context, VirtualGroup, World

BOX = ("F", 0, 1, 0)
STAGING = Staging(torch.device("cpu"))


class CountingGroup(VirtualGroup):
    sent = nbytes = 0

    def send(self, tensors, rank, tag):
        self.sent += 1
        self.nbytes += tensors[0].nbytes
        work = super().send(tensors, rank, tag)
        return Late(work) if tag == 1 else work


class Late:
    """A receipt, which must not be waited for before the end of the batch."""

    may_wait = False

    def __init__(self, work):
        self.work = work

    def wait(self):
        assert self.may_wait
        self.work.wait()


class Ends:
    """A link from rank 0 to rank 1, in one thread."""

    def __init__(self):
        self.world = World(2)
        self.context = Context(self.world, "messages", [0, 1])
        self.groups = [CountingGroup(self.context, rank) for rank in range(2)]
        self.ends = [Link(group, 1 - rank) for rank, group in enumerate(self.groups)]

    def begin(self, kind):
        for end in self.ends:
            end.begin(kind, STAGING.empty)

    def send(self, value, box=BOX):
        self.ends[0].send(*messages.pack(box, value))
        self.world.settle()

    def receive(self):
        parcel = self.ends[1].receive(STAGING.empty)
        self.world.settle()
        return parcel.description.box, parcel.value(torch.Tensor.cpu)

    def handed_on(self, value, box=BOX):
        """What arrives, and how many transfers that takes."""
        before = self.groups[0].sent
        self.send(value, box)
        return self.receive(), self.groups[0].sent - before


def test_a_message_like_that_of_an_earlier_step_is_not_described():
    ends, (one, other) = Ends(), torch.rand(2, 3)
    boxes = [("F", i, 1, 0) for i in range(3)]
    counts = []
    for _ in range(3):
        ends.begin("step")
        for box in boxes:
            (there, value), count = ends.handed_on([one, other], box)
            assert there == box
            assert torch.equal(torch.stack(value), torch.stack([one, other]))
            counts.append(count)
    # Difference, length, description, two tensors.
    assert counts == [5, 5, 5, 2, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(("kinds", "described"), [(2, 2), (16, 16), (17, 51)])
def test_batches_of_several_kinds_in_turns(kinds, described):
    """Sixteen are remembered; no message takes the memory of one of another kind."""
    ends, news = Ends(), []
    for number in range(3 * kinds):
        value = torch.rand(number % kinds * 10 + 1)
        before = ends.groups[0].nbytes
        ends.begin(str(number % kinds))
        (_, there), count = ends.handed_on(value)
        assert torch.equal(there, value)
        news.append((count, ends.groups[0].nbytes - before - value.nbytes))
    assert [count for count, _ in news].count(4) == described
    assert all(more == 0 if count == 1 else more < 1000 for count, more in news)


def test_a_batch_that_has_fewer_messages_than_an_earlier_one_of_its_kind():
    ends = Ends()
    for count in (3, 1, 3, 2):
        ends.begin("step")
        for i in range(count):
            (box, value), _ = ends.handed_on(torch.full((9 - i,), i), ("F", i, 1, 0))
            assert (box, value.tolist()) == (("F", i, 1, 0), [i] * (9 - i))
        ends.begin("other")
        (_, value), _ = ends.handed_on(torch.ones(30))
        assert value.tolist() == [1] * 30


def test_a_receiver_does_not_wait_for_its_receipts(monkeypatch):
    ends = Ends()
    for _ in range(9):
        ends.handed_on(torch.ones(2))
    monkeypatch.setattr(Late, "may_wait", True)
    for end in ends.ends:
        end.finish()


@pytest.mark.parametrize(
    "values",
    [
        [torch.rand(2, 3), torch.rand(3, 2), torch.rand(0, 2), torch.rand(1), torch.rand(2).double()],
        [[torch.rand(2), None], [None, torch.rand(2)], [None, None]],
        [1, True, 1.0],
        [(1, torch.rand(2)), (True, torch.rand(2))],
        [torch.rand(2), torch.rand(2).requires_grad_()],
        [torch.rand(2, 3), torch.rand(3, 2).t(), torch.rand(2, 6)[:, :3]],
        [torch.eye(2), torch.eye(2).to_sparse()],
    ],
)
def test_a_message_that_differs_from_that_of_the_last_step_is_described(values):
    ends = Ends()
    for value in [*values, *values, values[0], values[0], *reversed(values)]:
        (_, there), _ = ends.handed_on(value)
        assert type(there) is type(value)
        torch.testing.assert_close(there, value, rtol=0, atol=0)
        if isinstance(value, torch.Tensor):
            assert there.requires_grad == value.requires_grad


# PyTorch 2.14.1 says so of every tensor that it loads.
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_a_tensor_that_came_can_be_saved(tmp_path):
    (_, there), _ = Ends().handed_on(torch.ones(3, dtype=torch.float64))
    torch.save(there, tmp_path / "there.pt")
    assert torch.load(tmp_path / "there.pt").tolist() == [1, 1, 1]


def test_strides_stay():
    value = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    (_, there), _ = Ends().handed_on(value)
    assert there.stride() == value.stride()


def test_a_microbatch():
    value = MicroBatch((torch.rand(2), torch.rand(2), 3), messages.tree_flatten((0, (0, 0)))[1], frozenset({1}))
    ends = Ends()
    for _ in range(3):
        (_, there), _ = ends.handed_on(value)
        assert (there.structure, there.aliased) == (value.structure, value.aliased)
        torch.testing.assert_close(there.values, value.values)


def test_tensors_are_freed_once_they_are_received():
    ends, alive = Ends(), weakref.WeakSet()
    for number in range(32):
        value = torch.rand(3)
        alive.add(value.untyped_storage())
        ends.send(value)
        del value
        ends.receive()
        assert len(alive) <= 4, number
    ends.ends[0].finish()
    assert not alive


def test_a_process_that_ends_after_its_last_message():
    ends = Ends()
    for _ in range(2):
        ends.handed_on(torch.ones(2))
    ends.send(torch.ones(2))
    ends.context.close(0)
    _, value = ends.receive()
    assert value.tolist() == [1, 1]
    with pytest.raises(LostError):
        ends.receive()


def test_a_value_that_no_other_process_can_import():
    class Own:
        pass

    with pytest.raises(TypeError, match="values between processes must be tensors, or what pickle takes, got Own and"):
        messages.pack(BOX, [Own()])


@pytest.mark.filterwarnings("ignore")  # both kinds of tensors warn
@pytest.mark.parametrize("kind", ["quantised", "nested"])
def test_tensors_that_are_refused(kind):
    x = torch.rand(2, 3)
    make = {
        "quantised": lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([x[0], x[1, :2]]),
    }
    with pytest.raises(TypeError, match=f"must be plain, dense or sparse, got a {kind} tensor"):
        messages.pack(BOX, [make[kind]()])
