"""Measured layers are simulated as arithmetic with their times says, where transfers are free."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random

import pytest

from gpipe_bench.balance import balance_by_simulation, layer_simulated_times
from gpipe_bench.emulator import emulate
from gpipe_bench.errors import BalanceError, ConfigError
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.schedules import SCHEDULES, Durations, named_schedule, timing, with_recomputation
from gpipe_bench.schedules.cycles import checkpoint_stop
from gpipe_bench.schedules.table import TWO_PER_DEVICE
from gpipe_bench.settings import CHECKPOINT_MODES
from gpipe_bench.simulator import MeasuredLayer, Model, simulate, write_layers

MIB, GIB = 2**20, 2**30
PROFILE = load_profile("p40")
LINKS = {name: link.model_copy(update={"gb_per_s": 1e5, "latency_us": 0}) for name, link in PROFILE.links.items()}
FREE = PROFILE.model_copy(update={"launch_us": 0, "links": LINKS})
"""Copies of nothing take no time, and no launch costs any."""


def drawn_layers(random, count):
    """Layers with times of whole milliseconds."""
    layers = []
    for _ in range(count):
        weights, inputs = random.randint(0, 90), random.randint(0, 90)
        values = {"backward_ms": weights + inputs, "backward_weights_ms": weights}
        layers.append(MeasuredLayer(forward_ms=random.randint(1, 99), **values))
    return layers


def durations(layers, balance):
    """Of each partition; the inputs of the first one need no gradient, so all of its backward pass is for weights."""
    found = []
    for start, stop in pairwise(accumulate(balance, initial=0)):
        part = layers[start:stop]
        forward, backward, weights = (
            sum(getattr(layer, name) for layer in part) for name in ("forward_ms", "backward_ms", "backward_weights_ms")
        )
        found.append(Durations(forward, backward - weights, weights) if start else Durations(forward, 0, backward))
    return found


def expected_ms(layers, balance, schedule, checkpoint):
    complete = with_recomputation(schedule, checkpoint_stop(checkpoint, schedule.microbatches))
    return timing(complete, durations(layers, balance)).makespan


def simulated(layers, balance, m, **options):
    given = {"batch_size": m, "chunks": m, "profile": FREE, "steps": 1, **options}
    return simulate(layers, balance=balance, **given)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("name", [None, *SCHEDULES])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_the_step_takes_what_the_schedule_takes_by_arithmetic(p, name, checkpoint):
    random = Random(f"{p} {name} {checkpoint}")
    for m in (1, 2, 5, 8):
        n = p * 2 if name in TWO_PER_DEVICE else p
        balance = [random.randint(1, 3) for _ in range(n)]
        layers = drawn_layers(random, sum(balance))
        step = simulated(layers, balance, m, schedule=name, checkpoint=checkpoint)
        assert step.step_time_ms == expected_ms(layers, balance, named_schedule(name or "gpipe", m, n, p), checkpoint)
        assert step.throughput_samples_per_s == pytest.approx(1000 * m / step.step_time_ms)
        row = step.row()
        assert (row.evidence, row.model, row.device_count) == ("simulated", "layers", p)


@pytest.mark.parametrize("name", ["interleaved", "looped_bfs"])
@pytest.mark.parametrize(("p", "each"), [(2, 1), (2, 3), (3, 4), (4, 2)])
def test_any_number_of_partitions_on_each_device(name, p, each):
    n, m = p * each, 2 * p
    layers = drawn_layers(Random(n), n)
    step = simulated(layers, [1] * n, m, schedule=name, devices=[j % p for j in range(n)], checkpoint="never")
    assert step.step_time_ms == expected_ms(layers, [1] * n, named_schedule(name, m, n, p), "never")


def test_a_schedule_of_ones_own():
    layers = drawn_layers(Random(0), 3)
    schedule = named_schedule("zb_h1", 5, 3, 3)
    step = simulated(layers, [1] * 3, 5, schedule=schedule, checkpoint="never")
    assert step.step_time_ms == expected_ms(layers, [1] * 3, schedule, "never")


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_one_device_takes_all_passes_and_recomputations(checkpoint):
    layers = drawn_layers(Random(checkpoint), 4)
    forward, backward = (sum(getattr(layer, name) for layer in layers) for name in ("forward_ms", "backward_ms"))
    m = 6
    expected = m * (forward + backward) + checkpoint_stop(checkpoint, m) * forward
    assert simulated(layers, [4], m, checkpoint=checkpoint).step_time_ms == expected


@pytest.mark.parametrize("profile", ["p40", "h100", "v100"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_hardware_does_not_change_the_passes(profile, precision):
    """What the host launches, copies and updates is the profile's; the passes of layers are not."""
    layers = drawn_layers(Random(1), 2)
    step = simulated(layers, [1, 1], 4, profile=profile, precision=precision, schedule="1f1b")
    kinds = {"forward": "forward_ms", "backward": "backward_ms", "recompute": "forward_ms"}
    own = [event for event in step.events if event.kind in kinds]
    assert len(own) == 2 * (4 + 4 + 3)
    for event in own:
        measured = getattr(layers[event.partition], kinds[event.kind])
        assert event.end_us - event.start_us == pytest.approx(1000 * measured)
    assert not step.bound_by_host


