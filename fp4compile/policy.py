"""Which matmuls of a model take part, and why: a policy, resolved on a module tree into decisions with
reasons.

What a matmul that takes part gets is the recipe's matter. Shapes are not known here; the graph decides what
they forbid.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast, get_args

from torch import nn

from .config import as_object, bad_value, canonical_json, is_count, read_object
from .decisions import Choice, Decision, Decisions, Table, merge
from .errors import ConfigError, Fp4Warning
from .modules import ModuleTree, NamedParameter, ancestors, clean_name, matches, site_name
from .recipe import ROLES, Precision, Role

__all__ = ["Choice", "Decision", "Decisions", "Policy", "clean_name", "default_ends", "resolve"]

HEAD_NAMES = ("lm_head", "head", "output", "embed_out", "classifier", "score")
"""Last components of the names that an output head usually has."""

RolePrecisions = tuple[tuple[Role, Precision], ...]
Overrides = tuple[tuple[str, RolePrecisions], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Policy:
    """Which matmuls are done in FP4. A pattern is a case-sensitive glob on the name of a module or parameter;
    it also holds for everything in a module that it matches ("layers.3" for "layers.3.mlp.up").

    For each GEMM of each weight the first of these that applies decides: an override; the weight belongs to a
    convolution or a norm (bf16); a skip pattern (bf16); no include pattern (bf16); embedding or output head
    (bf16); the first or last blocks (bf16); K or N below ``min_size`` (bf16). What is left is done as the
    recipe says.

    Raises ConfigError naming field, value and what is allowed.
    """

    include: str | Sequence[str] = ("*",)
    """Patterns of what may take part. Stored as a tuple, like ``skip``; one string is one pattern."""

    skip: str | Sequence[str] = ()
    """Patterns of what stays bf16."""

    first: int | None = None
    """How many of the first blocks stay bf16; None is the rule of ``default_ends``."""

    last: int | None = None
    """How many of the last blocks stay bf16; None is the rule of ``default_ends``."""

    blocks: str | None = None
    """Name or glob of the block list: "layers", "model.layers.*". None finds it
    (``ModuleTree.find_blocks``)."""

    overrides: Mapping[str, Any] | Sequence[tuple[str, Any]] = ()
    """Pattern -> "recipe", "nvfp4", "mxfp4" or "bf16", for all GEMMs or by role: {"*.wo": {"forward":
    "bf16"}}. The first matching pattern that names the role decides, in the order given. Stored as pairs of
    tuples."""

    min_size: int = 16
    """Matmuls with K or N below this stay bf16."""

    keep_head: bool = True
    """Whether embeddings and the output head stay bf16. The head is a weight outside the blocks that is tied
    to an embedding, has as many output features as an embedding has entries (unless it is inside a block of another
    list: an encoder's layers may be as wide as a table of positions is long), or is called by one of HEAD_NAMES."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "include", _patterns("include", self.include))
        object.__setattr__(self, "skip", _patterns("skip", self.skip))
        object.__setattr__(self, "overrides", _overrides(self.overrides))
        for field in ("first", "last"):
            if getattr(self, field) is not None and not is_count(getattr(self, field)):
                raise bad_value(Policy, field, getattr(self, field), "a number of blocks, or None for the default rule")
        if self.blocks is not None and not isinstance(self.blocks, str):
            raise bad_value(Policy, "blocks", self.blocks, "the name or a glob of the block list, or None to find it")
        if not is_count(self.min_size, least=1):
            raise bad_value(Policy, "min_size", self.min_size, "an int of at least 1")
        if not isinstance(self.keep_head, bool):
            raise bad_value(Policy, "keep_head", self.keep_head, "True or False")

    @classmethod
    def of(cls, value: Policy | Mapping[str, Any] | None) -> Policy:
        """What an option may hold, as a Policy: one, a mapping of its fields, or None for the default."""
        if isinstance(value, Policy):
            return value
        return cls() if value is None else cls.from_dict(value)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Policy:
        """A policy from its fields; an unknown one is a ConfigError that lists those there are."""
        return cls(**as_object(cls, value))

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """The inverse of ``to_json``."""
        return cls(**read_object(cls, text))

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain JSON values. Overrides are a list of pairs, since their order has a
        meaning."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        overrides = [[pattern, dict(roles)] for pattern, roles in plain.pop("overrides")]
        return {**plain, "include": list(self.include), "skip": list(self.skip), "overrides": overrides}

    def to_json(self) -> str:
        """Canonical JSON: equal policies give the same text."""
        return canonical_json(self.to_dict())

    def ends(self, blocks: int) -> tuple[int, int]:
        """How many of the first and of the last of that many blocks stay bf16."""
        first, last = default_ends(blocks)
        return first if self.first is None else self.first, last if self.last is None else self.last

    def patterns(self) -> list[tuple[str, str]]:
        """(field, pattern) of every pattern on weights."""
        fields = (("include", self.include), ("skip", self.skip), ("overrides", dict(self._overrides)))
        return [(field, pattern) for field, patterns in fields for pattern in patterns]

    def override(self, name: str, role: Role, counts: Callable[[str], bool] | None = None) -> Choice | None:
        """The choice of the first override that names the role and matches the name, of the patterns that count."""
        for pattern, roles in self._overrides:
            precision = dict(roles).get(role)
            if precision is not None and (counts is None or counts(pattern)) and matches(pattern, name):
                return Choice(precision, f"override {pattern!r}")
        return None

    def __repr__(self) -> str:
        """The fields that differ from the default policy. Evaluates to an equal policy."""
        fields = (field for field in dataclasses.fields(self) if getattr(self, field.name) != field.default)
        return f"Policy({', '.join(f'{field.name}={getattr(self, field.name)!r}' for field in fields)})"

    @property
    def _overrides(self) -> Overrides:
        return cast(Overrides, self.overrides)


def default_ends(blocks: int) -> tuple[int, int]:
    """How many first and last blocks stay bf16 by default, out of ``blocks``.

    round(2 n / 62) and round(8 n / 62): the 2 and 8 of 62 blocks that arXiv 2509.25149 keeps in its 12B
    model, scaled. So there is a last block from 4 blocks on, and a first from 16.
    """
    return round(2 * blocks / 62), round(8 * blocks / 62)


def resolve(model: nn.Module, policy: Policy) -> Decisions:
    """What ``policy`` decides for every parameter and module of ``model``, which is only read.

    Warns (Fp4Warning) about a pattern that matches nothing. Raises ConfigError if ``first`` or ``last`` keeps
    blocks in bf16 and the model has no list of blocks.
    """
    warn_unmatched(policy, [model])
    return decide(model, policy)


def decide(model: nn.Module, policy: Policy) -> Decisions:
    """``resolve`` without a word about patterns, for a model that may be one of several."""
    tree = ModuleTree(model)
    blocks = tree.find_blocks(policy.blocks)
    if not blocks and (policy.first or policy.last):
        raise ConfigError(
            f"Policy(first={policy.first}, last={policy.last}) counts blocks and no list of blocks was "
            f"found in {type(model).__name__}: name it with Policy(blocks=...), or, if this is one block of "
            "a model that is compiled block by block, use prepare() on the whole model and compile_blocks()"
        )
    rules = _Rules(policy, tree, blocks)
    owned: dict[str, list[NamedParameter]] = {name: [] for name in tree.inner}
    names: dict[int, list[str]] = {}
    for parameter in tree.parameters:
        owned[parameter.owner].append(parameter)
        names.setdefault(id(parameter.value), []).append(parameter.name)
    parameters = {p.name: rules.decide(p.name, [p]) for p in tree.parameters}
    modules = {name: rules.decide(name, own) for name, own in owned.items()}
    aliases = sorted(tuple(sorted(group)) for group in names.values() if len(group) > 1)
    shared: dict[str, Decision] = {}
    for group in aliases:
        if len({parameters[name] for name in group}) > 1:
            shared.update(dict.fromkeys(group, merge([parameters[name] for name in group])))
    return Decisions(_table(parameters), _table(modules), tuple(aliases), _table(shared), policy.min_size)


NAMELESS = "no module owns it, so no rule by name can hold; include it by this name"
"""Why a parameter stays in bf16 that is handed to a function by itself."""


def decide_nameless(names: Iterable[str], policy: Policy) -> Decisions:
    """What ``policy`` decides for parameters that no module owns, by the names that a report gives them.

    Rules by name (head, blocks, patterns for all) would be guesses: such a parameter stays in bf16, unless an override,
    or an include pattern that is not for all, gives its name or the beginning of it.
    """
    return Decisions(_table({name: _decide_nameless(name, policy) for name in names}), (), min_size=policy.min_size)


def _decide_nameless(name: str, policy: Policy) -> Decision:
    excluded = _excluded(policy, name)
    meant = [pattern for pattern in policy.include if matches(pattern, name) and _names(pattern)]
    if excluded:
        general = Choice("bf16", excluded)
    else:
        general = Choice("recipe", f"include {meant[0]!r}") if meant else Choice("bf16", NAMELESS)
    overrides = (policy.override(name, role, _names) for role in ROLES)
    return Decision(*(choice or general for choice in overrides))


def _names(pattern: str) -> bool:
    """Whether a pattern gives the name that it is for, or the beginning of it: no wildcard comes first."""
    return not pattern.startswith(("*", "?", "["))


class _Rules:
    """The policy's rules against the facts of one model: which block a name is in, and what a head looks
    like."""

    def __init__(self, policy: Policy, tree: ModuleTree, blocks: Sequence[str]) -> None:
        self.policy = policy
        self.index = {name: index for index, name in enumerate(blocks)}
        embeddings = [parameter for parameter in tree.parameters if parameter.is_embedding]
        self.vocabularies = {parameter.value.shape[0] for parameter in embeddings}
        self.listed = tree.listed
        self.embedding_of = {id(parameter.value): parameter.owner for parameter in embeddings}

    def decide(self, name: str, owned: Sequence[NamedParameter]) -> Decision:
        """The decision for a parameter, or for a module with the parameters that it owns."""
        general = self._general(name, owned)
        return Decision(*(self.policy.override(name, role) or general for role in ROLES))

    def _general(self, name: str, owned: Sequence[NamedParameter]) -> Choice:
        reason = (
            self._no_matmul(owned)
            or _excluded(self.policy, name)
            or (self._head(name, owned) if self.policy.keep_head else None)
            or self._end(name)
        )
        return Choice("bf16", reason) if reason else Choice("recipe", "recipe")

    def _no_matmul(self, owned: Sequence[NamedParameter]) -> str | None:
        kinds = [type(parameter.module).__name__ for parameter in owned if parameter.is_of_no_matmul]
        return f"{kinds[0]}, not a matmul" if kinds else None

    def _head(self, name: str, owned: Sequence[NamedParameter]) -> str | None:
        if any(parameter.is_embedding for parameter in owned):
            return "embedding"
        if self._block(name) is not None:
            return None
        for weight in owned:
            embedding = self.embedding_of.get(id(weight.value))
            if embedding is not None:
                return f"output head: tied to {embedding}"
            in_list = not self.listed.isdisjoint(ancestors(weight.owner))
            if weight.is_weight and not in_list and _out_features(weight) in self.vocabularies:
                return f"output head: {_out_features(weight)} outputs, like an embedding"
        last = site_name(name).rpartition(".")[2]
        return f"output head: called {last}" if last in HEAD_NAMES else None

    def _end(self, name: str) -> str | None:
        block = self._block(name)
        if block is None:
            return None
        count = len(self.index)
        first, last = self.policy.ends(count)
        if block >= count - last:
            return f"last {last} of {count} blocks"
        return f"first {first} of {count} blocks" if block < first else None

    def _block(self, name: str) -> int | None:
        return next((self.index[part] for part in (name, *ancestors(name)) if part in self.index), None)


def _excluded(policy: Policy, name: str) -> str | None:
    for pattern in policy.skip:
        if matches(pattern, name):
            return f"skip {pattern!r}"
    included = any(matches(pattern, name) for pattern in policy.include)
    return None if included else "not in include"


def _out_features(weight: NamedParameter) -> int:
    """Output features of the owner's matmul: its own word, else the rows, as in w [N, K]."""
    for attribute in ("out_features", "nf"):  # nf: the [in, out] Conv1D of GPT-2
        features = getattr(weight.module, attribute, None)
        if isinstance(features, int):
            return features
    return weight.value.shape[0]


def warn_unmatched(policy: Policy, models: Iterable[nn.Module], nameless: Iterable[str] = ()) -> None:
    """Warn (Fp4Warning) about each pattern that matches nothing in the models and no parameter beside them."""
    trees = [ModuleTree(model) for model in models]
    names = [name for tree in trees for name in (*filter(None, tree.inner), *(p.name for p in tree.parameters))]
    names += nameless
    unmatched = [
        (field, pattern)
        for field, pattern in policy.patterns()
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names)
    ]
    if policy.blocks is not None and not any(tree.find_blocks(policy.blocks) for tree in trees):
        unmatched.append(("blocks", policy.blocks))
    for field, pattern in unmatched:
        close = _close_names(pattern, names)
        hint = f"; close to it: {', '.join(close)}" if close else ""
        message = f"Policy.{field} pattern {pattern!r} matches no module and no parameter of the model{hint}"
        warnings.warn(message, Fp4Warning, stacklevel=4)


