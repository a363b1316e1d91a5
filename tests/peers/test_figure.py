"""The figures of the race: from the table alone, whatever took part."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpipe_bench.bench.peers.contenders import CONTENDERS
from gpipe_bench.bench.peers.tables import write_race
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.peers import PEERS
from gpipe_bench.figures.race import LOOKS, read_race
from gpipe_bench.figures.style import drawing
from gpipe_bench.results.peer_rows import PeerRow
from gpipe_bench.results.tables import csv_text, read_table
from tests.peers.cases_of import outcome, raced, tiny_cells, tiny_unet

FACTS = {"device": "cpu Some CPU", "torch": "2.13.0"}


@pytest.fixture
def table(tmp_path):
    """Everybody on three sizes of cells and one network; fairscale is not there."""
    races = []
    for n, mode in ((1, "never"), (2, "never"), (4, "never"), (2, "always")):
        races.append(tiny_cells(partitions=n, checkpoint=mode, balance=(1,) * n))
    races += [tiny_unet(checkpoint=mode) for mode in ("always", "never")]
    done = []
    for case in races:
        names = [name for name, one in CONTENDERS.items() if one.runs(case.workload)]
        found = {name: outcome(case, name, [0.01 * (k + 1), 0.011 * (k + 1)]) for k, name in enumerate(names)}
        absent = found["fairscale"]
        absent.status, absent.reason, absent.visits = "skipped", "fairscale is not installed", []
        done.append(raced(case, [*found.values()]))
    write_race(done, FACTS, 1e-4, tmp_path / "peers.csv", "{}")
    return tmp_path / "peers.csv"


def read(path):
    return read_table(path, records=PeerRow)


def texts(rows):
    """What the figure of some rows says."""
    with drawing():
        figure = PEERS.canvas(rows)
    found = []
    for axes in figure.axes:
        found += [text.get_text() for text in (*axes.texts, *axes.get_yticklabels(), axes.title, axes.xaxis.label)]
    return found


def test_files_are_drawn_alike_and_without_torch(table, tmp_path):
    paths = PEERS.draw(table, tmp_path / "first")
    assert [path.suffix for path in paths] == [".svg", ".pdf", ".png"]
    program = f"""
import sys
from pathlib import Path
sys.modules["torch"] = None
from gpipe_bench.figures.peers import PEERS
PEERS.draw(Path({str(table)!r}), Path({str(tmp_path / "second")!r}))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert [path.read_bytes() for path in paths] == [
        path.with_name(path.name.replace("first", "second")).read_bytes() for path in paths
    ]


def test_what_the_figure_says(table):
    said = texts(read(table))
    assert "measured" in said
    for name, contender in CONTENDERS.items():
        assert (name in said) == (contender.runs("unet") or contender.runs("cells"))
    assert "skipped" in said
    assert {"unet, always", "unet, never", "over loop", "tiny layers, n=2, m=4"} <= set(said)
    assert "Not everywhere: fairscale: skipped; the table has the reasons." in said


def test_the_limit_is_drawn(table):
    with drawing():
        figure = PEERS.canvas(read(table))
    loop = read(table).query("workload == 'unet' and contender == 'loop'").iloc[0]
    limit = loop["limit_samples_per_s"] / loop["throughput_samples_per_s"]
    assert limit == pytest.approx(8 / 5)
    drawn = [line.get_xdata()[0] for axes in figure.axes for line in axes.lines if len(set(line.get_xdata())) == 1]
    assert any(abs(x - limit) < 1e-9 for x in drawn)


def test_everybody_looks_different():
    assert set(LOOKS) == set(CONTENDERS)
    looks = [(colour, marker) for colour, _, marker in LOOKS.values()]
    assert len(set(looks)) == len({marker for _, marker in looks}) == len(LOOKS)


def test_tables_without_cells_or_without_networks(table):
    rows = read(table)
    assert not any(text.startswith("unet") for text in texts(rows[rows["workload"] == "cells"]))
    assert not any(text.startswith("tiny") for text in texts(rows[rows["workload"] != "cells"]))


def test_without_the_plain_loop_there_is_no_limit(table):
    assert "torchgpipe" in texts(read(table).query("contender == 'torchgpipe'"))


def test_a_table_with_nothing_to_draw_is_refused(table, tmp_path):
    rows = read(table)
    for name, kept, said in (
        ("failed", rows[rows["status"] != "ok"], "must have a row that is ok"),
        ("cut", rows[["workload", "status"]], " ratio, "),
    ):
        path = tmp_path / f"{name}.csv"
        path.write_text(csv_text(list(kept.columns), kept))
        with pytest.raises(ConfigError, match=said) as refused:
            read_race(path)
        assert len(refused.value.problems) == 1
    with pytest.raises(ConfigError, match="table must be a readable CSV file"):
        read_race(tmp_path / "none.csv")
