"""Sequences of layers: what a pipeline asks of them, and layers that take several arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Arguments(NamedTuple):
    """What a caller hands to the first layer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class PipeSequential(nn.Sequential):
    """An ``nn.Sequential`` whose layers may take several inputs.

    ``PipeSequential(a, b)(x, y)`` is ``b(*a(x, y))`` where a gives a tuple, and ``b(a(x, y))`` where it gives anything
    else. Keyword arguments go to the first layer.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the layers one after the other."""
        value: Any = inputs
        for layer in self:
            value = layer(*value, **kwargs) if isinstance(value, tuple) else layer(value)
            kwargs = {}
        return value


def opened(layer: nn.Module) -> nn.Module:
    """A plain ``nn.Sequential`` as a :class:`PipeSequential`; any other layer as it is.

    Both are one module with two classes: they share parameters, hooks and flags, now and later.
    """
    if type(layer) is not nn.Sequential:
        return layer
    twin = PipeSequential.__new__(PipeSequential)
    twin.__dict__ = layer.__dict__
    return twin


def check_outermost(module: nn.Module) -> None:
    """Check that a module is the sequence of its layers and nothing else, which a pipeline would leave out."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"module must be an nn.Sequential, got {type(module).__name__}; list its layers in one")
    if type(module).forward not in (nn.Sequential.forward, PipeSequential.forward):
        raise TypeError(
            f"module must run its layers one after the other, got {type(module).__name__} with a forward of its own; "
            "put what it does into a layer"
        )
    if own := [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]:
        raise ValueError(f"module must have all its parameters and buffers in its layers, got {own}; move them there")
    if hooks := hooks_of(module):
        raise ValueError(
            f"module must have no hooks of its own, got {hooks}; register them on its layers, or on the pipeline"
        )


def children_of(module: nn.Module) -> list[tuple[str, Any]]:
    """Every child with its name: also None, and one that occurs twice, which ``named_children`` leaves out.

    Since there is no public way, FSDP reads the same private name.
    """
    return list(module._modules.items())  # noqa: SLF001 - see above


def hooks_of(module: nn.Module) -> list[str]:
    """The kinds of hooks that a module has itself."""
    return [name[1:] for name in _HOOKS if vars(module).get(name)]


def check_sharing(module: nn.Sequential) -> None:
    """Check that children are distinct, and modules with parameters within one of them. A parameter may be in several.

    While a partition computes, such a module has the copies of its device.
    """
    owners: dict[int, str] = {}
    for name, child in module.named_children():
        for inner_name, inner in child.named_modules():
            if next(inner.parameters(recurse=False), None) is not None:
                owner = owners.setdefault(id(inner), name)
                if owner != name:
                    raise ValueError(
                        f"a module with parameters must belong to one child, got {inner_name!r} of child '{name}' "
                        f"shared with child '{owner}'; give each child a module of its own, and let these share the "
                        "parameter, as in head.weight = embedding.weight"
                    )
    places: dict[int, int] = {}
    for place, child in enumerate(module):
        first = places.setdefault(id(child), place)
        if first != place:
            raise ValueError(
                f"children must be distinct, got one module as children {first} and {place}; copy it or merge the two"
            )
