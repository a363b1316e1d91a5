"""The rules keep to what was learned about Snakemake the hard way."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.workflow.checkouts import ROOT

FILES = sorted([*(ROOT / "workflow" / "rules").glob("*.smk"), *(ROOT / "studies").glob("*/*.smk")])
TEXT = "\n".join(path.read_text() for path in FILES)
RULES = dict(re.findall(r"^rule (\w+):\n((?:    .*\n|\n)+)", TEXT, re.MULTILINE))
JOBS = {name: body for name, body in RULES.items() if "shell:" in body}


def test_all_rules_are_seen():
    assert set(RULES) == set(re.findall(r"^\s*(?:rule|checkpoint) (\w+)", TEXT, re.MULTILINE))
    targets = {
        "ablation",
        "advice",
        "figures",
        "judge",
        "memory",
        "peers",
        "processes",
        "residuals",
        "schedules",
        "speed",
        "sweep",
        "timeline",
        "transparency",
        "verify",
    }
    assert set(RULES) - set(JOBS) == targets


@pytest.mark.parametrize("name", RULES)
def test_a_rule_says_what_it_is_for(name):
    assert re.match(r'    """[A-Z].*\."""\n', RULES[name])


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_logged_and_follows_its_sources(name):
    body = JOBS[name]
    assert "    log:\n" in body
    assert body.rstrip().endswith('> {log:q} 2>&1"')
    assert "sources=source_digest(" in body
    assert "non_empty=True" in body


@pytest.mark.parametrize("name", JOBS)
def test_everything_that_a_command_takes_is_quoted(name):
    command = JOBS[name].split("shell:")[1]
    # Wildcards are held to harmless characters by their constraints.
    assert [field for field in re.findall(r"{([^}]*)}", command) if not re.search(r":q$|^wildcards\.\w+$", field)] == []


@pytest.mark.parametrize(
    "word", [r"\blambda\b", r"^ +run:", r"\bscript:", r"\bmessage:", r"\bretries:", r"^checkpoint "]
)
def test_what_is_not_used(word):
    assert not re.search(word, TEXT, re.MULTILINE)


def test_every_wildcard_is_constrained():
    used = set(re.findall(r"(?<![\w.]){(\w+)}", re.sub(r"(?s:expand\(.*?\),\n)|glob_wildcards\(.*|shell:.*", "", TEXT)))
    parts = ((ROOT / "workflow" / "Snakefile").read_text() + TEXT).split("wildcard_constraints:")[1:]
    constrained = "".join(part.split("\n\n")[0] for part in parts)
    assert used >= {"cell", "experiment", "variant"}
    assert used <= set(re.findall(r"(\w+)=", constrained))


def test_what_the_catalogue_of_workflows_reads_is_yaml():
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert usage["mandatory-flags"]["flags"] == "--cores 1"


@pytest.mark.parametrize("profile", sorted((ROOT / "profiles").glob("*/profile.yaml")), ids=str)
def test_a_profile_shows_the_logs_of_jobs_that_fail(profile):
    settings = yaml.safe_load(profile.read_text())
    assert settings["show-failed-logs"] is True
    assert not {"rules", "all"} & set(settings.get("quiet", ()))


def test_timed_jobs_take_turns():
    profile = yaml.safe_load((ROOT / "profiles" / "default" / "profile.yaml").read_text())
    assert profile["resources"] == {"timing_slot": 1}
    assert {name for name, body in RULES.items() if "timing_slot=1" in body} == {"run_cell", "race_peers"}


def test_another_torch_measures_anew():
    assert all('torch=version("torch")' in RULES[name] for name in ("run_cell", "race_peers"))


def test_one_rule_draws_the_figures_of_a_run():
    assert [name for name, body in RULES.items() if "gpipe_bench figure" in body] == ["figure", "redraw"]
    assert "multiext(" in RULES["figure"]


def test_all_is_every_target():
    body = (ROOT / "workflow" / "Snakefile").read_text().split("rule all:")[1].split("\n\n")[0]
    # The race of peers wants packages that are optional, and a machine that does nothing else; so do processes.
    # Schedules take as long as half of all others.
    targets = set(RULES) - set(JOBS) - {"judge", "peers", "processes", "residuals", "schedules"}
    assert {name for name in targets if f"rules.{name}.input" in body} == targets
