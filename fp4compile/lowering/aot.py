"""Compile generated kernels for an architecture by its name, ahead of time and without a GPU.

Triton's wheel brings all that is needed: the compiler, NVIDIA's assemblers and the disassembler. What comes out is what
such a GPU would run, so registers, spills, shared memory and instructions are known where there is none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import sass as disassembly
from .kernels.kernel import Kernel

CAPABILITIES = {
    "sm_80": (8, 0),
    "sm_89": (8, 9),
    "sm_90": (9, 0),
    "sm_100a": (10, 0),
    "sm_103a": (10, 3),
    "sm_120a": (12, 0),
    "sm_121a": (12, 1),
}
"""Architecture -> compute capability. 8.6 and 8.7 run sm_80's code; the assembler of Triton 3.6 does not know 11.0."""

ALIASES = {"sm_90a": "sm_90"}
"""Other names. For 9.0 there is one target: Triton always compiles for sm_90a."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a kernel became on one architecture.

    sass: None, with the reason in ``note``, where Triton's disassembler does not know the architecture.
    warps: of a launch, those that warp specialization adds included. registers: of a thread.
    spilled: bytes of a thread's stack, which a Triton kernel has only for registers that did not fit.
    shared: bytes of a block. tensor_memory: columns, of 512.
    """

    kernel: Kernel
    arch: str
    ttgir: str
    ptx: str
    cubin: bytes
    sass: str | None
    note: str
    warps: int
    registers: int
    spilled: int
    shared: int
    tensor_memory: int

    @property
    def opcodes(self) -> Counter[str]:
        """How often each opcode is in the program."""
        return disassembly.count_instructions(self.sass or "")

    @property
    def main_opcodes(self) -> Counter[str]:
        """The same without what follows the last EXIT: slow paths and padding."""
        return disassembly.count_instructions(disassembly.main_path(self.sass or ""))


def architecture(name: str) -> str:
    """The one of ``CAPABILITIES`` that a name stands for."""
    found = ALIASES.get(name, name)
    if found not in CAPABILITIES:
        raise ConfigError(f"unknown architecture {name!r}; known: {', '.join([*CAPABILITIES, *ALIASES])}")
    return found


def capability_of_architecture(arch: str) -> tuple[int, int]:
    """The compute capability of an architecture's name."""
    return CAPABILITIES[architecture(arch)]


def require_triton() -> None:
    """Raise where kernels cannot be compiled at all, with the way out."""
    try:
        import triton
    except ImportError as error:
        raise ConfigError(f"Triton cannot be imported ({error}); on Linux: pip install triton") from error
    if triton.knobs.runtime.interpret:
        raise ConfigError("TRITON_INTERPRET is set: Triton interprets kernels and compiles none; unset it")


def compile_kernel(kernel: Kernel, arch: str) -> Compiled:
    """Compile one kernel; no GPU and no driver is looked for."""
    arch = architecture(arch)
    capability = CAPABILITIES[arch]
    require_triton()
    binary = _compile(kernel, capability)
    cubin = binary.asm["cubin"]
    text, note, usage = _inspect(cubin)
    registers, stack = _resources(usage, binary.metadata.name)
    return Compiled(
        kernel=kernel,
        arch=arch,
        ttgir=binary.asm["ttgir"],
        ptx=binary.asm["ptx"],
        cubin=cubin,
        sass=text,
        note=note,
        warps=binary.metadata.num_warps,
        registers=registers,
        spilled=stack,
        shared=binary.metadata.shared or 0,
        tensor_memory=binary.metadata.tmem_size or 0,
    )


def _compile(kernel: Kernel, capability: tuple[int, int]) -> Any:
    # Triton prints the whole PTX when the assembler refuses it; the exception has the assembler's words.
    with contextlib.redirect_stdout(io.StringIO()):
        return kernel.compile(capability, options=_launch_options(kernel, capability))


def _launch_options(kernel: Kernel, capability: tuple[int, int]) -> dict[str, str]:
    """What the launch of the kernel's family tells Triton beside warps and stages."""
    from .kernels import gemm

    return gemm.compile_options(capability) if kernel.family == gemm.FAMILY else {}


def _inspect(cubin: bytes) -> tuple[str | None, str, str]:
    """Disassembly, why there is none, and resource usage of a binary."""
    from triton import knobs

    with tempfile.TemporaryDirectory(prefix="fp4compile-") as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(cubin)
        code = _run(knobs.nvidia.nvdisasm.path, "-c", str(path))
        usage = _run(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path))
    if usage.returncode:
        raise RuntimeError(f"cuobjdump failed: {usage.stderr.strip()}")
    if code.returncode:
        return None, f"not disassembled: {code.stderr.strip()}", usage.stdout
    return code.stdout, "", usage.stdout


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _resources(usage: str, name: str) -> tuple[int, int]:
    """Registers and stack bytes of a function, from cuobjdump's table."""
    found = re.search(rf"Function {re.escape(name)}:\s+REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump shows no resource usage of {name!r}: {usage.strip()!r}")
    return int(found.group(1)), int(found.group(2))
