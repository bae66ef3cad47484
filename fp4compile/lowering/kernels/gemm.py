"""Products of packed FP4 operands on the tensor cores of Blackwell, which take codes and block scales as they are.

    D[M, N] = factor * sum_k decode(A)[m, k] * decode(B)[n, k] + bias[n]

| argument | tensor |
|---|---|
| a, b | packed uint8 [M, K / 2] and [N, K / 2], rows of a multiple of 16 bytes |
| a_scales, b_scales | 128x4 tiles [ceil(rows / 128), ceil(nb / 4), 32, 4, 4] of formats/layout.py, padding zero |
| a_amax, b_amax | 0-d float32, nvfp4 only, or no a_amax; factor, on the accumulator: formats/nvfp4.py's gemm_factor |
| bias | [N] or none; added in float32 |
| d | [M, N] bfloat16, float16 or float32, contiguous |

Operands and scales arrive through the tensor memory accelerator (TMA), which fills with zeros what lies past the end:
a ragged M, N or K adds nothing to a sum. So does D where its rows are multiples of 16 bytes; else stores are masked.
sm_100a and sm_103a multiply by tcgen05.mma and copy scales to tensor memory by tcgen05.cp; sm_120a and sm_121a multiply
by mma.sync from registers. Only the order of accumulation differs from the reference. A scale byte 0 of mxfp4 (2^-127)
may count as 0 on sm_90a, which has no such instruction and multiplies the decoded bf16.

| schedule | programs | loop |
|---|---|---|
| tiles | one a tile | loads run ahead of the products |
| specialized | one a tile | loads, products and the rest by warps of their own |
| persistent | one a multiprocessor | the same over all its tiles: a tile is stored while the next is multiplied |

Where nothing is measured it is "tiles"; the template of a graph (lowering/template.py) has the same, and max-autotune
measures all. No schedule has two CTAs: Triton 3.6 to 3.9 compile no ``tl.dot_scaled`` with ``num_ctas=2``
(https://github.com/triton-lang/triton/issues/7982).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ...errors import ConfigError
from ...formats import layout, mxfp4, nvfp4
from ..targets import Isa, capability_of
from .common import on_device_of
from .kernel import Kernel, render

FAMILY = "gemm"

Format = Literal["nvfp4", "mxfp4"]
Schedule = Literal["tiles", "specialized", "persistent"]

BLOCKS: Mapping[str, int] = {"nvfp4": nvfp4.BLOCK, "mxfp4": mxfp4.BLOCK}
SCALE_TYPES: Mapping[str, str] = {"nvfp4": "fp8e4nv", "mxfp4": "u8"}
OUT_TYPES: Mapping[torch.dtype, tuple[str, str]] = {
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float16: ("fp16", "float16"),
    torch.float32: ("fp32", "float32"),
}
"""dtype of D -> its name in a signature, its name in triton.language."""

ALIGNMENT = 16
"""Bytes: of the base and of every stride that TMA takes."""

DATACENTER = (10, 0)
"""From this capability on the tensor cores take codes and scales: tcgen05, with 227 KiB of shared memory a block."""
CONSUMER = (12, 0)
"""From this one on mma.sync takes tcgen05's place, and a block has 99 KiB."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes in elements (K of unpacked elements), warps of a program, loads in flight, and the schedule."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 256
    num_warps: int = 4
    num_stages: int = 4
    schedule: Schedule = "tiles"
    group: int = 8

    def tiles(self, m: int, n: int) -> int:
        """How many tiles cover an [m, n] result."""
        return _ceil_div(m, self.block_m) * _ceil_div(n, self.block_n)

    @property
    def name(self) -> str:
        """Part of a kernel's name."""
        return f"{self.block_m}x{self.block_n}x{self.block_k}_{self.num_warps}w_{self.num_stages}s_{self.schedule}"


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


