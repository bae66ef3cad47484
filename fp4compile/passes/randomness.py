"""One seed a graph for stochastic rounding.

The seed is drawn on the device by its default generator, so that it follows ``torch.manual_seed`` and differs from step
to step, without a host value that a CUDA graph would freeze. Sites differ by the number each quantize node carries. The
draw stands at the head of the graph; the partitioner moves it into the backward when only the backward needs it.
"""

from __future__ import annotations

import torch
from torch import fx

from .. import compat
from ..graph import emit


class GraphSeeds:
    """The seeds of one graph, one a device, made when first asked for."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._seeds: dict[torch.device, fx.Node] = {}

    def on(self, device: torch.device, like: fx.Node) -> fx.Node:
        """The 0-d int64 seed of a device. ``like`` gives a new one its phase (forward or backward)."""
        if device not in self._seeds:
            with self._graph.inserting_before(_first_call(self._graph)):
                drawn = emit(self._graph, like, compat.SEEDS, 1, device)
                self._seeds[device] = emit(self._graph, like, compat.LOOKUP_SEED, drawn, 0)
            for node in (drawn, self._seeds[device]):
                node.meta.pop("recompute", None)  # a seed drawn again would round differently
        return self._seeds[device]


def _first_call(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op == "call_function")
