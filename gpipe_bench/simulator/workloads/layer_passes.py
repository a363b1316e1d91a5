"""The passes of layers in a row: what each layer asks for, and who holds what passes between them.

A storage that leaves a layer is the next one's input: one block with several holders (the value between two layers, the
graphs of the layers that kept it), which is free when the last one lets go.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Mapping, Sequence

from gpipe_bench.kernels.kernel import NO_BLOCK, Free, LayerFacts, LayerTrace, Port
from gpipe_bench.simulator.workloads.blocks import Blocks
from gpipe_bench.simulator.workloads.workload import gradient_name, input_name

SkipCopy = tuple[int, int]
"""A copy of a skip that goes to other partitions: the number of the skip, and which of its readers has the copy."""


class LayerPasses:
    """Layers in a row, and the skips that come to them and go from them.

    Args:
        layers: trace of each layer.
        facts: of each layer.
        input_bytes: of the tensors that enter, skips aside.
        arriving: copies of skips that come from other partitions, and their bytes.
        departing: copies of skips that go to others.
        apart: whether inputs are leaves, as in a checkpoint: gradients that are shared or laid out otherwise are copied
            (``AccumulateGrad``).
        copies: whether the layers get copies of their inputs, because they write to them.

    Attributes:
        skip_bytes: of the copies of skips that go.
        needs: for each input but skips, whether it needs a gradient.
        skip_needs: numbers of the skips that arrive and need one.
        writes: whether layers write to what enters.
        cloned: bytes of the gradients that leaves copy, or would if inputs were leaves.
        added: bytes of the gradients of skips that are added up, of those that are read several times.
    """

    def __init__(
        self,
        layers: Sequence[LayerTrace],
        facts: Sequence[LayerFacts],
        *,
        input_bytes: Sequence[int],
        arriving: Mapping[SkipCopy, int],
        departing: Sequence[SkipCopy],
        apart: bool = False,
        copies: bool = False,
    ) -> None:
        self.layers, self.facts, self.departing = layers, facts, list(departing)
        self.apart, self.copies = apart, copies
        self.bytes, self.arriving = tuple(input_bytes), arriving
        self.skip_bytes: dict[SkipCopy, int] = {}
        self.writes = False
        self.cloned: list[int] = []
        self.added: list[int] = []
        self.needs = self.layers[0].needs[: len(self.bytes)]
        self.skip_needs: set[int] = set()
        # How often each skip is read here or goes on, how many copies of it come, and its bytes.
        self._uses = Counter(number for layer in facts for number in layer.reads)
        self._uses.update(number for number, _ in departing)
        self._came = Counter(number for number, _ in arriving)
        self._sizes = {number: nbytes for (number, _), nbytes in arriving.items()}

    def forward(self, blocks: Blocks, *, graph: bool) -> tuple[list[Port], list[int], list[dict[int, int]]]:
        """Run the layers; gives outputs, block of each copy that departs, and the names that the graph keeps."""
        sizes = (*self.bytes, *self.arriving.values())
        copies = self.copies
        entered = [blocks.alloc(nbytes) if copies else input_name(place) for place, nbytes in enumerate(sizes)]
        # The micro-batch holds them until the pass has ended, or the pass its copies; and the first layer that takes
        # them does.
        for block in entered if copies else (*entered, *entered):
            blocks.hold(block)
        ports = [Port(block, nbytes) for block, nbytes in zip(entered, sizes, strict=True)]
        values, skips = ports[: len(self.bytes)], defaultdict[int, deque[Port]](deque)
        for (number, _), port in zip(self.arriving, ports[len(self.bytes) :], strict=True):
            skips[number] += _held(blocks, port, self._uses[number] // self._came[number])
        graphs: list[dict[int, int]] = []
        for layer, facts in zip(self.layers, self.facts, strict=True):
            incoming = [*values, *(skips[facts.reads[index]].popleft() for index in layer.read)]
            self.writes |= any(incoming[place].block in entered for place in layer.writes)
            leaving, kept = _forward(blocks, layer, [port.block for port in incoming], graph=graph)
            graphs.append(kept)
            split = len(leaving) - len(layer.stashed)
            values = leaving[:split]
            for index, port in zip(layer.stashed, leaving[split:], strict=True):
                number = facts.stashes[index]
                self._sizes[number] = port.bytes
                skips[number] = _held(blocks, port, self._uses[number])
        left = [(copy, skips[copy[0]].popleft()) for copy in self.departing if skips[copy[0]]]
        self.skip_bytes = {copy: port.bytes for copy, port in left}
        departed = [port.block for _, port in left]
        if copies:
            for block in entered:
                blocks.drop(block)
        else:
            blocks.leave(entered)
        blocks.leave([*(port.block for port in values), *departed])
        return values, departed, graphs

    def backward(self, blocks: Blocks, graphs: list[dict[int, int]]) -> tuple[list[int], dict[SkipCopy, int]]:
        """Run the layers' backward passes; gives blocks of the gradients of inputs and of copies that arrived."""

        def run(at: int, gradients: list[int]) -> list[int]:
            layer, facts = self.layers[at], self.facts[at]
            names = dict(graphs[at])
            name_gradients(blocks, layer.output_gradients, names, gradients)
            blocks.run(layer.backward, names)
            arrived = pass_on(blocks, layer.input_gradients, names)
            split = layer.inputs - len(layer.read)
            # What is added up is nobody else's.
            alone = {number for number, uses in self._uses.items() if uses == self._came[number]}
            numbers = [facts.reads[index] for index in layer.read]
            sizes = [*(self.bytes if not at else [0] * split)]
            sizes += [self._sizes[number] if number in alone else 0 for number in numbers]
            self._own(blocks, layer, arrived, sizes)
            self.skip_needs |= {number for number, needs in zip(numbers, layer.needs[split:], strict=True) if needs}
            return arrived

        values, skips = self.gradients()
        for block in (*values, *skips.values()):
            blocks.hold(block)
        return self.back(blocks, values, skips, run)

    def gradients(self) -> tuple[list[int], dict[SkipCopy, int]]:
        """Names of the gradients of the outputs: values, and copies of skips."""
        last = self.layers[-1]
        outputs = len(last.outputs) - len(last.stashed)
        skips = {copy: gradient_name(outputs + place) for place, copy in enumerate(self.skip_bytes)}
        return [gradient_name(place) for place in range(outputs)], skips

    def back(
        self,
        blocks: Blocks,
        values: list[int],
        skips: dict[SkipCopy, int],
        run: Callable[[int, list[int]], list[int]],
    ) -> tuple[list[int], dict[SkipCopy, int]]:
        """Go from the last layer to the first, with blocks of gradients; those of a skip are added up, last ones first.

        Args:
            blocks: of the pass.
            values: of each output.
            skips: of each copy that leaves.
            run: (layer, gradients of its outputs) -> gradients of its inputs.

        Returns:
            Those of each input, and of each copy that arrived.
        """
        self.added = []
        sums: dict[int, int] = {}
        own: dict[SkipCopy, int] = {}
        waiting = [*self.arriving]
        for number, reader in reversed(skips):
            self._add(blocks, sums, number, skips[number, reader])
        for at, (layer, facts) in reversed(list(enumerate(zip(self.layers, self.facts, strict=True)))):
            stashed = [facts.stashes[index] for index in layer.stashed]
            arrived = run(at, [*values, *(sums.pop(number, NO_BLOCK) for number in stashed)])
            split = layer.inputs - len(layer.read)
            values = arrived[:split]
            for index, gradient in zip(layer.read, arrived[split:], strict=True):
                number = facts.reads[index]
                if self._came[number] > 1:
                    copy = next(one for one in reversed(waiting) if one[0] == number)
                    waiting.remove(copy)
                    own[copy] = gradient
                else:
                    self._add(blocks, sums, number, gradient)
        return values, {copy: sums[copy[0]] for copy in self.arriving if copy[0] in sums} | own

    def _add(self, blocks: Blocks, sums: dict[int, int], number: int, gradient: int) -> None:
        """Add a gradient of a skip to those that have come before."""
        first = sums.get(number, NO_BLOCK)
        if NO_BLOCK in (first, gradient):
            sums[number] = gradient if first == NO_BLOCK else first
            return
        self.added.append(self._sizes[number])
        if not blocks.sums_onto(first):
            sums[number] = blocks.alloc(self._sizes[number])
            blocks.drop(first)
        blocks.drop(gradient)

    def _own(self, blocks: Blocks, layer: LayerTrace, arrived: list[int], sizes: Sequence[int]) -> None:
        """Give each input of the task its gradient for itself, as a leaf takes it; ``sizes``: 0 for other inputs."""
        for place, (block, nbytes) in enumerate(zip(arrived, sizes, strict=True)):
            shared = (block < NO_BLOCK or blocks.holders[block] > 1) and not layer.views[place]
            if block != NO_BLOCK and nbytes and (shared or not layer.fits[place]):
                self.cloned.append(nbytes)
                if self.apart:
                    arrived[place] = blocks.alloc(nbytes)
                    blocks.drop(block)


