"""Streams are handed out as PyTorch hands them out: the default ones of all devices, then those of their pools."""

from __future__ import annotations

from gpipe_bench.components import Components
from gpipe_bench.simulator.clock.lowering import Lowered
from gpipe_bench.simulator.clock.run import Clock, Settings
from tests.simulator.support import Plain, task, workload


def placed(*devices, m=3, copy_streams=True, **options):
    """Device of each stream, and the compute stream of each partition."""
    settings = Settings(Components(copy_streams=copy_streams), devices=devices, **options)
    places = Clock(Lowered(workload(m, [task()] * len(devices)), Plain(), settings)).places()
    return list(places.device_of), list(places.computing)


def test_each_microbatch_copies_on_a_stream_of_its_own():
    assert placed(0, 1) == ([0, 1, 0, 0, 0, 1, 1, 1], [0, 1])


def test_until_the_pool_of_the_device_is_used_up():
    assert placed(0, 1, m=31)[0] == [0, 1, *[0] * 31, *[1] * 31]
    assert placed(0, 1, m=64)[0] == [0, 1, *[0] * 32, *[1] * 32]
    assert placed(0, 0, m=20)[0] == [0, *[0] * 32]


def test_partitions_that_exchange_through_the_host_compute_on_streams_of_their_own():
    assert placed(0, 0, 1, transfer="host")[1] == [2, 3, 1]


def test_which_are_of_another_pool_than_those_that_copy():
    assert placed(0, 0, m=20, transfer="host")[0] == [0] * (1 + 2 + 32)


def test_partitions_of_one_device_compute_on_its_default_stream():
    assert placed(0, 0, 1)[1] == [0, 0, 1]


def test_partitions_that_a_schedule_has_on_one_device_share_its_stream():
    assert placed(0, 1, 1, 0, transfer="host", schedule="zb_v", m=4)[1] == [0, 1, 1, 0]
    assert placed(0, 0, 0, 0, transfer="host", schedule="zb_v", m=4)[1] == [1, 2, 2, 1]


def test_without_copy_streams_copies_run_where_partitions_compute():
    assert placed(0, 1, copy_streams=False) == ([0, 1], [0, 1])


def test_a_single_partition_copies_nothing():
    assert placed(0) == ([0], [0])


def test_the_cpu_has_no_streams():
    assert placed(0, 0, transfer="host", streams=False) == ([0], [0, 0])
