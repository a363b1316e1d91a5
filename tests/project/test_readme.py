"""The first page is short and opens with a picture, a table and the two commands; claims are complete."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.project.pages import PAGES, blocks, commands
from tests.project.tree import ROOT

README = PAGES["README.md"]
QUICKSTARTS = re.split(r"^## Quickstart: ", README, flags=re.MULTILINE)[1:]


def test_it_is_short():
    assert README.count("\n") <= 150


def test_no_page_is_longer_than_250_lines():
    assert {name: text.count("\n") for name, text in PAGES.items() if text.count("\n") > 250} == {}


def test_table_commands_and_picture_come_in_this_order():
    places = [README.index(part) for part in ("<!-- table: summary -->", "make ablation  ", "ablation_timelines.svg")]
    assert places == sorted(places)
    assert commands(README)[:2] == [["make", "ablation"], ["make", "test"]]


def test_the_next_command_is_shown_after_the_two():
    assert commands(README)[2:4] == [["source", ".venv/bin/activate"], ["snakemake", "--cores", "1", "speed"]]


def test_there_are_three_quickstarts():
    assert len(QUICKSTARTS) == 3


@pytest.mark.parametrize("quickstart", QUICKSTARTS)
def test_quickstarts_are_short(quickstart):
    found = [block for language in ("sh", "python") for block in blocks(quickstart.split("\n## ")[0], language)]
    assert found
    assert all(block.count("\n") <= 12 for block in found)


def test_the_citation_is_linked():
    assert "[CITATION.cff](CITATION.cff)" in README
    stated = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"title", "version", "url", "date-released"} <= set(stated)


def test_every_claim_has_a_command_an_expectation_and_a_time():
    claims = re.split(r"^### ", PAGES["docs/claims.md"], flags=re.MULTILINE)[1:]
    assert [claim.split(".")[0] for claim in claims] == [f"C{number}" for number in range(1, len(claims) + 1)]
    for claim in claims:
        assert re.search(r"^```sh\n\S", claim, re.MULTILINE), claim
        assert "**Expect**" in claim
        assert re.search(r"\*\*Takes\*\* \d+ (to \d+ )?(s|min)", claim), claim


def test_every_component_is_explained():
    import dataclasses

    from gpipe_bench import Components

    for field in dataclasses.fields(Components):
        assert f"| `{field.name}` |" in PAGES["docs/results.md"]
