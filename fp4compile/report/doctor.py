"""``python -m fp4compile doctor``: what this machine will do, and why."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from typing import Any

import torch

from .. import compat
from ..lowering import cublas
from ..lowering.targets import Target, capability_of, target_for


def examine() -> dict[str, Any]:
    """Versions, devices with their lowering, and problems found; JSON values."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "fp4compile": _version("fp4compile"),
        "devices": [_device(name, target) for name, target in _devices()],
        "problems": _problems(),
    }


def to_text(facts: dict[str, Any]) -> str:
    """The facts of ``examine`` for a person."""
    lines = [f"{name:11} {facts[name]}" for name in ("python", "torch", "triton", "fp4compile")]
    for device in facts["devices"]:
        lines += [
            f"{device['device']:11} {device['name']}",
            f"{'':11} lowering: {device['lowering']} ({device['reason']})",
        ]
    if not facts["problems"]:
        return "\n".join([*lines, "no problem found"])
    return "\n".join([*lines, "problems:", *(f"  - {problem}" for problem in facts["problems"])])


def _devices() -> list[tuple[str, Target]]:
    found = [(platform.processor() or platform.machine(), target_for("cpu"))]
    for index in range(torch.cuda.device_count()):
        capability = capability_of(torch.device("cuda", index))
        name = torch.cuda.get_device_name(index)
        if capability is not None:
            name += f", compute capability {capability[0]}.{capability[1]}"
        found.append((name, target_for("cuda", capability)))
    return found


def _device(name: str, target: Target) -> dict[str, Any]:
    return {
        "device": target.device,
        "name": name,
        "lowering": target.lowering,
        "native_fp4": target.native_fp4,
        "reason": target.reason,
    }


def _problems() -> list[str]:
    problems = []
    if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        problems.append("no C++ compiler on PATH: Inductor needs one for CPUs (Debian: apt-get install g++)")
    if "nvfp4" not in {point.name for point in importlib.metadata.entry_points(group="torch_dynamo_backends")}:
        problems.append("backend 'nvfp4' is not registered: install the package (pip install fp4compile)")
    if torch.version.cuda is not None and torch.cuda.is_available() and not cublas.available():
        problems.append("PyTorch's cuBLAS was not found: products apply their tensor scales in a pass of their own")
    return problems + compat.self_test()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
