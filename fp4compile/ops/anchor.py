"""fp4::anchor: y, made to depend on tensors that the forward is to keep for the backward.

The partitioner of forward and backward saves a marked tensor only if the forward needs it. ``lower`` removes the
operator again; run as it is, it copies y.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .library import library


def anchor(y: Tensor, kept: Sequence[Tensor]) -> Tensor:
    return y.clone()


library.define("anchor(Tensor y, Tensor[] kept) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.impl("anchor", anchor, "CompositeExplicitAutograd")
torch.library.register_fake("fp4::anchor", anchor, lib=library)
