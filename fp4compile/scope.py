"""Where the names in a captured graph start: the module trees that its parameters and calls belong to.

Dynamo may reach a parameter by any expression: an argument of a wrapper, a list, a closure, an attribute of an object.
The expression is followed object by object, and what it leads to is looked up by identity in the trees of the modules
on the way. So a name is that of ``named_modules``, however the model was called.

After a graph break, and under FSDP, torch compiles a model in parts, each a frame of its own that sees a block as if it
was alone. Its names start where the model does: at the outermost module that torch.compile was called for, which is in
the Python calls around the frame. What is compiled for one block is then used for others by torch; a guard lets it only
where the decisions are the same.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from . import compat
from .decisions import Decision, Decisions
from .errors import Fp4Error
from .modules import ModuleTree, views


@dataclasses.dataclass(frozen=True)
class Root:
    """A module that names are relative to. ``label`` tells it from the other roots of a graph."""

    label: str
    tree: ModuleTree
    module: nn.Module


@dataclasses.dataclass(frozen=True)
class Borrowed:
    """A module or parameter of the frame that has its name from a root which does not lie on the way to it."""

    step: compat.Step
    root: Root


class Scope:
    """Names for one graph under compilation.

    ``params``: an input of the graph, as AOTAutograd numbers or names it -> (label of the root, parameter name).
    ``nameless``: the parameters that no module owns, as far as the frame and the calls around it show; by a name made
    of Dynamo's expression, which in ``params`` has the root "".
    ``borrowed``: what the graph must not be used without.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        ways = dict(_parameters(gm))
        self._trees: dict[int, ModuleTree] = {}
        on_ways = [module for way in ways.values() for module in _modules_on(way)]
        # Largest first, so that of modules in one another the outermost is the root.
        self._candidates = sorted(_distinct([*on_ways, *modules_around()]), key=self._size, reverse=True)
        self._roots: dict[int, Root] = {}
        self.nameless: dict[str, Any] = {}
        self.borrowed: list[Borrowed] = []
        self.params = {key: self._name(way) for key, way in ways.items()}

    @property
    def roots(self) -> list[Root]:
        """The modules that names of parameters are relative to."""
        return list(self._roots.values())

    def _name(self, way: list[compat.Step]) -> tuple[str, str]:
        """(root's label, name) of the parameter at the end of a way."""
        home = self._home(way)
        if home is None:
            name = _name_of(way)
            self.nameless[name] = way[-1].value
            return "", name
        outer = next((one for one in self._candidates if self._tree(one).name_of(id(home)) is not None), home)
        root = self._root(outer, way)
        if all(module is not outer for module in _modules_on(way)):
            self._borrow(way, root)
        owner = next(reversed(_modules_on(way)), None)
        names = root.tree.names_of(way[-1].value)
        return root.label, next((named for named in names if named.module is owner), names[0]).name

    def _borrow(self, way: list[compat.Step], root: Root) -> None:
        """Not what the graph itself holds: it has no expression, and no other can take its place."""
        step = next((step for step in way if isinstance(step.value, nn.Module)), way[-1])
        if step.source is not None:
            self.borrowed.append(Borrowed(step, root))

    def call(self, node: fx.Node) -> tuple[str, str]:
        """(root's label, module name) of the module that a call of the graph runs in; ("", "") if no root has it."""
        module = compat.module_id(node)
        for root in self._roots.values():
            name = None if module is None else root.tree.name_of(module)
            if name is not None:
                return root.label, name
        return "", ""

    def _home(self, way: list[compat.Step]) -> nn.Module | None:
        """The first module on the way that has the parameter, else one that the frame or what is around it names."""
        others = [*self._candidates, *_modules(compat.local_values())]
        return next((one for one in [*_modules_on(way), *others] if self._tree(one).names_of(way[-1].value)), None)

    def _root(self, module: nn.Module, way: list[compat.Step]) -> Root:
        if id(module) not in self._roots:
            label = next((_name_of(way[: i + 1]) for i, step in enumerate(way) if step.value is module), "")
            label = label or type(module).__name__
            while label in {root.label for root in self._roots.values()}:
                label += "'"
            self._roots[id(module)] = Root(label, self._tree(module), module)
        return self._roots[id(module)]

    def _tree(self, module: nn.Module) -> ModuleTree:
        if id(module) not in self._trees:
            self._trees[id(module)] = ModuleTree(module)
        return self._trees[id(module)]

    def _size(self, module: nn.Module) -> int:
        return len(self._tree(module))