def _held(blocks: Blocks, port: Port, uses: int) -> deque[Port]:
    """A skip for each of its uses; it is held once already."""
    for _ in range(uses - 1):
        blocks.hold(port.block)
    if not uses:
        blocks.drop(port.block)
    return deque([port] * uses)


def _forward(
    blocks: Blocks, layer: LayerTrace, incoming: Sequence[int], *, graph: bool
) -> tuple[list[Port], dict[int, int]]:
    """Run a layer; gives what leaves it, and the names that its graph keeps."""
    names = dict(enumerate(incoming))
    steps, ports = (layer.forward, layer.outputs) if graph else (layer.plain, layer.plain_outputs)
    blocks.run([step for step in steps if not (isinstance(step, Free) and step.block < layer.inputs)], names)
    leaving = [Port(names.get(port.block, NO_BLOCK), port.bytes) for port in ports]
    kept = {block: names[block] for block in layer.kept if block in names} if graph else {}
    for block in (*(port.block for port in leaving), *kept.values()):
        blocks.hold(block)
    # The layer and its caller drop their references.
    own = [name for block, name in names.items() if block >= layer.inputs]
    for block in (*own, *incoming):
        blocks.drop(block)
    return leaving, kept


def name_gradients(blocks: Blocks, own: Sequence[int], names: dict[int, int], gradients: Sequence[int]) -> None:
    """Enter the ``gradients`` of a layer's outputs, its ``own`` blocks, and drop those that it does not need."""
    for block, gradient in zip(own, gradients, strict=True):
        if block != NO_BLOCK:
            names[block] = gradient
        elif gradient != NO_BLOCK:
            blocks.drop(gradient)


def pass_on(blocks: Blocks, own: Sequence[int], names: dict[int, int], staying: Container[int] = ()) -> list[int]:
    """The gradients of a layer's inputs, which are its ``own`` blocks; of all others it keeps those ``staying``."""
    arrived = [names.get(block, NO_BLOCK) for block in own]
    # One gradient may be that of several inputs, as of both operands of a sum.
    for block in arrived:
        blocks.hold(block)
    for block in [block for block in names if block not in staying]:
        blocks.drop(names.pop(block))
    return arrived
