"""The process group of virtual devices: messages of their tensors are parts of meetings in the trace.

    script ── torch.distributed ──> VirtualGroup ── tensors of the CPU ──> gloo
                                         │
                                         ├── tensors of a device ──> rows `meet`, one a rank; the replay joins them
                                         └── values of small ones ──> the rendezvous of the ranks

A message runs on the stream of its communicator, as NCCL's do: one of a group, one of each pair of ranks in both
directions; those of a batch in no order. It begins after the work of the current stream, and ``wait`` lets the current
stream wait for it; values come with ``wait``. No process waits for a message of devices for ever, so no deadlock can
stop the recording.

A Python ``Backend`` cannot be made in PyTorch 2.13, a Python ``ProcessGroup`` can. It replaces the whole group.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

import gpipe_bench
from gpipe_bench.emulator.clocks import HostMessage
from gpipe_bench.emulator.device_values import MOST_BYTES, values_of, write_values
from gpipe_bench.emulator.library import backend
from gpipe_bench.emulator.rendezvous import Rendezvous
from gpipe_bench.errors import ConfigError

NAME: Final = "emulated"
DEFAULT_GROUP: Final = "0"
"""PyTorch's name of the group of all ranks."""
_LIBRARIES: Final = tuple(str(Path(module.__file__ or "").parent) for module in (torch, gpipe_bench))

