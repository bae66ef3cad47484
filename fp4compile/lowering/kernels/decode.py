"""Packed codes to code * block scale, exactly. Twin: ``nvfp4.decode`` and ``mxfp4.decode``."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from ...ops.library import BLOCKS
from ..targets import Isa
from . import common, tuning
from .kernel import Kernel, render


@dataclasses.dataclass(frozen=True)
class Config:
    """``threads`` words of eight codes at a time, ``loop`` times."""

    threads: int = 64
    loop: int = 2


def choose() -> Config:
    return Config()


@functools.cache
def candidates() -> list[Config]:
    """What autotuning tries, the choice first."""
    return [choose(), Config(128, 2), Config(64, 4), Config(256, 4)]


@functools.cache
def kernel(isa: Isa, format: common.Format, dtype: torch.dtype, config: Config) -> Kernel:
    name = f"decode_{format}_{common.DTYPES[dtype]}"
    return Kernel(
        family="decode",
        name=name,
        source=render("decode.py.jinja", name=name, isa=isa, format=format, dtype=common.DTYPES[dtype]),
        signature={
            "codes_ptr": "*i32",
            "scales_ptr": "*u8",
            "out_ptr": common.element_type(dtype),
            "words": "i32",
            "N": "constexpr",
            "LOOP": "constexpr",
        },
        constants={"N": config.threads, "LOOP": config.loop},
        aligned=("codes_ptr", "scales_ptr", "out_ptr", "words"),
        num_warps=config.threads // 32,
    )


def decode(codes: Tensor, scales: Tensor, format: common.Format, dtype: torch.dtype) -> Tensor:
    """uint8 [R, nb * B/2] and scales [R, nb] -> [R, nb * B] bfloat16 or float32."""
    codes, scales = common.aligned(codes), scales.contiguous()
    out = codes.new_empty((codes.shape[0], scales.shape[1] * BLOCKS[format]), dtype=dtype)
    count = codes.numel() // 4
    if count:
        isa = common.isa_of(codes.device)
        arguments = (codes, scales, out, count)

        def launch(config: Config) -> None:
            kernel(isa, format, dtype, config).run(-(-count // (config.threads * config.loop)), *arguments)

        with common.on_device_of(codes):
            tuning.launch(("decode", isa, format, dtype, count, codes.device), candidates(), launch)
    return out
