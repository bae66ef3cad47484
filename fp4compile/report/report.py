"""The report: sites with their precisions and reasons, matmuls left alone, bytes saved for backward, the graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import fx

from ..plan import LeftMatmul, SiteRecord
from ..recipe import ROLES
from ..table import table
from .roofline import Roofline


@dataclasses.dataclass(frozen=True)
class SavedBytes:
    """Bytes of the tensors that the forward keeps for the backward, parameters and inputs not counted.

    ``packed_bytes`` are those of FP4 codes and scales among ``bytes``; ``baseline_bytes`` what the same model saves
    without this backend's rewriting.
    """

    bytes: int
    packed_bytes: int
    baseline_bytes: int


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
            "saved_for_backward": dataclasses.asdict(self.saved_for_backward),
            **prediction,
        }

    def __str__(self) -> str:
        prediction = "" if self.roofline is None else str(self.roofline)
        parts = [self._sites(), self._left(), self._totals(), prediction]
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


def _shape(shape: Mapping[str, int | str]) -> str:
    return " x ".join(str(shape[name]) for name in ("T", "K", "N"))


def _reasons(site: SiteRecord) -> str:
    """One reason if all GEMMs share it, else one a role."""
    by_role = {role: getattr(site, role).reason for role in ROLES}
    if len(set(by_role.values())) == 1:
        return by_role["forward"]
    return "; ".join(f"{role}: {reason}" for role, reason in by_role.items())
