"""Mistakes in a hardware profile: none hides another, and each names what was meant."""

from __future__ import annotations

import pytest
import yaml

from gpipe_bench.errors import ConfigError
from gpipe_bench.simulator.hardware import PROFILES, load_profile, parse_profile

P40 = yaml.safe_load((PROFILES / "p40.yaml").read_text(encoding="utf-8"))


def problems(data):
    with pytest.raises(ConfigError) as caught:
        parse_profile(data, "mine.yaml")
    return list(caught.value.problems)


def test_a_link_that_does_not_exist_is_named_beside_other_mistakes():
    links = sorted(P40["links"])
    wrong = f"{links[0]}x"
    found = problems(P40 | {"queue_depth": 0, "topology": P40["topology"] | {"host": wrong}})
    assert len(found) == 2
    assert found[0].startswith("mine.yaml: queue_depth")
    assert found[1] == f"mine.yaml: topology.host must name one of links, got '{wrong}'; use '{links[0]}'"


@pytest.mark.parametrize(
    ("change", "name", "hint"),
    [
        ({"memory_gb": 22}, "memory_gb", "use 'memory_gib'"),
        ({"topology": P40["topology"] | {"groupsize": 4}}, "topology.groupsize", "use 'group_size'"),
        ({"links": P40["links"] | {"new": {"gb_per_s": 1, "latency_us": 1, "latency": 2}}}, "links.new.latency",
         "use 'latency_us'"),
        ({"zzz": 1}, "zzz", "remove it"),
    ],
)  # fmt: skip
def test_an_unknown_setting_names_the_nearest_one(change, name, hint):
    (found,) = problems(P40 | change)
    assert found == f"mine.yaml: {name} must be a setting of a profile, got an unknown one; {hint}"


@pytest.mark.parametrize(("name", "meant"), [("p4O", "p40"), ("h1OO", "h100"), ("A1O0", "a100"), ("H20O", "h200")])
def test_a_name_with_letters_for_digits(name, meant):
    with pytest.raises(ConfigError, match=f"got '{name}'; use '{meant}'"):
        load_profile(name)
