"""Simulations are shared: every cell stands in one job, whoever asks for it."""

from __future__ import annotations

import re

from gpipe_bench.bench.experiments.config import SuiteConfig
from gpipe_bench.bench.running.simulation_groups import GROUP_PATTERN, group_cells
from gpipe_bench.bench.spec.cells import CELL_PATTERN
from gpipe_bench.bench.spec.simulated_cells import SimulatedCell

SHARED = {"model": "unet", "model_args": "depth=1;B=1;C=2;size=4"}


def cell(**settings):
    given = {**SHARED, "partitions": 2, "balance": "auto", "batch_size": 4, "chunks": 2, **settings}
    return SimulatedCell.model_validate(given)


def test_a_cell_that_two_experiments_ask_for_is_simulated_once():
    one, two, three = cell(), cell(chunks=4), cell(chunks=1)
    (group,) = group_cells([([one, two], False), ([two, three], True)])
    assert [member.id for member in group.cells] == [one.id, two.id, three.id]
    assert group.timelines == {two.id, three.id}


def test_jobs_share_a_model_and_a_profile():
    groups = group_cells([([cell(), cell(profile="v100"), cell(model_args="depth=1;B=1;C=4;size=4")], False)])
    assert [len(group.cells) for group in groups] == [1, 1, 1]
    assert len({group.id for group in groups}) == 3


def test_pipelines_of_many_partitions_have_a_job_of_their_own():
    groups = group_cells([([cell(partitions=n, model_args="depth=3;B=1;C=2;size=16") for n in (1, 32, 33)], False)])
    assert [[member.partitions for member in group.cells] for group in groups] == [[1, 32], [33]]


def test_a_long_job_is_cut():
    cells = [cell(chunks=m, batch_size=400) for m in range(1, 251)]
    groups = group_cells([(cells, False)])
    assert [len(group.cells) for group in groups] == [150, 100]
    assert len({group.id for group in groups}) == 2


def test_names_of_jobs_are_those_that_rules_accept():
    suite = SuiteConfig()
    groups = group_cells([(experiment.simulations(), False) for experiment in suite.experiments().values()])
    assert all(re.fullmatch(GROUP_PATTERN, group.id) for group in groups)
    assert all(re.fullmatch(CELL_PATTERN, member.id) for group in groups for member in group.cells)
    # A shell takes 128 KiB in a word.
    assert max(len(group.names) for group in groups) < 30_000


def test_a_job_names_its_cells_and_those_whose_timelines_are_kept():
    members = [cell(), cell(checkpoint="never")]
    (group,) = group_cells([(members[:1], True), (members, False)])
    assert group.names.split(",") == [member.id for member in members]
    assert group.kept == members[0].id


def test_a_model_of_a_library_has_a_name_without_slashes():
    made = SimulatedCell.model_construct(**{**cell().model_dump(), "model": "unet"})
    assert "/" not in made.id
