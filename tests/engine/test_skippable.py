"""Skippable layers: what they may yield, what they must do, and that they work without the engine."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import threading

import pytest
import torch
from torch import nn

from gpipe_bench.errors import SkipUsageError
from gpipe_bench.skip import Namespace, Skippable, isolate, pop, skippable, stash
from gpipe_bench.skip.tracker import LocalTracker, current_tracker, use_tracker
from tests.engine.support import Pop, Stash, on_cpu

X = torch.arange(4.0).view(2, 2)


@skippable(stash=["a", "b"])
class Two(nn.Module):
    def forward(self, x):
        yield stash("a", x + 1)
        yield stash("b", x * 2)
        return x


@skippable(pop=["a", "b"])
class Both(nn.Module):
    def forward(self, x):
        b = yield pop("b")
        a = yield pop("a")
        return x + 10 * a + 100 * b


@skippable(stash=["a"], pop=["b"])
class Exchange(nn.Module):
    """Pops one skip and stashes another."""

    def forward(self, x):
        b = yield pop("b")
        yield stash("a", b * 3)
        return x


def layer(forward, **declared) -> nn.Module:
    """A layer with that forward."""
    return skippable(**declared)(type("Layer", (nn.Module,), {"forward": forward}))()


# --- what works ----------------------------------------------------------------------------------------------------


def test_in_a_plain_sequential():
    torch.testing.assert_close(nn.Sequential(Two(), nn.Identity(), Both())(X), X + 10 * (X + 1) + 100 * (X * 2))


def test_nested_in_children():
    nested = nn.Sequential(nn.Sequential(Two()), nn.Sequential(nn.Identity(), nn.Sequential(Both())))
    expected = X + 10 * (X + 1) + 100 * (X * 2)
    torch.testing.assert_close(nested(X), expected)
    torch.testing.assert_close(on_cpu(nested, [1, 1], chunks=2)(X), expected)


def test_a_layer_may_pop_one_skip_and_stash_another():
    class Enter(nn.Module):
        def forward(self, x):
            yield stash("b", x)
            return x

    class Leave(nn.Module):
        def forward(self, x):
            a = yield pop("a")
            return x + a

    module = nn.Sequential(skippable(stash=["b"])(Enter)(), Exchange(), skippable(pop=["a"])(Leave)())
    torch.testing.assert_close(module(X), X * 4)
    torch.testing.assert_close(on_cpu(module, [1, 1, 1], chunks=2)(X), X * 4)


def test_nothing_is_a_legal_skip():
    seen = []

    def forward(self, x):
        seen.append((yield pop("skip")))
        return x

    nn.Sequential(Stash(nothing=True), layer(forward, pop=["skip"]))(X)
    assert seen == [None]


def test_a_forward_that_is_no_generator_is_legal_without_declarations():
    torch.testing.assert_close(layer(lambda self, x: x * 2)(X), X * 2)


class Keep(nn.Module):
    """Stashes what comes to it."""

    def __init__(self, name) -> None:
        super().__init__()
        self.name = name
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        yield stash(self.name, x)
        return x

    def extra_repr(self):
        return super().extra_repr() + self.name


class Add(nn.Module):
    def __init__(self, name) -> None:
        super().__init__()
        self.name = name

    def forward(self, x):
        y = yield pop(self.name)
        return 2 * x + y


def wrapped(kind, verb, name):
    return skippable(**{verb: [name]})(kind)(name)


def test_one_class_can_be_decorated_for_several_skips():
    module = nn.Sequential(
        wrapped(Keep, "stash", "a"), nn.Tanh(), wrapped(Keep, "stash", "b"), nn.Tanh(),
        wrapped(Add, "pop", "b"), wrapped(Add, "pop", "a"),
    )  # fmt: skip
    expected = 4 * X.tanh().tanh() + 2 * X.tanh() + X
    torch.testing.assert_close(module(X), expected)
    torch.testing.assert_close(on_cpu(module, [1] * 6, chunks=2)(X), expected)


@pytest.mark.parametrize("kind", [Keep, nn.Linear])
def test_the_class_that_is_decorated_stays_as_it_was(kind):
    before = dict(vars(kind)), kind.__bases__
    made = skippable(stash=["a"])(kind)
    assert (dict(vars(kind)), kind.__bases__) == before
    assert made is not kind
    assert issubclass(made, kind)
    assert issubclass(made, Skippable)
    assert not issubclass(kind, Skippable)


def test_a_decorated_class_has_the_names_of_its_original():
    made = skippable(stash=["a"])(Keep)
    assert [getattr(made, name) for name in ("__name__", "__qualname__", "__module__", "__doc__")] == [
        getattr(Keep, name) for name in ("__name__", "__qualname__", "__module__", "__doc__")
    ]
    assert inspect.getsource(made) == inspect.getsource(Keep)
    assert inspect.signature(made) == inspect.signature(Keep)
    assert made.forward.__qualname__ == "Keep.forward"
    assert list(made("a").state_dict()) == ["linear.weight", "linear.bias"]


def test_methods_of_a_decorated_class_may_call_super():
    assert wrapped(Keep, "stash", "a").extra_repr() == "a"


def test_a_decorated_class_can_be_decorated_again():
    again = skippable(stash=["b"])(skippable(stash=["a"])(Keep))("b")
    assert again.stashes() == [(None, "b")]
    torch.testing.assert_close(nn.Sequential(again, wrapped(Add, "pop", "b"))(X), 3 * X)


class MoreOfTwo(Two):
    """Inherits the skips of its base."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


def test_a_class_derived_from_a_decorated_one_can_be_pickled():
    again = pickle.loads(pickle.dumps(MoreOfTwo()))
    assert type(again) is MoreOfTwo
    assert isinstance(again, Two)
    torch.testing.assert_close(nn.Sequential(again, Both())(X), X + 10 * (X + 1) + 100 * (X * 2))