def test_outputs_cross_boundaries_at_the_pace_of_the_link():
    layers = [replace(layer, output_mib=64.0) for layer in drawn_layers(Random(2), 2)]
    links = {name: link.model_copy(update={"gb_per_s": 8}) for name, link in LINKS.items()}
    link = FREE.model_copy(update={"links": links})
    step = simulated(layers, [1, 1], 1, profile=link, checkpoint="never")
    passes = sum(layer.forward_ms + layer.backward_ms for layer in layers)
    assert step.step_time_ms == pytest.approx(passes + 2 * 64 * MIB / 8e6)
    assert step.caveats == ()


def test_each_parameter_takes_the_host_time_in_an_update():
    constant = load_profile("h100").constants["parameter_us"]
    layer = MeasuredLayer(forward_ms=1, backward_ms=2, parameter_mib=40.0)
    one, ten = (simulated([replace(layer, parameters=count)], [1], 1, profile="h100") for count in (1, 10))
    assert 1000 * (ten.step_time_ms - one.step_time_ms) == pytest.approx(9 * constant)


def sized(count, **sizes):
    values = {"activation_mib": 100.0, "output_mib": 10.0, "parameter_mib": 50.0, "buffer_mib": 5.0, **sizes}
    return [MeasuredLayer(forward_ms=10, backward_ms=20, **values) for _ in range(count)]


def peaks(step):
    return [round(use.peak_live_gib * GIB / MIB, 6) for use in step.devices]


@pytest.mark.parametrize("optimizer", [None, "sgd", "adam"])
@pytest.mark.parametrize("m", [1, 3])
def test_memory_of_one_device_without_checkpoints(m, optimizer):
    """Most is there in the first layer that runs backward: all graphs, and gradients of output, input and weights."""
    layers = sized(4, parameter_mib=1.0)
    step = simulated(layers, [4], m, checkpoint="never", optimizer=optimizer, steps=2, schedule="gpipe")
    state = 2 * 4 if optimizer == "adam" else 0
    assert peaks(step) == [4 * (1 + 5) + m * 4 * 100 + state + 10 + 10 + 1]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_h2"])
def test_memory_grows_with_the_passes_in_flight(schedule):
    """From eight micro-batches to nine only GPipe holds more."""
    layers = sized(4)
    few, many = (simulated(layers, [1] * 4, m, schedule=schedule, checkpoint="never") for m in (8, 9))
    more = [after - before for before, after in zip(peaks(few), peaks(many), strict=True)]
    assert all(increase >= 100 for increase in more) if schedule == "gpipe" else max(more) <= 10


def test_with_checkpoints_two_graphs_are_there_at_once_and_not_eight():
    """The second is the one that is recomputed early."""
    kept, dropped = (
        peaks(simulated(sized(2), [1, 1], 8, schedule="gpipe", checkpoint=mode)) for mode in ("never", "always")
    )
    assert (kept[0] - dropped[0]) // 100 == 8 - 2


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, ["copies take the latency", "each W takes half"]),
        ({"output_mib": 1.0}, ["each W takes half"]),
        ({"backward_weights_ms": 1.0}, ["copies take the latency"]),
        ({"output_mib": 1.0, "backward_weights_ms": 1.0}, []),
        ({"output_mib": 1.0, "backward_weights_ms": 1.0, "activation_mib": 1.0}, ["memory lacks a part"]),
        ({"output_mib": 1.0, "backward_weights_ms": 1.0, "buffer_mib": 1.0}, ["memory lacks a part"]),
        ({"output_mib": 1.0, "backward_weights_ms": 1.0, "activation_mib": 1.0, "parameter_mib": 1.0}, []),
    ],
)
def test_what_is_not_known_is_said(columns, words):
    layers = [MeasuredLayer(forward_ms=1, backward_ms=2, **columns)] * 2
    step = simulated(layers, [1, 1], 4, schedule="zb_h1")
    assert len(step.caveats) == len(words)
    assert all(word in caveat for word, caveat in zip(words, step.caveats, strict=True))
    has_memory = columns.keys() & {"activation_mib", "parameter_mib", "buffer_mib"}
    assert (step.peak_allocated_gib is not None) == bool(has_memory)


