"""A configuration is checked as a whole, as Snakemake merges it; the schema follows from the settings of cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from gpipe_bench.cli import main
from gpipe_bench.data import DEFAULT_CONFIG
from gpipe_bench.errors import ConfigError
from gpipe_bench.suite.experiments.config import (
    CONFIG_PATH,
    SCHEMA_PATH,
    json_schema,
    json_schema_text,
    load_config,
    parse_config,
)
from tests.suite.cells_of import configured

BALANCE_RULE = "must have one entry per partition"
ROOT = Path(__file__).resolve().parents[2]


def problems(*texts, folder):
    """What is wrong with configuration files of these texts, a.yaml, b.yaml and so on."""
    paths = [folder / f"{name}.yaml" for name, _ in zip("abc", texts, strict=False)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(paths)
    return [text.replace(f"{folder}/", "") for text in caught.value.problems]


def test_all_problems_are_reported_at_once(tmp_path):
    text = """
        devce: cpu
        experiments:
          ablation:
            gpu:
              chunks: 0
              chuncks: 4
              tf32: "yes"
            cpu: 3
          mine:
            grid: {run: simulated, batch_size: many, checkpoint: allways, partitions: 3, balance: 1-2}
            other: {run: simulated, variant: [published, dep-str-xx], model_args: dept=4;B=x}
          My: {}
        advice: {unet: {model: vitt}}
    """
    found = sorted(problems(text, folder=tmp_path))
    vitt = found.pop(0)
    assert vitt.startswith("a.yaml: advice.unet.model must be ")
    experiments = "a.yaml: experiments"
    variant = "must be 'baseline' or slots like 'dep-str-ptl' or 'dep-str-ptl-clk-rec' with 'x' for what is off"
    layers = "must sum to the 53 layers of unet"
    names = "must have names of lower-case letters, digits, hyphens and _, which no other table has"
    assert found == [
        "a.yaml: devce must be a known key, got 'devce'; use 'device'",
        f"{experiments} {names}, got 'My'; rename it",
        f"{experiments}.ablation.cpu must be a block of settings, got 3; write its keys below it, indented",
        f"{experiments}.ablation.gpu.chuncks must be a known key, got 'chuncks'; use 'chunks'",
        f"{experiments}.mine.grid.balance {BALANCE_RULE}, 3, got 2 in 1-2; change balance or partitions",
        f"{experiments}.mine.grid.balance {layers}, got 1-2, which sums to 3; change its entries",
        f"{experiments}.mine.grid.batch_size must be a whole number of at least 1, got 'many'; use 1 or more",
        f"{experiments}.mine.grid.checkpoint must be one of always, except_last, never, got 'allways'; use 'always'",
        f"{experiments}.mine.other.model_args: B of unet must be an integer, at least 1, got 'x'; the default is 5",
        f"{experiments}.mine.other.model_args: argument of unet must be one it declares, got 'dept'; use 'depth'",
        f"{experiments}.mine.other.variant {variant}, got 'dep-str-xx'; use 'dep-str-x'",
    ]


def test_a_problem_names_the_file_that_it_is_in(tmp_path):
    first = "experiments: {ablation: {cpu: {seed: -1, steps: 1}}}"
    second = "experiments: {ablation: {cpu: {steps: 0}}}"
    assert sorted(problems(first, second, folder=tmp_path)) == [
        "a.yaml: experiments.ablation.cpu.seed must be a whole number of at least 0, got -1; use 0 or more",
        "b.yaml: experiments.ablation.cpu.steps must be a whole number of at least 1, got 0; use 1 or more",
    ]


def test_problems_of_reading_stand_beside_those_of_settings(tmp_path):
    found = problems("a: [1", "advice: {unet: {devices: 2, devices: 3}}", "device: tpu", folder=tmp_path)
    assert len(found) == 3
    assert found[0].startswith("configuration must be YAML, got an error in a.yaml: ")
    assert "key 'devices' stands twice" in found[1]
    assert found[2] == "c.yaml: device must be one of auto, cpu, cuda, got 'tpu'; use 'cpu'"


@pytest.mark.parametrize("text", ["- 1\n- 2", "7"])
def test_a_file_that_has_no_sections(tmp_path, text):
    (found,) = problems(text, folder=tmp_path)
    assert found.startswith("configuration must be sections of settings, got ")


def test_keys_are_text(tmp_path):
    (found,) = problems("1: x", folder=tmp_path)
    assert "key 1 must be text" in found


@pytest.mark.parametrize("text", ["a: &a {b: *a}", "a: &a [1, *a]", "a: &a {<<: *a}"])
def test_an_alias_inside_of_what_it_names_is_refused(tmp_path, text):
    (found,) = problems(text, folder=tmp_path)
    assert found.startswith("configuration must be YAML, got an error in a.yaml: line 1, column ")
    assert "a section contains an alias of itself" in found


def test_blocks_may_share_parts_by_aliases_and_merges(tmp_path):
    text = """
        common: {net: &net {model: unet, partitions: [1, 2], chunks: 2}}
        experiments:
          mine:
            a: &a {run: simulated, <<: *net, partitions: 4}
            b: {<<: [*a, *net], profile: v100}
    """
    (tmp_path / "a.yaml").write_text(text)
    cells = load_config([tmp_path / "a.yaml"]).experiment("mine").simulated
    assert [(cell.partitions, cell.profile) for cell in cells] == [(4, "p40"), (4, "v100")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "experiments: {mine: {a: {run: simulated, model_args: 'depth=1000000'}}}",
            "depth of unet must be an integer, at least 1 and less",
        ),
        (
            "advice: {unet: {memory_limit_gib: .inf}}",
            "advice.unet.memory_limit_gib must be at least 0 and at most 1000000, got inf",
        ),
        (
            "experiments: {mine: {a: {run: simulated, profile: 'a{b}.yaml'}}}",
            "profile must be a path without braces, got 'a{b}",
        ),
    ],
)
def test_what_would_not_end_or_not_fit_is_refused(tmp_path, text, said):
    (found,) = problems(text, folder=tmp_path)
    assert said in found


def test_a_small_number_may_be_written_as_yaml_does_not_read_it(tmp_path):
    (tmp_path / "a.yaml").write_text("advice: {unet: {memory_limit_gib: 1e1}}")
    assert load_config([tmp_path / "a.yaml"]).advice["unet"].memory_limit_gib == 10


def test_an_absent_file(tmp_path):
    with pytest.raises(ConfigError, match=r"configuration must be a readable file, got .*none\.yaml"):
        load_config([tmp_path / "none.yaml"])


@pytest.mark.parametrize("old", ["ablation: {cpu: {chunks: 4}}", "sweep: {simulated: {mine: {model: vit}}}"])
def test_a_configuration_of_the_old_form_gets_one_error_that_shows_the_new_one(tmp_path, old):
    (found,) = problems(old, folder=tmp_path)
    key = old.partition(":")[0]
    assert found == (
        f"a.yaml: experiments must be below the key experiments, as blocks whose lists are axes, got {key} at the top; "
        "write them like experiments: {sweep_mine: {grid: {run: simulated, model: unet, partitions: [1, 2, 4], "
        "chunks: [1, 4, 16], batch_size: 64}}}"
    )
    new = yaml.safe_load(found.partition("write them like ")[2])
    assert len(configured(**new["experiments"]).experiment("sweep_mine").simulated) == 9


def test_later_files_go_over_earlier_ones(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "device: cuda\nexperiments: {sweep_processes: {measured: {steps: 7, chunks: [2]}}}"
    )
    (tmp_path / "b.yaml").write_text("experiments: {sweep_processes: {measured: {chunks: [8, 16]}}, speed: null}")
    config = load_config([tmp_path / "a.yaml", tmp_path / "b.yaml"])
    grid = config.experiment("sweep_processes").blocks["measured"]
    assert {(point["steps"], point["chunks"]) for point in grid.points} == {(7, 8), (7, 16)}
    assert config.device == "cuda"
    assert "speed" not in config.experiments


def test_an_empty_file_has_the_defaults(tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert load_config([tmp_path / "a.yaml"]) == load_config() == parse_config({})


def test_the_file_of_the_working_folder_takes_the_place_of_that_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "ablation" in load_config().experiments
    (tmp_path / "config").mkdir()
    (tmp_path / CONFIG_PATH).write_text("experiments: {mine: {a: {run: simulated}}}\nadvice: {}")
    assert list(load_config().experiments) == ["mine"]


def test_what_is_checked_is_what_snakemake_runs(tmp_path, capsys):
    """A setting of a file is checked beside those of the default configuration that it does not replace."""
    (tmp_path / "a.yaml").write_text("experiments: {sweep_unet: {emulated: {balance: 121-120}}}")
    with pytest.raises(SystemExit) as ended:
        main(["config", "check", str(tmp_path / "a.yaml")])
    assert ended.value.code == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 3
    assert all(f"experiments.sweep_unet.emulated.balance {BALANCE_RULE}" in line for line in printed)


def test_the_schema_is_the_generated_one():
    assert (ROOT / SCHEMA_PATH).read_text() == json_schema_text(), "run python -m gpipe_bench config write"


def test_every_number_has_limits():
    """Whatever is given, a run ends: no setting takes infinity or any whole number."""

    def unlimited(part, path=""):
        if isinstance(part, dict):
            if part.get("type") in ("integer", "number") and not {"maximum", "exclusiveMaximum"} & set(part):
                yield path
            for key, value in part.items():
                yield from unlimited(value, f"{path}.{key}")
        if isinstance(part, list):
            for value in part:
                yield from unlimited(value, path)

    assert [path for path in unlimited(json_schema()) if "balance" not in path] == []


def test_the_schema_accepts_the_default_file_and_refuses_wrong_ones():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    assert schema["$schema"].startswith("https://json-schema.org/draft/")
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    default = yaml.safe_load(DEFAULT_CONFIG.read_text())
    assert list(validator.iter_errors(default)) == []
    assert json.loads(json_schema_text()) == schema
    block = {"run": "simulated", "chunks": [1, 2], "each": [{"workers": "cores"}]}
    assert validator.is_valid({"experiments": {"mine": {"a": block, "b": None}}})
    for wrong in ({"chunks": 0}, {"chunks": [1, 0]}, {"chunks": []}, {"chunsk": 1}, {"run": "all"}, {"workers": "all"}):
        assert not validator.is_valid({"experiments": {"mine": {"a": {**block, **wrong}}}}), wrong
    for wrong in ({"devce": "cpu"}, {"device": "tpu"}, {"ablation": {}}, {"experiments": {"mine": {"a": 3}}}):
        assert not validator.is_valid(wrong)
