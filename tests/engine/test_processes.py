"""Threads and processes around a pipeline: several callers, copies, pickles and forks."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import traceback
import warnings

import pytest
import torch
from torch import nn

from gpipe_bench import Components
from gpipe_bench.engine.worker import result_of
from tests.engine.steps import mean_loss, scheduled, targets
from tests.engine.support import FACTORIAL, Do, Mix, assert_same, crossing_model, label, on_cpu, train_step

X = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)


def crossing_pipe(**options):
    return on_cpu(crossing_model(), [2, 2, 3], chunks=3, **options)


@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("components", FACTORIAL[::5], ids=label)
def test_a_deep_copy_trains_on_its_own(components, schedule):
    pipe = crossing_pipe(components=components, schedule=schedule)
    train_step(pipe, X)
    clone = copy.deepcopy(pipe)
    before = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter.add_(1)
    torch.testing.assert_close(dict(pipe.state_dict()), before)
    assert_same(train_step(copy.deepcopy(pipe), X), train_step(crossing_model(), X))


@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("components", FACTORIAL[::5], ids=label)
def test_a_pickled_pipeline_trains_as_before(components, schedule):
    pipe = crossing_pipe(components=components, checkpoint="always", transfer="host", schedule=schedule)
    expected = train_step(pipe, X)
    loaded = pickle.loads(pickle.dumps(pipe))
    assert (loaded.components, loaded.transfer, loaded.balance) == (components, "host", [2, 2, 3])
    assert_same(train_step(loaded, X), expected)


def test_a_copy_shares_its_layers_with_its_own_partitions():
    clone = copy.deepcopy(crossing_pipe())
    assert [id(layer) for partition in clone.partitions for layer in partition] == [id(layer) for layer in clone]


def test_two_pipelines_run_in_two_threads():
    expected = train_step(crossing_model(), X)
    outcomes = []
    # made before: making a model draws from the generator that all threads share
    pipes = [crossing_pipe() for _ in range(2)]

    def work(pipe):
        outcomes.extend(train_step(pipe, X) for _ in range(3))

    threads = [threading.Thread(target=work, args=(pipe,)) for pipe in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 6
    for outcome in outcomes:
        assert_same(outcome, expected)


def test_one_pipeline_called_by_two_threads_serves_one_after_the_other():
    first_runs, second_calls = threading.Event(), threading.Event()
    order = []

    def note(x):
        call = int(x[0, 0])
        if call == 0:
            first_runs.set()
            assert second_calls.wait(timeout=30)
            # long enough for the other call to begin if it were let in
            work = torch.ones(200, 200)
            for _ in range(20):
                work = work @ work
        order.append(call)
        return x

    pipe = on_cpu(nn.Sequential(Do(note), Do(note)), [1, 1], chunks=3)

    def second():
        first_runs.wait(timeout=30)
        second_calls.set()
        pipe(torch.ones(3, 1))

    thread = threading.Thread(target=second)
    thread.start()
    pipe(torch.zeros(3, 1))
    thread.join()
    assert order == [0] * 6 + [1] * 6


@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize("schedule", [None, "gpipe", "zb_h1"])
@pytest.mark.parametrize("caller", ["loss", "layer", "hook of a gradient"])
def test_a_batch_that_calls_its_own_pipeline(caller, schedule, workers):
    """It would wait for itself, with the caller, for ever. The paper's executor has ended by the time of the loss."""
    pipe = scheduled(nn.Sequential(Mix(), Mix()).double(), [1, 1], schedule, chunks=2, workers=workers)
    armed, outcomes = True, []

    def again(*_):
        if armed:
            with torch.no_grad():
                pipe(X)

    def loss(output, target):
        if caller == "loss":
            again()
        elif caller == "hook of a gradient":
            output.register_hook(again)
        return mean_loss(output, target)

    if caller == "layer":
        pipe[1].register_forward_hook(again)

    def train():
        nonlocal armed
        for armed in (True, False):  # noqa: B007 - read by the calls
            outcomes.append(result_of(lambda: pipe.step(X, targets(6), loss)))

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert len(outcomes) == 2
    (_, error), (value, later) = outcomes
    assert later is None
    assert torch.isfinite(value)
    if schedule is None and caller != "layer":
        assert error is None
    else:
        assert isinstance(error, RuntimeError)
        assert "a pipeline must run one batch at a time, got a call from a loss, layer or hook" in str(error)


@pytest.mark.parametrize("inner", [None, "gpipe"])
@pytest.mark.parametrize("outer", [None, "gpipe"])
def test_a_pipeline_within_a_layer_of_a_pipeline(outer, inner):
    plain = nn.Sequential(Mix(), nn.Sequential(Mix(), Mix()), Mix()).double()
    layers = copy.deepcopy(plain)
    layers[1] = on_cpu(layers[1], [1, 1], chunks=2, schedule=inner)
    pipe = on_cpu(layers, [1, 2], chunks=3, schedule=outer)
    found, expected = train_step(pipe, X), train_step(plain, X)
    torch.testing.assert_close(found.output, expected.output)
    torch.testing.assert_close(list(found.gradients.values()), list(expected.gradients.values()))


def run_in_a_fork(work) -> int:
    """The exit status of ``work`` in a forked child, which is killed if it hangs."""
    with warnings.catch_warnings():
        # Python 3.12 warns of forks in a process with threads; that is what is tested
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        status = 1
        try:
            work()
            status = 0
        except BaseException:  # noqa: BLE001  (the parent sees a status only)
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which this platform lacks")
@pytest.mark.parametrize("components", [Components(), Components(fork_join=False)], ids=label)
def test_a_pipeline_works_in_a_forked_process(components):
    pipe = crossing_pipe(components=components)
    expected = train_step(pipe, X)
    status = run_in_a_fork(lambda: assert_same(train_step(pipe, X), expected))
    assert status == 0
