"""Streams are handed out as PyTorch hands them out."""

from __future__ import annotations

from tests.simulator.oracle.places import Places


def test_each_microbatch_copies_on_a_stream_of_its_own_until_the_pool_is_used_up():
    places = Places((0, 1), copy_streams=True, transfer="direct")
    streams = [places.copying(i, 0) for i in range(64)]
    assert streams[32:] == streams[:32]
    assert len(set(streams)) == 32
    assert {places.device_of[stream] for stream in streams} == {0}
    assert not set(streams) & {places.copying(i, 1) for i in range(64)}
    assert [places.copying(i, 0) for i in range(64)] == streams


def test_partitions_that_exchange_through_the_host_compute_on_streams_of_their_own():
    places = Places((0, 0, 1), copy_streams=True, transfer="host")
    assert len(set(places.computing)) == 3
    assert places.computing[2] == 1
    assert places.workers == [0, 0, 2]
    assert not {places.copying(i, 0) for i in range(40)} & set(places.computing)


def test_partitions_of_one_device_compute_on_its_default_stream():
    assert Places((0, 0, 1), copy_streams=True, transfer="direct").computing == [0, 0, 1]


def test_without_copy_streams_copies_run_where_partitions_compute():
    places = Places((0, 1), copy_streams=False, transfer="direct")
    assert [places.copying(3, j) for j in (0, 1)] == places.computing == [0, 1]


def test_the_cpu_has_no_streams_and_a_worker_for_each_partition():
    places = Places((0, 0), copy_streams=True, transfer="host", streams=False)
    assert (places.computing, places.workers, places.copying(1, 0)) == ([0, 0], [0, 1], 0)
    assert places.moves(0, 1)
    assert not Places((0, 0), copy_streams=True, transfer="direct", streams=False).moves(0, 1)
