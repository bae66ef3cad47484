"""A model's module tree under the names that its author gave: wrappers removed, parameters listed, blocks
found.

It reads the tree and decides nothing; what follows from a name is the policy's matter.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property

from torch import Tensor, nn

WRAPPER_COMPONENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""What torch.compile, checkpoint_wrapper and FSDP put into a name. No author writes these, so the text is
enough."""

_MANAGED = "_is_fsdp_managed_module"
"""Set by FullyShardedDataParallel."""

_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
"""They put the plain word "module" into a name, which an author may use too: only the class tells."""

_NO_MATMUL = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.LayerNorm, nn.RMSNorm),
)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_LISTS = (nn.ModuleList, nn.ModuleDict)  # they have no forward, so they are never a block themselves


def clean_name(name: str) -> str:
    """A module or parameter name without the components that wrappers put in."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_COMPONENTS)


def join(prefix: str, name: str) -> str:
    """``prefix.name``, where either may be the root's empty name."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def ancestors(name: str) -> Iterator[str]:
    """Names of the modules that a module or parameter is in, from the inside out, without the root."""
    while name := name.rpartition(".")[0]:
        yield name


def matches(pattern: str, name: str) -> bool:
    """Whether a case-sensitive glob names ``name`` or a module that it is in."""
    return any(fnmatch.fnmatchcase(part, pattern) for part in (name, *ancestors(name)))


@dataclasses.dataclass(frozen=True, eq=False)
class NamedParameter:
    """A parameter and the module that owns it directly. Tied parameters are several of these with one
    ``value``."""

    name: str
    owner: str
    module: nn.Module
    value: Tensor

    @property
    def is_embedding(self) -> bool:
        return isinstance(self.module, _EMBEDDINGS)

    @property
    def is_of_no_matmul(self) -> bool:
        """Whether the owner's class tells that no matmul reads it: convolutions and norms."""
        return isinstance(self.module, _NO_MATMUL)

    @property
    def is_weight(self) -> bool:
        """Whether a matmul may read it, as far as the module tree tells."""
        return self.value.dim() >= 2 and not (self.is_embedding or self.is_of_no_matmul)

    @property
    def site(self) -> str:
        """The name that a report gives to a matmul with this weight."""
        return site_name(self.name)


def site_name(parameter: str) -> str:
    """A parameter's name without a last component ``weight``."""
    owner, _, last = parameter.rpartition(".")
    return owner if owner and last == "weight" else parameter


def views(module: nn.Module) -> dict[str, Tensor]:
    """The parameters that FullyShardedDataParallel keeps in a flat one and that are views of it, in plain attributes,
    while the forward runs."""
    if not getattr(module, _MANAGED, False):
        return {}
    return {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}