Values = list[Tensor | None]
_Group: Any = c10d.ProcessGroup
_Work: Any = c10d.Work


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of a message.

    Attributes:
        row: of the trace; -1: of a message of CPU tensors.
        kind: ``send``, ``recv``, or the collective.
        group: name of its process group.
        ranks: of the group.
        rank: that issues it.
        peer: the other rank of a send or a recv, else -1.
        number: how many of its kind came before, with that peer.
        nbytes: of the message.
        line: of the script.
        terms: what all parts must agree in: the type of the numbers, how they are combined, whose they are.
    """

    row: int
    kind: str
    group: str
    ranks: tuple[int, ...]
    rank: int
    peer: int
    number: int
    nbytes: int
    line: str
    terms: str = ""


class _DeviceWork(_Work):  # type: ignore[misc]  # PyTorch leaves it untyped
    """What a message of devices returns: `wait` lets the current stream wait, and fetches values."""

    def __init__(self, event: torch.Event, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        # Tensors live until somebody has waited, as NCCL's do.
        self.event, self.tensors, self.device = event, list(tensors), tensors[0].device
        self.fetch: Callable[[], None] | None = None
        self.blocks_host = False

    def wait(self, timeout: object = None) -> bool:  # noqa: ARG002 - the signature of PyTorch
        torch.accelerator.current_stream(self.device).wait_event(self.event)
        if self.blocks_host:
            self.event.synchronize()
        fetch, self.fetch = self.fetch, None
        if fetch is not None:
            fetch()
        self.tensors = self.tensors[:1]
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self.tensors

    def get_future(self) -> Any:
        tensors = self.tensors
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(tensors)
        return future


class _HostWork(_Work):  # type: ignore[misc]  # likewise
    """A message of CPU tensors that brings data: what to do before somebody waits for it, and after."""

    def __init__(self, work: Any, before: Callable[[], object], after: Callable[[], object]) -> None:
        super().__init__()
        self._work, self._before, self._after = work, before, after

    def wait(self, *timeout: Any) -> bool:
        self._before()
        done = bool(self._work.wait(*timeout))
        self._after()
        return done

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def result(self) -> Any:
        return self._work.result()

    def get_future(self) -> Any:
        return self._work.get_future()


class VirtualGroup(_Group):  # type: ignore[misc]  # likewise
    """A group of ranks with one virtual device each.

    Args:
        options: as ``register_backend(extended_api=True)`` hands them over.
        rendezvous: of this process.
        parts: takes the parts of messages that this rank issues.
        on_host: takes what messages of CPU tensors do to the host of this rank.
    """

    def __init__(self, options: Any, rendezvous: Rendezvous, parts: list[Part], on_host: list[HostMessage]) -> None:
        super().__init__(options.group_rank, options.group_size)
        # All ranks if there are none.
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self._me, self._name, self._rendezvous, self._parts = options.group_rank, options.group_id, rendezvous, parts
        self._on_host = on_host
        self._gloo: Any = c10d.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )
        self._streams: dict[object, torch.Stream] = {}
        self._seen: Counter[tuple[str, int]] = Counter()
        self._batch: list[torch.Event] | None = None

    def getBackendName(self) -> str:  # noqa: N802 - the names of PyTorch, here and below
        return NAME

    def getSize(self) -> int:  # noqa: N802
        return len(self._ranks)

    @property
    def group_name(self) -> str:
        return str(self._name)

    def _part(self, kind: str, peer: int, nbytes: int, row: int, terms: str = "") -> Part:
        number = self._seen[kind, peer]
        self._seen[kind, peer] += 1
        other = self._ranks[peer] if peer >= 0 else -1
        own = Part(
            row, kind, self.group_name, self._ranks, self._ranks[self._me], other, number, nbytes, _line(), terms
        )  # fmt: skip
        self._parts.append(own)
        return own

    def _note(self, key: str, *, gives: bool) -> None:
        self._on_host.append(HostMessage(int(backend().vd_trace_size()), key, gives, _line()))

    def _key(self, part: Part) -> str:
        return f"{part.group}/{'.'.join(map(str, part.ranks))}/{part.kind}/{part.number}"

    def _pair(self, sender: int, part: Part) -> str:
        receiver = part.peer if sender == part.rank else part.rank
        return f"{part.group}/{'.'.join(map(str, part.ranks))}/{sender}-{receiver}/{part.number}"

    # --- messages of devices ------------------------------------------------------------------------------------------

    def _stream(self, device: torch.device, key: object) -> torch.Stream:
        if (device, key) not in self._streams:
            self._streams[device, key] = torch.Stream(device)
        return self._streams[device, key]

    def _post(  # noqa: PLR0917 - one method issues what all messages are
        self, kind: str, reads: Sequence[Tensor], writes: Sequence[Tensor], nbytes: int, peer: int = -1, terms: str = ""
    ) -> tuple[_DeviceWork, Part]:
        """Issue this rank's part of the next message of its kind.

        Raises:
            ConfigError: its tensors are on a device of another rank.
        """
        tensors = [*reads, *(tensor for tensor in writes if not any(tensor is read for read in reads))]
        device = tensors[0].device
        require_own_device(device.index)
        batched = self._batch is not None
        own = self._stream(device, "group" if peer < 0 or batched else frozenset((self._me, peer)))
        # The parts of a batch have no order among themselves. What follows the batch waits for all of them.
        stream = torch.Stream(device) if batched else own
        if batched:
            stream.wait_stream(own)
        stream.wait_stream(torch.accelerator.current_stream(device))
        both = [*reads, *writes]
        addresses = (ctypes.c_void_p * len(both))(*(tensor._cdata for tensor in both))  # noqa: SLF001 - C++ knows it by that
        with stream:
            row = backend().vd_meet(kind.encode(), device.index, addresses, len(reads), len(both), nbytes)
        event = stream.record_event()
        for tensor in tensors:
            tensor.record_stream(stream)
        if self._batch is not None:
            self._batch.append(event)
        said = ", ".join(filter(None, (terms, str(tensors[0].dtype).removeprefix("torch."))))
        return _DeviceWork(event, writes or reads), self._part(kind, peer, nbytes, row, said)

    def _collective(  # noqa: PLR0917 - each method below calls it
        self,
        kind: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        nbytes: int,
        on_host: Callable[[], Any],
        combined: Callable[[list[Values]], Values],
        terms: str = "",
        pieces: Sequence[Tensor] = (),
    ) -> Any:
        """A collective: ``combined`` makes the values of the outputs from those of all ranks' inputs.

        ``pieces``: of the inputs, one for each rank, whose sizes may differ; ``combined`` gets those instead.
        """
        tensors = [*inputs, *outputs]
        if tensors[0].device.type == "cpu":
            key = self._meet_on_host(kind)
            # Pieces of an all-to-all may be empty.
            if inputs and nbytes and kind != "all_to_all":
                self._note(key, gives=True)
            work = on_host()
            return _HostWork(work, lambda: None, lambda: self._note(key, gives=False)) if outputs else work
        work, part = self._post(kind, inputs, outputs, nbytes, terms=terms)
        # Where sizes differ, a rank does not know whether those of the others are small.
        if nbytes <= MOST_BYTES or pieces:
            self._rendezvous.tell(self._key(part), [values_of(tensor) for tensor in pieces or inputs])
            if outputs:
                work.fetch = lambda: self._fetch(self._key(part), self._ranks, outputs, combined, equal=not pieces)
        for tensor in outputs:
            write_values(tensor, None)
        return work

    def _fetch(
        self,
        key: str,
        ranks: Sequence[int],
        outputs: Sequence[Tensor],
        combined: Callable[[list[Values]], Values],
        *,
        equal: bool = True,
    ) -> None:
        """Write the values that ranks have told; where they never do, or sizes differ, they stay unknown."""
        heard = self._rendezvous.values(key, ranks)
        if heard is None:
            return
        if equal and any(len({*map(_numel, column)} - {-1}) > 1 for column in zip_longest(*heard)):
            return
        for tensor, values in zip(outputs, combined(heard), strict=True):
            if _numel(values) == tensor.numel():
                write_values(tensor, values)

    def _meet_on_host(self, kind: str) -> str:
        """Wait until all ranks have come to a collective of the CPU, where a deadlock is noticed; its key."""
        part = self._part(f"{kind} of CPU tensors" if kind != "barrier" else kind, -1, 0, -1)
        self._rendezvous.tell(self._key(part))
        self._rendezvous.hear(self._key(part), self._ranks)
        return self._key(part)

    @contextmanager
    def batched(self, device: torch.device) -> Iterator[None]:
        """Parts that are issued in the block are one batch."""
        self._batch = []
        try:
            yield
        finally:
            events, self._batch = self._batch, None
            for event in events:
                self._stream(device, "group").wait_event(event)

    # --- point to point -----------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        if tensors[0].device.type == "cpu":
            part = self._part(f"send of CPU tensors, tag {tag}", dst, tensors[0].nbytes, -1)
            key = f"{self.group_name}/{tag}/{part.rank}-{part.peer}/{part.number}"
            self._rendezvous.tell(key)
            self._note(key, gives=True)
            return self._gloo.send(tensors, dst, tag)
        work, part = self._post("send", tensors, [], tensors[0].nbytes, dst)
        if tensors[0].nbytes <= MOST_BYTES:
            self._rendezvous.tell(self._pair(part.rank, part), [values_of(tensors[0])])
        return work

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        if tensors[0].device.type == "cpu":
            part = self._part(f"recv of CPU tensors, tag {tag}", src, tensors[0].nbytes, -1)
            key = f"{self.group_name}/{tag}/{part.peer}-{part.rank}/{part.number}"
            return _HostWork(
                self._gloo.recv(tensors, src, tag),
                lambda: self._rendezvous.hear(key, [part.peer]),
                lambda: self._note(key, gives=False),
            )
        work, part = self._post("recv", [], tensors, tensors[0].nbytes, src)
        write_values(tensors[0], None)
        if tensors[0].nbytes <= MOST_BYTES:
            work.fetch = lambda: self._fetch(self._pair(part.peer, part), [part.peer], tensors, lambda heard: heard[0])
        return work

    # --- collectives --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = opts or c10d.AllreduceOptions()
        return self._collective(
            "all_reduce", tensors, tensors, _nbytes(tensors), lambda: self._gloo.allreduce(tensors, opts),
            lambda heard: [_reduced(column, opts.reduceOp) for column in zip(*heard, strict=True)],
            _operation(opts.reduceOp),
        )  # fmt: skip

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        inputs, outputs = (tensors, []) if opts.rootRank == self._me else ([], tensors)
        return self._collective(
            "broadcast", inputs, outputs, _nbytes(tensors), lambda: self._gloo.broadcast(tensors, opts),
            lambda heard: heard[opts.rootRank], self._root(opts.rootRank),
        )  # fmt: skip

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        root = opts.rootRank == self._me
        return self._collective(
            "reduce", tensors, tensors if root else [], _nbytes(tensors), lambda: self._gloo.reduce(tensors, opts),
            lambda heard: [_reduced(column, opts.reduceOp) for column in zip(*heard, strict=True)],
            f"{self._root(opts.rootRank)}, {_operation(opts.reduceOp)}",
        )  # fmt: skip

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:  # noqa: ARG002
        return self._collective(
            "all_gather", inputs, outputs[0], _nbytes(outputs[0]), lambda: self._gloo.allgather(outputs, inputs),
            lambda heard: [own for (own,) in heard],
        )  # fmt: skip

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002, ARG002
        return self._collective(
            "all_gather", [input], [output], output.nbytes, lambda: self._gloo._allgather_base(output, input),  # noqa: SLF001
            lambda heard: [_joined([own for (own,) in heard])],
        )  # fmt: skip

    _allgather_base = all_gather_single

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:  # noqa: ARG002
        return self._collective(
            "all_gather", inputs, outputs, _nbytes(outputs),
            lambda: self._gloo.allgather_into_tensor_coalesced(outputs, inputs),
            lambda heard: [_joined(column) for column in zip(*heard, strict=True)],
        )  # fmt: skip

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:  # noqa: A002
        opts = opts or c10d.ReduceScatterOptions()
        return self._collective(
            "reduce_scatter", [input], [output], input.nbytes,
            lambda: self._gloo._reduce_scatter_base(output, input, opts),  # noqa: SLF001
            lambda heard: [self._own(_reduced([own for (own,) in heard], opts.reduceOp))],
            _operation(opts.reduceOp),
        )  # fmt: skip

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        return self._collective(
            "reduce_scatter", inputs, outputs, _nbytes(inputs),
            lambda: self._gloo.reduce_scatter_tensor_coalesced(outputs, inputs, opts),
            lambda heard: [self._own(_reduced(column, opts.reduceOp)) for column in zip(*heard, strict=True)],
            _operation(opts.reduceOp),
        )  # fmt: skip

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        opts = opts or c10d.ReduceScatterOptions()
        return self._collective(
            "reduce_scatter", inputs[0], outputs, _nbytes(inputs[0]),
            lambda: self._gloo.reduce_scatter(outputs, inputs, opts),
            lambda heard: [_reduced([own[self._me] for own in heard], opts.reduceOp)], _operation(opts.reduceOp),
        )  # fmt: skip

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        return self._collective(
            "gather", inputs, outputs[0] if outputs else [], len(self._ranks) * inputs[0].nbytes,
            lambda: self._gloo.gather(outputs, inputs, opts), lambda heard: [own for (own,) in heard],
            self._root(opts.rootRank),
        )  # fmt: skip

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        return self._collective(
            "scatter", inputs[0] if inputs else [], outputs, len(self._ranks) * outputs[0].nbytes,
            lambda: self._gloo.scatter(outputs, inputs, opts), lambda heard: [heard[opts.rootRank][self._me]],
            self._root(opts.rootRank),
        )  # fmt: skip

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Any = (), input_splits: Any = (), opts: Any = None  # noqa: A002, ARG002
    ) -> Any:  # fmt: skip
        count = len(self._ranks)
        return self._collective(
            "all_to_all", [input], [output], input.nbytes,
            lambda: self._gloo.alltoall_base(output, input, output_splits, input_splits),
            lambda heard: [_joined([own[self._me] for own in heard])],
            pieces=input.detach().split_with_sizes(list(input_splits) or [len(input) // count] * count),
        )  # fmt: skip

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        return self._collective(
            "all_to_all", inputs, outputs, _nbytes(inputs),
            lambda: self._gloo.alltoall(outputs, inputs, opts or c10d.AllToAllOptions()),
            lambda heard: [own[self._me] for own in heard], pieces=inputs,
        )  # fmt: skip

    def barrier(self, opts: Any = None) -> Any:  # noqa: ARG002
        """In virtual time a collective of four bytes that the host waits for."""
        self._meet_on_host("barrier")
        device = torch.accelerator.current_accelerator()
        flag = torch.empty(1, device=device)
        work, _ = self._post("all_reduce", [flag], [flag], flag.nbytes)
        work.blocks_host = True
        return work

    def _root(self, place: int) -> str:
        return f"root {self._ranks[place]}"

    def _own(self, values: Tensor | None) -> Tensor | None:
        """This rank's of as many equal pieces as there are ranks."""
        return None if values is None else values.reshape(len(self._ranks), -1)[self._me]


