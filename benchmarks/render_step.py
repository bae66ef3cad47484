"""Tables of a training step for docs/performance.md, from what train_step_gpu.py wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import render_base as base

SETUPS = {"train_step_2048": "2048", "train_step_4096": "4096"}
SLOW = ("eager", "compiled-eager")
OURS = ("fp4 rows", "fp4 produced rows", "fp4 rotated columns", "fp4 amax", "pointwise", "matrix products")
RECIPES = {
    "train_step_2048_bound": {"bf16": "bf16", "nvfp4": "NVIDIA's", "nvfp4-bound": 'rotated_scale="bound"'},
    "train_step_2048_row": {"bf16": "bf16, again", "nvfp4": "NVIDIA's", "nvfp4-row": 'activation_scale="row"'},
}
"""File -> variant -> its name. The scales of rows in the first were of an earlier kernel."""
POOLED = "nvfp4-graphs"
"""A CUDA graph's memory belongs to its pool: the allocator does not tell what lives between forward and backward."""


def setups() -> Iterator[tuple[Mapping[str, Any], str, Mapping[str, Any]]]:
    """(whole record, name of the setup, its record)."""
    for name, setup in SETUPS.items():
        yield base.load(name), setup, base.part(name, "setups")[setup]


def steps() -> str:
    rows, notes = [], []
    for record, setup, found in setups():
        notes.append(base.environment(record["environment"]))
        model = f"{setup}: {_shape(found)}"
        slow = found["timings"]["all"]
        rows += [[model, *_step(row)] for row in record["rows"] if row["variant"] not in SLOW]
        by_variant = {row["variant"]: row for row in record["rows"]}
        rows += [[model, *_turn(by_variant[variant], slow)] for variant in slow]
    header = ["model", "variant", "ms", "of bf16", "peak GB", "of bf16", "kept for backward GB", "of bf16"]
    return f"{' '.join(dict.fromkeys(notes))}\n\n{base.table(header, rows)}"


def _shape(found: Mapping[str, Any]) -> str:
    model = found["setup"]["model"]
    return f"{model['layers']} layers of {model['dim']}, SwiGLU {model['hidden']}, {found['tokens']:,} tokens"


def _turn(row: Mapping[str, Any], slow: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A variant in the turns that the slow ones are in, too."""
    ms = slow[row["variant"]]["median_ms"]
    memory = _step(row)[3:] if row["variant"] in SLOW else [""] * 4
    where = "" if row["variant"] in SLOW else ", in their turns"
    return [row["variant"] + where, base.number(ms, 1), base.number(ms / slow["bf16"]["median_ms"], 3), *memory]


def _step(row: Mapping[str, Any]) -> list[str]:
    told = row["variant"] != POOLED
    return [
        row["variant"],
        base.number(row["ms"], 1),
        base.number(row["of bf16"], 3),
        base.number(row["peak GB"], 2),
        base.number(row["peak of bf16"], 3),
        base.number(row["saved GB"], 2) if told else "",
        base.number(row["saved of bf16"], 3) if told else "",
    ]


def step_marks() -> str:
    rows = [
        [setup, mark["what"], base.number(mark["value"], 3), f"{mark['mark']:g}", base.yes(mark["met"])]
        for _, setup, found in setups()
        for mark in found["marks"]
    ]
    return base.table(["model", "mark", "measured", "wanted", "met"], rows)


def step_profile() -> str:
    rows = []
    for _, setup, found in setups():
        for row in found["floors"]["nvfp4"]:
            numbers = [base.number(row[key], 1) for key in ("bf16 ms", "ms", "floor ms")]
            launches = "" if row["launches"] is None else str(row["launches"])
            rows.append([setup, row["group"], *numbers, launches, base.number(row["GB"], 1)])
    header = ["model", "kernels", "bf16 ms", "nvfp4 ms", "floor ms", "launches of ours", "GB they must move"]
    return base.table(header, rows)


def step_saved() -> str:
    rows = []
    for _, setup, found in setups():
        kinds = {variant: _kinds(found["variants"][variant]) for variant in ("bf16", "nvfp4")}
        for kind in dict.fromkeys([*kinds["bf16"], *kinds["nvfp4"]]):
            counts = [kinds[variant].get(kind, (0, 0)) for variant in ("bf16", "nvfp4")]
            if max(size for _, size in counts) > 5e7:
                cells = [f"{count} x, {size / 1e9:.2f} GB" if count else "" for count, size in counts]
                rows.append([setup, f"{kind[0]} {kind[1]}", *cells])
    return base.table(["model", "tensor", "kept by bf16", "kept by nvfp4"], rows)


def _kinds(variant: Mapping[str, Any]) -> dict[tuple[str, str], tuple[int, int]]:
    return {
        (one["dtype"], "x".join(map(str, one["shape"]))): (one["count"], one["bytes"])
        for one in variant["saved, largest"]
    }


def step_compile() -> str:
    rows = []
    for name, what in (
        ("train_step_2048_cold", "2048, cold"),
        ("train_step_2048_bound", "2048, cold, again"),
        ("train_step_2048_row", "2048, cold, again"),
        ("train_step_4096_warm", "4096, warm"),
    ):
        first = {row["variant"]: row["first step s"] for row in base.part(name, "rows")}
        ratio = first["nvfp4"] / first["bf16"]
        rows.append([what, base.number(first["bf16"], 1), base.number(first["nvfp4"], 1), base.number(ratio, 2)])
    return base.table(["first step", "bf16 s", "nvfp4 s", "ratio"], rows)


def step_recipes() -> str:
    rows = []
    for name in ("train_step_2048_bound", "train_step_2048_row"):
        found = base.part(name, "setups")["2048"]
        for row in base.part(name, "rows"):
            if row["variant"] in RECIPES[name]:
                kernels = _ours(found, row["variant"])
                rows.append(
                    [RECIPES[name][row["variant"]], *kernels, *map(base.number, (row["ms"], row["of bf16"]), (1, 3))]
                )
    header = ["recipe", *OURS, "all kernels ms", "a step ms", "of bf16"]
    return base.table(header, rows)


def _ours(found: Mapping[str, Any], variant: str) -> list[str]:
    """Milliseconds of one step by group, and of all kernels."""
    groups = found["profiles"][variant]["groups"]
    return [base.number(value, 1) for value in (*(groups.get(group, 0.0) for group in OURS), sum(groups.values()))]


SECTIONS = {
    "step": steps,
    "step marks": step_marks,
    "step profile": step_profile,
    "step saved": step_saved,
    "step recipes": step_recipes,
    "step compile": step_compile,
}
