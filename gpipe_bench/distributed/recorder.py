"""Record which messages the processes of a group begin, and for which ones they wait.

    with recorded("messages"):
        train()

Each process writes ``messages/rank0.csv`` and so on while it runs, so a run that hangs leaves its record, too.
``gpipe-bench schedule check messages --channels pair`` says whether the same calls would end over NCCL.

It records calls of ``send``, ``recv``, ``isend`` and ``irecv`` of ``torch.distributed``, made in the thread of the
``with`` block, and calls of ``wait`` on the work that ``isend`` and ``irecv`` return. A ``TorchFunctionMode`` sees
these calls, so the program stays as it is. The mode does not see ``batch_isend_irecv`` itself, only each message of
the batch. With ``--batched``, ``schedule check`` takes messages that follow each other as one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TextIO

import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CALLS: Final = {dist.send: "dst", dist.isend: "dst", dist.recv: "src", dist.irecv: "src"}


@contextmanager
def recorded(folder: str | Path) -> Iterator[None]:
    """Record the messages of this process into ``folder/rankN.csv``.

    Args:
        folder: of all ranks; it is made if it is missing. A record that is there already is written anew.

    Raises:
        ValueError: a receive takes messages of any rank, which no list can say.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / f"rank{dist.get_rank()}.csv").open("w", encoding="utf-8") as file, _Recorder(file):
        yield


class _Recorder(TorchFunctionMode):
    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file, self._count = file, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _CALLS:
            return func(*args, **kwargs)
        end, group = _CALLS[func], kwargs.get("group")
        peer, inside = kwargs.get(end), kwargs.get(f"group_{end}")
        if peer is None and inside is not None:
            peer = inside if group is None else dist.get_global_rank(group, inside)
        if peer is None:
            raise ValueError(f"a recorded {func.__name__} must name its rank, got src=None; give the rank")
        tag = kwargs.get("tag") or 0
        self.write(f"{func.__name__} {peer}" + (f" tag {tag}" if tag else ""))
        number = self._count
        self._count += 1
        work = func(*args, **kwargs)
        return _Work(work, self, number) if func in (dist.isend, dist.irecv) and work is not None else work

    def write(self, field: str) -> None:
        """Add a field to the list of this process."""
        self._file.write(field if self._file.tell() == 0 else f",{field}")
        self._file.flush()


class _Work:
    """What ``isend`` and ``irecv`` return, with its waits recorded."""

    def __init__(self, work: Any, recorder: _Recorder, number: int) -> None:
        self._work, self._recorder, self._number = work, recorder, number

    def wait(self, *arguments: Any, **named: Any) -> Any:
        """Wait for the message."""
        self._recorder.write(f"wait {self._number}")
        return self._work.wait(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
