"""Today's decoders for the table of models; what touches tensors loads PyTorch on its first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.models.arguments import Argument, Values
from gpipe_bench.models.language import next_tokens, token_cross_entropy, width_problems
from gpipe_bench.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from gpipe_bench.models.llama import Sizes
    from gpipe_bench.models.spec import Device

_BALANCE_WEIGHT: Final = 0.01
_AHEAD_WEIGHT: Final = 0.3
"""Switch Transformers' weight of the balancing loss, and that of the tokens ahead in most of DeepSeek-V3's training."""


def _arguments(defaults: tuple[int, ...], **more: Argument) -> Mapping[str, Argument]:
    blocks, width, heads, kv, hidden, vocabulary, context = defaults
    return MappingProxyType(
        {
            "L": Argument(int, blocks, "blocks, each an attention and an MLP", minimum=1),
            "D": Argument(int, width, "width", minimum=2),
            "heads": Argument(int, heads, "of queries", minimum=1),
            "kv": Argument(int, kv, "heads of keys and values", minimum=1),
            "hidden": Argument(int, hidden, "width inside an MLP", minimum=1),
            "vocabulary": Argument(int, vocabulary, "number of tokens", minimum=1),
            "context": Argument(int, context, "tokens of a sequence", minimum=1),
            **more,
        }
    )


def _sizes(arguments: Values) -> Sizes:
    from gpipe_bench.models.llama import Sizes

    return Sizes(*(int(arguments[name]) for name in ("L", "D", "heads", "kv", "hidden", "vocabulary")))


def _problems(arguments: Values) -> list[str]:
    heads, kv = int(arguments["heads"]), int(arguments["kv"])
    found = width_problems(arguments)
    if heads % kv:
        found.append(f"heads must be a multiple of kv = {kv}: heads share keys and values, got {heads}; change either")
    if not found and int(arguments["D"]) // heads % 2:
        rule = "D must give heads an even width: positions turn pairs of numbers"
        found.append(f"{rule}, got {int(arguments['D']) // heads}; change D or heads")
    return found


def _spec(
    name: str, arguments: Mapping[str, Argument], network: Callable[[Values], nn.Sequential], source: str, **other: Any
) -> ModelSpec:
    settings: dict[str, Any] = {
        "layers": lambda a: int(a["L"]) + 2,
        "input_shape": lambda a: (int(a["context"]),),
        "input_type": lambda _: "int64",
        "batch": next_tokens,
        "loss": token_cross_entropy,
        "rules": _problems,
        **other,
    }
    return ModelSpec(name=name, arguments=arguments, network=network, source=source, **settings)


def _decoder(arguments: Values) -> nn.Sequential:
    from gpipe_bench.models.llama import decoder

    return decoder(_sizes(arguments))


def _attention_residuals(arguments: Values) -> nn.Sequential:
    from gpipe_bench.models.attention_residuals import attention_residuals

    return attention_residuals(_sizes(arguments), int(arguments["block"]), recompute=bool(arguments["recompute"]))


def _hyper_connections(arguments: Values) -> nn.Sequential:
    from gpipe_bench.models.hyper_connections import hyper_connections

    return hyper_connections(_sizes(arguments), int(arguments["streams"]))


def _experts(arguments: Values) -> nn.Sequential:
    from gpipe_bench.models.experts import Mixture, experts

    chosen, capacity = int(arguments["chosen"]), float(arguments["capacity"])
    return experts(_sizes(arguments), Mixture(int(arguments["experts"]), chosen, capacity))


def _expert_problems(arguments: Values) -> list[str]:
    chosen, experts = int(arguments["chosen"]), int(arguments["experts"])
    many = f"chosen must be at most experts = {experts}, got {chosen}; lower it"
    return _problems(arguments) + [many] * (chosen > experts)


def _balanced_cross_entropy(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    logits, balance = output
    return token_cross_entropy(logits, target) + _BALANCE_WEIGHT * balance.mean()


def _multi_token(arguments: Values) -> nn.Sequential:
    from gpipe_bench.models.multi_token import multi_token

    return multi_token(_sizes(arguments), int(arguments["ahead"]), tied=bool(arguments["tied"]))


def _longer(arguments: Values) -> dict[str, Any]:
    return {**arguments, "context": int(arguments["context"]) + int(arguments["ahead"])}


def _tokens_ahead(
    batch_size: int, arguments: Values, generator: torch.Generator | None, device: Device
) -> tuple[Tensor, Tensor]:
    return next_tokens(batch_size, _longer(arguments), generator, device)


def _cross_entropy_ahead(output: Tensor, target: Tensor) -> Tensor:
    """Logits of shape (N, 1 + depth, T, vocabulary), tokens of shape (N, T + depth)."""
    depth, length = output.shape[1] - 1, output.shape[2]
    losses = [token_cross_entropy(output[:, k], target[:, k : k + length]) for k in range(depth + 1)]
    total: Tensor = losses[0] + _AHEAD_WEIGHT / depth * sum(losses[1:])
    return total


def _captions(arguments: Values) -> nn.Sequential:
    from gpipe_bench.models.captions import Picture, captions

    picture = Picture(*(int(arguments[name]) for name in ("V", "width", "vheads", "size", "patch")))
    return captions(picture, _sizes(arguments), int(arguments["every"]))


def _pixels_and_tokens(
    batch_size: int, arguments: Values, generator: torch.Generator | None, device: Device
) -> tuple[Tensor, Tensor]:
    import torch

    pixels = 3 * int(arguments["size"]) ** 2
    image = torch.randint(256, (batch_size, pixels), generator=generator, device=device)
    tokens, target = next_tokens(batch_size, arguments, generator, device)
    return torch.cat([image, tokens], 1), target


def _caption_problems(arguments: Values) -> list[str]:
    found = _problems(arguments)
    for whole, part, what in (
        ("size", "patch", "patches cover the image"),
        ("width", "vheads", "heads share the width"),
    ):
        if int(arguments[whole]) % int(arguments[part]):
            rule = f"{whole} must be a multiple of {part} = {arguments[part]}: {what}"
            found.append(f"{rule}, got {arguments[whole]}; change either")
    return found


_LLAMA_3_8B: Final = (32, 4096, 32, 8, 14336, 128256, 8192)
_LLAMA_32_1B: Final = (16, 2048, 32, 8, 8192, 128256, 8192)
_OLMO_1B: Final = (16, 2048, 16, 16, 8192, 50304, 2048)
_MIXTRAL: Final = (32, 4096, 32, 8, 14336, 32000, 8192)

DECODERS: Final = (
    _spec("decoder", _arguments(_LLAMA_3_8B), _decoder, "Grattafiori et al., arXiv 2407.21783: by default Llama 3 8B"),
    _spec(
        "attention-residuals",
        _arguments(
            _LLAMA_3_8B,
            block=Argument(int, 4, "transformer layers of a block of residuals", minimum=1),
            recompute=Argument(bool, True, "depths are mixed again in the backward pass, as Kimi K3 does"),
        ),
        _attention_residuals,
        "Kimi Team, arXiv 2603.15031; the sizes are those of Llama 3 8B, with the 8 blocks that the paper advises",
    ),
    _spec(
        "hyper-connections",
        _arguments(_OLMO_1B, streams=Argument(int, 4, "copies of the activations", minimum=1)),
        _hyper_connections,
        "Zhu et al., arXiv 2409.19606: by default the sizes of OLMo-1B-DHCx4",
    ),
    _spec(
        "experts",
        _arguments(
            _MIXTRAL,
            experts=Argument(int, 8, "MLPs of a block", minimum=1),
            chosen=Argument(int, 2, "experts of a token", minimum=1),
            capacity=Argument(float, 1.25, "tokens that an expert takes, times an even share", minimum=0.01),
        ),
        _experts,
        "Jiang et al., arXiv 2401.04088: by default Mixtral 8x7B, but with the capacity of arXiv 2006.16668",
        loss=_balanced_cross_entropy,
        rules=_expert_problems,
    ),
    _spec(
        "multi-token",
        _arguments(
            _LLAMA_32_1B,
            ahead=Argument(int, 1, "tokens predicted behind the next one", minimum=1),
            tied=Argument(bool, True, "embedding, modules and head have one weight"),
        ),
        _multi_token,
        "DeepSeek-V3, arXiv 2412.19437, section 2.2; the sizes are those of Llama 3.2 1B",
        layers=lambda a: int(a["L"]) + int(a["ahead"]) + 2,
        input_shape=lambda a: (int(a["context"]) + int(a["ahead"]),),
        batch=_tokens_ahead,
        loss=_cross_entropy_ahead,
    ),
    _spec(
        "captions",
        _arguments(
            _LLAMA_32_1B,
            V=Argument(int, 32, "blocks of the encoder", minimum=1),
            width=Argument(int, 1280, "of the encoder", minimum=1),
            vheads=Argument(int, 16, "heads of the encoder", minimum=1),
            size=Argument(int, 224, "height and width of the images, in pixels", minimum=1),
            patch=Argument(int, 14, "height and width of a patch, in pixels", minimum=1),
            every=Argument(int, 1, "blocks from one that looks at the image to the next", minimum=1),
        ),
        _captions,
        "Grattafiori et al., arXiv 2407.21783, section 7; the sizes are those of ViT-H/14 and Llama 3.2 1B",
        layers=lambda a: int(a["V"]) + int(a["L"]) + 3,
        input_shape=lambda a: (3 * int(a["size"]) ** 2 + int(a["context"]),),
        batch=_pixels_and_tokens,
        rules=_caption_problems,
    ),
)
"""decoder, attention-residuals, hyper-connections, experts, multi-token, captions."""