WIDE = Config(block_n=256, num_warps=8)
SQUARE = Config()
GB300 = Config(block_n=256, num_warps=8, num_stages=3)
"""Published as the best there for large products, with D stored in four parts, as the template stores it:
https://github.com/triton-lang/triton/pull/10903."""
DATACENTER_CONFIGS = (
    WIDE,
    SQUARE,
    GB300,
    Config(block_n=256, num_warps=8, num_stages=3, schedule="specialized"),
    Config(num_warps=8, schedule="specialized"),
    Config(num_warps=8, schedule="persistent"),
)
CONSUMER_CONFIGS = (
    Config(block_k=128, num_warps=8, num_stages=3),
    Config(block_k=128, num_warps=4, num_stages=3),
)


def choose(
    m: int, n: int, k: int, out_dtype: torch.dtype, capability: tuple[int, int], processors: int = 148
) -> Config:
    """The configuration of an [m, n, k] product where nothing is measured.

    The widest tile, which reads each operand least often, unless fewer of them than multiprocessors would run.
    """
    return candidates(m, n, k, out_dtype, capability, processors)[0]


def candidates(
    m: int, n: int, k: int, out_dtype: torch.dtype, capability: tuple[int, int], processors: int = 148
) -> tuple[Config, ...]:
    """What is worth measuring for an [m, n, k] product, the best guess first."""
    if capability < DATACENTER:
        return CONSUMER_CONFIGS[:1]
    if capability >= CONSUMER:
        return CONSUMER_CONFIGS
    configs = [config for config in DATACENTER_CONFIGS if _fits(config, out_dtype, _boxed(n, out_dtype))]
    return tuple(sorted(configs, key=lambda config: _idle(config, m, n, processors)))


def _fits(config: Config, out_dtype: torch.dtype, boxed: bool) -> bool:
    """Specialized warps keep D's tile in shared memory beside the operands', and spill registers on masked stores."""
    return config.schedule == "tiles" or (boxed and out_dtype.itemsize * config.block_n <= 512)


def _idle(config: Config, m: int, n: int, processors: int) -> bool:
    """Whether smaller tiles would keep more multiprocessors busy."""
    return config.block_n > SQUARE.block_n and config.tiles(m, n) < processors


def _boxed(n: int, out_dtype: torch.dtype) -> bool:
    """Whether rows of D are such as TMA stores."""
    return n * out_dtype.itemsize % ALIGNMENT == 0


def compile_options(capability: tuple[int, int]) -> dict[str, str]:
    """What Triton has to be told beside warps and stages.

    Triton before 3.8 lowers block-scaled products for 12.0 alone and decodes them on 12.1, whose instructions are the
    same: it gets 12.0's intermediate code, assembled for 12.1.
    """
    return {"arch": "sm120"} if capability == (12, 1) else {}


@functools.cache
def kernel(
    format: str,
    out_dtype: torch.dtype,
    config: Config,
    bias: torch.dtype | None = None,
    boxed: bool = True,
    left_scale: bool = True,
) -> Kernel:
    """The kernel of one format, output and configuration.

    bias: its dtype, None for no bias. boxed: rows of D are multiples of 16 bytes, and D is stored by TMA. left_scale:
    whether a has a tensor scale, where operands have.
    """
    out_name, out_type = OUT_TYPES[out_dtype]
    block = BLOCKS[format]
    tensor_scales = tensor_scales_of(format, left_scale)
    variant = ["bias"] * (bias is not None) + ["masked"] * (not boxed) + ["right"] * (tensor_scales == 1)
    name = "_".join([FAMILY, format, out_name, *variant, config.name])
    source = render(
        "gemm.py.jinja",
        title=f"{format} product of packed operands to {out_name}, schedule '{config.schedule}'.",
        name=name,
        block=block,
        tensor_scales=tensor_scales,
        bias=bias is not None,
        boxed=boxed,
        out_type=out_type,
        outer_loop=_outer_loop(config.schedule),
        inner_loop=_inner_loop(config.schedule),
        large_amax=2.0**63,
        shrink=2.0**-32,
        divisor=float(nvfp4.TENSOR_MAX**2),
        largest=float(nvfp4.TENSOR_MAX),
    )
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP": config.group,
        "STAGES": config.num_stages,
    }
    signature = _signature(format, out_name, config, bias, boxed, tensor_scales) | dict.fromkeys(constants, "constexpr")
    return Kernel(
        family=FAMILY,
        name=name,
        source=source,
        signature=signature,
        constants=constants,
        aligned=tuple(argument for argument in ("bias", "d") if signature.get(argument, "").startswith("*")),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        warp_specialize=config.schedule != "tiles",
    )


