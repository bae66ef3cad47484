"""max |x| of a tensor, and together with that of its rotated transpose, from one read.

Twin: ``nvfp4.amax(x)`` and ``nvfp4.amax(rotation.rotate(x.t()))``. The largest magnitudes are compared as integers, in
which NaN is above all others, so NaN shows.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from ..targets import Isa
from . import common
from .kernel import Kernel, render


@dataclasses.dataclass(frozen=True)
class Config:
    """Threads of a program, ``groups`` x ``units`` of them where the tensor is two-dimensional, and its loop."""

    units: int
    groups: int = 1
    loop: int = 8


def choose(quads: int, processors: int) -> Config:
    """For the whole tensor, read 16 bytes a thread at a time."""
    return Config(256, loop=8 if quads >= 256 * 8 * processors * 4 else 1)


def choose_both(groups: int, units: int, processors: int) -> Config:
    """Of 16 tokens a thread; a wide program reads whole lines."""
    config = Config(64, groups=2, loop=4)
    programs = -(-groups // (config.groups * config.loop)) * -(-units // config.units)
    return config if programs >= processors * 2 else dataclasses.replace(config, loop=1)


@functools.cache
def kernel(isa: Isa, dtype: torch.dtype, config: Config) -> Kernel:
    name = f"amax_{common.DTYPES[dtype]}"
    return Kernel(
        family="amax",
        name=name,
        source=render("amax.py.jinja", name=name, isa=isa, dtype=common.DTYPES[dtype]),
        signature={
            "x_ptr": common.element_type(dtype),
            "amax_ptr": "*i32",
            "quads": "i32",
            "N": "constexpr",
            "LOOP": "constexpr",
        },
        constants={"N": config.units, "LOOP": config.loop},
        aligned=("x_ptr",),
        num_warps=config.units // 32,
    )


@functools.cache
def kernel_both(isa: Isa, dtype: torch.dtype, plain: bool, signs: int, config: Config) -> Kernel:
    """plain: of the tensor as it is, too."""
    name = f"amax_{'both' if plain else 'rotated'}_{common.DTYPES[dtype]}"
    values = {"isa": isa, "dtype": common.DTYPES[dtype], "plain": plain, "signs": signs}
    signature = {"x_ptr": common.element_type(dtype), **({"amax_ptr": "*i32"} if plain else {}), "rotated_ptr": "*i32"}
    signature |= {"tokens": "i32", "units": "i32", "G": "constexpr", "C": "constexpr", "LOOP": "constexpr"}
    return Kernel(
        family="amax",
        name=name,
        source=render("amax_both.py.jinja", name=name, **values),
        signature=signature,
        constants={"G": config.groups, "C": config.units, "LOOP": config.loop},
        aligned=("x_ptr", "units"),
        num_warps=config.groups * config.units // 32,
    )


def amax(x: Tensor) -> Tensor:
    """max |x|, 0-d float32, of a bfloat16, float16 or float32 tensor."""
    result = x.new_zeros((), dtype=torch.float32)
    if x.numel() == 0:
        return result
    flat = x.t() if x.dim() == 2 and x.t().is_contiguous() else x
    flat = common.aligned(flat).view(-1)
    per_quad = 16 // x.dtype.itemsize
    missing = -flat.numel() % per_quad
    flat = F.pad(flat, (0, missing)) if missing else flat  # padding by nothing would copy
    quads = flat.numel() // per_quad
    config = choose(quads, common.processors_of(x.device))
    with common.on_device_of(x):
        kernel(common.isa_of(x.device), x.dtype, config).run(
            -(-quads // (config.units * config.loop)), flat, result, quads
        )
    return result


def amax_both(x: Tensor, signs: int, plain: bool = True) -> tuple[Tensor | None, Tensor]:
    """[T, K] -> max |x| (None unless ``plain``) and max |rotate(x.t())|, 0-d float32."""
    outputs = [x.new_zeros((), dtype=torch.float32) for _ in range(1 + plain)]
    if x.numel():
        per_unit = 16 // x.dtype.itemsize
        x = common.padded(x, per_unit)
        groups, units = -(-x.shape[0] // 16), x.shape[1] // per_unit
        config = choose_both(groups, units, common.processors_of(x.device))
        programs = -(-groups // (config.groups * config.loop)) * -(-units // config.units)
        with common.on_device_of(x):
            kernel_both(common.isa_of(x.device), x.dtype, plain, signs, config).run(
                programs, x, *outputs, x.shape[0], units
            )
    return (outputs[0] if plain else None), outputs[-1]
