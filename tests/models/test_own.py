"""Models of one's own: names, arguments, batch and loss, what is noticed of an edit, and what is said of a mistake."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from textwrap import dedent

import pytest
import torch
from torch import nn

from gpipe_bench.errors import ConfigError
from gpipe_bench.models.own import uses_default_loss
from gpipe_bench.models.own_files import own_files, portable, split_name
from gpipe_bench.models.table import (
    MODELS,
    check_arguments,
    format_arguments,
    model_digest,
    model_spec,
    parse_arguments,
)
from tests.models.folders import write
from tests.project.tree import ROOT

NET = """
    import torch
    from torch import nn

    def net(width: int = 4, rate: float = 0, deep=False, activation=nn.ReLU, *, depth=2):
        layers = [nn.Sequential(nn.Linear(width, width), activation()) for _ in range(depth + 10 * deep)]
        return nn.Sequential(*layers, nn.Dropout(rate))

    def net_batch(batch_size, width=4):
        return torch.rand(batch_size, width), torch.rand(batch_size, width)

    def net_loss(output, target):
        return (output - target).abs().sum()

    NUMBER = 3
    """


pytestmark = pytest.mark.usefixtures("folder")
HELPED = """
    import torch
    from helper import LAYERS
    from torch import nn
    def net():
        return nn.Sequential(*(nn.ReLU() for _ in range(LAYERS)))
    """


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("net.py", "net.py:net"),
        ("net.py", "./net.py:net"),
        ("a/b/net.py", "a/b/net.py:net"),
        ("net.py", "net:net"),
        ("a/b/net.py", "a.b.net:net"),
    ],
)
def test_a_function_of_a_file_or_module_is_a_model(folder, path, name):
    write(folder / path, NET)
    spec = model_spec(name)
    assert name in MODELS
    assert isinstance(spec.build(), nn.Sequential)
    assert len(spec.build(depth=5)) == spec.layers(spec.check({"depth": 5})) == 6
    assert spec.input_shape(spec.check({"width": 7})) == (7,)


def test_a_file_by_its_whole_path_is_named_from_the_current_folder(folder):
    write(folder / "a" / "net.py", NET)
    assert portable(f"{folder}/a/net.py:net") == "a/net.py:net"
    assert portable("./a/../a/net.py:net") == "a/net.py:net"
    assert portable("a.net:net") == "a.net:net"
    assert portable("timm/resnet18") == "timm/resnet18"
    assert model_spec(f"{folder}/a/net.py:net").name == "a/net.py:net"


@pytest.mark.parametrize("name", ["unet", "timm/vit_tiny_patch16_224", "net.py", "", 3])
def test_other_names_are_not_of_this_form(name):
    assert split_name(name) is None


def test_arguments_are_those_with_defaults_of_plain_types(folder):
    write(folder / "net.py", NET)
    values = parse_arguments("net.py:net", "depth=3;deep=true;rate=0.5")
    assert format_arguments(values) == "width=4;rate=0.5;deep=true;depth=3"
    assert values == check_arguments("net.py:net", {"depth": 3, "deep": True, "rate": 0.5})
    assert parse_arguments("net.py:net", "")["rate"] == 0.0
    assert len(model_spec("net.py:net").build(**values)) == 14


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("depht=3", "argument of net.py:net must be one it declares, got 'depht'; use 'depth'"),
        ("width=x", "width of net.py:net must be an integer, got 'x'; the default is 4"),
        ("rate=x", "rate of net.py:net must be a number, got 'x'; the default is 0.0"),
        ("deep=2", "deep of net.py:net must be true or false, got '2'; the default is false"),
    ],
)
def test_wrong_arguments(folder, text, problem):
    write(folder / "net.py", NET)
    with pytest.raises(ConfigError) as caught:
        parse_arguments("net.py:net", text)
    assert caught.value.problems == (problem,)


def test_annotations_may_be_postponed(folder):
    write(folder / "net.py", "from __future__ import annotations\n" + dedent(NET))
    assert format_arguments(check_arguments("net.py:net", {})) == "width=4;rate=0.0;deep=false;depth=2"


def test_batch_and_loss_are_those_of_the_file(folder):
    write(folder / "net.py", NET)
    spec = model_spec("net.py:net")
    batches = [spec.make_batch(3, {"width": 5}, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert [tuple(part.shape) for part in batches[0]] == [(3, 5), (3, 5)]
    torch.testing.assert_close(batches[1], batches[0], rtol=0, atol=0)
    assert not torch.equal(batches[2][0], batches[0][0])
    assert spec.loss(torch.zeros(2, 2), torch.ones(2, 2)) == 4
    assert not uses_default_loss("net.py:net")


def test_a_batch_leaves_the_random_numbers_of_the_caller_alone(folder):
    write(folder / "net.py", NET)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    model_spec("net.py:net").make_batch(3, {}, torch.Generator().manual_seed(1))
    assert torch.equal(torch.rand(2), expected)


def test_a_batch_of_one_tensor_is_its_own_target_and_the_mean_square_the_loss(folder):
    write(
        folder / "net.py",
        """
        import torch
        from torch import nn
        def tokens():
            return nn.Sequential(nn.Embedding(7, 2))
        def tokens_batch(batch_size):
            return torch.randint(7, (batch_size, 5))
        """,
    )
    spec = model_spec("net.py:tokens")
    inputs, target = spec.make_batch(3, {})
    assert torch.equal(inputs, target)
    assert (spec.input_shape({}), spec.input_type({})) == ((5,), "int64")
    assert spec.loss(torch.full((2, 2), 3.0), target) == 9
    assert uses_default_loss("net.py:tokens")
    assert not uses_default_loss("unet")


def test_a_class_of_sequences_is_a_function(folder):
    write(
        folder / "net.py",
        """
        from torch import nn
        class Net(nn.Sequential):
            def __init__(self, depth=3):
                super().__init__(*(nn.Linear(2, 2) for _ in range(depth)))
        """,
    )
    assert model_spec("net.py:Net").layers({"depth": 5}) == 5


def test_a_specification_is_taken_as_it_is(folder):
    write(
        folder / "net.py",
        """
        from dataclasses import replace
        from gpipe_bench.models.table import UNET
        SMALL = replace(UNET, name="small")
        """,
    )
    assert model_spec("net.py:SMALL").name == "net.py:SMALL"
    assert model_spec("net.py:SMALL").layers({"B": 1, "depth": 2}) == 29


def test_a_model_that_needs_values_is_made_on_the_cpu(folder):
    write(
        folder / "net.py",
        """
        import torch
        from torch import nn
        def net():
            rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
            return nn.Sequential(*map(nn.Dropout, rates))
        def net_batch(batch_size):
            return torch.zeros(batch_size, int(torch.tensor(3).item()))
        """,
    )
    spec = model_spec("net.py:net")
    assert spec.layers({}) == 3
    assert spec.input_shape({}) == (3,)
    assert spec.make_batch(2, {}, device="meta")[0].is_meta


def test_an_edit_is_seen_in_the_same_process(folder):
    write(folder / "net.py", HELPED.replace("from helper import LAYERS", "LAYERS = 3"))
    before = model_digest("net.py:net"), model_spec("net.py:net").layers({})
    # As long as it was, in the same second perhaps.
    (folder / "net.py").write_text((folder / "net.py").read_text().replace("LAYERS = 3", "LAYERS = 4"))
    assert model_digest("net.py:net") != before[0]
    assert model_spec("net.py:net").layers({}) == 4 != before[1]


@pytest.mark.parametrize("name", ["net.py:net", "net:net"])
def test_an_edit_of_what_it_imports_is_seen(folder, name):
    write(folder / "net.py", HELPED)
    write(folder / "helper.py", "LAYERS = 3")
    before = model_digest(name)
    assert model_spec(name).layers({}) == 3
    write(folder / "helper.py", "LAYERS = 1 + 3")
    assert model_digest(name) != before
    assert model_spec(name).layers({}) == 4


def test_an_edit_of_what_the_user_has_imported_is_seen(folder):
    write(folder / "net.py", HELPED)
    write(folder / "helper.py", "LAYERS = 3")
    sys.path.insert(0, str(folder))
    importlib.import_module("net")
    write(folder / "helper.py", "LAYERS = 1 + 3")
    assert model_spec("net:net").layers({}) == 4


def test_what_is_installed_is_imported_once(folder):
    write(folder / "site-packages" / "installed_net.py", HELPED.replace("from helper import LAYERS", "LAYERS = 3"))
    sys.path.insert(0, str(folder / "site-packages"))
    before = importlib.import_module("installed_net")
    assert model_spec("installed_net:net").layers({}) == 3
    assert sys.modules["installed_net"] is before


def test_two_files_may_import_helpers_of_one_name(folder):
    for place, layers in (("a", 2), ("b", 5)):
        write(folder / place / "net.py", HELPED)
        write(folder / place / "helper.py", f"LAYERS = {layers}")
    assert [model_spec(f"{place}/net.py:net").layers({}) for place in ("a", "b", "a")] == [2, 5, 2]
    assert model_digest("a/net.py:net") != model_digest("b/net.py:net")
    write(folder / "a" / "helper.py", "LAYERS = 3 + 4")
    assert [model_spec(f"{place}/net.py:net").layers({}) for place in ("a", "b")] == [7, 5]


def test_a_file_may_import_from_the_current_folder(folder):
    write(folder / "a" / "net.py", HELPED)
    write(folder / "helper.py", "LAYERS = 6")
    sys.path[:] = [place for place in sys.path if place not in ("", str(folder))]
    assert model_spec("a/net.py:net").layers({}) == 6


def test_a_digest_covers_packages_and_leaves_out_what_is_installed(folder):
    write(folder / "pkg" / "__init__.py", "")
    write(
        folder / "pkg" / "net.py", "import json, torch\nfrom . import parts\nfrom pkg.more import thing\n" + dedent(NET)
    )
    write(folder / "pkg" / "parts.py", "import numpy")
    write(folder / "pkg" / "more" / "__init__.py", "thing = 3")
    found = own_files(split_name("pkg.net:net"))
    assert {str(path.relative_to(folder)) for path in found.values()} == {
        *("pkg/__init__.py", "pkg/net.py", "pkg/parts.py", "pkg/more/__init__.py")
    }
    other = model_digest("pkg.net:net")
    write(folder / "unrelated.py", "x = 1")
    assert model_digest("pkg.net:net") == other
    write(folder / "pkg" / "parts.py", "import numpy as np")
    assert model_digest("pkg.net:net") != other


def test_the_same_files_elsewhere_have_the_same_digest(folder):
    for place in ("a", "b"):
        write(folder / place / "net.py", NET)
    assert model_digest("a/net.py:net") == model_digest("b/net.py:net")


def test_a_copy_of_a_layer_can_be_pickled_and_copied(folder):
    import copy
    import pickle

    write(
        folder / "net.py",
        "from torch import nn\nclass Mine(nn.ReLU): pass\ndef net(): return nn.Sequential(Mine(), Mine())",
    )
    module = model_spec("net.py:net").build()
    assert len(copy.deepcopy(module)) == len(pickle.loads(pickle.dumps(module))) == 2


def test_a_name_is_known_without_importing_anything(folder):
    write(folder / "net.py", "raise AssertionError")
    program = "import sys\nfrom gpipe_bench.models.table import MODELS\nassert 'net.py:net' in MODELS"
    program += "\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