def require_own_device(index: int) -> None:
    """A rank has the device of its place on its host.

    Raises:
        ConfigError: it uses another one.
    """
    own = int(os.environ["LOCAL_RANK"])
    if index != own:
        got = f"got a message of rank {os.environ['RANK']} on device {index}, LOCAL_RANK {own}"
        mend = 'call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) first'
        raise ConfigError([f"a rank must use the device of its LOCAL_RANK alone, {got}; {mend}"])


def _numel(values: Tensor | None) -> int:
    return -1 if values is None else values.numel()


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _joined(values: Sequence[Tensor | None]) -> Tensor | None:
    known = [one.flatten() for one in values if one is not None]
    return torch.cat(known) if len(known) == len(values) else None


_REDUCTIONS: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _operation(operation: Any) -> str:
    return next((own for own in _REDUCTIONS if operation == getattr(dist.ReduceOp, own)), "")


def _reduced(values: Sequence[Tensor | None], operation: Any) -> Tensor | None:
    name = _operation(operation)
    known = [one for one in values if one is not None]
    if len(known) < len(values) or name not in _REDUCTIONS:
        return None
    total = reduce(_REDUCTIONS[name], known)
    return total / len(known) if name == "AVG" else total


def _line() -> str:
    """The innermost line outside PyTorch and this package."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - traceback's own way is ten times slower
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown line"


@contextmanager
def groups_replaced(rendezvous: Rendezvous, parts: list[Part], on_host: list[HostMessage]) -> Iterator[None]:
    """Let ``init_process_group`` and ``new_group`` make such groups in the block, unless the script asks for gloo."""
    module: Any = dist.distributed_c10d
    before: dict[tuple[Any, str], Any] = {}
    ranks, rank = tuple(range(int(os.environ["WORLD_SIZE"]))), int(os.environ["RANK"])
    calls: Counter[str] = Counter()

    def all_come(kind: str) -> None:
        """Wait for all ranks at a call that each of them must make, where a deadlock is noticed."""
        parts.append(Part(-1, kind, DEFAULT_GROUP, ranks, rank, -1, calls[kind], 0, _line()))
        key = f"{kind}/{calls[kind]}"
        calls[kind] += 1
        rendezvous.tell(key)
        rendezvous.hear(key, ranks)

    def replace(name: str, change: Callable[[Any], Any], owners: Sequence[Any] = (module, dist)) -> None:
        changed = change(getattr(module, name))
        for owner in owners:
            before[owner, name] = getattr(owner, name, None)
            setattr(owner, name, changed)

    def named(plain: Any) -> Any:
        def init(backend: Any = None, *args: Any, **options: Any) -> Any:
            # One communicator for all pairs would be made at once.
            options.pop("device_id", None)
            options.pop("pg_options", None)
            all_come("init_process_group")
            return plain(_own_name(backend), *args, **options)

        return init

    def grouped(plain: Any) -> Any:
        def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *_: Any, **options: Any) -> Any:
            options.pop("pg_options", None)
            options.pop("device_id", None)
            inherited = module._get_default_group().name() if backend is None else backend  # noqa: SLF001
            if not options.get("use_local_synchronization"):
                all_come("new_group")
            return plain(ranks, timeout, _own_name(inherited), **options)

        return new_group

    def batched(plain: Any) -> Any:
        def batch(ops: Any) -> Any:
            group = ops[0].group or module._get_default_group()  # noqa: SLF001
            # PyTorch looks at the type of the group.
            if ops[0].tensor.device.type == "cpu" or not isinstance(group, VirtualGroup):
                return plain(ops)
            with group.batched(ops[0].tensor.device):
                return plain(ops)

        return batch

    def of_objects(plain: Any) -> Any:
        return lambda *args, **options: plain(*args, **{**options, "device": torch.device("cpu")})

    dist.Backend.register_backend(
        NAME,
        lambda options, _: VirtualGroup(options, rendezvous, parts, on_host),
        extended_api=True,
        devices=["cpu", "virtual"],
    )
    replace("init_process_group", named)
    replace("new_group", grouped)
    replace("batch_isend_irecv", batched)
    # Scripts branch on these; PyTorch itself asks the module.
    replace("is_nccl_available", lambda _: lambda: True, (dist,))
    replace("is_backend_available", lambda plain: lambda name: name.lower() == "nccl" or plain(name), (dist,))
    replace("get_backend", lambda plain: lambda group=None: "nccl" if plain(group) == NAME else plain(group), (dist,))
    for name in ("send_object_list", "recv_object_list", "broadcast_object_list"):
        replace(name, of_objects)
    replace("_get_object_coll_device", lambda _: lambda group=None: "cpu", (module,))  # noqa: ARG005
    try:
        yield
    finally:
        for (owner, name), plain in before.items():
            setattr(owner, name, plain)


def _own_name(backend: Any) -> Any:
    return backend if str(backend).lower() in {"gloo", "mpi"} else NAME