class ModuleTree:
    """The modules and parameters of ``model`` by cleaned name.

    A wrapper and the module inside share a name: ``outer`` has the wrapper, which is what the model calls,
    and ``inner`` the author's module. Modules and parameters that are reachable under several names have an
    entry for each.
    """

    def __init__(self, model: nn.Module) -> None:
        self.outer: dict[str, nn.Module] = {}
        self.inner: dict[str, nn.Module] = {}
        self.parameters: list[NamedParameter] = []
        self._names: dict[int, str] = {}
        self._of_parameter: dict[int, list[NamedParameter]] = {}
        cleaned: dict[str, str] = {}
        modules: dict[str, nn.Module] = {}
        for raw, module in model.named_modules(remove_duplicate=False):
            parent, _, last = raw.rpartition(".")
            wrapped = last in WRAPPER_COMPONENTS or (last == "module" and isinstance(modules[parent], _PARALLEL))
            name = cleaned[parent] if wrapped else join(cleaned.get(parent, ""), last)
            cleaned[raw], modules[raw] = name, module
            self.outer.setdefault(name, module)
            self.inner[name] = module
            self._names.setdefault(id(module), name)
            own_parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            for own, value in {**own_parameters, **views(module)}.items():
                named = NamedParameter(join(name, own), name, module, value)
                self.parameters.append(named)
                self._of_parameter.setdefault(id(value), []).append(named)
        self._children: dict[str, list[str]] = {}
        for name in self.inner:
            if name:
                self._children.setdefault(name.rpartition(".")[0], []).append(name)
        self._elements = Counter[str]()  # in weights that a matmul may read, by every module that they are in
        for parameter in self.parameters:
            if parameter.is_weight:
                for ancestor in ancestors(parameter.name):
                    self._elements[ancestor] += parameter.value.numel()

    def __len__(self) -> int:
        """How many modules it has, wrappers counted."""
        return len(self._names)

    def name_of(self, module: int) -> str | None:
        """The (first) name of the module with that ``id``; None if it is not in the tree."""
        return self._names.get(module)

    def names_of(self, parameter: object) -> list[NamedParameter]:
        """A parameter under each of its names."""
        return self._of_parameter.get(id(parameter), [])

    def find_blocks(self, pattern: str | None = None) -> tuple[str, ...]:
        """Names of the model's blocks in model order, the units that "the last 8 blocks" counts.

        pattern: a glob on module names; the outermost modules it matches are the blocks, except that a
        ModuleList or
            ModuleDict stands for its children, and so does a Sequential that is the only match. None finds
            the list by itself: the ModuleList, ModuleDict or Sequential with the most elements in matmul
            weights of children that are of one class, two of them at least. So a list of blocks wins over the
            lists inside a block, and of an encoder's and a decoder's the larger one is taken. Its blocks are
            all children with a matmul weight; of a Sequential only those of that class, since a Sequential
            may be a whole model with embedding and head.

        Empty if nothing is found. A module that is in the list several times counts once.
        """
        return self._matching_blocks(pattern) if pattern is not None else self._largest_list()

    @cached_property
    def listed(self) -> frozenset[str]:
        """The blocks of every list of the model: also of an encoder's where the decoder's list is the larger."""
        return frozenset(block for blocks, _ in self._lists() for block in blocks)

    def _matching_blocks(self, pattern: str) -> tuple[str, ...]:
        matching = {name: None for name in self.inner if fnmatch.fnmatchcase(name, pattern)}
        outermost = [name for name in matching if not any(ancestor in matching for ancestor in ancestors(name))]
        names: list[str] = []
        for name in outermost:
            module = self.inner[name]
            if isinstance(module, _LISTS) or (isinstance(module, nn.Sequential) and len(outermost) == 1):
                names.extend(self._children.get(name, ()))
            else:
                names.append(name)
        return tuple(self._distinct(names))

    def _largest_list(self) -> tuple[str, ...]:
        return max(self._lists(), key=lambda found: found[1], default=((), 0))[0]

    def _lists(self) -> Iterator[tuple[tuple[str, ...], int]]:
        """The blocks of every list that may be one of blocks, and the elements in matmul weights of those of one
        class."""
        for name, module in self.inner.items():
            if not isinstance(module, (*_LISTS, nn.Sequential)):
                continue
            blocks = self._distinct(child for child in self._children.get(name, ()) if self._may_be_block(child))
            classes = Counter(type(self.inner[block]) for block in blocks)
            kind, count = classes.most_common(1)[0] if classes else (None, 0)
            if count >= 2:
                alike = [block for block in blocks if type(self.inner[block]) is kind]
                elements = sum(self._elements[block] for block in alike)
                yield tuple(alike if isinstance(module, nn.Sequential) else blocks), elements

    def _may_be_block(self, name: str) -> bool:
        return bool(self._elements[name]) and not isinstance(self.inner[name], _LISTS)

    def _distinct(self, names: Iterable[str]) -> list[str]:
        first: dict[int, str] = {}
        for name in names:
            first.setdefault(id(self.inner[name]), name)
        return list(first.values())
