"""Pipe: the part of a pipeline that one process has. The runtime of one process, with mailboxes between processes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice, pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gpipe_bench.autograd.microbatch import MicroBatch
from gpipe_bench.components import Components
from gpipe_bench.distributed.agreement import Begin, compare, description, fingerprint
from gpipe_bench.distributed.connections import Connections, given_network
from gpipe_bench.distributed.data_parallel import Replicas
from gpipe_bench.distributed.exchange import Exchange
from gpipe_bench.distributed.norms import clip, norms_of, total_norm
from gpipe_bench.distributed.tied import Elsewhere, pairs, share, stand_ins
from gpipe_bench.engine.arguments import checked_module, named_device
from gpipe_bench.engine.batchnorm import convert_deferred_batch_norm
from gpipe_bench.engine.goal import Goal, Reduction
from gpipe_bench.engine.gpipe import cut_input, gather
from gpipe_bench.engine.microbatches import Cut, in_list
from gpipe_bench.engine.module import PartitionedModule
from gpipe_bench.engine.pipeline import Batch, Pipeline
from gpipe_bench.engine.randomness import seeded, state_digest
from gpipe_bench.engine.replicas import check_layers
from gpipe_bench.engine.runtime.executor import RuntimeExecutor
from gpipe_bench.engine.runtime.lists import ScheduleLike, checked_schedule, ranks_of_partitions
from gpipe_bench.engine.tied import Tie, find_ties
from gpipe_bench.errors import DeviceCountError, PeerError, text_of
from gpipe_bench.settings import Switches, checked
from gpipe_bench.skip.layout import SkipCopy, SkipLayout, inspect_skip_layout


class Pipe(PartitionedModule):
    """A pipeline with a process for each device of its schedule.

    Every process of the group makes it of the same module, and keeps its own partitions. On a model that is larger than
    the memory of a process, make the module on ``meta``: each process then materialises its own layers alone.

    ::

        dist.init_process_group("gloo")     # in each of two processes that torchrun has started
        pipe = Pipe(nn.Sequential(a, b, c, d), balance=[2, 2], chunks=8)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        loss = pipe.step(x, y, criterion)   # x is used in the first process, y in the last one
        optimizer.step()

    Parameters have the names that they have in ``module``; a process has those of its partitions. Processes that have a
    tied weight sum up its gradient; each has the weight, under its first name in ``module``, and steps alike.

    Args:
        module: the layers, the same ones in all processes.
        balance: layers per partition, as for :class:`gpipe_bench.GPipe`.
        schedule: as for :class:`gpipe_bench.GPipe`. Its device r is the process with rank r of the group.
        group: the processes, a ``ProcessGroup``; default: all.
        mesh: a one-dimensional ``DeviceMesh`` in the place of ``group``.
        replicas: the processes that have the same partitions in other pipelines, a ``ProcessGroup`` or a
            one-dimensional ``DeviceMesh``. Each pipeline trains on a part of the batch, all of one size; gradients are
            averaged in ``step``. All are made alike, and begin with the weights of the first one.
        device: where this process computes.
        chunks: as for :class:`gpipe_bench.GPipe`, as ``checkpoint`` and ``deferred_batch_norm``.
        checkpoint: see above.
        deferred_batch_norm: see above.
        components: whether copies of skips are ``shared`` on the way between processes, too; the others must be on.
        materialise: called with each module of an own layer that was on ``meta``, once it has memory: it must set the
            weights. Without it they are left to ``torch.distributed.checkpoint``.
        timeout_s: seconds that a process waits for another one before it gives up. A process that ends is noticed at
            once.

    Attributes:
        rank: of this process in the group.
        failure: why the pipeline can run no more, or None.

    Raises:
        TypeError: as for :class:`gpipe_bench.GPipe`, or ``group`` and ``mesh`` are both given.
        ValueError: as for :class:`gpipe_bench.GPipe`; the processes have different models, balances or schedules, or a
            layer averages gradients itself, as DistributedDataParallel and FSDP do.
        DeviceCountError: the group has another number of processes than the schedule has devices.
        PeerError: another process has failed, is gone, or has not made the pipeline within ``timeout_s``.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int],
        *,
        schedule: ScheduleLike | Iterable[Iterable[tuple[str, int, int]]] = "1f1b",
        group: Any = None,
        mesh: Any = None,
        replicas: Any = None,
        device: torch.device | str | int = "cpu",
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        components: Components | None = None,
        materialise: Callable[[nn.Module], object] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(components=Components(copy_streams=False), workers="never")
        given = given_network(group, mesh)
        refused: Exception | None = None
        try:
            own = named_device("device", device)
            self.components = checked_components(components)
        except (TypeError, ValueError, DeviceCountError) as error:
            # The others hear of it below.
            own, refused = torch.device("cpu"), error
        self.rank: int = given.rank()
        self.failure: str | None = None
        self._size, self._device, self._evaluations = given.size(), own, 0
        self._connections: Any = Connections(given, replicas, timeout_s, own)
        # Of the processes, until the schedule has said which partition belongs to which.
        with self._together(tuple(range(self._size)), {}) as exchange:
            if refused is not None:
                raise refused
            self.chunks, self.checkpoint, self.deferred_batch_norm = chunks, checkpoint, deferred_batch_norm
            sizes = checked_module(module, balance)
            chosen = checked_schedule(schedule) or "gpipe"
            ranks = process_ranks(chosen, len(sizes), self._size)
            if deferred_batch_norm:
                convert_deferred_batch_norm(module)
            is_own = [rank == self.rank for rank in ranks]
            partitions, layout, self.ties = own_partitions(module, sizes, is_own, own, materialise)
            self._executor = RuntimeExecutor(chosen, [own] * len(ranks), ranks)
            self._pipeline = Pipeline(self._executor, ranks, processes=True)
            self.adopt_layers(partitions, layout, sizes, [own] * len(ranks))
            # First, so that parameters have these names.
            self.__dict__["_modules"] = {**stand_ins(self.ties), **self._modules}
            nccl, links = self._connections.over_nccl, self._connections.links
            made = description(module, sizes, schedule, layout, self.ties, deferred=deferred_batch_norm)
            mine = {"NCCL": nccl is not None, "the component shared": self.components.shared} | made
            found = exchange.gather(mine)
            # All must have heard of the others before one of them stops.
            exchange.finish()
            compare(found, links.ranks)
            if nccl is not None:
                nccl.connect(edges(ranks, self._chains().values(), self.ties), own)
            share(exchange, self.ties, ranks, self.rank)

            def alike(replicas: Replicas) -> None:
                own = [j for j, rank in enumerate(ranks) if rank == self.rank]
                replicas.agree(mine | {"the own partitions": own}, "make the same pipeline everywhere")
                replicas.copy(self)

            exchange.replicated(alike)

    def forward(self, input: Any = None) -> Any:  # noqa: A002 - as in GPipe
        """Evaluate one batch, in every process and without gradients.

        Args:
            input: as for :meth:`gpipe_bench.GPipe.forward` in the process with the first partition, else ignored.

        Returns:
            The output in the process with the last partition, else None.

        Raises:
            RuntimeError: grad mode is on.
            PeerError: another process has failed, or is gone.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a distributed pipeline must be called without gradients, got a call in grad mode; train with "
                "pipe.step(input, target, loss), or use torch.no_grad()"
            )
        self._evaluations += 1
        with self._together(self._pipeline.ranks, self._chains()) as exchange:
            batch, _ = self._begun(exchange, input, "forward")
            return self._executor.forward(batch, exchange)

    def step(
        self,
        input: Any = None,  # noqa: A002 - as in GPipe
        target: Any = None,
        loss: Callable[[Any, Any], Tensor] | None = None,
        *,
        return_output: bool = False,
        reduction: Reduction = None,
    ) -> Any:
        """Run one batch forward and backward, in every process; gradients are added to those of the parameters.

        Args:
            input: as for :meth:`gpipe_bench.GPipe.step` in the process with the first partition, else ignored.
            target: likewise in the process with the last partition.
            loss: likewise.
            return_output: whether to return the output, too.
            reduction: as for :meth:`gpipe_bench.GPipe.step`, in the process with the last partition.

        Returns:
            The loss, the same number in every process; or (loss, output), where output is None in all processes but
            that with the last partition.

        Raises:
            PeerError: another process has failed, or is gone.
            Exception: as for :meth:`gpipe_bench.GPipe.step`. All other processes raise a PeerError that names it, and
                the pipeline can run no more.
        """
        pipeline, last = self._pipeline, self.rank == self._pipeline.ranks[-1]
        goal = Goal(target, loss, return_output, reduction) if last else None
        with self._together(pipeline.ranks, self._chains()) as exchange:
            batch, begin = self._begun(exchange, input, "step")
            evaluations, self._evaluations = self._evaluations, 0
            settings = begin.settings | {"rows": [*begin.sizes], "calls of pipe(x) before this step": evaluations}
            settings["reduction"] = "a function" if callable(reduction) else reduction if last else None
            actions = self._executor.lists(batch.plan).facts.order if batch.plan.backward else ()
            tied = {tie.parameter for tie in self.ties or () if tie.parameter is not None}
            exchange.replicated(lambda replicas: replicas.begin(self.partitions, tied, actions, settings))
            total, output = self._executor.step(batch, goal, exchange)
        return (total.to(self._device), output) if return_output else total.to(self._device)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients by their norm over all processes, as ``torch.nn.utils.clip_grad_norm_`` does.

        Args:
            max_norm: the largest norm that they may have.
            norm_type: of the p-norm.

        Returns:
            The norm before.
        """
        call = {"the call": "clip_grad_norm_", "max_norm": max_norm, "norm_type": norm_type}

        ranks = self._pipeline.ranks
        with self._together(ranks, {}) as exchange:
            self._agreed(exchange, call, "clip_grad_norm_")
            exchange.replicated(lambda replicas: replicas.agree(call))
            found = exchange.gather(norms_of(self._counted_once(), norm_type))
        total = total_norm(found, ranks, norm_type, self._device)
        clip(self.parameters(), max_norm, total)
        return total

    def _counted_once(self) -> Iterator[list[nn.Parameter]]:
        """The parameters of each partition but tied ones of partitions before it."""
        for j, partition in enumerate(self.partitions):
            before = {tie.parameter for tie in self.ties or () if min(tie.slots) < j}
            yield [parameter for parameter in partition.parameters() if parameter not in before]

    def close(self) -> None:
        """Close the connections of the pipeline, which can run no more."""
        self._connections, self.failure = None, self.failure or "it was closed"

    def __len__(self) -> int:
        """The number of layers of this process."""
        return len(self._layers())

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers of this process in order."""
        return iter([layer for _, layer in self._layers()])

    def _layers(self) -> list[tuple[str, Any]]:
        return [child for child in self._modules.items() if not isinstance(child[1], Elsewhere)]

    def __getstate__(self) -> NoReturn:
        raise TypeError("a distributed pipeline must stay in its process, got a copy of it; copy its state_dict()")

    # --- what processes agree on -------------------------------------------------------------------------------------

    def _chains(self) -> dict[SkipCopy, tuple[int, ...]]:
        return self.skip_layout.chains(shared=self.components.shared)

    @contextmanager
    def _together(self, ranks: tuple[int, ...], chains: Mapping[Any, tuple[int, ...]]) -> Iterator[Exchange]:
        """A block that all processes enter together. If it fails in this one, it does in all.

        Args:
            ranks: for each partition the rank of its process.
            chains: as :class:`Exchange` has them.
        """
        if self.failure is not None:
            raise PeerError(f"a distributed pipeline must run without failure, got {self.failure}; make a new one")
        exchange = Exchange(self._connections, ranks, chains, self._device)
        try:
            yield exchange
            exchange.finish()
        except BaseException as error:
            exchange.give_up(f"rank {self._connections.failures.rank} failed: {text_of(error)}")
            self.failure = exchange.failure
            raise

    def _begun(self, exchange: Exchange, value: Any, call: str) -> tuple[Batch, Begin]:
        """A batch, with its micro-batches if they begin here, and what the first process has said of it."""
        self.check_free()
        if self._layers() != self.layers_in_use:
            raise ValueError("layers of a distributed pipeline must stay, got others; make a new pipeline of them")
        settings: dict[str, Any] = {"the call": call}
        if self.rank == self._pipeline.ranks[0]:
            cut = cut_input(value, self.chunks, self._device)
            shapes = [[getattr(each, "shape", None) for each in microbatch.values] for microbatch in cut.microbatches]
            settings |= self._settings(len(cut.sizes))
            kind = fingerprint((settings, shapes))
            begin = self._agreed(exchange, settings, kind, cut.sizes, state_digest(), cut.chunks)
        else:
            begin = self._agreed(exchange, settings)
            self._agree(begin, self._settings(len(begin.sizes)))
            cut = Cut([], begin.sizes, begin.chunks, in_list if begin.chunks is None else gather)
        if self.rank != self._pipeline.ranks[-1]:
            cut.gather = _nothing
        return self._pipeline.batch(self, cut), begin

    def _agreed(self, exchange: Exchange, settings: dict[str, Any], *batch: Any) -> Begin:
        """What the first process says; it must have these settings, too. The first process has ``batch``."""
        first = self._pipeline.ranks[0]
        if self.rank == first:
            begin = Begin(settings, *batch)
            exchange.tell("begin", [rank for rank in range(self._size) if rank != first], tuple(begin))
        else:
            begin = Begin(*exchange.hear("begin", first))
            self._agree(begin, settings)
        exchange.begin(begin)
        return begin

    def _agree(self, begin: Begin, settings: dict[str, Any]) -> None:
        ranks = self._connections.links.ranks
        begin.agree(settings, (ranks[self._pipeline.ranks[0]], ranks[self.rank]))

    def _settings(self, m: int) -> dict[str, Any]:
        lists = self._executor.lists(self._pipeline.plan(self, m))
        return {
            "chunks": self.chunks,
            "checkpoint": self.checkpoint,
            "training mode": self.training,
            "grad mode": torch.is_grad_enabled(),
            "the schedule": f"{lists.name} with {len(lists.facts.order)} actions, {fingerprint(lists.facts.schedule)}",
        }


def _nothing(_: list[MicroBatch]) -> MicroBatch:
    """What a process without the last partition makes of results."""
    return MicroBatch((None,), None)


def checked_components(components: Components | None) -> Components:
    """Those of a process: ``shared`` is as it is given, and there are no copy streams of components."""
    given = checked("components", Switches | None, components) or Components()
    if replace(given, copy_streams=True, shared=True) != Components():
        raise ValueError(
            f"components of a distributed pipeline must be on, except for shared, got {given.label}; switch others off "
            "in gpipe_bench.GPipe"
        )
    return replace(given, copy_streams=False)


def process_ranks(schedule: ScheduleLike, n: int, size: int) -> tuple[int, ...]:
    """For each of n partitions the rank of its process, of ``size``."""
    ranks = ranks_of_partitions(schedule, n, size)
    if max(ranks, default=-1) + 1 != size:
        raise DeviceCountError(
            f"processes must be as many as the devices of the schedule, {max(ranks, default=-1) + 1} for "
            f"{len(ranks)} partitions, got {size}; start as many, or change balance or schedule"
        )
    return ranks


def own_partitions(
    module: nn.Sequential,
    balance: Sequence[int],
    is_own: Sequence[bool],
    device: torch.device,
    materialise: Callable[[nn.Module], object] | None,
) -> tuple[list[nn.Sequential], SkipLayout, list[Tie]]:
    """The partitions of a process, with memory on its device, the others without layers; the skips and ties of all.

    Args:
        module: the layers of all processes.
        balance: layers per partition.
        is_own: whether each partition is one of this process.
        device: of this process.
        materialise: sets the weights of a module that was on ``meta``.
    """
    check_layers(module)
    named = list(module.named_children())
    layers = iter(named)
    whole = [nn.Sequential(OrderedDict(islice(layers, size))) for size in balance]
    ties = [tie.within(is_own) for tie in find_ties(whole)]
    partitions = [part if own else nn.Sequential() for part, own in zip(whole, is_own, strict=True)]
    kept = {layer for part in partitions for layer in part}
    made: dict[Tensor, Tensor] = {}
    with seeded(device) as seed:
        for number, (_, layer) in enumerate(named):
            if layer not in kept:
                continue
            seed(number)
            for each in _given_memory(layer, device, made):
                if materialise is not None:
                    materialise(each)
            layer.to(device)
    return partitions, inspect_skip_layout(whole), ties


def _given_memory(layer: nn.Module, device: torch.device, made: dict[Tensor, Tensor]) -> list[nn.Module]:
    """Give memory to what is on ``meta``, and nothing else; gives the modules that hold any of it, or whose modules do.

    ``nn.Module.to_empty`` would also empty tensors that have values. And it would make two tensors of a tied weight.
    ``made`` holds the new tensor of each tensor on ``meta``, for all layers, so a tied weight stays one.
    """

    def on_meta(module: nn.Module, *, recurse: bool) -> list[tuple[str, Tensor]]:
        options: Any = {"recurse": recurse, "remove_duplicate": False}
        named = chain(module.named_parameters(**options), module.named_buffers(**options))
        return [(name, tensor) for name, tensor in named if tensor.is_meta]

    modules = [module for module in layer.modules() if on_meta(module, recurse=True)]
    for module in modules:
        for name, tensor in on_meta(module, recurse=False):
            if tensor not in made:
                empty = torch.empty_like(tensor, device=device)
                is_weight = isinstance(tensor, nn.Parameter)
                made[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
            setattr(module, name, made[tensor])
    return modules


def edges(ranks: Sequence[int], chains: Iterable[Sequence[int]], ties: Sequence[Tie]) -> set[tuple[int, int]]:
    """(sender, receiver) of all channels: neighbours, skips, ties, and all with rank 0 and the first process."""
    ends = [pair for chain in (range(len(ranks)), *chains) for pair in pairwise(chain)]
    found = {(ranks[source], ranks[target]) for source, target in ends} | {*pairs(ties, ranks)}
    found |= {(center, rank) for center in (0, ranks[0]) for rank in ranks}
    return {edge for pair in found for edge in (pair, pair[::-1]) if pair[0] != pair[1]}
