"""pyproject.toml, the locks, the conda environments and the version say the same thing."""

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
TEXTS = {layer: (lock.FOLDER / f"{layer}.lock").read_text() for layer in lock.LAYERS}
PINS = {layer: lock.pins(text) for layer, text in TEXTS.items()}
COMPILER_TEXT = (lock.FOLDER / "compiler.lock").read_text()
COMPILER_PINS = lock.pins(COMPILER_TEXT)
ALL_PINS = [pin for pins in (*PINS.values(), COMPILER_PINS) for pin in pins]
LOCKED = dict(pin.split("==") for pin in ALL_PINS)
DEPENDENCIES = [
    Requirement(text)
    for text in [*PROJECT["dependencies"], *(r for group in PROJECT["optional-dependencies"].values() for r in group)]
]


def packages_up_to(layer):
    """The names that a layer and those before it pin."""
    layers = list(PINS)[: list(PINS).index(layer) + 1]
    return {pin.partition("==")[0] for name in layers for pin in PINS[name]}


def test_every_line_of_a_lock_pins_one_version_and_no_package_is_pinned_twice():
    assert [pin for pin in ALL_PINS if not re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.]*", pin)] == []
    assert len(LOCKED) == len(ALL_PINS)


@pytest.mark.parametrize("layer", PINS)
def test_a_lock_is_as_the_script_writes_it(layer):
    assert TEXTS[layer] == lock.lock_text(layer, PINS[layer])


def test_the_layers_take_in_every_extra_once():
    extras = [extra for extras in lock.LAYERS.values() for extra in extras]
    assert sorted([*extras, lock.COMPILER]) == sorted(PROJECT["optional-dependencies"])


def test_the_compiler_has_a_lock_of_its_own():
    assert lock.lock_text(lock.COMPILER, COMPILER_PINS) == COMPILER_TEXT
    assert [pin.partition("==")[0] for pin in COMPILER_PINS] == ["ziglang"]


@pytest.mark.parametrize("layer", PINS)
def test_a_layer_has_what_its_extras_ask_for(layer):
    groups = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in lock.LAYERS[layer])]
    asked = {canonicalize_name(Requirement(text).name) for group in groups for text in group}
    assert asked - packages_up_to(layer) == set()


@pytest.mark.parametrize("layer", PINS)
def test_a_layer_needs_nothing_of_a_later_one(layer):
    """By what the installed packages say that they depend on."""
    later = set(LOCKED) - packages_up_to(layer)
    needed = {
        f"{pin} needs {requirement.name}"
        for pin in PINS[layer]
        for requirement in map(Requirement, metadata.requires(pin.partition("==")[0]) or ())
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if canonicalize_name(requirement.name) in later
    }
    assert needed == set()


def test_the_core_is_small():
    """What `import gpipe_bench`, simulations and figures need: no workflow, no tools."""
    assert packages_up_to("run").isdisjoint({"snakemake", "frictionless", "scikit-learn", "timm", "pytest", "psutil"})
    assert len(packages_up_to("run")) < 45


@pytest.mark.parametrize("requirement", DEPENDENCIES, ids=str)
def test_the_lock_is_within_the_ranges_of_the_project(requirement):
    assert LOCKED[canonicalize_name(requirement.name)] in requirement.specifier


def test_pins_made_by_hand_are_in_the_lock():
    made = [Requirement(line) for line in lock.pins((lock.FOLDER / "pins.in").read_text())]
    assert {r.name for r in made} == {"torch", "torchvision", "timm", "setuptools"}
    assert [str(r) for r in made if LOCKED[r.name] not in r.specifier] == []


def test_torch_is_what_the_results_are_made_with():
    assert (LOCKED["torch"], LOCKED["torchvision"]) == ("2.13.0", "0.28.0")


def test_the_conda_environment_of_the_rules_is_two_locks():
    assert lock.RULES_ENVIRONMENT.read_text() == lock.rules_environment(PINS)
    environment = yaml.safe_load(lock.RULES_ENVIRONMENT.read_text())
    assert environment["dependencies"][-1] == {"pip": sorted([*PINS["run"], *PINS["workflow"]])}


def test_the_conda_environment_installs_locks_and_the_package():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["dependencies"][0] == "python=3.11"
    assert environment["dependencies"][-1] == {
        "pip": ["--requirement requirements/models.lock", "--editable ."],
    }


def test_a_layer_is_what_the_layers_before_it_lack():
    needed = {"run": ["a==1"], "workflow": ["a==1", "c==3", "b==2"], "models": ["a==1", "b==2", "c==3"]}
    added = lock.split(["a==1", "b==2", "c==3", "d==4"], {**needed, "dev": ["c==3", "d==4", "a==1"]})
    assert added == {"run": ["a==1"], "workflow": ["b==2", "c==3"], "models": [], "dev": ["d==4"]}


def test_a_layer_with_a_version_of_its_own_is_refused():
    needed = {"run": ["a==2"], "workflow": [], "models": [], "dev": []}
    with pytest.raises(ValueError, match="layer run must have the pins of the whole environment, got a==2"):
        lock.split(["a==1"], needed)


def test_what_torch_brings_along_stays_out_of_the_lock():
    brought = ["nvidia-cudnn-cu13==9.1 ; platform_system == 'Linux'", "cuda-toolkit==13.0", "triton==3.7"]
    resolved = "\n".join(
        ["torch==2.13.0+cpu  # a local build", "# a comment", *brought, "nvidia-ml-py==13.6", "attrs==26.1"]
    )
    assert lock.portable(resolved) == ["attrs==26.1", "nvidia-ml-py==13.6", "torch==2.13.0"]


def test_this_environment_is_the_lock():
    """Only of the environment that set-up makes: elsewhere other versions in the ranges are as good."""
    complete = Path(sys.prefix) / ".complete"
    if not complete.exists():
        pytest.skip("this environment was not made by scripts/setup.sh")
    asked_for = {"torch", "torchvision"} if "-torch-" in complete.parent.name else set()
    names = packages_up_to(complete.read_text().split()[0]) - asked_for
    installed = {name: Version(metadata.version(name)).public for name in names}
    assert installed == {name: Version(LOCKED[name]).public for name in names}


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
    assert citation["date-released"][:4].isdigit()
    assert citation["url"] == citation["repository-code"] == PROJECT["urls"]["Homepage"]
    for reference in citation["references"]:
        assert {"type", "title", "authors"} < set(reference)
        assert all({"family-names", "given-names"} == set(author) for author in reference["authors"])


def test_snakemake_must_be_as_new_as_the_project_asks_for():
    (workflow,) = (text for text in PROJECT["optional-dependencies"]["workflow"] if text.startswith("snakemake"))
    found = re.search(r'^min_version\("([\d.]+)"\)', (ROOT / "Snakefile").read_text(), re.MULTILINE)
    assert found is not None
    assert f">={found[1]}" in workflow
