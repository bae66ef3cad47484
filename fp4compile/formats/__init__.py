"""The reference: what every 4-bit format means, in plain PyTorch, one file a format.

Everything here is a pure function of its arguments with no data-dependent control flow, so it runs eagerly,
under `torch.compile`, and inlined into another graph, with the same bits. It trusts its arguments: the checks
are in `fp4compile.ops`.
"""

from . import layout, mxfp4, noise, nvfp4, packing, rotation, rounding

__all__ = ["layout", "mxfp4", "noise", "nvfp4", "packing", "rotation", "rounding"]
