"""The ledger: each storage once, by owner, until it is freed."""

import gc
import threading

import pytest
import torch

from gpipe_bench.measure.ledger import Ledger

KIB = 1024


def kib(n=1):
    """A tensor whose storage takes ``n`` KiB."""
    return torch.zeros(256 * n)


def test_new_storages_count_to_their_owner():
    ledger, one, two = Ledger(2), kib(1), kib(2)
    ledger.enter([one], 0)
    ledger.enter([two], 1)
    assert ledger.live_bytes == ledger.peak_bytes == [KIB, 2 * KIB]
    assert ledger.peak_total_bytes == 3 * KIB


def test_views_and_repeats_count_once():
    ledger, tensor = Ledger(2), kib()
    ledger.enter([tensor, tensor, tensor[3:], tensor.view(16, 16).t(), tensor.detach()], 0)
    ledger.enter([tensor.view(-1)], 1)
    assert ledger.live_bytes == [KIB, 0]


def test_a_view_of_a_part_counts_the_whole_storage():
    ledger, part = Ledger(1), kib(4)[:1]
    ledger.enter([part], 0)
    assert ledger.live_bytes == [4 * KIB]


def test_freed_storages_leave_and_peaks_stay():
    ledger, one, two = Ledger(2), kib(1), kib(2)
    ledger.enter([one], 0)
    ledger.enter([two], 1)
    del two
    assert ledger.live_bytes == [KIB, 0]
    assert ledger.peak_bytes == [KIB, 2 * KIB]


def test_a_storage_lives_while_any_view_lives():
    ledger, tensor = Ledger(1), kib()
    ledger.enter([tensor], 0)
    view = tensor[:1]
    del tensor
    assert ledger.live_bytes == [KIB]
    del view
    assert ledger.live_bytes == [0]


def test_a_storage_lives_while_only_autograd_holds_it():
    ledger, leaf = Ledger(1), torch.zeros(1, requires_grad=True)
    saved = leaf.expand(256).exp()
    ledger.enter([saved], 0)
    total = saved.sum()
    del saved
    gc.collect()
    assert ledger.live_bytes == [KIB]
    total.backward()
    assert ledger.live_bytes == [0]


def test_what_is_freed_before_does_not_count_in_the_next_peak():
    ledger = Ledger(1)
    for _ in range(5):
        tensor = kib()
        ledger.enter([tensor], 0)
        del tensor
    assert ledger.peak_bytes == [KIB]


def test_owners_need_not_peak_together():
    ledger = Ledger(2)
    for owner in (0, 1):
        tensor = kib(owner + 1)
        ledger.enter([tensor], owner)
        del tensor
    assert ledger.peak_bytes == [KIB, 2 * KIB]
    assert ledger.peak_total_bytes == 2 * KIB


@pytest.mark.parametrize("kibs", [3, 0])
def test_a_resize_changes_what_the_owner_has(kibs):
    ledger, tensor = Ledger(2), kib()
    ledger.enter([tensor], 1)
    tensor.untyped_storage().resize_(kibs * KIB)
    ledger.enter([tensor], 0)
    assert ledger.live_bytes == [0, kibs * KIB]
    assert ledger.peak_bytes == [0, max(kibs, 1) * KIB]


def test_refresh_sees_resizes_but_enters_nothing():
    ledger, known, unknown = Ledger(1), kib(), kib()
    ledger.enter([known], 0)
    known.resize_(512)
    ledger.refresh([known, unknown])
    assert ledger.live_bytes == [2 * KIB]


def test_what_is_in_transit_moves_to_who_enters_it_for_good():
    ledger, tensor = Ledger(2), kib()
    ledger.enter([tensor], 1, in_transit=True)
    ledger.enter([tensor], 1)
    assert ledger.live_bytes == [0, KIB]
    ledger.enter([tensor], 0)
    assert ledger.live_bytes == [KIB, 0]
    assert ledger.peak_total_bytes == KIB
    ledger.enter([tensor], 1)
    assert ledger.live_bytes == [KIB, 0]


def test_owner_is_that_of_the_first_counted_tensor():
    ledger, one, two = Ledger(2), kib(), kib()
    ledger.enter([one], 1)
    ledger.enter([two], 0)
    assert ledger.owner([kib(), one, two]) == 1
    assert ledger.owner([kib()]) is None


def test_sparse_tensors_and_empty_ones_take_nothing():
    ledger = Ledger(1)
    ledger.enter([torch.eye(3).to_sparse(), torch.empty(0)], 0)
    assert ledger.live_bytes == [0]


def test_threads_lose_nothing():
    ledger, kept, together = Ledger(4), [[] for _ in range(4)], threading.Barrier(4)

    def work(owner):
        together.wait()
        for k in range(200):
            tensor = kib()
            ledger.enter([tensor], owner)
            if k % 2:
                kept[owner].append(tensor)

    threads = [threading.Thread(target=work, args=(owner,)) for owner in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.live_bytes == [100 * KIB] * 4
    kept.clear()
    assert ledger.live_bytes == [0] * 4


def test_tensors_freed_by_another_thread_leave_too():
    ledger, held = Ledger(1), [kib()]
    ledger.enter(held, 0)
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert ledger.live_bytes == [0]


def test_tensors_in_a_reference_cycle_leave_when_it_is_collected():
    ledger, cycle = Ledger(1), [kib()]
    cycle.append(cycle)
    ledger.enter(cycle[:1], 0)
    del cycle
    gc.collect()
    assert ledger.live_bytes == [0]
