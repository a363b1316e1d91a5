"""Streams are handed out as PyTorch hands them out: the default one of a device, then those of its pools."""

from __future__ import annotations

from gpipe_bench.components import Components
from gpipe_bench.simulator.steps.layout import Layout
from gpipe_bench.simulator.steps.settings import Settings


def placed(*devices, m=3, rows=None, copy_streams=True, **options):
    """Compute stream of each partition, and the streams on which it copies."""
    settings = Settings(Components(copy_streams=copy_streams), **options)
    layout = Layout.of(devices, rows or range(len(devices)), m, settings)
    return list(layout.computing), [list(streams) for streams in layout.copying]


def test_each_microbatch_copies_on_a_stream_of_its_own():
    assert placed(0, 1) == ([(0, 0), (1, 0)], [[(0, 33), (0, 34), (0, 35)], [(1, 33), (1, 34), (1, 35)]])


def test_until_the_pool_of_the_device_is_used_up():
    assert [len(set(streams)) for streams in placed(0, 1, m=31)[1]] == [31, 31]
    assert [len(set(streams)) for streams in placed(0, 1, m=64)[1]] == [32, 32]
    first, second = placed(0, 0, m=20)[1]
    assert len({*first, *second}) == 32


def test_partitions_that_exchange_through_the_host_compute_on_streams_of_their_own():
    assert placed(0, 0, 1, transfer="host")[0] == [(0, 1), (0, 2), (1, 0)]


def test_which_are_of_another_pool_than_those_that_copy():
    computing, copying = placed(0, 0, m=20, transfer="host")
    assert not set(computing) & {*copying[0], *copying[1]}


def test_partitions_of_one_device_compute_on_its_default_stream():
    assert placed(0, 0, 1)[0] == [(0, 0), (0, 0), (1, 0)]


def test_partitions_that_a_schedule_has_on_one_device_share_its_stream():
    rows = (0, 1, 1, 0)
    assert placed(0, 1, 1, 0, transfer="host", rows=rows)[0] == [(0, 0), (1, 0), (1, 0), (0, 0)]
    assert placed(0, 0, 0, 0, transfer="host", rows=rows)[0] == [(0, 1), (0, 2), (0, 2), (0, 1)]


def test_without_copy_streams_copies_run_where_partitions_compute():
    assert placed(0, 1, copy_streams=False) == ([(0, 0), (1, 0)], [[(0, 0)] * 3, [(1, 0)] * 3])


def test_a_single_partition_copies_nothing():
    assert placed(0) == ([(0, 0)], [[(0, 0)] * 3])


def test_the_cpu_has_no_streams():
    assert placed(0, 0, transfer="host", streams=False) == ([(0, 0), (0, 0)], [[(0, 0)] * 3] * 2)
