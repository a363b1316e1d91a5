"""What to change, where an error of PyTorch does not say that the pipeline is the reason.

The error keeps its type, its text and its traceback; the advice is a note below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from traceback import walk_tb
from typing import Any

from torch import Tensor, nn

from gpipe_bench.errors import text_of

_ONE_ROW = "Expected more than 1 value per channel when training"
# Raised by the node with which a cell of the runtime begins its backward pass. Elsewhere PyTorch compares the shapes of
# outputs and gradients in a function of this name, which fails with one of several errors.
_OTHER_SHAPE = "Function _HandOverBackward returned an invalid gradient"
_COMPARES_SHAPES = "_make_grads"


def advise(error: BaseException, m: int, rows: tuple[int, int]) -> None:
    """Add a note to an error that a task of a batch has raised.

    Args:
        error: what it has raised.
        m: how many micro-batches there are.
        rows: of the first and of the last micro-batch.
    """
    text = text_of(error)
    notes = []
    if _ONE_ROW in text and rows[1] == 1:
        notes.append(
            f"A micro-batch must have at least 2 rows for batch normalisation, got {rows[0] * (m - 1) + 1} rows in {m} "
            f"micro-batches, the last with one; {_other_chunks(rows[0] * (m - 1) + 1, m)}."
        )
    places = {frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)}
    if _OTHER_SHAPE in text or _COMPARES_SHAPES in places:
        notes.append(
            "A checkpointed layer must give the same when it runs again, got another shape in the recomputation; draw "
            "random numbers from torch, hand on jagged tensors as values and offsets, or use checkpoint='never'."
        )
    _add(error, notes)


def held_tensors(loss: Any, rows: int) -> list[Tensor]:
    """The tensors that a loss holds, other than those of its target, which may have a row for each sample."""
    held: list[Any] = []
    while isinstance(loss, partial):
        held += [*loss.args, *loss.keywords.values()]
        loss = loss.func
    if isinstance(loss, nn.Module):
        held += loss.buffers()
    return [each for each in held if isinstance(each, Tensor) and each.dim() and len(each) == rows > 1]


def advised(loss: Callable[[Any, Any], Tensor], held: Sequence[Tensor]) -> Callable[[Any, Any], Tensor]:
    """A loss whose errors say that it may be due to the tensors ``held``, of which a micro-batch has no rows."""
    shapes = ", ".join(str(list(each.shape)) for each in held)
    note = (
        f"A loss sees one micro-batch at a time, got one that holds a tensor of shape {shapes}; if it has a row per "
        "sample, pass it with the target, as in (target, weight)."
    )

    def call(output: Any, target: Any) -> Tensor:
        try:
            return loss(output, target)
        except (RuntimeError, ValueError) as error:
            _add(error, [note])
            raise

    return call


def _add(error: BaseException, notes: Sequence[str]) -> None:
    for note in notes:
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _other_chunks(rows: int, m: int) -> str:
    """What gives every micro-batch two rows or more."""
    for chunks in range(m - 1, 0, -1):
        size = -(-rows // chunks)
        if size > 1 and rows % size != 1:
            return f"use chunks={-(-rows // size)}, or a larger batch"
    return "use a larger batch"