def test_a_derived_class_may_call_the_forward_of_its_base():
    class Louder(Two):
        def forward(self, x):
            return super().forward(x) * 2

    torch.testing.assert_close(nn.Sequential(Louder(), Both())(X), X * 2 + 10 * (X + 1) + 100 * (X * 2))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_find_their_skips(again):
    namespace = Namespace()
    module = again(nn.Sequential(Stash(namespace), Pop(namespace)))
    torch.testing.assert_close(module(X), X + X.cos())
    torch.testing.assert_close(on_cpu(module, [1, 1])(X), X + X.cos())


# --- what does not -------------------------------------------------------------------------------------------------


def undeclared_stash(self, x):
    yield stash("other", x)
    return x


def undeclared_pop(self, x):
    yield pop("other")
    return x


def lazy(self, x):
    yield stash("skip", x)
    return x


def several(self, x):
    yield stash("skip", (x, x))
    return x


def silent(self, x):
    return x


def foreign(self, x):
    yield x.sum()
    return x


WRONG = {
    "an undeclared stash": (
        layer(undeclared_stash, stash=["skip"]),
        SkipUsageError,
        (
            "Layer must declare every skip it uses, got stash('other') with stash declared as ['skip']; add 'other' to "
            "@skippable(stash=[...])"
        ),
    ),
    "an undeclared pop": (layer(undeclared_pop), SkipUsageError, "got pop('other') with pop declared as []"),
    "a pop that is declared as a stash": (
        layer(undeclared_pop, stash=["other"]),
        SkipUsageError,
        "got pop('other') with pop declared as []",
    ),
    "a stash not made": (layer(lazy, stash=["skip", "b", "a"]), SkipUsageError, "got none of ['a', 'b']"),
    "a pop not made": (layer(lazy, stash=["skip"], pop=["late"]), SkipUsageError, "got none of ['late']"),
    "a forward that is no generator": (layer(silent, stash=["skip"]), SkipUsageError, "got none of ['skip']"),
    "a pop of what was never stashed": (Pop(), SkipUsageError, "skip 'skip' must be stashed before it is read"),
    "a tuple of tensors stashed": (layer(several, stash=["skip"]), TypeError, "a stash must be one tensor or none"),
    "something else yielded": (layer(foreign), TypeError, "got tensor(6.); yield nothing else from a skippable layer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused_in_forward(name):
    module, error, message = WRONG[name]
    with use_tracker(LocalTracker()), pytest.raises(error, match=re.escape(message)):
        module(X)


def test_usage_errors_surface_from_a_pipeline():
    module = nn.Sequential(layer(silent, stash=["skip"]), Pop())
    assert issubclass(SkipUsageError, RuntimeError)
    with pytest.raises(SkipUsageError, match="must stash every skip it declares"):
        on_cpu(module, [1, 1], chunks=2)(X)


@pytest.mark.parametrize("argument", ["stash", "pop"])
def test_a_bare_string_is_no_list_of_names(argument):
    with pytest.raises(TypeError, match=rf"{argument} must be a list of names, got the string 'abc'; write \['abc'\]"):
        skippable(**{argument: "abc"})


def test_isolating_a_name_that_is_not_declared():
    with pytest.raises(
        ValueError, match=r"only must name skips that Two declares, got \['c'\]; choose from \['a', 'b'\]"
    ):
        Two().isolate(Namespace(), only=["a", "c"])


def test_isolating_a_bare_string():
    with pytest.raises(TypeError, match="only must be a list of names, got the string 'a'"):
        Two().isolate(Namespace(), only="a")


# --- trackers ------------------------------------------------------------------------------------------------------


def test_every_thread_has_a_tracker_of_its_own():
    trackers = [current_tracker()]
    thread = threading.Thread(target=lambda: trackers.append(current_tracker()))
    thread.start()
    thread.join()
    assert trackers[0] is not trackers[1]


def test_a_tracker_is_put_back_after_an_exception():
    before = current_tracker()
    with pytest.raises(ZeroDivisionError), use_tracker(LocalTracker()):
        raise ZeroDivisionError
    assert current_tracker() is before


def test_skips_of_several_layers_are_isolated_at_once():
    def pair():
        return nn.Sequential(Two(), nn.Identity(), Both())

    outer, inner = Namespace(), Namespace()
    first, second = isolate(pair(), outer), isolate(pair(), inner, only=["a"])
    assert first[0].stashes() == first[2].pops() == [(outer, "a"), (outer, "b")]
    assert second[0].stashes() == [(inner, "a"), (None, "b")]
    plain = nn.Sequential(*first, *second)
    torch.testing.assert_close(on_cpu(copy.deepcopy(plain), [1, 2, 2, 1], chunks=2)(X), plain(X))


def test_a_name_that_no_layer_declares_is_not_isolated():
    with pytest.raises(ValueError, match=r"layers of Sequential declare, got \['c'\]; choose from \['a', 'b'\]"):
        isolate(nn.Sequential(Two(), Both()), Namespace(), only=["a", "c"])
    with pytest.raises(ValueError, match="choose from"):
        isolate(nn.Linear(1, 1), Namespace(), only=["a"])


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        yield stash("kept", x)
        return self.linear(x)


OtherName = skippable(stash=["kept"])(Kept)


def test_a_class_that_is_not_found_under_its_name_can_be_pickled_and_copied():
    layer = OtherName()
    for twin in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert isinstance(twin, Kept)
        assert twin.stashes() == layer.stashes()
        torch.testing.assert_close(twin.state_dict(), layer.state_dict())
