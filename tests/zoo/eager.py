"""The weight matmuls that a model does when it runs eagerly: what a compiled graph has to find, found without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn, ops
from torch.utils._python_dispatch import TorchDispatchMode

aten = ops.aten
PLAIN = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2)}
BATCHED = {aten.bmm.default: (0, 1), aten.baddbmm.default: (1, 2), aten._grouped_mm.default: (0, 1)}


class Watch(TorchDispatchMode):
    """Inside, the matmuls of ``model`` that read a parameter are recorded, called as a report calls sites: ``plain``
    products of two matrices, ``batched`` of stacks of them.

    A view of a parameter is known by its memory, a copy in another dtype by being made of it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.plain: list[str] = []
        self.batched: list[str] = []
        self._running: list[str] = []
        self._names: dict[int, list[str]] = {}
        self._copies: list[Tensor] = []  # kept alive, or others would get their memory
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(_memory(parameter), []).append(name)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name))
            module.register_forward_hook(self._leave)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is aten._to_copy.default and _memory(args[0]) in self._names:
            self._copies.append(result)
            self._names[_memory(result)] = self._names[_memory(args[0])]
        for found, operands in ((self.plain, PLAIN), (self.batched, BATCHED)):
            for operand in operands.get(function, ()):
                if names := self._names.get(_memory(args[operand])):
                    found.append(self._site(names))
        return result

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def _site(self, names: list[str]) -> str:
        """The weight under the name that it has in the module that runs."""
        running = self._running[-1]
        for name in names:
            owner, _, last = name.rpartition(".")
            if owner == running:
                return owner if last == "weight" else name
        return names[0]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def weight_matmuls(model: nn.Module, inputs: Mapping[str, Tensor]) -> Watch:
    """What one forward of the model does. The model keeps the hooks: give one that is used for nothing else."""
    with Watch(model) as watch:
        model(**inputs)
    return watch