def _outer_loop(schedule: Schedule) -> str:
    return "num_stages=STAGES, flatten=True, warp_specialize=True" if schedule == "persistent" else "num_stages=1"


def _inner_loop(schedule: Schedule) -> str:
    return "num_stages=STAGES, warp_specialize=True" if schedule == "specialized" else "num_stages=STAGES"


def tensor_scales_of(format: str, left_scale: bool) -> int:
    """How many amaxes a product takes; one is the right operand's."""
    return 0 if format != "nvfp4" else 1 + left_scale


def _signature(
    format: str, out_name: str, config: Config, bias: torch.dtype | None, boxed: bool, tensor_scales: int
) -> dict[str, str]:
    signature = {}
    for operand, rows in (("a", config.block_m), ("b", config.block_n)):
        signature[operand] = _descriptor_type("u8", _codes_box(rows, config))
        signature[f"{operand}_scales"] = _descriptor_type(SCALE_TYPES[format], _scales_box(rows, config, format))
    signature |= dict.fromkeys(("a_amax", "b_amax")[2 - tensor_scales :], "*fp32")
    if bias is not None:
        signature["bias"] = f"*{OUT_TYPES[bias][0]}"
    signature["d"] = _descriptor_type(out_name, [config.block_m, config.block_n]) if boxed else f"*{out_name}"
    return signature | dict.fromkeys("mnk", "i32")


def _descriptor_type(element: str, box: list[int]) -> str:
    return f"tensordesc<{element}{box}>"


