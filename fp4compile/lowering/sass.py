"""What a kernel's machine code consists of, read from its disassembly; pure functions on text.

Counts are of instructions in the program, not of instructions executed: a loop's body counts once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*"  # address; a brace opens a dual-issued pair on old GPUs
    r"(?:@!?U?P[T0-9]+\s+)?"  # predicate
    r"([A-Z][A-Za-z0-9_.]*)",
    re.MULTILINE,
)
_LAST_EXIT = re.compile(r".*^\s*/\*[0-9a-f]{4,}\*/[^\n;]*\bEXIT\b[^\n]*", re.MULTILINE | re.DOTALL)

MATTERS = {
    "FP4 MMA": r"(UTCOMMA|OMMA\.SF)",
    "tcgen05 MMA": r"UTC[HQI]MMA",
    "warpgroup MMA": r"[HQI]GMMA",
    "warp MMA": r"[HQID]MMA",
    "scale copies": r"UTCCP",
    "TMEM moves": r"(LDTM|STTM)",
    "TMA loads": r"UTMALDG",
    "TMA stores": r"UTMASTG",
    "global loads": r"LDG",
    "global stores": r"STG",
    "async copies": r"LDGSTS",
    "shared loads": r"LDSM?",
    "shared stores": r"STSM?",
    "shuffles": r"SHFL",
    "local loads": r"LDL",
    "local stores": r"STL",
    "E2M1 nearest": r"F2FP\.SATFINITE\.E2M1(?!.*\.RS)",
    "E2M1 stochastic": r"F2FP\.SATFINITE\.E2M1(?=.*\.RS)",
    "E2M1 decodes": r"F2FP\.F16\.E2M1",
    "E4M3 encodes": r"F2FP\.SATFINITE\.E4M3",
    "E4M3 decodes": r"F2FP\.F16\.E4M3",
    "divisions": r"FCHK",
    "calls": r"CALL",
    "MUFU": r"MUFU",
    "barriers": r"BAR",
}
"""Readable name -> pattern of an opcode's beginning, up to a dot or its end, as Triton 3.6 and 3.7 assemble them.

FP4 MMA, block-scaled: tcgen05's kind::mxf4nvf4 is UTCOMMA (.4X on 10.0, .BLOCK16 on 10.3), mma.sync's is OMMA.SF. E2M1:
cvt.rn.satfinite.e2m1x2.f32 is F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C, cvt.rs.satfinite.e2m1x4.f32 is two of it with
.RS. An exact division checks its operands' range (FCHK) and calls a slow path seldom; other calls check tensor
memory (TMEM). MUFU: special functions, reciprocals among them. Local loads and stores are spilled registers.
"""

PIPES = {
    "fma": "FFMA FMUL FADD FFMA2 FMUL2 FADD2 FSWZADD FHADD FHFMA HFMA2 HADD2 HMUL2 IMAD IMUL IDP",
    "alu": "LOP3 LOP PLOP3 SHF SHL SHR IADD3 IADD VIADD VIADDMNMX PRMT LEA SEL FSEL FMNMX FMNMX3 IMNMX VIMNMX VIMNMX3"
    " HMNMX2 ISETP FSETP FSET HSETP2 HSET2 PSETP FCHK SGXT BMSK IABS VABSDIFF F2FP I2FP MOV CS2R P2R R2P",
    "lsu": "LD ST LDG STG LDS STS LDL STL LDSM STSM LDGSTS LDGDEPBAR ATOM ATOMG ATOMS RED SHFL S2R",
    "mufu": "MUFU I2F F2I F2F FRND POPC FLO BREV",
    "tensor": "HMMA IMMA DMMA QMMA OMMA HGMMA QGMMA IGMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA UTCCP UTCBAR LDTM STTM",
    "uniform": "R2UR S2UR VOTEU",
}
"""Pipe -> opcodes of 9.0 and 10.0 that it executes; what is in none ("other") branches, waits or loads constants.

Which opcodes share a pipe: Nsight Compute's Profiling Guide, "Metrics Decoder", "Pipelines" (ALU: bit manipulation,
logic, comparisons and integers without multiplication; FMA: float32 and integer multiplication; XU: special functions
and conversions between integers and floats; LSU: memory accesses, shuffles and special registers). Every other opcode
that begins with U is the uniform datapath's, TMA's included: one instruction a warp, not one a thread.
"""

LANES = {"fma": 128, "alu": 64, "lsu": 32, "mufu": 16}
"""Operations a clock and SM on 9.0; a warp's instruction is 32 of them.

CUDA C++ Programming Guide, "Arithmetic Instructions", table of throughputs: float32 add, multiply and multiply-add 128;
integer add, compare, minimum, shift and logic 64; special functions 16; warp shuffles 32. Integer multiply-add (IMAD)
is 64: it has half of the fma pipe. 10.0 is taken to be the same.
"""

_PIPE_OF = {opcode: pipe for pipe, opcodes in PIPES.items() for opcode in opcodes.split()}


def count_instructions(sass: str) -> Counter[str]:
    """How often each opcode, with its modifiers, is in a disassembly by nvdisasm or cuobjdump."""
    return Counter(_INSTRUCTION.findall(sass))


def main_path(sass: str) -> str:
    """The disassembly up to its last EXIT: what follows are slow paths, retries of waits and padding."""
    found = _LAST_EXIT.match(sass)
    return found.group() if found else sass


def count_what_matters(opcodes: Mapping[str, int]) -> dict[str, int]:
    """Readable name -> number of instructions, for every name in ``MATTERS``, zeros included."""
    return {
        name: sum(count for opcode, count in opcodes.items() if re.fullmatch(rf"{pattern}(\..*)?", opcode))
        for name, pattern in MATTERS.items()
    }


def instruction_mix(opcodes: Mapping[str, int]) -> dict[str, int]:
    """Pipe -> number of instructions, for every pipe in ``PIPES`` and "other"."""
    mix = dict.fromkeys([*PIPES, "other"], 0)
    for opcode, count in opcodes.items():
        mix[pipe_of(opcode)] += count
    return mix


def pipe_of(opcode: str) -> str:
    """The pipe that executes an opcode."""
    base = opcode.partition(".")[0]
    return _PIPE_OF.get(base, "uniform" if base.startswith("U") or base == "LDCU" else "other")
