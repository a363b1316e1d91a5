"""A configuration is checked as a whole; default file and schema follow from the typed settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from gpipe_bench.bench.experiments.config import SuiteConfig, load_config, parse_config
from gpipe_bench.bench.experiments.config_files import (
    CONFIG_PATH,
    SCHEMA_PATH,
    default_config_yaml,
    json_schema,
    json_schema_text,
)
from gpipe_bench.bench.spec.variants import labels_of
from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.errors import ConfigError

BALANCE_RULE = "must have one entry per partition"
VARIANTS_RULE = "must be published, factorial or labels like dep-str-ptl"
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
        ablation:
          cuda:
            chunks: 0
            chuncks: 4
            batch_size: many
            tf32: "yes"
            steps: true
            checkpoint: allways
            partitions: 3
            balance: 1-2
            variants: [published, dep-str-xx]
            model_args: dept=4;B=x
          cpu: 3
    """
    assert sorted(problems(text, folder=tmp_path)) == [
        "a.yaml: ablation.cpu must be a section of settings, got 3; write its keys below it, indented",
        f"a.yaml: ablation.cuda.balance {BALANCE_RULE}, 3, got 2 in 1-2; change balance or partitions",
        "a.yaml: ablation.cuda.batch_size must be a whole number, got 'many'; write it without quotes or decimals",
        "a.yaml: ablation.cuda.checkpoint must be one of always, except_last, never, got 'allways'; use 'always'",
        "a.yaml: ablation.cuda.chuncks must be a known key, got 'chuncks'; use 'chunks'",
        "a.yaml: ablation.cuda.chunks must be at least 1, got 0; raise it",
        "a.yaml: ablation.cuda.model_args: B of unet must be an integer, at least 1, got 'x'; the default is 5",
        "a.yaml: ablation.cuda.model_args: argument of unet must be one it declares, got 'dept'; use 'depth'",
        "a.yaml: ablation.cuda.steps must be a whole number, got True; write it without quotes or decimals",
        "a.yaml: ablation.cuda.tf32 must be true or false, got 'yes'; write one of them without quotes",
        f"a.yaml: ablation.cuda.variants {VARIANTS_RULE}, got 'dep-str-xx'; use 'dep-str-x'",
        "a.yaml: devce must be a known key, got 'devce'; use 'device'",
    ]


def test_a_problem_names_the_file_that_it_is_in(tmp_path):
    first, second = "ablation: {cpu: {chunks: 0, steps: 1}}", "ablation: {cpu: {steps: 0}}"
    assert problems(first, second, folder=tmp_path) == [
        "a.yaml: ablation.cpu.chunks must be at least 1, got 0; raise it",
        "b.yaml: ablation.cpu.steps must be at least 1, got 0; raise it",
    ]


def test_problems_of_reading_stand_beside_those_of_settings(tmp_path):
    found = problems("a: [1", "ablation: {cpu: {chunks: 2, chunks: 3}}", "device: tpu", folder=tmp_path)
    assert len(found) == 3
    assert found[0].startswith("configuration must be YAML, got an error in a.yaml: ")
    assert "key 'chunks' stands twice" in found[1]
    assert found[2] == "c.yaml: device must be one of auto, cpu, cuda, got 'tpu'; use 'cpu'"


@pytest.mark.parametrize("text", ["- 1\n- 2", "7"])
def test_a_file_that_has_no_sections(tmp_path, text):
    (found,) = problems(text, folder=tmp_path)
    assert found.startswith("configuration must be sections of settings, got ")


def test_keys_are_text(tmp_path):
    (found,) = problems("1: x", folder=tmp_path)
    assert "key 1 must be text" in found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "ablation: {cpu: {model_args: 'depth=1000000'}}",
            "depth of unet must be an integer, at least 1 and less",
        ),
        ("advice: {unet: {memory_limit_gib: .inf}}", "advice.unet.memory_limit_gib must be a finite number"),
        (
            "sweep: {simulated: {unet: {profile: 'a{b}.yaml'}}}",
            "profile must be a path without braces, got 'a{b}",
        ),
        (f"sweep: {{simulated: {{unet: {{chunks: [{'1, ' * 100}]}}}}}}", "must have at most 64 entries, got 100"),
    ],
)
def test_what_would_not_end_or_not_fit_is_refused(tmp_path, text, said):
    (found,) = problems(text, folder=tmp_path)
    assert said in found


def test_a_small_number_may_be_written_as_yaml_does_not_read_it(tmp_path):
    (tmp_path / "a.yaml").write_text("advice: {unet: {memory_limit_gib: 1e1}}")
    assert load_config([tmp_path / "a.yaml"]).advice["unet"].memory_limit_gib == 10


