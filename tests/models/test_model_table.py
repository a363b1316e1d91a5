"""The table of models: light to import, strict with arguments, batches and losses of the published runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpipe_bench.errors import ConfigError
from gpipe_bench.models.table import MODELS, ModelSpec, check_arguments, format_arguments, model_spec, parse_arguments

SMALL: dict[str, str] = {
    "unet": "B=1;C=4;size=64;out=2",
    "amoebanet-d": "L=3;D=8;size=64;classes=7",
    "vit": "L=2;D=8;heads=2;size=8;patch=4;classes=7",
    **dict.fromkeys(
        ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"), "L=2;D=8;heads=2;vocabulary=11;context=6;dropout=0"
    ),
    **dict.fromkeys(
        ("decoder", "attention-residuals", "hyper-connections", "experts", "multi-token"),
        "L=2;D=8;heads=2;kv=1;hidden=12;vocabulary=11;context=6",
    ),
    "captions": "L=2;D=8;heads=2;kv=1;hidden=12;vocabulary=11;context=6;V=1;width=8;vheads=2;size=8;patch=4",
}
LLAMA_3_8B = "L=32;D=4096;heads=32;kv=8;hidden=14336;vocabulary=128256"
LLAMA_32_1B = "L=16;D=2048;heads=32;kv=8;hidden=8192;vocabulary=128256"
every_model = pytest.mark.parametrize("name", MODELS)


def problems_of(name: str, text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_arguments(name, text)
    return caught.value.problems


def test_the_table_loads_without_pytorch() -> None:
    code = (
        "import sys, gpipe_bench.models.table as t; t.parse_arguments('unet', 'B=2'); sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@every_model
def test_a_model_of_the_table_trains_one_step(name: str) -> None:
    spec = MODELS[name]
    arguments = parse_arguments(name, SMALL[name])
    module = spec.build(**arguments)

    images, target = spec.make_batch(2, arguments)
    loss = spec.loss(module(images), target)
    torch.autograd.backward(loss)

    assert images.shape == (2, *spec.input_shape(arguments))
    assert loss.shape == ()
    assert loss.isfinite()
    assert all(parameter.grad is not None for parameter in module.parameters())


@every_model
@pytest.mark.parametrize("change", [{}, {"B": 2, "depth": 3}, {"L": 9}])
def test_the_number_of_layers_is_known_without_building(name: str, change: dict[str, int]) -> None:
    spec = MODELS[name]
    arguments = spec.check({key: value for key, value in change.items() if key in spec.arguments})

    with torch.device("meta"):
        module = spec.build(**arguments)

    assert spec.layers(arguments) == len(module)


@every_model
def test_defaults_are_the_published_sizes(name: str) -> None:
    published = {
        "unet": "depth=5;B=5;C=64;size=192;in=3;out=1;dropout=0.1",
        "amoebanet-d": "L=18;D=256;size=224;classes=1000;max3_is_average=true;concat_0346=true;stem_relu=true",
        "vit": "L=32;D=1280;heads=16;size=224;patch=14;classes=1000",
        "gpt2": "L=12;D=768;heads=12;vocabulary=50257;context=1024;dropout=0.1",
        "gpt2-medium": "L=24;D=1024;heads=16;vocabulary=50257;context=1024;dropout=0.1",
        "gpt2-large": "L=36;D=1280;heads=20;vocabulary=50257;context=1024;dropout=0.1",
        "gpt2-xl": "L=48;D=1600;heads=25;vocabulary=50257;context=1024;dropout=0.1",
        "decoder": f"{LLAMA_3_8B};context=8192",
        "attention-residuals": f"{LLAMA_3_8B};context=8192;block=4;recompute=true",
        "hyper-connections": "L=16;D=2048;heads=16;kv=16;hidden=8192;vocabulary=50304;context=2048;streams=4",
        "experts": "L=32;D=4096;heads=32;kv=8;hidden=14336;vocabulary=32000;context=8192;"
        "experts=8;chosen=2;capacity=1.25",
        "multi-token": f"{LLAMA_32_1B};context=8192;ahead=1;tied=true",
        "captions": f"{LLAMA_32_1B};context=8192;V=32;width=1280;vheads=16;size=224;patch=14;every=1",
    }

    assert format_arguments(parse_arguments(name, "")) == published[name]


@every_model
def test_a_generator_makes_equal_batches(name: str) -> None:
    spec = MODELS[name]
    arguments = parse_arguments(name, SMALL[name])

    batches = [spec.make_batch(4, arguments, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)]

    assert all(torch.equal(one, other) for one, other in zip(batches[0], batches[1], strict=True))
    assert not torch.equal(batches[0][0], batches[2][0])


@every_model
def test_a_batch_goes_to_the_device_asked_for(name: str) -> None:
    batch = MODELS[name].make_batch(1, {}, torch.Generator(), "meta")

    assert [part.device.type for part in batch] == ["meta", "meta"]


def test_unet_learns_ones_by_binary_cross_entropy_on_logits() -> None:
    spec = MODELS["unet"]

    images, target = spec.make_batch(3, parse_arguments("unet", SMALL["unet"]), torch.Generator().manual_seed(0))

    assert images.min() >= 0
    assert images.max() < 1
    assert abs(images.mean().item() - 0.5) < 0.01
    assert torch.equal(target, torch.ones(3, 2, 64, 64))
    torch.testing.assert_close(spec.loss(torch.zeros(2, 2), torch.ones(2, 2)), torch.tensor(2.0).log())


def test_amoebanet_learns_random_classes_by_cross_entropy() -> None:
    spec = MODELS["amoebanet-d"]

    _, target = spec.make_batch(200, parse_arguments("amoebanet-d", SMALL["amoebanet-d"]), torch.Generator())

    assert target.shape == (200,)
    assert set(target.tolist()) == set(range(7))
    torch.testing.assert_close(spec.loss(torch.zeros(2, 7), target[:2]), torch.tensor(7.0).log())


@pytest.mark.parametrize(
    ("name", "is_off"),
    [
        ("max3_is_average", lambda m: any(isinstance(a, nn.MaxPool2d) and a.kernel_size == 3 for a in m.modules())),
        ("concat_0346", lambda m: m.get_submodule("normal1_0").concat == (4, 5, 6)),
        ("stem_relu", lambda m: not isinstance(m[0][0], nn.ReLU)),
    ],
)
def test_each_quirk_is_on_and_can_be_switched_off(name: str, is_off: Callable[[nn.Sequential], bool]) -> None:
    spec = MODELS["amoebanet-d"]

    with torch.device("meta"):
        published, without = spec.build(L=3, D=8), spec.build(L=3, D=8, **{name: False})

    assert is_off(without)
    assert not is_off(published)


def test_dropout_reaches_the_network() -> None:
    module = MODELS["unet"].build(depth=1, B=1, C=2, size=4, dropout=0)

    assert {layer.p for layer in module if isinstance(layer, nn.Dropout2d)} == {0.0}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("unet", "B=2;depth=4", "depth=4;B=2;C=64;size=192;in=3;out=1;dropout=0.1"),
        ("unet", " dropout = 0 ; ; C=6;", "depth=5;B=5;C=6;size=192;in=3;out=1;dropout=0.0"),
        ("unet", "dropout=0.3333333333333333", "depth=5;B=5;C=64;size=192;in=3;out=1;dropout=0.3333333333333333"),
        (
            "amoebanet-d",
            "stem_relu=no;D=208",
            "L=18;D=208;size=224;classes=1000;max3_is_average=true;concat_0346=true;stem_relu=false",
        ),
    ],
)
def test_text_is_read_into_declared_order_and_written_back(name: str, text: str, expected: str) -> None:
    arguments = parse_arguments(name, text)

    assert format_arguments(arguments) == expected
    assert parse_arguments(name, expected) == arguments


@pytest.mark.parametrize(
    ("name", "text"), [("unet", "depth=5;B=5;C=64;in=3;out=1"), ("amoebanet-d", "L=18;D=256;classes=1000")]
)
def test_settings_as_published_are_the_defaults(name: str, text: str) -> None:
    assert parse_arguments(name, text) == parse_arguments(name, "")


def test_data_is_checked_like_text() -> None:
    assert check_arguments("unet", {"B": 2, "dropout": 0}) == parse_arguments("unet", "B=2;dropout=0")


def test_all_problems_are_reported_at_once() -> None:
    assert problems_of("unet", "deph=5;B=0;C=7;B=3;oops;dropout=1") == (
        "model argument 'B' must be given once, got 0 and 3; drop one",
        "model arguments must be 'key=value' joined by ';', got 'oops'; write '<key>=<value>'",
        "argument of unet must be one it declares, got 'deph'; use 'depth'",
        "B of unet must be an integer, at least 1, got '0'; the default is 5",
        "C of unet must be a multiple of 2, at least 2, got '7'; the default is 64",
        "dropout of unet must be a number, at least 0 and less than 1, got '1'; the default is 0.1",
    )


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("unet", "size=200", "size must be a multiple of 2^depth = 32, at least 64, got 200; use 192"),
        ("unet", "size=32", "size must be a multiple of 2^depth = 32, at least 64, got 32; use 64"),
        ("unet", "depth=3;size=20", "size must be a multiple of 2^depth = 8, at least 16, got 20; use 16"),
        ("amoebanet-d", "size=331", "size must be a multiple of 2^5 = 32, at least 64, got 331; use 320"),
        ("amoebanet-d", "L=4", "L of amoebanet-d must be a multiple of 3, at least 3, got '4'; the default is 18"),
        ("amoebanet-d", "D=12", "D of amoebanet-d must be a multiple of 8, at least 8, got '12'; the default is 256"),
        ("amoebanet-d", "stem_relu=2", "stem_relu of amoebanet-d must be true or false, got '2'; the default is true"),
        ("unet", "dropout=nan", "dropout of unet must be a number, at least 0 and less than 1, got 'nan'; "),
        ("unet", "b=2;x=1", "argument of unet must be one it declares, got 'b'; use 'B'"),
    ],
)
def test_a_problem_says_what_was_got_and_what_to_write(name: str, text: str, problem: str) -> None:
    assert problems_of(name, text)[0].startswith(problem)


@pytest.mark.parametrize("value", [True, 2.5, None, [2]])
def test_data_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="B of unet must be an integer, at least 1, got"):
        check_arguments("unet", {"B": value})


def test_a_number_is_no_flag() -> None:
    with pytest.raises(ConfigError, match="stem_relu of amoebanet-d must be true or false, got 1"):
        check_arguments("amoebanet-d", {"stem_relu": 1})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("amoebanet", "use 'amoebanet-d'"),
        ("UNet", "use 'unet'"),
        ("zzz", "use one of them"),
        ("resnet", "use one of them"),
        ("Timm/resnet18", "use 'timm/resnet18'"),
        ("torch/resnet18", "use 'torchvision/resnet18'"),
        ("a/b", "use one of them"),
        ("gpt-2", "use 'gpt2'"),
        ("gpt2-small", "use 'gpt2'"),
        ("./net.py", "name a function in it, './net.py:<function>'"),
    ],
)
def test_an_unknown_model_names_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_spec(name)
    known = (
        "unet, amoebanet-d, vit, gpt2, gpt2-medium, gpt2-large, gpt2-xl, decoder, attention-residuals, "
        "hyper-connections, experts, multi-token, captions, timm/<name>, torchvision/<name>, "
        "<file>.py:<function>, <module>:<function>"
    )
    assert str(caught.value) == f"model must be one of {known}, got {name!r}; {hint}"


def test_a_model_needs_neither_rules_nor_source() -> None:
    unet = MODELS["unet"]
    names = ("name", "arguments", "network", "layers", "input_shape", "target", "loss")
    spec = ModelSpec(**{name: getattr(unet, name) for name in names})

    # 7 pixels do not suffice for five halvings, which the rules of this model say.
    assert spec.check({"size": 7})["size"] == 7
    assert spec.source == ""