def _parameters(gm: fx.GraphModule) -> Iterator[tuple[int | str, list[compat.Step]]]:
    """(AOT input key, way to it) of every parameter the graph reads, as an input or as an attribute."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(placeholders):
        way = compat.way_to(node) or [compat.Step(None, None, node.name)]
        values = (node.meta.get("example_value"), way[-1].value)
        flat = [view for module in _modules_on(way)[-1:] for view in views(module).values()]
        # Without a way there still is an example, without an example a type.
        is_parameter = node.type is nn.Parameter or any(isinstance(value, nn.Parameter) for value in values)
        if is_parameter or any(view is way[-1].value for view in flat):
            yield index, way
    for name, parameter in gm.named_parameters():
        yield name, [compat.Step(parameter, None, name)]


def _name_of(way: Iterable[compat.Step]) -> str:
    """A way as a readable name: ``args.0.weights.w1``."""
    return ".".join(filter(None, (step.word for step in way)))


def _modules_on(way: Iterable[compat.Step]) -> list[nn.Module]:
    return list(_modules(step.value for step in way))


def modules_around(inside: bool = True) -> list[nn.Module]:
    """Modules in the Python calls around the frame under compilation, from the inside out; see ``compat.calls_around``.

    They are those that are called and, inside, those that functions name, directly or in an attribute of their first
    argument.
    """
    found: list[nn.Module] = []
    for called, named in compat.calls_around(inside):
        attributes = () if isinstance(called, nn.Module) or not inside else getattr(called, "__dict__", {}).values()
        found += _modules([called, *(named if inside else ()), *attributes])
    return _distinct(found)


def _modules(values: Iterable[Any]) -> Iterator[nn.Module]:
    return (value for value in values if isinstance(value, nn.Module))


def _distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for module in modules}.values())


# --- frames that torch uses for several modules ----------------------------------------------------------------------


class SameDecisions:
    """Whether for an object, a module or a parameter in a frame, the same is decided as for the one that the frame was
    compiled for.

    ``resolve`` decides for the model that an object is found in. Modules of one class are decided together, each once.
    """

    def __init__(self, borrowed: Borrowed, resolve: Callable[[nn.Module], Decisions]) -> None:
        self._model = weakref.ref(borrowed.root.module)
        self._resolve = resolve
        self._known: Any = WeakIdKeyDictionary()
        self._expected = self._decided(borrowed.step.value)

    def __call__(self, value: Any) -> bool:
        decided = self._decided(value) if isinstance(value, (nn.Module, Tensor)) else None
        return decided is not None and decided == self._expected

    def _decided(self, value: Any) -> Decisions | Decision | None:
        if value not in self._known:
            models = [self._model(), *reversed(modules_around())]
            if not any(self._learn(value, model) for model in models if model is not None):
                self._known[value] = None
        return self._known[value]

    def _learn(self, value: Any, model: nn.Module) -> bool:
        tree = ModuleTree(model)
        if tree.name_of(id(value)) is None and not tree.names_of(value):
            return False
        try:
            self._known.update(self._alike(value, model, tree))
        except Fp4Error:  # raised again when the object's frame is compiled, where its user sees it
            return False
        return True

    def _alike(self, value: Any, model: nn.Module, tree: ModuleTree) -> Iterator[tuple[Any, Decisions | Decision]]:
        """What is decided for the model's objects of a kind."""
        decisions = self._resolve(model)
        if isinstance(value, Tensor):
            for named in tree.parameters:
                yield named.value, decisions.lookup("", [named.name])[1]
            return
        for module in model.modules():
            name = tree.name_of(id(module))
            if type(module) is type(value) and name is not None:
                yield module, decisions.for_block(name)


def same_object(borrowed: Borrowed) -> Callable[[Any], bool]:
    """Whether an object is the one that a frame was compiled for."""
    return functools.partial(_is, weakref.ref(borrowed.step.value))


def _is(reference: weakref.ref[Any], value: Any) -> bool:
    return reference() is value
