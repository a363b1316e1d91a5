"""The first page is short: the question, three commands with what they print, a picture; claims are complete."""

from __future__ import annotations

import re

import yaml

from tests.project.pages import PAGES, blocks, commands, lines, printed
from tests.project.tree import ROOT

README = PAGES["README.md"]


def test_it_is_short():
    assert README.count("\n") <= 150


def test_no_page_is_longer_than_250_lines():
    by_hand = {name: text for name, text in PAGES.items() if "\nGenerated from " not in text}
    assert {name: text.count("\n") for name, text in by_hand.items() if text.count("\n") > 250} == {}


def test_question_commands_picture_installation_and_table_come_in_this_order():
    parts = (
        "what memory?",
        "gpipe-bench advise",
        "--races",
        "make ablation",
        "schedules.svg",
        "make setup",
        "summary -->",
    )
    places = [README.index(part) for part in parts]
    assert places == sorted(places)
    assert [words[:2] for words in commands(README)[:3]] == [
        ["gpipe-bench", "advise"],
        ["gpipe-bench", "emulate"],
        ["make", "ablation"],
    ]


def test_the_first_three_commands_show_what_they_print():
    assert [line for line, _ in printed(README)] == lines(README)[:3]


def test_examples_are_short():
    found = [block for language in ("sh", "python") for block in blocks(README, language)]
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
