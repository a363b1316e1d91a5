"""Exact makespans over several hosts: a forward pass takes 10 ms, a backward pass 20, a copy within a host 1."""

from __future__ import annotations

import itertools

import pytest

from gpipe_bench.machine.networks import machine_of
from gpipe_bench.machine.profile import Link, load_profile
from gpipe_bench.simulator.steps.run import Settings, run
from tests.simulator.support import MS, task, workload

H100 = load_profile("h100")
LINKS = {name: Link(gb_per_s=1e5, latency_us=1000) for name in H100.links}
PROFILE = H100.model_copy(update={"links": LINKS, "launch_us": 0})


def makespan(m, network_ms, hosts=2):
    network = Link(gb_per_s=1e5, latency_us=network_ms * 1000)
    machine = machine_of(PROFILE, hosts=hosts, devices=4, network=network)
    return run(workload(m, [task()] * 4), machine, Settings(checkpoint="never")).makespan_ns / MS


def test_a_slow_network_delays_one_microbatch_by_its_time_in_each_direction():
    # Four passes in each direction, and between them copies of 1, 3 and 1 ms.
    assert makespan(1, 3) == 4 * 10 + 4 * 20 + 2 * (1 + 3 + 1)


def test_a_network_that_is_slower_than_the_devices_is_the_bound():
    # Two hosts of two devices, copies over the network of 30 ms:
    #   forward    device 1 ends at 21; the network 21-51, 51-81, 81-111; devices 2 and 3 111-121, 122-132
    #   backward   device 3 132-152, device 2 153-173; the network 173-203, 203-233, 233-263; 263-283, 284-304
    assert makespan(3, 30) == 304


def test_a_network_as_fast_as_the_links_is_one_host():
    assert makespan(3, 1) == makespan(3, 30, hosts=1) == (3 + 4 - 1) * 30 + 2 * 3


@pytest.mark.parametrize("shared", [False, True])
def test_copies_take_turns_on_the_card_of_a_host_if_it_has_but_one(shared):
    # Portals 0 -> 3 and 1 -> 2, and copies 1 -> 2, of free tasks.
    work = workload(4, [task(0, 0)] * 4, [(0, 3), (1, 2)])
    network = Link(gb_per_s=1, latency_us=5000, shared=shared)
    machine = machine_of(PROFILE, hosts=2, devices=4, network=network)
    events = run(work, machine, Settings(checkpoint="never")).events
    across = sorted(
        (event.start_us, event.end_us)
        for event in events
        if event.kind == "portal" or (event.kind == "copy" and event.partition == 2)
    )
    assert len(across) == 12
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(across)) == shared


@pytest.mark.parametrize("partition", [2, 4], ids=["sends", "receives"])
def test_copies_of_other_devices_take_turns_on_the_one_card_that_both_need(partition):
    # Of three hosts, portals 0 -> 5 and copies 1 -> 2 leave the first; the portals and copies 3 -> 4 go to the third.
    network = Link(gb_per_s=1, latency_us=5000, shared=True)
    machine = machine_of(PROFILE, hosts=3, devices=6, network=network)
    events = run(workload(6, [task(0, 0)] * 6, [(0, 5)]), machine, Settings(checkpoint="never")).events
    arriving = sorted(
        (event.start_us, event.end_us)
        for event in events
        if event.kind == "portal" or (event.kind == "copy" and event.partition == partition)
    )
    assert len(arriving) == 12
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(arriving))