def test_every_number_has_limits():
    """Whatever is given, a run ends: no setting takes infinity or any whole number."""
    unlimited = [
        f"{kind['title']}.{name}"
        for kind in json_schema()["$defs"].values()
        for name, setting in kind["properties"].items()
        for part in (setting, setting.get("items", {}))
        if part.get("type") in ("integer", "number") and not {"maximum", "exclusiveMaximum"} & set(part)
    ]
    assert unlimited == []


def test_an_absent_file(tmp_path):
    with pytest.raises(ConfigError, match=r"configuration must be a readable file, got .*none\.yaml"):
        load_config([tmp_path / "none.yaml"])


def test_rules_between_settings_wait_only_for_the_settings_they_need():
    with pytest.raises(ConfigError) as caught:
        parse_config(
            {"ablation": {"simulated": {"partitions": 4, "balance": "1-2-3"}, "cuda": {"balance": "x", "chunks": 0}}}
        )
    text = "\n".join(caught.value.problems)
    assert "ablation.simulated.balance must have one entry per partition, 4, got 3" in text
    assert "ablation.cuda.balance must be positive numbers of layers, got 'x'" in text
    assert text.count("ablation.cuda.balance") == 1


def test_later_files_go_over_earlier_ones(tmp_path):
    (tmp_path / "a.yaml").write_text("device: cuda\nablation: {cpu: {steps: 7, variants: [baseline, dep-x-x]}}")
    (tmp_path / "b.yaml").write_text("ablation: {cpu: {variants: [dep-x-ptl]}, cuda: {repeats: 9}}")
    config = load_config([tmp_path / "a.yaml", tmp_path / "b.yaml"])
    assert (config.device, config.ablation.cpu.steps, config.ablation.cuda.repeats) == ("cuda", 7, 9)
    assert config.ablation.cpu.variants == ("dep-x-ptl",)
    assert config.ablation.cuda.chunks == SuiteConfig().ablation.cuda.chunks


def test_an_empty_file_has_the_defaults(tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert load_config([tmp_path / "a.yaml"]) == SuiteConfig()


@pytest.mark.parametrize(
    ("variants", "labels"),
    [
        ("published", list(PUBLISHED)),
        (["factorial"], [components.label for components in Components.factorial()]),
        ("dep-x-ptl", ["dep-x-ptl"]),
        (["dep-x-ptl-clk-rec", "published", "baseline"], ["dep-x-ptl", *PUBLISHED]),
    ],
)
def test_variants_are_sets_or_labels(variants, labels):
    assert labels_of(parse_config({"ablation": {"cuda": {"variants": variants}}}).ablation.cuda.variants) == labels


def test_a_balance_may_be_a_list_or_text():
    listed = parse_config({"ablation": {"cpu": {"balance": [60, 43, 30, 20]}}})
    assert listed.ablation.cpu.balance == (60, 43, 30, 20)
    assert listed == parse_config({"ablation": {"cpu": {"balance": "60-43-30-20"}}})


def test_the_published_settings_on_gpus():
    cuda = SuiteConfig().ablation.cuda
    assert (cuda.batch_size, cuda.chunks, cuda.balance, cuda.checkpoint) == (128, 8, (34, 76, 70, 61), "except_last")
    assert not cuda.tf32


def test_the_default_file_is_the_generated_one():
    assert (ROOT / CONFIG_PATH).read_text() == default_config_yaml(), "run python -m gpipe_bench config write"


def test_the_schema_is_the_generated_one():
    assert (ROOT / SCHEMA_PATH).read_text() == json_schema_text(), "run python -m gpipe_bench config write"


def test_the_default_file_says_what_the_defaults_are():
    assert load_config([ROOT / CONFIG_PATH]) == SuiteConfig()


def test_every_setting_of_the_default_file_is_explained():
    for line in default_config_yaml().splitlines():
        key, colon, value = line.partition(":")
        if colon and value and not key.lstrip().startswith("#"):
            assert "  # " in line, line
        assert len(line) <= 120


def test_the_schema_accepts_the_default_file_and_refuses_wrong_ones():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json_schema()
    assert schema["$schema"].startswith("https://json-schema.org/draft/")
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    default = yaml.safe_load((ROOT / CONFIG_PATH).read_text())
    assert validator.is_valid(default)
    assert json.loads(json_schema_text()) == schema
    for wrong in ({"devce": "cpu"}, {"device": "tpu"}, {"ablation": {"cpu": {"chunks": 0}}}, {"ablation": None}):
        assert not validator.is_valid(wrong)
