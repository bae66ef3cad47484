"""What each device does with the operators of a rewritten graph, and why.

One table, pure: device type and compute capability in, lowering and reason out. Lowering chooses how, never what:
codes, scales and amax have the same bits everywhere.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

Lowering = Literal["compiled", "reference"]


@dataclasses.dataclass(frozen=True)
class Target:
    """How one device runs the operators.

    ``lowering``: "compiled" (the formulas as Inductor's primitives, fused by its code generator, once for all sites) or
    "reference" (the operators' eager implementation, called from the generated code).
    """

    device: str
    lowering: Lowering
    native_fp4: bool
    reason: str


def target_for(device_type: str) -> Target:
    """The target of a torch device type."""
    if device_type == "cpu":
        return Target(
            "cpu", "compiled", False, "Inductor's C++ backend fuses the formulas; emulated exactly in float32"
        )
    return Target(
        device_type,
        "reference",
        False,
        "no generated kernels for this device yet: the formulas run eagerly, emulated exactly in float32",
    )


def current_device() -> torch.device:
    """The accelerator of this machine if there is one, else the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None else torch.device("cpu")
