"""The plan for a model, made before it is compiled or wrapped, and block-wise compilation by that plan.

Blocks that are compiled one by one share code and see only relative names, so no rule inside a graph can tell
the last block from the first. The decisions are therefore made here and travel as an option with value
equality: blocks with equal decisions share one compiled graph. Nothing is written onto a module.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from .decisions import Choice, Decisions
from .errors import ConfigError
from .modules import ModuleTree, NamedParameter, ancestors, clean_name
from .policy import Policy, resolve
from .recipe import ROLES, Recipe, Role
from .table import table


@dataclasses.dataclass(frozen=True)
class Row:
    """What a matmul with one weight gets, by role, and why. A weight tied to others has a row under each
    name.

    ``forward``, ``dgrad``, ``wgrad``: "nvfp4", "mxfp4", "bf16", or both formats where the operands' differ,
    as in "nvfp4/bf16". ``block`` is the block that the weight is in, "" outside. ``matmul`` is False for a
    weight whose module is known to use it otherwise: an embedding, a convolution, a norm.
    """

    name: str
    block: str
    shape: tuple[int, ...]
    matmul: bool
    forward: str
    dgrad: str
    wgrad: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What recipe and policy mean for one model. Made by ``prepare``; print it to see every weight's
    decision."""

    recipe: Recipe
    policy: Policy
    decisions: Decisions
    blocks: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def options(self) -> dict[str, Any]:
        """For the whole model: ``torch.compile(model, backend="nvfp4", options=plan.options)``."""
        return {"recipe": self.recipe, "policy": self.decisions}

    def block_options(self, name: str) -> dict[str, Any]:
        """For one block compiled by itself. Equal for blocks with equal decisions."""
        if clean_name(name) not in self.blocks:
            raise ConfigError(f"{name!r} is no block of this plan; its blocks are {_ranges(self.blocks)}")
        return {"recipe": self.recipe, "policy": self.decisions.for_block(name)}

    def to_dict(self) -> dict[str, Any]:
        """Recipe, policy, blocks and rows as plain JSON values."""
        return {
            "recipe": self.recipe.to_dict(),
            "policy": self.policy.to_dict(),
            "blocks": list(self.blocks),
            "rows": [{**dataclasses.asdict(row), "shape": list(row.shape)} for row in self.rows],
        }

    def __str__(self) -> str:
        blocks = f"blocks ({len(self.blocks)}): {_ranges(self.blocks) or 'none found'}"
        head = (repr(self.recipe), repr(self.policy), blocks, "")
        return "\n".join([*head, _table(self.rows), "", *_totals(self)])


def prepare(
    model: nn.Module,
    recipe: Recipe | str | None = None,
    policy: Policy | Mapping[str, Any] | None = None,
) -> Plan:
    """Decide for every weight of ``model``, which is only read; before compiling, wrapping and sharding.

    recipe: a Recipe or the name of one; None is NVIDIA's.
    policy: a Policy or a mapping of its fields; None is the default policy.

    Warns (Fp4Warning) about patterns that match nothing; raises ConfigError for what cannot be honoured.
    """
    recipe, policy = Recipe.of(recipe), Policy.of(policy)
    decisions = resolve(model, policy)
    tree = ModuleTree(model)
    blocks = tree.find_blocks(policy.blocks)
    rows = tuple(
        _row(parameter, blocks, recipe, policy, decisions)
        for parameter in tree.parameters
        if parameter.value.dim() >= 2
    )
    return Plan(recipe, policy, decisions, blocks, rows)


def compile_blocks(model: nn.Module, plan: Plan, **compile_kwargs: Any) -> None:
    """Compile the plan's blocks in place with the nvfp4 backend. What is outside the blocks stays eager.

    The blocks are found by name, also where checkpoint_wrapper, fully_shard or DistributedDataParallel came
    on top since ``prepare``; the outermost wrapper is compiled. ``compile_kwargs`` go to
    ``nn.Module.compile``; ``options`` among them are further options of the backend.

    Raises ConfigError before anything is compiled: without blocks, if one is missing or already wrapped by
    torch.compile, and if blocks with one forward have more different decisions than torch compiles variants
    of a function, since it would run the rest eagerly. Variants for shapes or evaluation come on top.
    """
    extra = _extra_options(compile_kwargs)
    found = ModuleTree(model).outer
    blocks = {name: _block(found, name) for name in plan.blocks}
    if not blocks:
        raise ConfigError(
            "the plan has no blocks to compile: name them with prepare(policy=Policy(blocks=...)), or "
            'compile the whole model with torch.compile(model, backend="nvfp4", options=plan.options)'
        )
    options = {name: plan.block_options(name) for name in blocks}
    _check_variants(blocks, options)
    kwargs = {key: value for key, value in compile_kwargs.items() if key != "options"}
    for name, block in blocks.items():
        block.compile(backend="nvfp4", options={**extra, **options[name]}, **kwargs)


