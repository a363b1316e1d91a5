"""A model of PyTorch's autograd engine: which node runs next, in which thread, at which moment of the host.

Each device has a thread and a queue of ready nodes. Of these the thread runs the one with the highest re-entrant depth,
then the one with the highest sequence number (``Engine::thread_main`` and ``CompareNodeTaskTime`` in
torch/csrc/autograd/engine.cpp). A node is ready when all its consumers have run.

    current     a node is queued on the device of its outputs (pytorch#135633); a nested backward pass stays on its
                device's thread and comes first, so a checkpoint runs as one piece; for every gradient the stream of
                the node that takes it waits for the stream of the node that gave it (pytorch#151079)
    published   PyTorch 1.3, as torchgpipe used it: the root of a nested backward pass goes to the thread of the CPU,
                which sleeps. Until it comes back the device's thread runs whatever else is ready; if that is a
                checkpoint, it nests again: how many do is a race. A pass nested deeper comes first, and one that is not
                the innermost cannot return, so checkpoints end last in, first out, and their copies wait. Only Wait
                and copies order streams. There is no Join before a Copy: the Copy itself releases the Fork, so that
                a device's thread never waits for the one before it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from tests.simulator.oracle.graph import Node
from tests.simulator.oracle.host import Host
from tests.simulator.oracle.streams import Thread

__all__ = ["Autograd"]


class _Frame:
    """A nested backward pass on a thread's stack."""

    __slots__ = ("checkpoint", "finished", "rooted")

    def __init__(self, checkpoint: Node) -> None:
        self.checkpoint = checkpoint
        # Whether its root has come back from the thread of the CPU.
        self.rooted = False
        self.finished = False


# (-depth, -node.rank, order of entry, node, nested pass that the node belongs to)
_Entry = tuple[int, int, int, Node, _Frame | None]


class Autograd:
    """Runs a shadow graph backward.

    Args:
        host: issues what nodes do.
        threads: of each device, the number of its thread; those without streams share one, as the CPU has it.
        flavour: one of :data:`gpipe_bench.simulator.clock.settings.FLAVOURS`.
        prepare_ns: in ``published``, the host's time to prepare a nested backward pass: it walks the nested graph.
        latencies: and then, one after the other, the times until its root comes back from the thread of the CPU.
        finished: a thread to resume when the graph has run.
    """

    def __init__(
        self,
        host: Host,
        threads: Sequence[int],
        *,
        flavour: str,
        prepare_ns: int,
        latencies: Iterator[int],
        finished: Thread | None,
    ) -> None:
        self._host = host
        self._clock = host.clock
        self._published = flavour == "published"
        self._prepare_ns, self._latencies = prepare_ns, latencies
        self._finished = finished
        # The thread of the CPU comes last.
        self._thread_of, count = threads, max(threads) + 2
        self._queues: list[list[_Entry]] = [[] for _ in range(count)]
        self._threads = [self._serve(place) for place in range(count)]
        self._idle = [True] * count
        self._entries = 0
        # Nodes queued or running; the graph has run when none is left.
        self._alive = 0

    def start(self, root: Node) -> None:
        """Queue the loss."""
        self._push(root)

    def _push(self, node: Node, depth: int = 0, frame: _Frame | None = None) -> None:
        self._alive += 1
        self._entries += 1
        place = self._thread_of[node.device]
        heappush(self._queues[place], (-depth, -node.rank, self._entries, node, frame))
        self._wake(place)

    def _wake(self, device: int) -> None:
        if self._idle[device]:
            self._idle[device] = False
            self._clock.resume(self._threads[device])

    def _serve(self, device: int) -> Thread:
        """A thread: ends a nested pass that has run, else runs the first ready node, else sleeps."""
        queue, frames = self._queues[device], list[_Frame]()
        while True:
            if frames and frames[-1].finished:
                self._finish(frames.pop().checkpoint)
            elif queue and not _outranked(queue[0][4], frames):
                _, _, _, node, frame = heappop(queue)
                if frame is not None:
                    yield from self._host.backward(node)
                    frame.finished = True
                    self._alive -= 1
                elif node.kind == "checkpoint" and self._published:
                    yield from self._nest(node, frames)
                else:
                    work = self._work(node)
                    if work is not None:
                        yield from work
                    self._finish(node)
            else:
                self._idle[device] = True
                yield None

    def _work(self, node: Node) -> Iterator[int | None] | None:
        """What running a node costs the host, if it issues anything."""
        kind = node.kind
        if kind == "recompute":
            return self._recompute(node)
        if kind == "checkpoint":
            return self._checkpoint(node)
        if kind in {"copy", "portal"}:
            return self._host.transfer(node, back=True)
        if kind == "task":
            return self._host.backward(node)
        if kind == "wait" and self._published:
            arriving = node.source != node.j
            streams = (node.stream, node.peer) if arriving else (node.peer, node.stream)
            self._clock.wait(*streams)
        return self._host.kernels(node.stream, self._host.workload.loss) if kind == "loss" else None

    def _recompute(self, node: Node) -> Iterator[int | None]:
        checkpoint = node.partner
        if checkpoint is None:
            raise RuntimeError(f"a recomputation must have a checkpoint, got none for ({node.i}, {node.j})")
        checkpoint.filled = True
        return self._host.forward(checkpoint, again=True)

    def _checkpoint(self, node: Node) -> Iterator[int | None]:
        if not node.filled:
            yield from self._host.forward(node, again=True)
        yield from self._host.backward(node)

    def _nest(self, node: Node, frames: list[_Frame]) -> Iterator[int | None]:
        if not node.filled:
            yield from self._host.forward(node, again=True)
        yield self._clock.now + self._prepare_ns
        frame = _Frame(node)
        frames.append(frame)
        self._clock.resume(self._root(frame, len(frames)), self._clock.now + next(self._latencies))

    def _root(self, frame: _Frame, depth: int) -> Thread:
        """The thread of the CPU, when it comes to the root of a nested pass."""
        frame.rooted = True
        self._push(frame.checkpoint, depth, frame)
        return
        yield

    def _finish(self, node: Node) -> None:
        """Pass gradients on."""
        for consumer in node.next:
            # Streams of one partition only: a copy meets the streams of both of its ends by itself.
            if not self._published and consumer.stream != node.stream:
                self._clock.wait(consumer.stream, node.stream)
            consumer.waiting -= 1
            if not consumer.waiting:
                self._push(consumer)
        lane = node.lane
        if lane is not None:
            lane.waiting -= 1
            if not lane.waiting:
                self._push(lane)
        self._alive -= 1
        if not self._alive and self._finished is not None:
            self._clock.resume(self._finished)


def _outranked(frame: _Frame | None, frames: list[_Frame]) -> bool:
    """Whether a pass nested deeper is about to come first: it goes between any two nodes of a pass that is less deep.

    What the thread does of ``frame`` until then, a few nodes, is left out.
    """
    return frame is not None and not frames[-1].rooted
