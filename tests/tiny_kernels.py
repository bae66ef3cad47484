"""Small kernels that exercise ahead-of-time compilation: each uses one instruction whose name matters."""

from __future__ import annotations

from fp4compile.lowering.kernels.kernel import Kernel

_HEADER = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"

_E2M1 = """def tiny_e2m1(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, i < n, 0.0)
    code = tl.inline_asm_elementwise(
        "{ .reg .b8 code; cvt.rn.satfinite.e2m1x2.f32 code, $1, $1; cvt.u32.u8 $0, code; }",
        "=r,r", [value], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out + i, code, i < n)
"""

_STOCHASTIC = """def tiny_stochastic(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, i < n, 0.0)
    code = tl.inline_asm_elementwise(
        "{ .reg .b16 code; cvt.rs.satfinite.e2m1x4.f32 code, {$1, $1, $1, $1}, $2; cvt.u32.u16 $0, code; }",
        "=r,r,r", [value, i], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out + i, code, i < n)
"""

_DECODE = """def tiny_decode(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(x + i, i < n, 0)
    pair = tl.inline_asm_elementwise(
        "{ .reg .b8 code; cvt.u8.u32 code, $1; cvt.rn.f16x2.e2m1x2 $0, code; }",
        "=r,r", [code], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out + i, pair, i < n)
"""

_DIVIDE = """def tiny_divide(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, i < n, 1.0)
    tl.store(out + i, tl.div_rn(tl.sum(value, 0), value), i < n)
"""

_E4M3 = """def tiny_e4m3(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, i < n, 0.0)
    tl.store(out + i, value.to(tl.float8e4nv).to(tl.float32), i < n)
"""

_PRODUCT = """def tiny_product(a, b, a_scales, b_scales, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    pair = tl.arange(0, SIZE // 2)
    block = tl.arange(0, SIZE // 16)
    left = tl.load(a + i[:, None] * (SIZE // 2) + pair[None, :])
    right = tl.load(b + i[None, :] * (SIZE // 2) + pair[:, None])
    left_scales = tl.load(a_scales + i[:, None] * (SIZE // 16) + block[None, :])
    right_scales = tl.load(b_scales + i[:, None] * (SIZE // 16) + block[None, :])
    product = tl.dot_scaled(left, left_scales, "e2m1", right, right_scales, "e2m1")
    tl.store(out + i[:, None] * SIZE + i[None, :], product)
"""

_TILES = """def tiny_tiles(a, b, out, SIZE: tl.constexpr):
    product = tl.dot(a.load([0, 0]), b.load([0, 0]).T)
    out.store([0, 0], product.to(tl.bfloat16))
"""


def _elementwise(body: str, x: str = "*fp32", out: str = "*i32", block: int = 1024, warps: int = 4) -> Kernel:
    name = body.partition("(")[0].removeprefix("def ")
    signature = {"x": x, "out": out, "n": "i32", "BLOCK": "constexpr"}
    return Kernel(name, name, _HEADER + body, signature, {"BLOCK": block}, ("x", "out", "n"), warps)


NEAREST = _elementwise(_E2M1)
STOCHASTIC = _elementwise(_STOCHASTIC)
DECODE = _elementwise(_DECODE, x="*i32")
DIVIDE = _elementwise(_DIVIDE, out="*fp32")
SPILLING = _elementwise(_DIVIDE, out="*fp32", block=8192, warps=1)
E4M3 = _elementwise(_E4M3, out="*fp32")
PRODUCT = Kernel(
    "gemm",  # this family's launches tell Triton how to lower block-scaled products on 12.1
    "tiny_product",
    _HEADER + _PRODUCT,
    {"a": "*u8", "b": "*u8", "a_scales": "*fp8e4nv", "b_scales": "*fp8e4nv", "out": "*fp32", "SIZE": "constexpr"},
    {"SIZE": 128},
    ("a", "b", "a_scales", "b_scales", "out"),
    4,
)
TILES = Kernel(
    "tiny_tiles",
    "tiny_tiles",
    _HEADER + _TILES,
    {**dict.fromkeys(("a", "b", "out"), "tensordesc<bf16[128, 128]>"), "SIZE": "constexpr"},
    {"SIZE": 128},
    (),
    4,
)
