"""pyproject.toml, the lock, the conda environment and the version say the same thing."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import gpipe_bench
from scripts import lock
from tests.project.tree import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = lock.LOCK.read_text()
LOCKED = dict(pin.split("==") for pin in lock.pins(LOCK))
DEPENDENCIES = [
    Requirement(text)
    for text in [*PROJECT["dependencies"], *(r for group in PROJECT["optional-dependencies"].values() for r in group)]
]


def test_every_line_of_the_lock_pins_one_version():
    assert [pin for pin in lock.pins(LOCK) if not re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.]*", pin)] == []


@pytest.mark.parametrize("requirement", DEPENDENCIES, ids=str)
def test_the_lock_is_within_the_ranges_of_the_project(requirement):
    assert LOCKED[canonicalize_name(requirement.name)] in requirement.specifier


def test_pins_made_by_hand_are_in_the_lock():
    made = [Requirement(line) for line in lock.pins((ROOT / "requirements.in").read_text())]
    assert {r.name for r in made} == {"torch", "torchvision", "timm", "setuptools"}
    assert [str(r) for r in made if LOCKED[r.name] not in r.specifier] == []


def test_torch_is_what_the_results_are_made_with():
    assert (LOCKED["torch"], LOCKED["torchvision"]) == ("2.13.0", "0.28.0")


def test_the_conda_environment_is_the_lock():
    assert lock.ENVIRONMENT.read_text() == lock.environment_yml(LOCK)
    environment = yaml.safe_load(lock.ENVIRONMENT.read_text())
    assert environment["dependencies"][-1] == {"pip": lock.pins(LOCK)}
    assert environment["dependencies"][0] == "python=3.11"


def test_what_torch_brings_along_stays_out_of_the_lock():
    brought = ["nvidia-cudnn-cu13==9.1 ; platform_system == 'Linux'", "cuda-toolkit==13.0", "triton==3.7"]
    resolved = "\n".join(
        ["torch==2.13.0+cpu  # a local build", "# a comment", *brought, "nvidia-ml-py==13.6", "attrs==26.1"]
    )
    assert lock.pins(lock.portable(resolved)) == ["attrs==26.1", "nvidia-ml-py==13.6", "torch==2.13.0"]


def test_this_environment_is_the_lock():
    """Only of the environment that set-up makes: elsewhere other versions in the ranges are as good."""
    if not (Path(sys.prefix) / ".complete").exists():
        pytest.skip("this environment was not made by scripts/setup.sh")
    installed = {name: Version(metadata.version(name)).public for name in LOCKED}
    assert installed == {name: Version(version).public for name, version in LOCKED.items()}


def test_supported_pythons():
    supported = SpecifierSet(PROJECT["requires-python"])
    named = re.findall(r":: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert named == ["3.11", "3.12", "3.13"]
    assert [version for version in named if version not in supported] == []
    assert "3.10" not in supported


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert gpipe_bench.__version__ == citation["version"] == newest.group(1)
    assert PROJECT["license"] == citation["license"] == "BSD-3-Clause"
    assert (ROOT / "LICENSE").read_text().startswith("BSD 3-Clause License")


def test_the_citation_has_what_citation_files_need():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["authors"] == [{"name": "The gpipe_bench authors"}] == PROJECT["authors"]
    assert {"message", "title"} < set(citation)
    for reference in citation["references"]:
        assert {"type", "title", "authors"} < set(reference)
        assert all({"family-names", "given-names"} == set(author) for author in reference["authors"])
