"""Runs the inline PTX of generated kernels on the CPU: what Triton's interpreter cannot, instruction by instruction.

Registers are arrays of 32 bits; only instructions that the kernels use are there.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def assembly_of(source: str, function: str) -> str:
    """The inline PTX of a function of a generated source, which has one."""
    found = re.search(rf'def {function}\(.*?inline_asm_elementwise\(\s*"""(.*?)"""', source, re.DOTALL)
    assert found, function
    return found.group(1)


def run(assembly: str, outputs: int, inputs: list[Words]) -> list[Words]:
    """What is in operands $0 to $(outputs - 1), of inputs in the operands after them."""
    registers = {f"${outputs + i}": words for i, words in enumerate(inputs)}

    def value(name: str) -> Words:
        if name.startswith("0f"):
            return np.uint32(int(name[2:], 16))  # type: ignore[return-value]
        return registers[name] if name in registers else np.uint32(int(name, 0))  # type: ignore[return-value]

    for statement in re.findall(r"[^;{}]+", assembly):
        opcode, _, operands = statement.strip().partition(" ")
        if opcode and not opcode.startswith(".reg"):
            into, *arguments = (name.strip() for name in operands.split(","))
            registers[into] = INSTRUCTIONS[opcode](*map(value, arguments))
    return [registers[f"${i}"] for i in range(outputs)]


def prmt(a: Words, b: Words, selector: Words) -> Words:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(selector)), np.uint32)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> ((nibble & 7).astype(np.uint64) * np.uint64(8))).astype(np.uint32) & np.uint32(255)
        byte = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte).astype(np.uint32)
        result |= byte << np.uint32(8 * i)
    return result


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    assert table == 0xEA
    return a & b | c


def bfloat16_fma(a: Words, b: Words, c: Words) -> Words:
    """Of each half; subnormal numbers are kept."""
    halves = [[(x << np.uint32(shift)) & np.uint32(0xFFFF0000) for x in (a, b, c)] for shift in (16, 0)]
    with np.errstate(invalid="ignore"):
        low, high = (_rounded(float32(x).astype(np.float64) * float32(y) + float32(z)) for x, y, z in halves)
    return low | high << np.uint32(16)


def _rounded(x: NDArray[np.float64]) -> Words:
    return torch.from_numpy(np.atleast_1d(x)).to(torch.bfloat16).view(torch.uint16).numpy().astype(np.uint32)


def float32(words: Words) -> NDArray[np.float32]:
    return np.asarray(words, np.uint32).view(np.float32)


def arithmetic(function: Callable[..., NDArray[np.float64]], saturate: bool = False) -> Callable[..., Words]:
    """Of float32, rounded once; saturated to [0, 1], of NaN 0."""

    def apply(*arguments: Words) -> Words:
        result = function(*(float32(words).astype(np.float64) for words in arguments))
        if saturate:
            result = np.clip(np.nan_to_num(result, nan=0.0), 0, 1)
        return result.astype(np.float32).view(np.uint32)

    return apply


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "fma.rn.bf16x2": bfloat16_fma,
    "abs.f32": lambda a: a & np.uint32(0x7FFFFFFF),
    "mul.rn.f32": arithmetic(lambda a, b: a * b),
    "mul.rn.sat.f32": arithmetic(lambda a, b: a * b, saturate=True),
    "add.rn.f32": arithmetic(lambda a, b: a + b),
    "fma.rn.f32": arithmetic(lambda a, b, c: a * b + c),
    "fma.rn.sat.f32": arithmetic(lambda a, b, c: a * b + c, saturate=True),
}
