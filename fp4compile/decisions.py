"""What a policy decided for one model: a table from names to precisions, as the compiled graph asks for it.

The table carries no module and no tensor. It is an option of the compiled region, so it has value equality
and a hash: blocks whose tables are equal share one compiled graph. The reasons are for people and take no
part in that.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from .config import canonical_json
from .errors import ConfigError, RewriteError
from .modules import clean_name, site_name
from .recipe import ROLES, Precision, Role


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is decided for one GEMM: "recipe" (as the recipe says), a format for both operands, or "bf16"."""

    precision: Precision
    reason: str = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Decision:
    """What is decided for the three GEMMs of one weight."""

    forward: Choice
    dgrad: Choice
    wgrad: Choice

    @classmethod
    def all_roles(cls, choice: Choice) -> Decision:
        return cls(choice, choice, choice)

    def choice(self, role: Role) -> Choice:
        chosen: Choice = getattr(self, role)
        return chosen

    def precisions(self) -> tuple[Precision, Precision, Precision]:
        """The precisions of forward, dgrad and wgrad."""
        return self.forward.precision, self.dgrad.precision, self.wgrad.precision


Table = tuple[tuple[str, Decision], ...]


@dataclasses.dataclass(frozen=True)
class Decisions:
    """The decisions for all modules and parameters below one root, the names relative to it. Made by
    ``resolve``.

    ``parameters`` has every parameter under each of its names, ``modules`` every module ("" is the root),
    both sorted. ``aliases`` groups the names of tied parameters. ``shared`` has, for tied parameters whose
    names are decided differently, what holds where none of these names applies; see ``lookup``. ``min_size``:
    matmuls with K or N below it stay bf16 unless an override names their format; only the graph knows the
    shapes.
    """

    parameters: Table
    modules: Table
    aliases: tuple[tuple[str, ...], ...] = ()
    shared: Table = ()
    min_size: int = 16

    def lookup(self, module: str, params: Sequence[str]) -> tuple[str, Decision]:
        """The site name and the decision of a matmul.

        module: name of the module that executes it, "" for the root
        params: names of the parameters that the weight operand is made of, any of a tied parameter's names

        A parameter that the module owns, under whatever name, is decided by that name; the site is then
        called like the module if the parameter is its ``weight``, else like the parameter. Used from another
        module (in a functional call) the site is called like the parameter, and if its aliases disagree bf16
        wins. A weight made of several parameters is in bf16 where one of them is. Without params the module's
        own decision holds. Raises RewriteError for a name that the table does not have.
        """
        if not params:
            name = _find(self._modules, module)
            if name is None:
                raise self._unknown("module", module, self._modules)
            return name, self._modules[name]
        sites = [self._site(_find(self._modules, module), param) for param in params]
        names = "+".join(dict.fromkeys(name for name, _ in sites))
        return names, merge([decision for _, decision in sites])

    def _site(self, module: str | None, param: str) -> tuple[str, Decision]:
        name = _find(self._parameters, param)
        if name is None:
            raise self._unknown("parameter", param, self._parameters)
        for alias in (name, *self._aliases.get(name, ())):
            if alias.rpartition(".")[0] == module:
                return site_name(alias), self._parameters[alias]
        return site_name(name), self._shared.get(name, self._parameters[name])

    def of_parameter(self, name: str) -> Decision:
        """The decision for a parameter under one of its names; RewriteError if there is none of that name."""
        if name not in self._parameters:
            raise self._unknown("parameter", name, self._parameters)
        return self._parameters[name]

    def for_block(self, prefix: str) -> Decisions:
        """The decisions below the module ``prefix``, by names relative to it: what that block, compiled
        alone, asks."""
        prefix = clean_name(prefix)
        if prefix not in self._modules:
            raise ConfigError(f"there is no module {prefix!r}{_closest(prefix, self._modules)}")
        groups = (tuple(_below(prefix, group)) for group in self.aliases)
        return Decisions(
            parameters=_table_below(prefix, self.parameters),
            modules=_table_below(prefix, self.modules),
            aliases=tuple(sorted(group for group in groups if len(group) > 1)),
            shared=_table_below(prefix, self.shared),
            min_size=self.min_size,
        )

    def to_json(self) -> str:
        """Canonical JSON of everything but the reasons: equal decisions give the same text."""
        value: dict[str, Any] = {
            part: {name: decision.precisions() for name, decision in getattr(self, part)}
            for part in ("parameters", "modules", "shared")
        }
        return canonical_json({**value, "aliases": self.aliases, "min_size": self.min_size})

    def _unknown(self, what: str, name: str, known: Mapping[str, Decision]) -> RewriteError:
        return RewriteError(
            f"a matmul of the graph belongs to {what} {name!r}, which these decisions do not have"
            f"{_closest(name, known)}. They were made for another model, before its modules changed, or for "
            "a model that torch compiles in parts (graph breaks, FSDP): call prepare() on the model that is "
            "compiled, and compile_blocks() where that is block by block"
        )

    @cached_property
    def _parameters(self) -> dict[str, Decision]:
        return dict(self.parameters)

    @cached_property
    def _modules(self) -> dict[str, Decision]:
        return dict(self.modules)

    @cached_property
    def _shared(self) -> dict[str, Decision]:
        return dict(self.shared)

    @cached_property
    def _aliases(self) -> dict[str, tuple[str, ...]]:
        return {name: group for group in self.aliases for name in group}


def merge(decisions: Sequence[Decision]) -> Decision:
    """One decision where several apply: bf16 for a role where one of them says so or where they name two
    formats."""
    return Decision(*(_merge_choices([decision.choice(role) for decision in decisions]) for role in ROLES))


def _merge_choices(choices: Sequence[Choice]) -> Choice:
    for choice in choices:
        if choice.precision == "bf16":
            return choice
    if len(set(choices)) == 1:
        return choices[0]
    named = ", ".join(f"{choice.precision} ({choice.reason})" for choice in dict.fromkeys(choices))
    return Choice("bf16", f"one weight, several decisions: {named}")


def _find(known: Mapping[str, Decision], name: str) -> str | None:
    """The table's form of a name from a graph. DistributedDataParallel, put around a model after the table
    was made, adds a component "module" that only the table can tell from an author's own."""
    cleaned = clean_name(name)
    parts = cleaned.split(".")
    without = [".".join(parts[:i] + parts[i + 1 :]) for i, part in enumerate(parts) if part == "module"]
    return next((candidate for candidate in (cleaned, *without) if candidate in known), None)


def _below(prefix: str, names: Iterable[str]) -> Iterator[str]:
    """Those of the names that are the module ``prefix`` or in it, relative to it."""
    for name in names:
        if not prefix or name == prefix or name.startswith(f"{prefix}."):
            yield name[len(prefix) :].removeprefix(".")


def _table_below(prefix: str, table: Table) -> Table:
    found = ((relative, decision) for name, decision in table for relative in _below(prefix, (name,)))
    return tuple(sorted(found, key=lambda entry: entry[0]))


def _closest(name: str, known: Mapping[str, Decision]) -> str:
    close = difflib.get_close_matches(name, list(known), n=3)
    return f" (closest: {', '.join(map(repr, close))})" if close else ""
