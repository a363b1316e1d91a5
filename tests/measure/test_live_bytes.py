"""Live bytes per partition, with tasks made by hand and with the engine's.

A unit is one tensor of 256 floats: 1 KiB. Layers multiply element by element, so that every operation, forward and
backward, allocates exactly what is counted here.
"""

import threading
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from gpipe_bench import Components, GPipe
from gpipe_bench.engine.observer import Task
from gpipe_bench.measure.memory import LiveBytes

UNIT = 1024
CPU = torch.device("cpu")


def unit():
    return torch.ones(1, 256)


class Scale(nn.Module):
    """One unit of parameters; its backward pass allocates one for the input and one for the weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(unit())

    def forward(self, data):
        return data * self.weight


class Pair(nn.Module):
    """Two partitions, as a pipeline has them."""

    def __init__(self):
        super().__init__()
        self.partitions = [nn.Sequential(Scale()), nn.Sequential(Scale())]


def task(kind, i, j):
    return Task(kind, i, j, CPU, None, "compute")


def in_thread(work):
    result = []
    thread = threading.Thread(target=lambda: result.append(work()))
    thread.start()
    thread.join()
    return result[0]


def units(found):
    return [round(value / UNIT, 2) for value in found]


class TestPlainModule:
    def test_everything_counts_to_its_one_partition(self):
        module = nn.Sequential(Scale())
        with LiveBytes(module) as live:
            one = torch.ones(256)
            two = one + 1
            del one
            three = two + 1
        assert units(live.live_bytes) == [1 + 2]
        assert units(live.peak_bytes) == [1 + 2]
        del two, three
        assert units(live.live_bytes) == [1]

    def test_parameters_buffers_and_gradients_count_from_the_start(self):
        module = nn.Sequential(Scale())
        module.register_buffer("statistics", torch.zeros(512))
        module[0].weight.grad = unit()
        with LiveBytes(module) as live:
            pass
        assert units(live.peak_bytes) == [1 + 2 + 1]

    def test_an_input_from_outside_counts_when_it_is_read(self):
        module, outside = nn.Sequential(Scale()), unit()
        with LiveBytes(module) as live:
            before = units(live.live_bytes)
            result = module(outside)
        assert before == [1]
        assert units(live.live_bytes) == [1 + 1 + 1]
        del result

    def test_training_step(self):
        module = nn.Sequential(Scale(), Scale())
        with LiveBytes(module) as live:
            module(unit()).sum().backward()
        # weights, input, first output, gradients of the second layer's input and weight; then that of the first
        assert [value // UNIT for value in live.peak_bytes] == [2 + 1 + 1 + 2]
        assert units(live.live_bytes) == [2 + 2]

    def test_an_operation_that_writes_in_place_or_makes_a_view_adds_nothing(self):
        with LiveBytes(nn.Sequential()) as live:
            data = torch.ones(256)
            data.add_(1).view(16, 16).t()
            torch.add(data, 1, out=data)
        assert units(live.peak_bytes) == [1]

    def test_growing_in_place_counts(self):
        with LiveBytes(nn.Sequential()) as live:
            data = torch.ones(256)
            data.resize_(768)
        assert units(live.live_bytes) == [3]
        del data


class TestTasks:
    def test_a_task_pays_for_what_its_thread_allocates(self):
        live = LiveBytes(Pair())

        def work():
            token = live.start(task("forward", 0, 1))
            result = [torch.ones(256), torch.ones(512)]
            live.finish(token, 0)
            return result

        with live:
            kept = in_thread(work)
        assert units(live.live_bytes) == [1, 1 + 3]
        kept.clear()
        assert units(live.live_bytes) == [1, 1]

    def test_threads_at_work_together_do_not_pay_for_each_other(self):
        live, together, kept = LiveBytes(Pair()), threading.Barrier(2), []

        def work(j):
            token = live.start(task("forward", 0, j))
            for _ in range(50):
                together.wait()
                kept.append(torch.ones(256 * (j + 1)))
            live.finish(token, 0)

        with live:
            threads = [threading.Thread(target=work, args=(j,)) for j in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert units(live.live_bytes) == [1 + 50, 1 + 100]

    def test_the_innermost_task_pays(self):
        live = LiveBytes(Pair())
        with live:
            outer = live.start(task("backward", 0, 0))
            inner = live.start(task("recompute", 0, 1))
            one = torch.ones(256)
            live.finish(inner, 0)
            two = torch.ones(512)
            live.finish(outer, 0)
        assert units(live.live_bytes) == [1 + 2, 1 + 1]
        del one, two

    def test_tasks_that_end_out_of_order(self):
        live = LiveBytes(Pair())
        with live:
            first = live.start(task("forward", 0, 0))
            second = live.start(task("forward", 0, 1))
            live.finish(first, 0)
            one = torch.ones(256)
            live.finish(second, 0)
            live.finish(second, 0)
        assert units(live.live_bytes) == [1, 1 + 1]
        del one

    def test_outside_tasks_the_owner_of_an_operand_pays(self):
        pair = Pair()
        live = LiveBytes(pair)
        with live:
            target = unit()
            weight = pair.partitions[1][0].weight.detach()
            loss = (weight - target) ** 2
        # the target and the square; the difference is gone
        assert units(live.live_bytes) == [1, 1 + 1 + 1]
        assert units(live.peak_bytes) == [1, 1 + 1 + 2]
        del loss

    def test_outside_tasks_what_has_no_owner_is_nobody_s(self):
        live = LiveBytes(Pair())
        with live:
            data = torch.ones(256) + 1
        assert units(live.peak_bytes) == [1, 1]
        del data

    @pytest.mark.parametrize("kind", ["copy", "copy_grad", "portal", "portal_grad"])
    def test_a_copy_belongs_to_who_computes_with_it(self, kind):
        live, source = LiveBytes(Pair()), unit()
        with live:
            token = live.start(task(kind, 0, 1))
            arrived = source.clone()
            live.finish(token, UNIT)
            on_the_way = units(live.live_bytes)
            token = live.start(task("backward", 0, 0))
            arrived.neg_()
            live.finish(token, 0)
        assert on_the_way == [1, 1 + 1]
        assert units(live.live_bytes) == [1 + 1, 1]

    def test_no_mode_stays_behind(self):
        live, seen = LiveBytes(Pair()), []

        def work():
            token = live.start(task("forward", 0, 0))
            seen.append(len(_get_current_dispatch_mode_stack()))
            live.finish(token, 0)
            return len(_get_current_dispatch_mode_stack())

        with live:
            seen.append(in_thread(work))
        assert [*seen, len(_get_current_dispatch_mode_stack())] == [1, 0, 0]

    def test_a_mode_that_somebody_else_switched_on_stays(self):
        live, foreign = LiveBytes(Pair()), FlopCounterMode(display=False)

        def work():
            token = live.start(task("forward", 0, 0))
            with foreign:
                before = _get_current_dispatch_mode_stack()
                live.finish(token, 0)
                return before == _get_current_dispatch_mode_stack()

        with live:
            assert in_thread(work)

    def test_after_the_block_nothing_is_counted(self):
        live = LiveBytes(nn.Sequential())
        with live:
            pass
        token = live.start(task("forward", 0, 0))
        data = torch.ones(256)
        live.finish(token, 0)
        assert live.peak_bytes == [0]
        del data

    def test_an_exception_leaves_the_thread_as_it_was(self):
        with pytest.raises(ZeroDivisionError), LiveBytes(nn.Sequential()):
            raise ZeroDivisionError
        assert _get_current_dispatch_mode_stack() == []


class Begin(Function):
    """Tells of the beginning of a backward pass as the engine does: it ends at once, the last call counts."""

    @staticmethod
    def forward(ctx, live, j, data):
        ctx.live, ctx.j = live, j
        return data.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.live.finish(ctx.live.start(task("backward", 0, ctx.j)), 0)
        return None, None, grad


class TestBackwardPass:
    def test_an_autograd_node_belongs_to_the_partition_that_made_it(self):
        live, leaf, seed, kept = LiveBytes(Pair()), unit().requires_grad_(), unit(), []
        with live:
            middle = Begin.apply(live, 0, leaf.exp())
            middle.register_hook(kept.append)
            Begin.apply(live, 1, middle.exp()).backward(seed)
            del middle
        # partition 1 read the seed and made the gradient of the middle; partition 0 made that of the leaf, of which
        # no operand tells, since its gradient comes from partition 1 and what it saved was made outside tasks
        assert [len(kept), leaf.grad is None] == [1, False]
        assert units(live.live_bytes) == [1 + 1, 1 + 2]

    def test_nodes_of_two_microbatches_in_turn(self):
        live, leaf = LiveBytes(Pair()), unit().requires_grad_()
        with live:
            ends = [Begin.apply(live, 1, Begin.apply(live, 0, leaf.exp()).exp()) for _ in range(2)]
            torch.autograd.backward(ends, [unit(), unit()])
            ends.clear()
        # all that is left is the gradient of the leaf: its second part was added in place to the first
        assert units(live.live_bytes) == [1 + 1, 1]
        assert live.peak_bytes[0] >= 3 * UNIT

    def test_nodes_are_let_go_after_the_backward_pass(self):
        live, leaf = LiveBytes(Pair()), unit().requires_grad_()
        with live:
            end = Begin.apply(live, 0, leaf.exp())
            node = weakref.ref(end.grad_fn)
            end.backward(unit())
            del end
        assert node() is None


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def step(pipe, rows):
    live, data = LiveBytes(pipe), torch.ones(rows, 256)
    with live, pipe.observe(live):
        pipe(data).sum().backward()
    return live


class TestPipeline:
    def pipe(self, **arguments):
        return GPipe(nn.Sequential(Scale(), Scale()), [1, 1], devices=["cpu", "cpu"], **arguments)

    def test_one_microbatch_without_checkpoint(self):
        live = step(self.pipe(checkpoint="never"), rows=1)
        # partition 0: weight, input, and either its output or its weight's gradient
        # partition 1: weight, gradients of its input and of its weight
        assert [value // UNIT for value in live.peak_bytes] == [3, 3]
        assert units(live.live_bytes) == [1 + 1, 1 + 1]

    @pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
    @pytest.mark.parametrize("label", ["baseline", "dep-str-ptl", "dep-str-ptl-x-rec", "dep-str-ptl-clk-x"])
    def test_after_a_step_each_partition_holds_its_weights_and_their_gradients(self, label, checkpoint):
        pipe = self.pipe(checkpoint=checkpoint, chunks=4, components=Components.from_label(label))
        live = step(pipe, rows=4)
        assert units(live.live_bytes) == [2, 2]
        assert all(peak > 3 * UNIT for peak in live.peak_bytes)
        assert max(live.peak_bytes) < live.peak_total_bytes <= sum(live.peak_bytes)

    def test_recomputing_everything_first_needs_more_on_the_last_partition(self):
        peaks = {}
        for label in ("dep-x-x", "baseline"):
            pipe = GPipe(
                nn.Sequential(Scale(), *[layer for _ in range(4) for layer in (nn.Softplus(), nn.Tanh())]),
                [1, 8],
                devices=["cpu", "cpu"],
                chunks=4,
                checkpoint="always",
                components=Components.from_label(label),
            )
            peaks[label] = step(pipe, rows=4).peak_bytes
        # without Fork and Join the activations of all four micro-batches are alive together, with them those of one
        assert peaks["baseline"][1] > 1.9 * peaks["dep-x-x"][1]

    def test_gradients_are_the_same_under_observation(self):
        found = []
        for observed in (False, True):
            torch.manual_seed(0)
            pipe = GPipe(
                nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)),
                [1, 2],
                devices=["cpu", "cpu"],
                chunks=2,
                checkpoint="always",
            )
            torch.manual_seed(1)
            if observed:
                live = LiveBytes(pipe)
                with live, pipe.observe(live):
                    pipe(torch.ones(4, 8)).sum().backward()
            else:
                pipe(torch.ones(4, 8)).sum().backward()
            found.append([parameter.grad for parameter in pipe.parameters()])
        for plain, watched in zip(*found, strict=True):
            assert torch.equal(plain, watched)
        assert _get_current_dispatch_mode_stack() == []


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
def test_the_timeline_shows_that_each_task_of_the_backward_pass_frees_its_micro_batch(mode):
    layers = nn.Sequential(*(Scale() for _ in range(8)))
    pipe = GPipe(layers, [4, 4], devices=["cpu"] * 2, chunks=3, checkpoint=mode, schedule="gpipe", workers="never")
    batch = torch.ones(3, 256)
    with LiveBytes(pipe) as live, pipe.observe(live):
        pipe(batch).sum().backward()
    kinds = [point.task.kind for point in live.timeline]
    assert kinds.count("forward") == kinds.count("backward") == 6
    assert kinds.count("recompute") == {"always": 6, "except_last": 4, "never": 0}[mode]
    held: list[list[int]] = [[], []]
    for point in live.timeline:
        if point.task.kind == "backward":
            j = point.task.partition
            held[j].append(round(point.live_bytes[j] / UNIT))
    # Weights, their gradients and the batch are left.
    assert round(sum(live.timeline[-1].live_bytes) / UNIT) == 2 * 8 + 3
    # Without checkpoints a task frees three activations or more. With them the last partition frees what it recomputed,
    # and its input in exchange for the gradient that it sends on; the first one sends none, and frees its part of the
    # batch.
    falls = [[before - after for before, after in pairwise(each)] for each in held]
    assert falls == {"always": [[1, 1], [0, 0]], "except_last": [[1, 1], [0, 0]], "never": [[4, 5], [3, 3]]}[mode]