def _codes_box(rows: int, config: Config) -> list[int]:
    return [rows, config.block_k // 2]


def _scales_box(rows: int, config: Config, format: str) -> list[int]:
    """Whole tiles, each as 2 x 256 bytes: one side of a box has at most 256 elements."""
    columns = config.block_k // BLOCKS[format]
    return [1, rows // layout.TILE_ROWS, columns // layout.TILE_COLS, 2, 256]


def kernels(isa: Isa, capability: tuple[int, int]) -> list[Kernel]:
    """The kernels to compile ahead of time for one capability: every configuration, epilogues in bf16 only.

    Where the tensor cores take no codes (sm_90a), mxfp4 alone: Triton decodes it to bf16.
    """
    formats = get_args(Format) if isa.matmul == "block_scaled" else ("mxfp4",) if capability >= (9, 0) else ()
    found = []
    for format, out_dtype in itertools.product(formats, OUT_TYPES):
        for config in candidates(1 << 13, 1 << 13, 1 << 13, out_dtype, capability):
            found.append(kernel(format, out_dtype, config))
            if format == "nvfp4" and out_dtype == torch.float32:
                found.append(kernel(format, out_dtype, config, left_scale=False))
            if out_dtype == torch.bfloat16:
                found.append(kernel(format, out_dtype, config, bias=out_dtype))
            if out_dtype == torch.bfloat16 and _fits(config, out_dtype, boxed=False):
                found.append(kernel(format, out_dtype, config, boxed=False))
    return found


def launch(
    a: Tensor,
    a_scales: Tensor,
    a_amax: Tensor | None,
    b: Tensor,
    b_scales: Tensor,
    b_amax: Tensor | None,
    format: str,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """D [M, N] of the packed operands [M, K / 2] and [N, K / 2]; the module's table describes the arguments.

    Where the packed K of the operands differs, the tail of the longer is padding and is not read. Rows of packed bytes
    that are no multiple of 16 bytes apart are copied first. a_amax: None where a has no tensor scale, but one a row
    by which D is still to be multiplied. config: None to have one chosen.
    """
    m, n, k = a.shape[0], b.shape[0], 2 * min(a.shape[1], b.shape[1])
    _check(a, a_scales, format, m)
    _check(b, b_scales, format, n)
    if (b_amax is None) == (format == "nvfp4") or (a_amax is not None and b_amax is None):
        raise ConfigError(f"gemm: nvfp4 takes b_amax, with a_amax or without, and no other format does; it is {format}")
    out = a.new_empty((m, n), dtype=out_dtype)
    if out.numel() == 0:
        return out
    if k == 0:  # a descriptor has no empty side
        return out.zero_() if bias is None else out.copy_(bias)
    capability, processors = _device(a.device)
    config = config or choose(m, n, k, out_dtype, capability, processors)
    boxed = _boxed(n, out_dtype)
    made = kernel(format, out_dtype, config, None if bias is None else bias.dtype, boxed, a_amax is not None)
    arguments = {
        "a": _codes(a, config.block_m, config),
        "a_scales": _scales(a_scales, config.block_m, config, format),
        "b": _codes(b, config.block_n, config),
        "b_scales": _scales(b_scales, config.block_n, config, format),
        "a_amax": a_amax,
        "b_amax": b_amax,
        "bias": None if bias is None else bias.contiguous(),
        "d": _describe(out, [config.block_m, config.block_n]) if boxed else out,
    }
    tiles = config.tiles(m, n)
    programs = min(tiles, processors) if config.schedule == "persistent" else tiles
    with on_device_of(a):
        made.function[(programs,)](
            **{name: value for name, value in arguments.items() if name in made.signature},
            m=m,
            n=n,
            k=k,
            **made.constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **compile_options(capability),
        )
    return out


def _check(codes: Tensor, scales: Tensor, format: str, rows: int) -> None:
    blocks = codes.shape[1] * 2 // BLOCKS[format]
    expected = (_ceil_div(rows, layout.TILE_ROWS), _ceil_div(blocks, layout.TILE_COLS), 32, 4, layout.TILE_COLS)
    if tuple(scales.shape) != expected or not scales.is_contiguous():
        raise ConfigError(
            f"gemm: scales of a {format} operand of packed shape {tuple(codes.shape)} are contiguous tiles of shape "
            f"{expected} (formats.layout.to_tiles); these have shape {tuple(scales.shape)}"
        )


def _device(device: torch.device) -> tuple[tuple[int, int], int]:
    """(capability, multiprocessors). Of a CPU, where kernels are interpreted: any."""
    capability = capability_of(device)
    if capability is None:
        return DATACENTER, 4
    return capability, torch.cuda.get_device_properties(device).multi_processor_count


def _codes(packed: Tensor, rows: int, config: Config) -> Any:
    if packed.stride(1) != 1 or packed.stride(0) % ALIGNMENT or packed.data_ptr() % ALIGNMENT:
        packed = _aligned_copy(packed)
    return _describe(packed, _codes_box(rows, config))


def _aligned_copy(packed: Tensor) -> Tensor:
    """The same bytes, [rows, bytes], with rows a multiple of 16 bytes apart."""
    rows, columns = packed.shape
    padded = packed.new_empty((rows, _ceil_div(columns, ALIGNMENT) * ALIGNMENT))[:, :columns]
    return padded.copy_(packed)


def _scales(tiles: Tensor, rows: int, config: Config, format: str) -> Any:
    if tiles.data_ptr() % ALIGNMENT:
        tiles = tiles.clone()
    element = torch.float8_e4m3fn if format == "nvfp4" else torch.uint8
    return _describe(tiles.view(element).view(1, *tiles.shape[:2], 2, 256), _scales_box(rows, config, format))


def _describe(tensor: Tensor, box: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box)