def test_without_the_time_of_weights_each_half_is_half():
    known = [MeasuredLayer(forward_ms=7, backward_ms=26, backward_weights_ms=13)] * 3
    unknown = [replace(layer, backward_weights_ms=None) for layer in known]
    one, other = (simulated(layers, [1] * 3, 5, schedule="zb_h1").step_time_ms for layers in (known, unknown))
    assert one == other


@pytest.mark.parametrize("samples", [4, None])
@pytest.mark.parametrize(("batch_size", "chunks", "size"), [(64, 8, 8), (30, 8, 2), (18, 4, 3)])
def test_the_batch_must_give_micro_batches_of_the_size_that_was_measured(batch_size, chunks, size, samples):
    layers = [MeasuredLayer(forward_ms=1, backward_ms=2, samples=samples)] * 2
    if samples is None and size == 8:
        assert simulated(layers, [1, 1], 1, batch_size=batch_size, chunks=chunks).status == "ok"
        return
    with pytest.raises(ConfigError, match=r"batch_size must give micro-batches of . samples, .* change batch_size or"):
        simulated(layers, [1, 1], 1, batch_size=batch_size, chunks=chunks)


def test_a_file_by_its_name_is_the_same(tmp_path):
    layers = [replace(layer, output_mib=3.0, parameter_mib=7.0) for layer in drawn_layers(Random(3), 4)]
    path = tmp_path / "times.csv"
    write_layers(path, layers)
    one = simulated(layers, [2, 2], 4, schedule="1f1b")
    other = simulated(Model(str(path), {}), [2, 2], 4, schedule="1f1b")
    assert (one.step_time_ms, peaks(one)) == (other.step_time_ms, peaks(other))
    assert other.row().model == str(path)


def test_the_balance_is_optimal_for_the_times_with_their_recomputations():
    layers = [MeasuredLayer(forward_ms=f, backward_ms=b) for f, b in ((1, 9), (5, 1), (5, 1), (5, 1))]
    how = {"batch_size": 8, "chunks": 8, "profile": "h100"}
    times = layer_simulated_times(layers, checkpoint="never", **how)
    assert times == pytest.approx([0.08, 0.048, 0.048, 0.048])
    assert balance_by_simulation(2, layers, checkpoint="never", **how) == [2, 2]
    assert layer_simulated_times(layers, checkpoint="always", **how) == pytest.approx([0.088, 0.088, 0.088, 0.088])
    assert balance_by_simulation(2, layers, checkpoint="always", **how) == [2, 2]


WRONG = {
    "sample": {"sample": 3},
    "loss": {"loss": len},
    "target": {"target": 3},
}


@pytest.mark.parametrize("name", WRONG)
def test_layers_take_no_tensors(name):
    with pytest.raises(ConfigError, match=f"{name} must be None with measured layers; leave it out"):
        simulated(drawn_layers(Random(4), 2), [1, 1], 4, **WRONG[name])


def test_wrong_values_are_named():
    layers = [MeasuredLayer(forward_ms=-1, backward_ms=float("nan")), MeasuredLayer(forward_ms="1", backward_ms=True)]
    with pytest.raises(ConfigError) as caught:
        simulated(layers, [1, 1], 4)
    assert len(caught.value.problems) == 4
    with pytest.raises(ConfigError, match=r"model must be an nn\.Sequential, a Model or MeasuredLayers"):
        simulated([*drawn_layers(Random(5), 1), "layer"], [1, 1], 4)
    with pytest.raises(BalanceError):
        simulated(drawn_layers(Random(5), 2), [1, 2], 4)


def test_layers_cannot_be_emulated():
    with pytest.raises(ConfigError, match="model must have layers that run, got measured times of layers"):
        emulate(drawn_layers(Random(6), 2), balance=[1, 1], batch_size=4, chunks=4, profile="p40")
