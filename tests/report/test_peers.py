"""The race of peers on the page: a line per contender, host time of tiny layers."""

from __future__ import annotations

from dataclasses import replace

from gpipe_bench.report.page import write_report
from gpipe_bench.report.peers import peer_tables
from gpipe_bench.results.peer_rows import PeerRow
from gpipe_bench.results.tables import csv_text
from tests.compare.test_peers import NAMES, race

FAILED = replace(race()[-1], contender="pipelining-1f1b", status="skipped", reason="not installed",
                 throughput_samples_per_s=None)  # fmt: skip


def column(table, name):
    return [line[table.header.index(name)].text for line in table.lines]


def test_a_table_per_workload_and_a_line_per_contender():
    tiny, net = peer_tables(race())
    assert column(tiny, "contender") == column(net, "contender") == list(NAMES)
    assert column(tiny, "host us per cell") == ["100", "200", "300"]
    assert "samples/s" not in tiny.header
    assert column(net, "samples/s") == ["10.0", "20.0", "30.0"]
    assert "host us per cell" not in net.header


def test_what_differs_is_a_column():
    rows = [replace(row, partitions=n) for n in (2, 4) for row in race()[:3]]
    (table,) = peer_tables(rows)
    assert column(table, "partitions") == ["2"] * 3 + ["4"] * 3
    assert "2 partitions" not in table.title


def test_ratios_stand_with_their_intervals_and_name_their_baseline():
    row = replace(race()[0], baseline="torchgpipe", ratio=0.5, ratio_low=0.4, ratio_high=0.6)
    (table,) = peer_tables([row])
    assert column(table, "over torchgpipe") == ["0.50 [0.40, 0.60]"]


def test_who_did_not_run_has_a_reason():
    (table,) = peer_tables([race()[-1], FAILED])
    assert column(table, "status") == ["ok", "skipped [1]"]
    assert table.notes == ["[1] not installed"]


def test_the_page_has_them(tmp_path):
    (tmp_path / "peers.csv").write_text(csv_text(PeerRow.columns(), [row.to_dict() for row in race()]))
    text = write_report(tmp_path, None, tmp_path, tmp_path / "report.html").read_text()
    assert 'id="section-peers"' in text
    assert all(text.count(f"<td>{name}</td>") == 2 for name in NAMES)
    assert "host us per cell" in text
