"""The passes of layers in a row: what each layer asks for, and who holds what passes between them.

A storage that leaves a layer is the next one's input: one block with several holders (the value between two layers, the
graphs of the layers that kept it), which is free when the last one lets go.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from gpipe_bench.kernels.kernel import NO_BLOCK, Free, LayerFacts, LayerTrace, Port, Step
from gpipe_bench.simulator.workloads.blocks import Blocks
from gpipe_bench.simulator.workloads.workload import gradient_name, input_name


class LayerPasses:
    """Layers in a row, and the skips that come to them and go from them.

    Args:
        layers: trace of each layer.
        facts: of each layer.
        input_bytes: of the tensors that enter, skips aside.
        arriving: numbers of the skips that come from other partitions, and their bytes.
        departing: numbers of the skips that go to others.
        apart: whether inputs are leaves, as in a checkpoint: gradients that are shared or laid out otherwise are copied
            (``AccumulateGrad``).
        copies: whether the layers get copies of their inputs, because they write to them.

    Attributes:
        skip_bytes: of the skips that go.
        needs: for each input but skips, whether it needs a gradient.
        skip_needs: numbers of the skips that arrive and need one.
        writes: whether layers write to what enters.
        cloned: bytes of the gradients that leaves copy, or would if inputs were leaves.
    """

    def __init__(
        self,
        layers: Sequence[LayerTrace],
        facts: Sequence[LayerFacts],
        *,
        input_bytes: Sequence[int],
        arriving: Mapping[int, int],
        departing: Sequence[int],
        apart: bool = False,
        copies: bool = False,
    ) -> None:
        self.layers, self.facts, self.departing = layers, facts, list(departing)
        self.apart, self.copies = apart, copies
        self.bytes, self.arriving = tuple(input_bytes), arriving
        self.skip_bytes: dict[int, int] = {}
        self.writes = False
        self.cloned: list[int] = []
        self.needs = self.layers[0].needs[: len(self.bytes)]
        self.skip_needs: set[int] = set()

    def forward(self, blocks: Blocks, *, graph: bool) -> tuple[list[Port], list[int], list[dict[int, int]]]:
        """Run the layers; gives outputs, block of each departing skip, and the names that the graph keeps."""
        sizes = (*self.bytes, *self.arriving.values())
        copies = self.copies
        entered = [blocks.alloc(nbytes) if copies else input_name(place) for place, nbytes in enumerate(sizes)]
        # The micro-batch holds them until the pass has ended, or the pass its copies; and the first layer that takes
        # them does.
        for block in entered if copies else (*entered, *entered):
            blocks.hold(block)
        ports = [Port(block, nbytes) for block, nbytes in zip(entered, sizes, strict=True)]
        values, skips = ports[: len(self.bytes)], dict(zip(self.arriving, ports[len(self.bytes) :], strict=True))
        graphs: list[dict[int, int]] = []
        for layer, facts in zip(self.layers, self.facts, strict=True):
            incoming = [*values, *(skips.pop(facts.pops[index]) for index in layer.popped)]
            self.writes |= any(incoming[place].block in entered for place in layer.writes)
            leaving, kept = _forward(blocks, layer, [port.block for port in incoming], graph=graph)
            graphs.append(kept)
            split = len(leaving) - len(layer.stashed)
            values = leaving[:split]
            skips |= {facts.stashes[index]: port for index, port in zip(layer.stashed, leaving[split:], strict=True)}
        self.skip_bytes = {number: skips[number].bytes for number in self.departing if number in skips}
        departed = [skips[number].block for number in self.skip_bytes]
        if copies:
            for block in entered:
                blocks.drop(block)
        else:
            blocks.leave(entered)
        blocks.leave([*(port.block for port in values), *departed])
        return values, departed, graphs

    def backward(self, blocks: Blocks, graphs: list[dict[int, int]]) -> tuple[list[int], dict[int, int]]:
        """Run the layers' backward passes; gives blocks of the gradients of inputs and of skips that arrived."""

        def run(at: int, gradients: list[int]) -> list[int]:
            layer, facts = self.layers[at], self.facts[at]
            arrived = _backward(blocks, layer, dict(graphs[at]), gradients)
            split = layer.inputs - len(layer.popped)
            sizes = self.bytes if not at else [0] * split
            sizes = [*sizes, *(self.arriving.get(facts.pops[index], 0) for index in layer.popped)]
            self._own(blocks, layer, arrived, sizes)
            popped = zip(layer.popped, layer.needs[split:], strict=True)
            self.skip_needs |= {facts.pops[index] for index, needs in popped if needs}
            return arrived

        values, skips = self.gradients()
        for block in (*values, *skips.values()):
            blocks.hold(block)
        return self.back(values, skips, run)

    def gradients(self) -> tuple[list[int], dict[int, int]]:
        """Names of the gradients of the outputs: values, and skips by number."""
        last = self.layers[-1]
        outputs = len(last.outputs) - len(last.stashed)
        skips = {number: gradient_name(outputs + place) for place, number in enumerate(self.skip_bytes)}
        return [gradient_name(place) for place in range(outputs)], skips

    def back(
        self, values: list[int], skips: dict[int, int], run: Callable[[int, list[int]], list[int]]
    ) -> tuple[list[int], dict[int, int]]:
        """Go from the last layer to the first, with blocks of gradients.

        Args:
            values: of each output.
            skips: of each skip that leaves, by number.
            run: (layer, gradients of its outputs) -> gradients of its inputs.

        Returns:
            Those of each input, and of each skip that arrived.
        """
        for at, (layer, facts) in reversed(list(enumerate(zip(self.layers, self.facts, strict=True)))):
            stashed = [facts.stashes[index] for index in layer.stashed]
            arrived = run(at, [*values, *(skips.pop(number, NO_BLOCK) for number in stashed)])
            split = layer.inputs - len(layer.popped)
            values = arrived[:split]
            skips |= {facts.pops[index]: item for index, item in zip(layer.popped, arrived[split:], strict=True)}
        return values, skips

    def _own(self, blocks: Blocks, layer: LayerTrace, arrived: list[int], sizes: Sequence[int]) -> None:
        """Give each input of the task its gradient for itself, as a leaf takes it; ``sizes``: 0 for other inputs."""
        for place, (block, nbytes) in enumerate(zip(arrived, sizes, strict=True)):
            shared = (block < NO_BLOCK or blocks.holders[block] > 1) and not layer.views[place]
            if block != NO_BLOCK and nbytes and (shared or not layer.fits[place]):
                self.cloned.append(nbytes)
                if self.apart:
                    arrived[place] = blocks.alloc(nbytes)
                    blocks.drop(block)


