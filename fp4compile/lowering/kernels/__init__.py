"""Generated Triton kernels: one file a family, each with its torch twin named in the file.

Every family has ``kernel(...)``, pure: a generated source in one configuration; ``choose`` and ``candidates``, pure:
the configurations; and functions of tensors that launch them.
"""

from __future__ import annotations

import itertools

import torch

from ...formats.rotation import SIGNS
from ..targets import ISAS
from . import amax, columns, decode, gemm, produced, rows, weights
from .kernel import Kernel

__all__ = ["Kernel", "all_kernels", "amax", "columns", "decode", "gemm", "produced", "rows", "weights"]


def all_kernels(arch: str) -> list[Kernel]:
    """Every kernel of an architecture ("sm_90", "sm_100a" ...), bfloat16 tensors, in its default configuration."""
    from ..aot import capability_of_architecture

    capability = capability_of_architecture(arch)
    isa = ISAS[capability]
    native = isa.matmul == "block_scaled"
    emulated = (
        (False,) if native else (False, True)
    )  # whether values are written: where products are of decoded operands
    x = torch.bfloat16
    many = 2**20
    result = [
        amax.kernel(isa, x, amax.choose(many, 132)),
        amax.kernel_both(isa, x, True, SIGNS, amax.choose_both(many, many, 132)),
        *(
            weights.kernel(isa, x, *which, weights.choose(), native)
            for which in ((True, False), (False, True), (True, True))
        ),
    ]
    for format, stochastic in itertools.product(("nvfp4", "mxfp4"), (False, True)):
        size = 32 if format == "mxfp4" else 16
        loops = rows.choose(many * 64, stochastic, 132)
        result += [rows.kernel(isa, x, format, stochastic, loops, native, decoded) for decoded in emulated]
        if format == "nvfp4":  # products with a scale a row are of decoded operands everywhere
            result.append(rows.kernel(isa, x, format, stochastic, loops, decoded=True, by_row=x))
        for (shape, tokens), decoded in itertools.product((("full", 2**14), ("ragged", 2**14 - 1)), emulated):
            config, found = columns.choose(tokens, 2**10, size, decoded)
            assert found == shape
            result.append(columns.kernel(isa, x, format, stochastic, True, SIGNS, config, found, native, decoded))
    result += [decode.kernel(isa, format, x, decode.choose()) for format in ("nvfp4", "mxfp4")]
    result += [weights.kernel(isa, x, True, False, weights.choose(), decoded=True) for decoded in emulated if decoded]
    result.append(produced.kernel(isa, produced.EXAMPLE))
    return result + gemm.kernels(isa, capability)
