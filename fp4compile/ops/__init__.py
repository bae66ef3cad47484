"""The operators that a rewritten graph is made of, `torch.ops.fp4.*`: one a file, with checks, fake and
reference.

An operator's reference runs on every device and is what any faster implementation is compared with, bit for
bit. Importing this package registers them.
"""

from . import amax, anchor, decode, decoded, produced, quantize, rotate, rotated, scaled_mm
from .library import REFERENCE

__all__ = ["REFERENCE", "amax", "anchor", "decode", "decoded", "produced", "quantize", "rotate", "rotated", "scaled_mm"]
