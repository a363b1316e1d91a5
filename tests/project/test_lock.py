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
from tests.project.tree import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TEXT = (ROOT / "requirements" / "lock.txt").read_text()
BLOCKS = re.split(r"^(?=[a-z])", TEXT, flags=re.MULTILINE)[1:]
LOCKED = dict(re.match(r"([a-z0-9.-]+)==([0-9][0-9a-z.]*)", block).groups() for block in BLOCKS)
DEPENDENCIES = [
    Requirement(text) for text in [*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]
]
CONDA = {
    name: yaml.safe_load((ROOT / name).read_text()) for name in ("environment.yml", "workflow/envs/gpipe_bench.yaml")
}


def test_every_package_is_pinned_once_with_hashes():
    assert len(LOCKED) == len(BLOCKS)
    assert [block for block in BLOCKS if not re.search(r" --hash=sha256:[0-9a-f]{64}", block)] == []


@pytest.mark.parametrize("requirement", DEPENDENCIES, ids=str)
def test_the_lock_is_within_the_ranges_of_the_project(requirement):
    assert LOCKED[canonicalize_name(requirement.name)] in requirement.specifier


def test_pins_made_by_hand_are_in_the_lock():
    lines = (ROOT / "requirements" / "pins.in").read_text().splitlines()
    made = [Requirement(line) for line in lines if not line.startswith("#")]
    assert {r.name for r in made} == {"torch", "torchvision", "timm", "setuptools", "pip"}
    assert [str(r) for r in made if LOCKED[r.name] not in r.specifier] == []


def test_torch_is_what_the_results_are_made_with():
    assert (LOCKED["torch"], LOCKED["torchvision"]) == ("2.13.0", "0.28.0")


def torch_brings(name):
    """Parts of CUDA, which builds of PyTorch pin themselves or do without."""
    return name.startswith(("nvidia", "cuda", "triton")) and name != "nvidia-ml-py"


def needed(*extras):
    """What the package and some extras lead to, by what the installed packages say of themselves."""
    waiting = [
        Requirement(text) for group in (PROJECT["dependencies"], *(EXTRAS[name] for name in extras)) for text in group
    ]
    found = set()
    while waiting:
        name = canonicalize_name(waiting.pop().name)
        if name not in found and not torch_brings(name):
            found.add(name)
            asked = map(Requirement, metadata.requires(name) or ())
            waiting += [r for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def test_the_core_is_small():
    """What `import gpipe_bench`, simulations and figures need: no workflow, no tools."""
    assert needed().isdisjoint({"snakemake", "frictionless", "scikit-learn", "timm", "pytest", "psutil"})
    assert len(needed()) < 45


@pytest.mark.parametrize(
    ("name", "extras", "more"),
    [
        ("workflow/envs/gpipe_bench.yaml", ("workflow", "slurm", "data"), []),
        ("environment.yml", ("workflow", "slurm", "data", "models"), ["--editable ."]),
    ],
)
def test_the_conda_environments_have_the_pins_of_the_lock(name, extras, more):
    python, pip, packages = CONDA[name]["dependencies"]
    assert (python, pip) == ("python=3.11", "pip")
    pins = packages["pip"][: len(packages["pip"]) - len(more)]
    assert packages["pip"][len(pins) :] == more
    assert [pin for pin in pins if LOCKED[pin.split("==")[0]] != pin.split("==")[1]] == []
    assert needed(*extras) - {pin.split("==")[0] for pin in pins} == set()


def test_what_torch_pins_itself_is_not_in_the_conda_environments():
    """There are builds of torch that do without, and platforms."""
    pins = [pin for environment in CONDA.values() for pin in environment["dependencies"][-1]["pip"]]
    assert [pin for pin in pins if torch_brings(pin.split("==")[0])] == []


def test_this_environment_is_the_lock():
    """Only of the environment that set-up makes: elsewhere other versions in the ranges are as good."""
    if not (Path(sys.prefix) / ".made-from").exists():
        pytest.skip("this environment was not made by scripts/setup.sh")
    another = "-torch-" in Path(sys.prefix).name
    asked_for = {name for name in LOCKED if another and (name in {"torch", "torchvision"} or torch_brings(name))}
    installed = {canonicalize_name(found.name): Version(found.version).public for found in metadata.distributions()}
    locked = {name: Version(LOCKED[name]).public for name in (set(installed) & set(LOCKED)) - asked_for}
    assert {name: installed[name] for name in locked} == locked


def test_supported_pythons():
    supported = SpecifierSet(PROJECT["requires-python"])
    named = re.findall(r":: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert named == ["3.11", "3.12", "3.13", "3.14"]
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
    found = re.search(r'^min_version\("([\d.]+)"\)', (ROOT / "workflow" / "Snakefile").read_text(), re.MULTILINE)
    assert found is not None
    assert f">={found[1]}" in workflow
