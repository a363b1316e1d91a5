"""Machines of several hosts: which copies take the network, what they share, and networks as data."""

from __future__ import annotations

import pytest

from gpipe_bench.errors import ConfigError
from gpipe_bench.machine.networks import machine_of, networks
from gpipe_bench.machine.profile import HardwareMachine, load_profile

P40, H100 = load_profile("p40"), load_profile("h100")
NBYTES = 45 * 10**6


def test_copies_between_hosts_take_the_network_and_others_the_links():
    alone, both = HardwareMachine(H100), machine_of(H100, hosts=2, devices=16, network="ndr400")
    assert both.copy_ns(7, 8, NBYTES) == both.copy_ns(8, 7, NBYTES) == both.copy_ns(0, 15, NBYTES) == 1_018_000
    for ends in ((0, 7), (8, 15), (3, 3)):
        assert both.copy_ns(*ends, NBYTES) == alone.copy_ns(ends[0] % 8, ends[1] % 8, NBYTES)


def test_groups_are_counted_from_the_first_device_of_a_host():
    alone, both = HardwareMachine(P40), machine_of(P40, hosts=2, devices=12, network="ethernet10")
    across = alone.copy_ns(3, 4, NBYTES)
    assert [both.copy_ns(j, j + 1, NBYTES) == across for j in (2, 3, 4, 8, 9, 10)] == [False, True, False] * 2
    assert both.buses(3, 4) == alone.buses(3, 4)
    assert not {*both.buses(3, 4)} & {*both.buses(9, 10)}


def test_a_card_is_shared_by_all_copies_of_its_host_in_one_direction():
    machine = machine_of(H100, hosts=3, devices=6, network="ethernet10")
    out = [{*machine.buses(source, target)} for source, target in ((2, 4), (3, 1), (2, 5))]
    into = [{*machine.buses(source, target)} for source, target in ((1, 2), (4, 3), (0, 3))]
    assert len(out[0] & out[1] & out[2]) == len(into[0] & into[1] & into[2]) == 1
    assert not any(one & other for one in out for other in into)
    assert machine.buses(2, 3) == ()


def test_cards_of_devices_are_not_shared():
    assert machine_of(H100, hosts=2, devices=4, network="ndr400").buses(1, 2) == ()


def test_a_link_of_a_profile_is_a_network():
    mine = P40.model_copy(update={"links": P40.links | {"mine": P40.links["pcie"]}})
    assert machine_of(mine, hosts=2, devices=2, network="mine").copy_ns(0, 1, 11 * 10**6) == 1_010_000


def test_networks_of_the_package_say_where_their_numbers_come_from():
    known = networks()
    assert all(network.source for network in known.values())
    speeds = [known[name].gb_per_s for name in ("ideal", "ndr400", "hdr200", "ethernet100", "ethernet10")]
    assert speeds == sorted(speeds, reverse=True)


def test_all_that_is_wrong_about_hosts_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        machine_of(H100, hosts=3, devices=8, network="ndr40", transfer="host")
    divided, direct, known = caught.value.problems
    assert divided == "hosts must divide the 8 devices evenly, got 3; change one of them"
    assert direct.startswith("hosts must be 1 where tensors are transferred through host memory, got 3; leave transfer")
    names = ", ".join(networks())
    assert known == f"network must be one of {names}, or a link of h100, got 'ndr40'; use 'ndr400'"
