"""The report: sites with their precisions and reasons, matmuls left alone, what is saved for backward, the graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from ..plan import LeftMatmul, SiteRecord
from ..recipe import ROLES
from ..table import table
from .roofline import Roofline
from .saved import SavedTensor

SMALL = 0.001
"""Share of the saved bytes below which a row of the table says nothing but how much it is."""


@dataclasses.dataclass(frozen=True)
class SavedBytes:
    """The tensors that the forward keeps for the backward, parameters and inputs not counted, and their bytes.

    ``packed_bytes`` are those of FP4 codes and scales among ``bytes``; ``baseline_bytes`` what the same model saves
    without this backend's rewriting.
    """

    tensors: tuple[SavedTensor, ...]
    baseline_bytes: int

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def packed_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors if tensor.packed)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        totals = {name: getattr(self, name) for name in ("bytes", "packed_bytes", "baseline_bytes")}
        return {**totals, "tensors": [tensor.to_dict() for tensor in self.tensors]}

    def __str__(self) -> str:
        """The same thing of several modules is one row, the largest rows first; the smallest are one row together."""
        groups: dict[tuple[Any, ...], list[SavedTensor]] = {}
        for tensor in self.tensors:
            operations = frozenset(operation for operation, _ in tensor.needed_by)
            groups.setdefault((tensor.what, tensor.dtype, operations), []).append(tensor)
        ordered = sorted(groups.values(), key=_bytes, reverse=True)
        rows = [self._row(group) for group in ordered if _bytes(group) >= SMALL * self.bytes]
        if small := [tensor for group in ordered if _bytes(group) < SMALL * self.bytes for tensor in group]:
            rows.append((f"less than {SMALL:.1%} each", "", "", "", *self._amounts(small)))
        columns = ("what", "module", "dtype", "needed by", "count", "bytes", "share")
        return table("Saved for backward", columns, rows) if rows else ""

    def _row(self, group: list[SavedTensor]) -> tuple[str, ...]:
        modules = _modules(tensor.module for tensor in group)
        return group[0].what, modules, group[0].dtype, _readers(group), *self._amounts(group)

    def _amounts(self, tensors: list[SavedTensor]) -> tuple[str, str, str]:
        size = _bytes(tensors)
        return str(len(tensors)), f"{size:,}", f"{size / max(self.bytes, 1):.1%}"


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``backend="nvfp4"`` does to a model. ``print`` it, or take ``to_dict()``.

    ``graphs`` maps "joint_before", "joint_after", "forward" and "backward" to ``torch.fx.GraphModule``: the last two
    after partitioning, "forward" alone for a model without gradients. A model that Dynamo splits into several graphs
    has "joint_before.1" and so on for the further ones. ``roofline`` is the prediction for ``explain``'s ``target``.
    """

    sites: tuple[SiteRecord, ...]
    matmuls_left: tuple[LeftMatmul, ...]
    saved_for_backward: SavedBytes
    graphs: Mapping[str, fx.GraphModule]
    roofline: Roofline | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything but the graphs, as JSON values; "roofline" only where there is one."""
        prediction = {} if self.roofline is None else {"roofline": self.roofline.to_dict()}
        return {
            "sites": [site.to_dict() for site in self.sites],
            "matmuls_left": [left.to_dict() for left in self.matmuls_left],
            "saved_for_backward": self.saved_for_backward.to_dict(),
            **prediction,
        }

    def __str__(self) -> str:
        prediction = "" if self.roofline is None else str(self.roofline)
        parts = [self._sites(), self._left(), self._totals(), str(self.saved_for_backward), prediction]
        return "\n\n".join(part for part in parts if part)

    def _sites(self) -> str:
        rows = [
            (
                site.fqn,
                site.kind,
                _shape(site.shape),
                *(getattr(site, role).precision for role in ROLES),
                _reasons(site),
            )
            for site in self.sites
        ]
        return table("Weight matmuls", ("site", "kind", "T x K x N", *ROLES, "reason"), rows)

    def _left(self) -> str:
        counts: dict[tuple[str, str, str], int] = {}
        for left in self.matmuls_left:
            key = (left.fqn, left.kind, left.reason)
            counts[key] = counts.get(key, 0) + 1
        rows = [(fqn or "(model)", kind, str(count), reason) for (fqn, kind, reason), count in counts.items()]
        return table("Other matmuls, left as they are", ("module", "kind", "count", "reason"), rows) if rows else ""

    def _totals(self) -> str:
        done = [site for site in self.sites if site.rewritten]
        gemms = sum(getattr(site, role).precision in ("nvfp4", "mxfp4") for site in self.sites for role in ROLES)
        saved = self.saved_for_backward
        lines = [f"{len(done)} of {len(self.sites)} weight matmuls rewritten, {gemms} GEMMs in FP4."]
        if saved.baseline_bytes:
            lines.append(
                f"Saved for backward: {saved.bytes:,} bytes, of which {saved.packed_bytes:,} packed FP4; "
                f"{saved.baseline_bytes:,} bytes without rewriting ({saved.bytes / saved.baseline_bytes:.2f}x)."
            )
        return "\n".join(lines)


def _bytes(tensors: Iterable[SavedTensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def _readers(tensors: Iterable[SavedTensor]) -> str:
    """The operations with the modules they run in, a line for those of the same modules."""
    modules: dict[str, list[str]] = {}
    for tensor in tensors:
        for operation, module in tensor.needed_by:
            modules.setdefault(operation, []).append(module)
    operations: dict[str, list[str]] = {}
    for operation, names in modules.items():
        operations.setdefault(_modules(names), []).append(operation)
    return "\n".join(f"{', '.join(names)} in {place}" for place, names in operations.items())


def _modules(names: Iterable[str]) -> str:
    """Modules that differ in numbers alone (blocks of a list) are one: layers.*.mlp."""
    return ", ".join(dict.fromkeys(_without_numbers(name) or "(model)" for name in names))


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _shape(shape: Mapping[str, int | str]) -> str:
    return " x ".join(str(shape[name]) for name in ("T", "K", "N"))


def _reasons(site: SiteRecord) -> str:
    """One reason if all GEMMs share it, else one a role."""
    by_role = {role: getattr(site, role).reason for role in ROLES}
    if len(set(by_role.values())) == 1:
        return by_role["forward"]
    return "; ".join(f"{role}: {reason}" for role, reason in by_role.items())
