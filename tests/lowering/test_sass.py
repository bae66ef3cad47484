"""Counting instructions is reading text: no compiler is needed."""

from __future__ import annotations

import pytest

from fp4compile.lowering.sass import MATTERS, PIPES, count_instructions, count_what_matters, instruction_mix, main_path

LISTING = """
	.section	.text.tiny,"ax",@progbits
tiny:
.text.tiny:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/                   S2R R0, SR_TID.X ;
        /*0020*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/             @!UP0 UMOV UR4, URZ ;
        /*0040*/                   F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C R0, R0, R19, RZ ;
        /*0050*/                   F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C.RS R10, R5, R2, R12 ;
        /*0060*/                   F2FP.BF16.F32.PACK_AB R9, R9, R10 &req={3} ?WAIT4_END_GROUP;
        /*0070*/                   STTM.x128 tmem[UR14], RZ ;
        /*0080*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath) ;
        /*0090*/               @P6 EXIT ;
        /*00a0*/                   IMAD.MOV.U32 R19, RZ, RZ, RZ ;
        /*10b0*/                   EXIT ;
.L_x_0:
        /*10c0*/                   MUFU.RCP R30, R32 ;
        /*10d0*/                   BRA `(.L_x_0);
        /*10e0*/                   NOP;
"""


def test_every_instruction_counts_once_without_its_predicate() -> None:
    counts = count_instructions(LISTING)
    assert counts.total() == 15
    assert counts["LDG.E.128"] == counts["UMOV"] == counts["STTM.x128"] == 1
    assert counts["EXIT"] == 2
    assert not count_instructions("")


def test_lines_of_cuobjdump_with_their_encoding_count_the_same() -> None:
    line = "        /*0530*/                   MUFU.RCP R0, R19 ;    /* 0x0000001300007308 */\n"
    assert count_instructions(line + "    /* 0x000fe200000010ff */\n") == {"MUFU.RCP": 1}


def test_the_main_path_ends_at_the_last_exit() -> None:
    counts = count_instructions(main_path(LISTING))
    assert counts.total() == 12
    assert counts["EXIT"] == 2
    assert counts["MUFU.RCP"] == counts["NOP"] == 0


def test_a_listing_without_exit_is_all_main_path() -> None:
    assert main_path("        /*0000*/   NOP;\n") == "        /*0000*/   NOP;\n"


def test_what_matters_has_readable_names() -> None:
    counts = count_what_matters(count_instructions(LISTING))
    assert set(counts) == set(MATTERS)
    assert {name for name, count in counts.items() if count} == {
        "global loads",
        "E2M1 nearest",
        "E2M1 stochastic",
        "TMEM moves",
        "calls",
        "MUFU",
    }


@pytest.mark.parametrize(
    ("opcode", "names"),
    [
        ("UTCOMMA.4X", ["FP4 MMA"]),
        ("UTCOMMA.BLOCK16", ["FP4 MMA"]),
        ("OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", ["FP4 MMA"]),
        ("UTCHMMA", ["tcgen05 MMA"]),
        ("HGMMA.64", ["warpgroup MMA"]),
        ("HMMA.16816.F32.BF16", ["warp MMA"]),
        ("HFMA2.MMA", []),
        ("LDGSTS.E.64", ["async copies"]),
        ("LDGDEPBAR", []),
        ("LDSM.16.M88.4", ["shared loads"]),
        ("LDL.LU.64", ["local loads"]),
        ("F2FP.F16.E2M1.UNPACK_B", ["E2M1 decodes"]),
        ("F2FP.SATFINITE.E4M3.F16.UNPACK_B_MERGE_C", ["E4M3 encodes"]),
        ("F2FP.BF16.F32.PACK_AB", []),
        ("BAR.SYNC.DEFER_BLOCKING", ["barriers"]),
    ],
)
def test_an_opcode_counts_under_one_name_at_most(opcode: str, names: list[str]) -> None:
    assert [name for name, count in count_what_matters({opcode: 3}).items() if count] == names


def test_the_mix_sorts_instructions_by_pipe_and_loses_none() -> None:
    counts = count_instructions(LISTING)
    mix = instruction_mix(counts)
    assert mix == {"fma": 1, "alu": 3, "lsu": 2, "mufu": 1, "tensor": 1, "uniform": 1, "other": 6}
    assert sum(mix.values()) == counts.total()


def test_no_opcode_is_in_two_pipes() -> None:
    opcodes = [opcode for pipe in PIPES.values() for opcode in pipe.split()]
    assert len(opcodes) == len(set(opcodes))


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        ("UTMALDG.2D", "uniform"),
        ("LDCU.64", "uniform"),
        ("UTCOMMA.4X", "tensor"),
        ("UIADD3.X", "uniform"),
        ("BRA.U", "other"),
    ],
)
def test_uniform_instructions_are_not_the_tensor_cores(opcode: str, pipe: str) -> None:
    assert instruction_mix({opcode: 2})[pipe] == 2
