"""What the model of benchmarks/blackwell_model.py counts in a disassembly."""

import blackwell_model
import pytest

LOOP = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
        /*0030*/                   FFMA R4, R4, R4, R4 ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
.L_x_1:
        /*0060*/                   BRA `(.L_x_1);
        /*0070*/                   NOP;
"""
LEAVES_INSIDE = """
.L_x_0:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 EXIT ;
        /*0030*/                   BRA `(.L_x_0) ;
$__internal_0_$__division:
        /*0040*/                   FADD R4, R4, R4 ;
        /*0050*/                   BRA `(.L_x_0) ;
"""


def test_a_loop_counts_as_often_as_it_turns():
    counts = blackwell_model.executed(LOOP, passes=4, loads=32)
    assert counts == {"MOV": 1, "EXIT": 1, "LDG.E.128": 8, "FFMA": 4, "BRA": 4}


def test_passes_that_the_assembler_put_into_one_turn_count_once():
    assert blackwell_model.executed(LOOP, passes=4, loads=16)["FFMA"] == 2


def test_a_loop_that_is_left_in_its_middle_counts_whole_and_subroutines_do_not():
    assert blackwell_model.executed(LEAVES_INSIDE, passes=3, loads=16) == {"LDG.E.128": 3, "EXIT": 3, "BRA": 3}


def test_without_a_loop_everything_counts_once():
    straight = LOOP.replace("@P0 BRA `(.L_x_0)", "@P0 BRA `(.L_x_1)")
    assert blackwell_model.executed(straight, passes=4, loads=32).total() == 6


def test_integer_multiply_adds_take_twice_the_time_of_their_pipe():
    ffma, imad = (blackwell_model.cycles(blackwell_model.Counter({name: 8})) for name in ("FFMA", "IMAD.WIDE"))
    assert imad["fma"] == pytest.approx(2 * ffma["fma"])
    assert imad["issue"] == ffma["issue"] == pytest.approx(8 / 128)