def _close_names(pattern: str, names: Iterable[str]) -> list[str]:
    """Up to 3 names, or last components of names, that are close to what is fixed in the pattern."""
    fixed = pattern.replace("*", "").strip(".")
    candidates = {name for full in names for name in (full, full.rpartition(".")[2])}
    return difflib.get_close_matches(fixed, sorted(candidates), n=3)


def _table(decisions: Mapping[str, Decision]) -> Table:
    return tuple(sorted(decisions.items(), key=lambda entry: entry[0]))


def _patterns(field: str, value: object) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, (tuple, list)) or not all(isinstance(pattern, str) for pattern in patterns):
        raise bad_value(Policy, field, value, "a glob on names, or a list of them")
    return tuple(patterns)


def _overrides(value: object) -> Overrides:
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (tuple, list)) or not all(isinstance(p, (tuple, list)) and len(p) == 2 for p in pairs):
        raise bad_value(Policy, "overrides", value, "a mapping from a pattern to a precision or {role: precision}")
    return tuple((_override_pattern(pattern), _role_precisions(given)) for pattern, given in pairs)


def _override_pattern(pattern: object) -> str:
    if not isinstance(pattern, str):
        raise bad_value(Policy, "overrides", pattern, "keyed by globs on names")
    return pattern


def _role_precisions(value: object) -> RolePrecisions:
    """Pairs in the order of ROLES, from one precision for all, a mapping by role, or such pairs."""
    if isinstance(value, str):
        value = dict.fromkeys(ROLES, value)
    elif isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        value = dict(value)
    if (
        not isinstance(value, Mapping)
        or not value
        or any(role not in ROLES for role in value)
        or any(precision not in get_args(Precision) for precision in value.values())
    ):
        allowed = ", ".join(map(repr, get_args(Precision)))
        raise bad_value(Policy, "overrides", value, f"one of {allowed}, or those by role ({', '.join(ROLES)})")
    return tuple((role, value[role]) for role in ROLES if role in value)