def _forward(
    blocks: Blocks, layer: LayerTrace, incoming: Sequence[int], *, graph: bool
) -> tuple[list[Port], dict[int, int]]:
    """Run a layer; gives what leaves it, and the names that its graph keeps."""
    names = dict(enumerate(incoming))
    steps, ports = (layer.forward, layer.outputs) if graph else (layer.plain, layer.plain_outputs)
    blocks.run([step for step in steps if not _frees_input(step, layer)], names)
    leaving = [Port(names.get(port.block, NO_BLOCK), port.bytes) for port in ports]
    kept = {block: names[block] for block in layer.kept if block in names} if graph else {}
    for block in (*(port.block for port in leaving), *kept.values()):
        blocks.hold(block)
    # The layer and its caller drop their references.
    own = [name for block, name in names.items() if block >= layer.inputs]
    for block in (*own, *incoming):
        blocks.drop(block)
    return leaving, kept


def _backward(blocks: Blocks, layer: LayerTrace, names: dict[int, int], gradients: Sequence[int]) -> list[int]:
    """Run a layer's backward pass on the ``gradients`` of its outputs; gives those of its inputs."""
    name_gradients(blocks, layer.output_gradients, names, gradients)
    blocks.run(layer.backward, names)
    return pass_on(blocks, layer.input_gradients, names)


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


def _frees_input(step: Step, layer: LayerTrace) -> bool:
    return isinstance(step, Free) and step.block < layer.inputs
