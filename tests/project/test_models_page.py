"""What docs/models.md shows is true: its table and its examples; test_commands.py runs its commands."""

from __future__ import annotations

import re

from gpipe_bench.models.table import MODELS, format_arguments, parse_arguments
from tests.project.tree import ROOT

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
EXAMPLE = "examples/my_model.py"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_table_has_every_model_with_its_defaults():
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", PAGE, re.MULTILINE)
    known = {name: arguments for name, arguments in rows if "=" in arguments}
    assert known == {name: format_arguments(parse_arguments(name, "")) for name in MODELS}


def test_the_example_is_the_one_in_the_repository():
    assert blocks("python")[0] == (ROOT / EXAMPLE).read_text(encoding="utf-8")


def test_numbers_of_parameters_are_those_of_gpt2():
    import torch

    with torch.device("meta"):
        model = MODELS["gpt2"].build()
    whole, head = (sum(part.numel() for part in module.parameters()) for module in (model, model[-1].linear))
    assert f"`gpt2` has {whole - head:,} parameters with a shared weight and {whole:,} without" in " ".join(
        PAGE.split()
    )
