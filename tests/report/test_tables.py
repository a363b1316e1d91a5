"""Wide tables become such that can be read: what all lines say alike stands once, above them."""

from __future__ import annotations

from gpipe_bench.report.cells import cell_tables
from gpipe_bench.report.page import write_report
from gpipe_bench.report.tables import Field, PageTable, lifted, plain_tables
from tests.figures.synthetic import ablation_row, write_rows


def words(*lines):
    return [[Field(text) for text in line] for line in lines]


def test_what_every_line_says_alike_becomes_a_fact():
    lines = words(("x", "p40", "1", ""), ("y", "p40", "2", ""))
    table = lifted(PageTable("t", "", ["name", "profile", "value", "cuda"], lines, keys=2))
    assert table.header == ["name", "value"]
    assert table.facts == [("profile", "p40")]
    assert [[entry.text for entry in line] for line in table.lines] == [["x", "1"], ["y", "2"]]
    assert table.keys == 1


def test_one_line_and_lines_that_are_all_the_same_stay():
    for lines in (words(("x", "1")), words(("x", "1"), ("x", "1"))):
        table = lifted(PageTable("t", "", ["name", "value"], lines))
        assert (table.header, table.facts) == (["name", "value"], [])


def test_the_heading_is_not_said_again():
    lines = words(("unet", "measured", "1"), ("unet", "measured", "2"))
    assert lifted(PageTable("t: unet", "measured", ["model", "evidence", "value"], lines)).facts == []


def test_a_file_of_several_models_is_a_table_for_each(tmp_path):
    path = tmp_path / "claims_verdict.csv"
    path.write_text(
        "evidence,model,quantity,n\nmeasured,unet,iou,5\nmeasured,amoebanet-d,loss,4\nmeasured,unet,loss,3\n"
    )
    tables = plain_tables(path)
    assert [(table.title, len(table.lines)) for table in tables] == [
        ("claims verdict: unet", 2),
        ("claims verdict: amoebanet-d", 1),
    ]
    assert {(table.evidence, table.keys) for table in tables} == {("measured", 3)}


def test_micro_batches_are_a_column_only_where_they_are_not_the_chunks():
    def header(*microbatches):
        rows = [ablation_row("baseline", chunks=m, microbatches=k) for m, k in zip((4, 8), microbatches, strict=True)]
        return cell_tables(rows)[0].header[:2]

    assert header(4, 7) == ["chunks", "microbatches"]
    assert "microbatches" not in header(4, 8)


def test_a_long_text_is_shown_in_part_and_whole_under_the_pointer():
    assert (Field("1-2-3").long, Field("1-2-3").hint) == (False, "")
    assert (Field("1-" * 40).long, Field("1-" * 40).hint) == (True, "1-" * 40)
    assert Field("oom [1]", more="needed 9 GiB").hint == "needed 9 GiB"


def test_many_reasons_are_folded(tmp_path):
    failed = [ablation_row("baseline", chunks=m, status="oom", reason=f"needed {m} GiB") for m in range(1, 9)]
    for count, folded in ((5, False), (8, True)):
        write_rows(tmp_path / "sweep_mine.csv", failed[:count])
        text = write_report(tmp_path, None, tmp_path, tmp_path / "report.html").read_text()
        assert (f"<summary>{count} reasons</summary>" in text) == folded
        assert f"[{count}] needed {count} GiB" in text


def test_checks_that_are_not_ok_come_first_and_are_counted(tmp_path):
    path = tmp_path / "verify.csv"
    checks = [("a", "ok"), ("b", "OUTSIDE"), ("c", "ok"), ("d", "not required"), ("e", "OUTSIDE")]
    path.write_text("cell,verdict\n" + "".join(f"{cell},{verdict}\n" for cell, verdict in checks))
    (table,) = plain_tables(path)
    assert [line[0].text for line in table.lines] == ["b", "d", "e", "a", "c"]
    assert table.note == "Verdicts: 2 OUTSIDE, 1 not required, 2 ok."


def test_a_failed_check_far_down_a_long_table_is_shown(tmp_path):
    path = tmp_path / "verify.csv"
    path.write_text("cell,verdict\n" + "".join(f"c{k},ok\n" for k in range(3000)) + "last,OUTSIDE\n")
    (table,) = plain_tables(path)
    assert table.lines[0][0].text == "last"
    assert table.note == "The first 2000 of 3001 lines. Verdicts: 1 OUTSIDE, 3000 ok."
