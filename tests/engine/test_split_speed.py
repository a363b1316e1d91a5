"""The table of host times of I and W: it has a row for each size, and times what it says."""

from __future__ import annotations

import re

import pytest
import torch

from scripts.split_speed import _backward, _Layers, _layers, main


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_table_has_a_row_for_each_number_of_blocks(capsys):
    main(["--blocks", "1", "3", "--repeats", "2"])
    head, _, *rows = capsys.readouterr().out.splitlines()
    time, ratio = r"\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)", r"\d+\.\d\d"
    form = rf"\| \d+ \| {time} \| {time} \| {time} \| {ratio} \| {time} \| {time} \| {ratio} \|"
    assert all(re.fullmatch(form, row) for row in rows), rows
    assert [row.split()[1] for row in rows] == ["1", "3"]
    assert head.count("|") == rows[0].count("|")


def test_b_gives_all_gradients_of_weights_i_none_and_w_all():
    layers = _layers(3)
    grads = {}
    for name, action in _backward(_Layers(layers)):
        action()
        grads[name] = [each.grad for each in layers.parameters()]
        if name != "I":
            layers.zero_grad()
    assert all(each is None for each in grads["I"])
    assert all(each is not None for each in [*grads["B"], *grads["W"]])


@pytest.mark.parametrize("wrong", [["--repeats", "1"], ["--blocks", "0"]])
def test_numbers_that_give_no_row_are_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        main(wrong)
    assert "must be 2 or more, --blocks 1 or more" in capsys.readouterr().err