def _extra_options(compile_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if "backend" in compile_kwargs:
        raise ConfigError("compile_blocks compiles with the nvfp4 backend; for another one call block.compile yourself")
    if compile_kwargs.get("mode") is not None:
        raise ConfigError('torch.compile takes either mode or options: give options={"mode": ...} instead of mode')
    extra = dict(compile_kwargs.get("options") or {})
    for key in ("recipe", "policy"):
        if key in extra:
            raise ConfigError(f"options[{key!r}] comes from the plan: give it to prepare()")
    return extra


def _block(found: Mapping[str, nn.Module], name: str) -> nn.Module:
    block = found.get(name)
    if block is None:
        raise ConfigError(f"the model has no module {name!r}, a block of the plan: call prepare() on it")
    if any(child == "_orig_mod" for child, _ in block.named_children()):
        raise ConfigError(f"block {name!r} is compiled already: take torch.compile off before compile_blocks")
    return block


def _check_variants(blocks: Mapping[str, nn.Module], options: Mapping[str, Mapping[str, Any]]) -> None:
    from .compat import recompile_limit  # late: it imports much of torch's compiler

    variants: dict[Callable[..., Any], set[Decisions]] = {}
    for name, block in blocks.items():
        forward = type(block).forward  # what Dynamo counts by; fully_shard's classes inherit it
        variants.setdefault(forward, set()).add(options[name]["policy"])
    limit = recompile_limit()
    for forward, distinct in variants.items():
        if len(distinct) > limit:
            raise ConfigError(
                f"blocks that run {forward.__qualname__} have {len(distinct)} different "
                f"sets of decisions and torch compiles {limit} variants of one function: use fewer distinct "
                "overrides, compile the whole model with plan.options, or raise "
                "torch._dynamo.config.recompile_limit"
            )


# --- rows -----------------------------------------------------------------------------------------


def _row(weight: NamedParameter, blocks: Sequence[str], recipe: Recipe, policy: Policy, decisions: Decisions) -> Row:
    decision = decisions.of_parameter(weight.name)
    shape = tuple(weight.value.shape)
    shown = {role: _shown(role, decision.choice(role), shape, recipe, policy) for role in ROLES}
    reasons = {why for _, why in shown.values()}
    by_role = "; ".join(f"{role}: {why}" for role, (_, why) in shown.items())
    reason = reasons.pop() if len(reasons) == 1 else by_role
    block = next((name for name in (weight.name, *ancestors(weight.name)) if name in blocks), "")
    forward, dgrad, wgrad = (precision for precision, _ in shown.values())
    return Row(weight.site, block, shape, weight.is_weight, forward, dgrad, wgrad, reason)


def _shown(role: Role, choice: Choice, shape: Sequence[int], recipe: Recipe, policy: Policy) -> tuple[str, str]:
    """(format, reason) of one GEMM."""
    if choice.precision == "bf16":
        return "bf16", choice.reason
    spec = recipe.gemm(role, choice.precision)
    if spec is None:
        return "bf16", "the recipe keeps this GEMM in bf16"
    smallest = min(shape[-2:])
    if choice.precision == "recipe" and smallest < policy.min_size:
        return "bf16", f"a side of {smallest}, below min_size {policy.min_size}"
    left, right = spec.left.format, spec.right.format
    return left if left == right else f"{left}/{right}", choice.reason


# --- text -----------------------------------------------------------------------------------------


def _table(rows: Sequence[Row]) -> str:
    """A table in which rows that differ in nothing but the block are one line."""
    merged: dict[Row, list[str]] = {}
    for row in rows:
        parent = row.block.rpartition(".")[0]
        inside = row.name[len(row.block) :].removeprefix(".") if row.block else row.name
        merged.setdefault(dataclasses.replace(row, name=inside, block=parent), []).append(row.block)
    cells = []
    for row, blocks in merged.items():
        name = ".".join(filter(None, (_ranges(blocks), row.name)))
        cells.append((name, " x ".join(map(str, row.shape)), row.forward, row.dgrad, row.wgrad, row.reason))
    return table("Weights", ("weight", "shape", *ROLES, "reason"), cells)


def _ranges(blocks: Sequence[str]) -> str:
    """``layers.[0-5,7]`` for blocks of one list, in the order given; names of several lists one after the
    other."""
    lists: dict[str, list[str]] = {}
    for block in blocks:
        parent, _, last = block.rpartition(".")
        lists.setdefault(parent, []).append(last)
    return ", ".join(".".join(filter(None, (parent, _range(names)))) for parent, names in lists.items())


def _range(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    runs: list[list[str]] = []
    for name in names:
        if runs and name.isdecimal() and runs[-1][-1].isdecimal() and int(name) == int(runs[-1][-1]) + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return "[" + ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) + "]"


def _totals(plan: Plan) -> Iterator[str]:
    rows = [row for row in plan.rows if row.matmul]
    sizes = [math.prod(row.shape) for row in rows]
    total = sum(sizes)
    shares = ""
    for role in ROLES:
        low = sum(size for row, size in zip(rows, sizes, strict=True) if getattr(row, role) != "bf16")
        shares += f", {role} {low / max(total, 1):.1%}"
    yield f"{len(rows)} weights that a matmul may read, {total:,} elements; in FP4{shares}"
    outside = [row.name for row in rows if not row.block]
    if plan.blocks and outside:
        more = f" and {len(outside) - 8} more" if len(outside) > 8 else ""
        yield f"outside the blocks, so left eager by compile_blocks: {', '.join(outside[:8])}{more}"
