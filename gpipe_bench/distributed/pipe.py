"""Pipe: the part of a pipeline that one process has. The runtime of one process, with mailboxes between processes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from gpipe_bench.components import Components
from gpipe_bench.distributed.agreement import Begin, compare, description, fingerprint
from gpipe_bench.distributed.connections import Connections, given_group
from gpipe_bench.distributed.data_parallel import Replicas
from gpipe_bench.distributed.exchange import Exchange
from gpipe_bench.distributed.goal import Goal
from gpipe_bench.distributed.norms import Norms, norms_of, total_norm
from gpipe_bench.engine.arguments import named_device
from gpipe_bench.engine.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm
from gpipe_bench.engine.gpipe import GPipe, gather
from gpipe_bench.engine.pipeline import hand_back
from gpipe_bench.engine.randomness import seeded, state_digest
from gpipe_bench.engine.replicas import check_layers
from gpipe_bench.engine.runtime.drive import Outputs, after
from gpipe_bench.engine.runtime.lists import ActionLists, ScheduleLike, schedule_rows
from gpipe_bench.engine.runtime.loss import Losses
from gpipe_bench.engine.runtime.reduction import Reduction
from gpipe_bench.engine.runtime.runtime import Runtime
from gpipe_bench.errors import DeviceCountError, PeerError
from gpipe_bench.schedules import Action
from gpipe_bench.schedules.program import Plan
from gpipe_bench.skip.layout import SkipLayout, inspect_skip_layout
from gpipe_bench.skip.namespace import SkipKey


class Pipe(GPipe):
    """A pipeline with a process for each device of its schedule.

    Every process of the group makes it of the same module, and keeps its own partitions. On a model that is larger than
    the memory of a process, make the module on ``meta``: each process then materialises its own layers alone.

    ::

        dist.init_process_group("gloo")     # in each of two processes that torchrun has started
        pipe = Pipe(nn.Sequential(a, b, c, d), balance=[2, 2], chunks=8)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        loss = pipe.step(x, y, criterion)   # x is used in the first process, y in the last one
        optimizer.step()

    Parameters have the names that they have in ``module``; a process has those of its partitions.

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

    rank: int
    failure: str | None
    _connections: Connections
    _size: int
    _device: torch.device
    _materialise: Callable[[nn.Module], object] | None
    _evaluations: int

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
        materialise: Callable[[nn.Module], object] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        given = given_group(group, mesh)
        rank, size = given.rank(), given.size()
        # Of the processes, until the schedule has said which partition belongs to which.
        self.__dict__.update(_rows=tuple(range(size)), _layout=SkipLayout({}), failure=None, _evaluations=0)
        refused: Exception | None = None
        try:
            own = named_device("device", device)
        except (TypeError, ValueError, DeviceCountError) as error:
            # The others hear of it below.
            own, refused = torch.device("cpu"), error
        self.__dict__.update(rank=rank, _size=size, _device=own, _materialise=materialise)
        connections = self.__dict__["_connections"] = Connections(given, replicas, timeout_s, own)
        mine: dict[str, Any] = {"NCCL": connections.over_nccl is not None}

        def make(exchange: Exchange) -> None:
            if refused is not None:
                raise refused
            super(Pipe, self).__init__(
                module,
                balance,
                chunks=chunks,
                checkpoint=checkpoint,
                deferred_batch_norm=deferred_batch_norm,
                components=Components(copy_streams=False),
                schedule=schedule,
                workers="never",
            )
            mine.update(description(module, self.balance, schedule, self._layout, deferred=deferred_batch_norm))
            found = exchange.gather(mine)
            # All must have heard of the others before one of them stops.
            exchange.finish()
            compare(found, connections.links.ranks)
            if connections.over_nccl is not None:
                connections.over_nccl.connect(self._edges(), self._device)
            exchange.replicated(share)

        def share(replicas: Replicas) -> None:
            replicas.agree(mine, "make the same pipeline everywhere")
            replicas.copy(self)

        self._exchanged(make)

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
        self.__dict__["_evaluations"] += 1
        return self._exchanged(lambda exchange: self._evaluate(exchange, input))

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
        goal = Goal(target, loss, return_output, reduction)
        total, output = self._exchanged(lambda exchange: self._train(exchange, input, goal))
        return (total, output) if return_output else total

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients by their norm over all processes, as ``torch.nn.utils.clip_grad_norm_`` does.

        Args:
            max_norm: the largest norm that they may have.
            norm_type: of the p-norm.

        Returns:
            The norm before.
        """
        call = {"the call": "clip_grad_norm_", "max_norm": max_norm, "norm_type": norm_type}

        def gathered(exchange: Exchange) -> list[Norms]:
            self._agreed(exchange, call, "clip_grad_norm_")
            exchange.replicated(lambda replicas: replicas.agree(call))
            return exchange.gather(norms_of(self.partitions, norm_type))

        total = total_norm(self._exchanged(gathered), self._rows, norm_type, self._device)
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, total)
        return total

    def close(self) -> None:
        """Close the connections of the pipeline, which can run no more."""
        self.__dict__.update(_connections=None, failure=self.failure or "it was closed")

    def __getstate__(self) -> NoReturn:
        raise TypeError("a distributed pipeline must stay in its process, got a copy of it; copy its state_dict()")

    # --- own partitions ----------------------------------------------------------------------------------------------

    def _on_devices(
        self,
        schedule: ScheduleLike | None,
        devices: list[Any] | None,  # noqa: ARG002 - every process has one
    ) -> tuple[tuple[int, ...], list[torch.device]]:
        rows = schedule_rows(schedule, len(self.balance), self._size)
        if max(rows, default=-1) + 1 != self._size:
            raise DeviceCountError(
                f"processes must be as many as the devices of the schedule, {max(rows, default=-1) + 1} for "
                f"{len(rows)} partitions, got {self._size}; start as many, or change balance or schedule"
            )
        return rows, [self._device] * len(rows)

    def _arrange(self, module: nn.Sequential) -> None:
        """Keep the layers of own partitions, with memory on the device of this process; the others are forgotten."""
        check_layers(module, whole=False)
        if self.deferred_batch_norm:
            convert_deferred_batch_norm(module)
        layers = iter(list(module.named_children()))
        whole = [nn.Sequential(OrderedDict(islice(layers, size))) for size in self.balance]
        partitions = [
            part if row == self.rank else nn.Sequential() for part, row in zip(whole, self._rows, strict=True)
        ]
        numbers = {layer: number for number, layer in enumerate(chain.from_iterable(whole))}
        with seeded(self._device) as seed:
            for layer in chain.from_iterable(partitions):
                seed(numbers[layer])
                self._give_memory(layer)
        own = [pair for part in partitions for pair in part.named_children()]
        self._modules.clear()
        self._modules.update(own)
        self.__dict__.update(
            partitions=partitions,
            _running=own,
            _layout=inspect_skip_layout(whole),
            _deferred=[each for _, layer in own for each in layer.modules() if isinstance(each, DeferredBatchNorm)],
        )

    def _give_memory(self, layer: nn.Module) -> None:
        if any(tensor.is_meta for tensor in chain(layer.parameters(), layer.buffers())):
            layer.to_empty(device=self._device)
            if self._materialise is not None:
                for each in layer.modules():
                    self._materialise(each)
        layer.to(self._device)

    def _replaced(self) -> None:
        if list(self._modules.items()) != self._running:
            raise ValueError("layers of a distributed pipeline must stay, got others; make a new pipeline of them")

    # --- what processes agree on -------------------------------------------------------------------------------------

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self.rank]

    def _edges(self) -> set[tuple[int, int]]:
        """(sender, receiver) of all channels: neighbours, ends of skips, and all with rank 0 and the first process."""
        ends = [(j, j + 1) for j in range(len(self._rows) - 1)] + [*self._layout.routes.values()]
        pairs = {(self._rows[source], self._rows[target]) for source, target in ends}
        pairs |= {(center, rank) for center in (0, self._rows[0]) for rank in range(self._size)}
        return {edge for pair in pairs for edge in (pair, pair[::-1]) if pair[0] != pair[1]}

    def _exchanged(self, job: Callable[[Exchange], Any]) -> Any:
        """Do what all processes do together. If this one fails, all do."""
        if self.failure is not None:
            raise PeerError(f"a distributed pipeline must run without failure, got {self.failure}; make a new one")
        exchange = Exchange(self._connections, self._rows, self._layout.routes, self._device)
        try:
            result = job(exchange)
            exchange.finish()
        except BaseException as error:
            exchange.give_up(f"rank {self._connections.news.rank} failed: {type(error).__name__}: {error}")
            self.__dict__["failure"] = exchange.failure
            raise
        return result

    def _begun(self, exchange: Exchange, value: Any, *, training: bool) -> tuple[Plan[SkipKey], Begin, list[Any]]:
        """The plan of a batch, what the first process has said of it, and its micro-batches if they begin here."""
        call, microbatches = {"the call": "step" if training else "forward"}, []
        if self.rank == self._rows[0]:
            microbatches = self._scattered(value)
            sizes = [microbatch.values[0].size(0) for microbatch in microbatches]
            shapes = [[getattr(each, "shape", None) for each in microbatch.values] for microbatch in microbatches]
            settings = call | self._settings(len(sizes))
            begin = self._agreed(exchange, settings, fingerprint((settings, shapes)), sizes, state_digest())
        else:
            self._settle()
            begin = self._agreed(exchange, call)
            self._agree(begin, self._settings(len(begin.sizes)))
        return self._plan(len(begin.sizes)), begin, microbatches

    def _agreed(self, exchange: Exchange, settings: dict[str, Any], *batch: Any) -> Begin:
        """What the first process says; it must have these settings, too. The first process has ``batch``."""
        first = self._rows[0]
        if self.rank == first:
            begin = Begin(settings, *batch)
            exchange.tell("begin", self._others, tuple(begin))
        else:
            begin = Begin(*exchange.hear("begin", first))
            self._agree(begin, settings)
        exchange.begin(begin.kind)
        return begin

    def _agree(self, begin: Begin, settings: dict[str, Any]) -> None:
        ranks = self._connections.links.ranks
        begin.agree(settings, (ranks[self._rows[0]], ranks[self.rank]))

    def _settings(self, m: int) -> dict[str, Any]:
        lists = self._lists(self._plan(m))
        return {
            "chunks": self.chunks,
            "checkpoint": self.checkpoint,
            "training mode": self.training,
            "grad mode": torch.is_grad_enabled(),
            "the schedule": f"{lists.name} with {len(lists.facts.order)} actions, {fingerprint(lists.facts.schedule)}",
        }

    def _lists(self, plan: Plan[SkipKey]) -> ActionLists:
        assert self._choice is not None  # noqa: S101 - a distributed pipeline has a schedule
        return self._choice.lists(plan.m, plan.checkpointed, early_recompute=True)

    # --- a batch -----------------------------------------------------------------------------------------------------

    def _train(self, exchange: Exchange, value: Any, goal: Goal) -> tuple[Tensor, Any]:
        plan, begin, microbatches = self._begun(exchange, value, training=True)
        lists, last = self._lists(plan), self._rows[-1]
        order = lists.facts.order if plan.backward else lists.forward
        exchange.replicated(lambda replicas: self._begin(replicas, begin, order))
        targets, loss, shares = (
            goal.shared(self.chunks, begin.sizes, learning=plan.backward) if self.rank == last else ([], goal.loss, ())
        )
        entering = [each for microbatch in microbatches for each in microbatch.values]
        with self._entered(plan, microbatches) as batch:
            batch.randomness.share(begin.seed)
            end = Losses(loss, targets, shares, batch, keeps=goal.return_output)
            options: Any = {"learning": plan.backward, "threads": False, "mailboxes": exchange}
            runtime = Runtime(self._layout, microbatches, batch, lists, end, **options)
            microbatches.clear()
            try:
                self._run(exchange, runtime, order)
                exchange.replicated(Replicas.finish)
                total = end.total() if self.rank == last else None
            finally:
                after(self._streams())
            told = exchange.gather((total, batch.randomness.found()))
            batch.randomness.settle([found for _, found in told])
        hand_back(entering, runtime.input_grads)
        output = gather(end.outputs).unwrap() if goal.return_output and self.rank == last else None
        return told[last][0].to(self._device), output

    def _begin(self, replicas: Replicas, begin: Begin, order: Sequence[Action]) -> None:
        """Let the replicas agree on a step, and on how many evaluations were before it."""
        settings = begin.settings | {"rows": [*begin.sizes], "calls of pipe(x) before this step": self._evaluations}
        self.__dict__["_evaluations"] = 0
        replicas.begin(self.partitions, order, settings)

    def _evaluate(self, exchange: Exchange, value: Any) -> Any:
        plan, begin, microbatches = self._begun(exchange, value, training=False)
        lists, end = self._lists(plan), Outputs(plan.m)
        with self._entered(plan, microbatches) as batch:
            batch.randomness.share(begin.seed)
            options: Any = {"learning": False, "threads": False, "mailboxes": exchange}
            self._run(exchange, Runtime(self._layout, microbatches, batch, lists, end, **options), lists.forward)
            after(self._streams())
            batch.randomness.settle(exchange.gather(batch.randomness.found()))
        return gather(end.microbatches).unwrap() if self.rank == self._rows[-1] else None

    def _run(self, exchange: Exchange, runtime: Runtime, order: Sequence[Any]) -> None:
        runtime.run([action for action in order if self._rows[action.j] == self.rank])
        exchange.check()
