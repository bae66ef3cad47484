"""What each device does with the operators of a rewritten graph, and why.

One table, pure: device type and compute capability in, a ``Target`` out. Lowering chooses how, never what: codes,
scales and amax have the same bits everywhere (stochastic codes of ``cvt.rs`` excepted: the hardware uses 8 random
bits).

| capability | E2M1 to nearest | E2M1 stochastic | E4M3 | matmul |
|---|---|---|---|---|
| 8.0, 8.6, 8.7 | formula | noise | integer: Triton has no float8e4nv here | decoded to bf16 |
| 8.9, 9.0 | formula | noise | cvt | decoded to bf16 |
| 10.0, 10.3 | cvt.rn | cvt.rs | cvt | tcgen05 block-scaled |
| 11.0 | cvt.rn | noise: no cvt.rs | cvt | tcgen05 block-scaled |
| 12.0, 12.1 | cvt.rn | noise: no cvt.rs | cvt | mma.sync block-scaled |

Tried with the assemblers of Triton 3.6 and 3.7 (docs/performance.md).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Literal

import torch

Lowering = Literal["compiled", "kernels", "reference"]


@dataclasses.dataclass(frozen=True)
class Isa:
    """The instructions that generated kernels use on one kind of GPU.

    nearest: float32 to E2M1 to nearest by "cvt" (cvt.rn.satfinite.e2m1x2) or by "formula".
    stochastic: by "cvt" (cvt.rs.satfinite.e2m1x4) or by "noise" (formula and 16 random bits).
    e4m3: conversions of block scales by "cvt" or in "integer" arithmetic.
    matmul: "block_scaled" (codes and scales go to the tensor cores) or "decoded" (bf16 operands).
    inline: PTX may be written inline; not in Triton's interpreter.
    xorsign: the larger magnitudes of bfloat16 pairs in one instruction; 8.0 has none, and 8.6 runs 8.0's code.
    """

    nearest: Literal["cvt", "formula"]
    stochastic: Literal["cvt", "noise"]
    e4m3: Literal["cvt", "integer"]
    matmul: Literal["block_scaled", "decoded"]
    inline: bool = True
    xorsign: bool = True


AMPERE = Isa("formula", "noise", "integer", "decoded", xorsign=False)
HOPPER = Isa("formula", "noise", "cvt", "decoded")
BLACKWELL = Isa("cvt", "cvt", "cvt", "block_scaled")
BLACKWELL_NO_RS = Isa("cvt", "noise", "cvt", "block_scaled")
INTERPRETER = Isa("formula", "noise", "integer", "decoded", inline=False)
"""What Triton's interpreter runs: no inline PTX, and a float32 to E4M3 conversion that does not carry."""

ISAS = {
    (8, 0): AMPERE,
    (8, 6): AMPERE,
    (8, 7): AMPERE,
    (8, 9): HOPPER,
    (9, 0): HOPPER,
    (10, 0): BLACKWELL,
    (10, 3): BLACKWELL,
    (11, 0): BLACKWELL_NO_RS,
    (12, 0): BLACKWELL_NO_RS,
    (12, 1): BLACKWELL_NO_RS,
}


@dataclasses.dataclass(frozen=True)
class Target:
    """How one device runs the operators.

    ``lowering``: "compiled" (the formulas as Inductor's primitives, fused by its code generator, once for all sites),
    "kernels" (generated Triton kernels for ``isa``) or "reference" (the operators' eager implementation, called from
    the generated code).
    """

    device: str
    lowering: Lowering
    isa: Isa | None
    reason: str

    @property
    def native_fp4(self) -> bool:
        """Whether the tensor cores multiply the codes themselves."""
        return self.isa is not None and self.isa.matmul == "block_scaled"


def target_for(device_type: str, capability: tuple[int, int] | None = None) -> Target:
    """The target of a torch device type; of a CUDA device by its compute capability."""
    if device_type == "cpu":
        return Target("cpu", "compiled", None, "Inductor's C++ backend fuses the formulas; emulated exactly in float32")
    if device_type == "cuda" and capability is not None:
        return _cuda(capability)
    return Target(
        device_type, "reference", None, "no kernels for this device: the formulas run eagerly, emulated exactly"
    )


def _cuda(capability: tuple[int, int]) -> Target:
    isa = ISAS.get(capability)
    name = f"sm_{capability[0]}{capability[1]}"
    if isa is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in ISAS)
        reason = f"no kernels for {name} (there are some for {known}): the formulas run eagerly, emulated exactly"
        return Target("cuda", "reference", None, reason)
    how = "native FP4 matrix products" if isa.matmul == "block_scaled" else "exact products of decoded bf16 operands"
    return Target("cuda", "kernels", isa, f"generated Triton kernels for {name}, {how}")


def current_device() -> torch.device:
    """The accelerator of this machine if there is one, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None else torch.device("cpu")


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device; None for other devices, ROCm's included."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability(device)


def target_of(device: torch.device) -> Target:
    """The target of a device of this machine."""
    target = target_for(device.type, capability_of(device))
    if target.lowering == "kernels" and importlib.util.find_spec("triton") is None:
        reason = "Triton is not installed, which generated kernels need: the formulas run eagerly, emulated exactly"
        return Target(target.device, "reference", None, reason)
    return target


def has_kernels(device: torch.device) -> bool:
    """Whether generated kernels run on a device."""
    return target_of(device).lowering == "kernels"


def multiplies_fp4(device: torch.device) -> bool:
    """Whether a device's tensor cores multiply FP4 codes themselves."""
    return target_of(device).native_fp4
