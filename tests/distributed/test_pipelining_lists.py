"""What PyTorch's pipelining lowers and sends over gloo ends, or is stuck, where the check of its lists says so."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_bench.distributed import recorded
from gpipe_bench.schedules import read_messages, stuck
from tests.distributed.watched import watched

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what threads do is read from /proc")

M = 4
CALLS = "GPipe", "1F1B"
LOWERED = "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"
OF_A_V = "ZBVZeroBubble", "DualPipeV"


class _Noted(list):
    """A list that notes how far a loop over it has come."""

    def __init__(self, items, rank, places):
        super().__init__(items)
        self.rank, self.places = rank, places

    def __iter__(self):
        for place, item in enumerate(super().__iter__()):
            self.places[self.rank] = place
            yield item
        self.places[self.rank] = len(self)


def train(rank, places, name, folder, lost=None):
    """A step of two ranks, recorded; ``lost``: a rank and the action that its list lacks."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    n = 2 if name in CALLS else 4
    own = [rank] if n == 2 else [rank, 3 - rank] if name in OF_A_V else [rank, rank + 2]
    stages = [PipelineStage(nn.Linear(2, 2), j, n, torch.device("cpu")) for j in own]
    schedule = get_schedule_class(name)(stages[0] if n == 2 else stages, M, loss_fn=functional.mse_loss)
    lists = getattr(schedule, "pipeline_order_with_comms", None)
    if lists is not None:
        if lost and lost[0] == rank:
            lists[rank] = [action for action in lists[rank] if str(action) != lost[1]]
        (folder / f"list{rank}").write_text(",".join(map(str, lists[rank])))
        lists[rank] = _Noted(lists[rank], rank, places)
    with recorded(folder / "calls"):
        schedule.step(
            *([torch.ones(M, 2)] if 0 in own else []), **({"target": torch.ones(M, 2)} if n - 1 in own else {})
        )


def texts(folder, name):
    return [(folder / name.format(rank)).read_text() for rank in range(2)]


@pytest.mark.parametrize("name", [*CALLS, *LOWERED])
def test_a_step_over_gloo_ends_as_the_check_says(name, tmp_path):
    assert watched(2, tmp_path, train, name, tmp_path) == {}
    calls = texts(tmp_path, "calls/rank{}.csv")
    assert all(line.count("send") >= M for line in calls)
    assert stuck(read_messages("\n".join(calls)), "gloo") == ()
    if name in LOWERED:
        assert stuck(read_messages("\n".join(texts(tmp_path, "list{}"))), "gloo") == ()


@pytest.mark.parametrize("name", LOWERED)
def test_a_list_that_lost_a_send_is_stuck_where_the_check_says(name, tmp_path):
    place = 0, "0SEND_F2"
    places = watched(2, tmp_path, train, name, tmp_path, place)
    rows = [line.split(",") for line in texts(tmp_path, "list{}")]
    said = stuck(read_messages("\n".join(map(",".join, rows))), "gloo")
    where = [re.match(r"rank (\d+) is stuck at (.*?): waits for", line) for line in said]
    assert places
    assert places == {
        int(one[1]): (*rows[int(one[1])], "the end of its list").index(one[2]) for one in where if one is not None
    }
