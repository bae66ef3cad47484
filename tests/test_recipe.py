"""A recipe is data: what each operand gets, equal when it says the same, and refused when it cannot be
honoured."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4compile.errors import ConfigError
from fp4compile.recipe import OPERANDS, ROLES, GemmSpec, OperandSpec, Recipe

FORMATS = ("nvfp4", "mxfp4", "bf16")
ALL_OPERANDS = [f"{role}.{name}" for role in ROLES for name in OPERANDS[role]]

formats = st.sampled_from(FORMATS) | st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS))
fields = st.fixed_dictionaries(
    {},
    optional={
        "forward": formats,
        "dgrad": formats,
        "wgrad": formats,
        "weight_block": st.sampled_from([(16, 16), (1, 16)]),
        "rotation": st.sampled_from([0, 4, 8, 16, 32, 64, 128]),
        "signs": st.integers(0, 0xFFFF),
        "rotated_scale": st.sampled_from(["amax", "bound"]),
        "activation_scale": st.sampled_from(["tensor", "row"]),
        "stochastic": st.sets(st.sampled_from(ALL_OPERANDS)),
    },
)


def nearest(fmt: str, *block: int) -> OperandSpec:
    return OperandSpec(fmt, block or None, "nearest")


def stochastic(fmt: str, *block: int) -> OperandSpec:
    return OperandSpec(fmt, block, "stochastic")


# --- what the default is --------------------------------------------------------------------------


def test_nvidia_quantizes_activations_1x16_and_weights_16x16_in_forward() -> None:
    assert Recipe.nvidia().gemm("forward") == GemmSpec(nearest("nvfp4", 1, 16), nearest("nvfp4", 16, 16), 0, 0)


def test_nvidia_rounds_the_gradient_stochastically_in_dgrad_and_does_not_rotate() -> None:
    assert Recipe.nvidia().gemm("dgrad") == GemmSpec(stochastic("nvfp4", 1, 16), nearest("nvfp4", 16, 16), 0, 0)


def test_nvidia_rotates_wgrad_by_16_with_transformer_engines_signs() -> None:
    spec = Recipe.nvidia().gemm("wgrad")
    assert spec == GemmSpec(stochastic("nvfp4", 1, 16), nearest("nvfp4", 1, 16), 16, 0xD7E8)


def test_the_constructors_defaults_are_nvidias_recipe() -> None:
    assert Recipe() == Recipe.nvidia() == Recipe.named("nvidia") == Recipe.of(None)


def test_mxfp4_by_name_rotates_by_32_and_keeps_blocks_of_32() -> None:
    spec = Recipe.named("mxfp4").gemm("wgrad")
    assert spec == GemmSpec(stochastic("mxfp4", 1, 32), nearest("mxfp4", 1, 32), 32, 0xD7E8)
    assert Recipe.named("mxfp4").gemm("forward").right == nearest("mxfp4", 1, 32)


def test_bf16_leaves_all_three_gemms_alone() -> None:
    assert [Recipe.bf16().gemm(role) for role in ROLES] == [None, None, None]


# --- what a change of one field does --------------------------------------------------------------


def test_a_late_switch_leaves_forward_alone_and_changes_nothing_else() -> None:
    switched = Recipe.nvidia(forward="bf16")
    assert switched.gemm("forward") is None
    assert [switched.gemm(role) for role in ("dgrad", "wgrad")] == [
        Recipe.nvidia().gemm(role) for role in ("dgrad", "wgrad")
    ]


def test_a_pair_gives_each_operand_its_own_format() -> None:
    spec = Recipe(forward=("bf16", "mxfp4")).gemm("forward")
    assert spec == GemmSpec(nearest("bf16"), nearest("mxfp4", 1, 32), 0, 0)
    assert spec.precision == "mxfp4"


def test_a_gemm_is_called_by_its_first_fp4_operand() -> None:
    assert Recipe(dgrad=("nvfp4", "mxfp4")).gemm("dgrad").precision == "nvfp4"
    assert Recipe(dgrad=("nvfp4", "bf16")).gemm("dgrad").precision == "nvfp4"


def test_stochastic_rounding_has_no_effect_on_a_bf16_operand() -> None:
    assert Recipe(dgrad=("bf16", "nvfp4")).gemm("dgrad").left == nearest("bf16")


@given(fields, st.sampled_from(ROLES))
def test_exactly_the_listed_operands_are_rounded_stochastically(changes: dict, role: str) -> None:
    recipe = Recipe(**changes)
    spec = recipe.gemm(role, "nvfp4")
    for name, operand in zip(OPERANDS[role], (spec.left, spec.right), strict=True):
        assert (operand.rounding == "stochastic") == (f"{role}.{name}" in recipe.stochastic)


def test_a_bf16_operand_of_wgrad_is_rotated_with_the_other() -> None:
    spec = Recipe(wgrad=("nvfp4", "bf16")).gemm("wgrad")
    assert (spec.right, spec.rotate, spec.signs) == (nearest("bf16"), 16, 0xD7E8)


def test_rotation_zero_turns_it_off_in_wgrad() -> None:
    spec = Recipe(rotation=0).gemm("wgrad")
    assert (spec.rotate, spec.signs) == (0, 0)


def test_the_scale_of_rotated_operands_is_that_of_the_rotated_tensor_unless_a_bound_is_asked_for() -> None:
    assert Recipe().gemm("wgrad").rotated_scale == "amax"
    assert Recipe(rotated_scale="bound").gemm("wgrad").rotated_scale == "bound"


@given(fields)
def test_what_is_not_rotated_has_its_own_amax(changes: dict) -> None:
    recipe = Recipe(**{**changes, "rotated_scale": "bound"})
    specs = [recipe.gemm(role, "nvfp4") for role in ROLES]
    assert [spec.rotated_scale == "bound" for spec in specs] == [False, False, recipe.rotation != 0]


@given(fields)
def test_only_an_nvfp4_activation_of_the_forward_has_a_scale_a_row(changes: dict) -> None:
    recipe = Recipe(**{**changes, "activation_scale": "row"})
    specs = [(role, recipe.gemm(role)) for role in ROLES]
    by_row = [(role, spec.left.scale == "row", spec.right.scale == "row") for role, spec in specs if spec]
    is_nvfp4 = recipe.forward[0] == "nvfp4"
    assert by_row == [(role, role == "forward" and is_nvfp4, False) for role, spec in specs if spec]


def test_an_activation_has_one_scale_a_tensor_unless_one_a_row_is_asked_for() -> None:
    assert (
        Recipe().gemm("forward").left.scale == Recipe(activation_scale="tensor").gemm("forward").left.scale == "tensor"
    )


@given(fields)
def test_only_wgrad_is_rotated(changes: dict) -> None:
    specs = [Recipe(**changes).gemm(role) for role in ("forward", "dgrad")]
    assert all(spec is None or spec.rotate == 0 for spec in specs)


@given(fields, st.sampled_from(ROLES), st.sampled_from(["nvfp4", "mxfp4"]))
def test_a_policys_format_replaces_those_of_both_operands(changes: dict, role: str, fmt: str) -> None:
    spec = Recipe(**changes).gemm(role, fmt)
    assert (spec.left.format, spec.right.format) == (fmt, fmt)
    assert spec == Recipe(**{**changes, role: fmt}).gemm(role)


@given(fields, st.sampled_from(ROLES))
def test_a_policys_bf16_leaves_the_gemm_alone_and_its_recipe_does_nothing(changes: dict, role: str) -> None:
    recipe = Recipe(**changes)
    assert recipe.gemm(role, "bf16") is None
    assert recipe.gemm(role, "recipe") == recipe.gemm(role)


@given(fields)
def test_blocks_follow_the_format_and_16x16_is_for_weights_only(changes: dict) -> None:
    recipe = Recipe(**changes)
    for role in ROLES:
        spec = recipe.gemm(role)
        for name, operand in zip(OPERANDS[role], (spec.left, spec.right) if spec else (), strict=False):
            nvfp4 = recipe.weight_block if name == "w" else (1, 16)
            assert operand.block == {"bf16": None, "mxfp4": (1, 32), "nvfp4": nvfp4}[operand.format]


# --- value semantics ------------------------------------------------------------------------------


@given(fields)
def test_json_round_trips_and_equal_recipes_have_equal_json_and_hash(changes: dict) -> None:
    recipe = Recipe(**changes)
    again = Recipe.from_json(recipe.to_json())
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert again.to_json() == recipe.to_json()


@given(fields, fields)
def test_json_tells_unequal_recipes_apart(one: dict, other: dict) -> None:
    assert (Recipe(**one) == Recipe(**other)) == (Recipe(**one).to_json() == Recipe(**other).to_json())


@given(fields)
def test_the_repr_evaluates_to_an_equal_recipe(changes: dict) -> None:
    recipe = Recipe(**changes)
    assert eval(repr(recipe), {"Recipe": Recipe}) == recipe


def test_the_repr_shows_only_what_differs_from_nvidia() -> None:
    assert repr(Recipe.nvidia()) == "Recipe.nvidia()"
    assert repr(Recipe.nvidia(forward="bf16", signs=1)) == "Recipe.nvidia(forward='bf16', signs=0x0001)"


def test_one_name_and_a_pair_of_it_are_the_same_recipe() -> None:
    assert Recipe(forward="mxfp4") == Recipe(forward=("mxfp4", "mxfp4")) == Recipe(forward=["mxfp4", "mxfp4"])


def test_json_has_every_field_under_its_name() -> None:
    assert set(json.loads(Recipe().to_json())) == {field.name for field in dataclasses.fields(Recipe)}


def test_a_recipe_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().rotation = 0  # type: ignore[misc]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("forward", "fp8", "'nvfp4', 'mxfp4' or 'bf16'"),
        ("dgrad", ("nvfp4",), "(dy, w)"),
        ("wgrad", None, "(dy, x)"),
        ("weight_block", (16, 1), "(16, 16) or (1, 16)"),
        ("weight_block", 16, "(16, 16) or (1, 16)"),
        ("rotation", 12, "4, 8, 16, 32, 64, 128"),
        ("rotation", True, "4, 8, 16, 32, 64, 128"),
        ("rotation", 256, "4, 8, 16, 32, 64, 128"),
        ("signs", 1 << 16, "16 bits"),
        ("signs", -1, "16 bits"),
        ("rotated_scale", "max", "'amax' or 'bound'"),
        ("rotated_scale", None, "'amax' or 'bound'"),
        ("activation_scale", "token", "'tensor' or 'row'"),
        ("activation_scale", None, "'tensor' or 'row'"),
        ("stochastic", True, "forward.x"),
        ("stochastic", "dgrad.dy", "forward.x"),
        ("stochastic", {"dgrad.x"}, "forward.x"),
    ],
)
def test_an_impossible_value_is_refused_by_field_value_and_what_is_allowed(
    field: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Recipe(**{field: value})
    for part in (f"Recipe.{field}", repr(value), allowed):
        assert part in str(caught.value)


@pytest.mark.parametrize("make", [Recipe.from_dict, lambda fields: Recipe.nvidia(**fields)])
def test_an_unknown_field_is_refused_with_the_closest_and_all_known(make) -> None:
    with pytest.raises(ConfigError, match=r"'rotations' \(did you mean 'rotation'\?\).*stochastic"):
        make({"rotations": 16})


@pytest.mark.parametrize("text", ["", "[]", "nvidia", "3"])
def test_json_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Recipe.from_json(text)


@pytest.mark.parametrize("name", ["", "nvfp4", "NVIDIA"])
def test_an_unknown_name_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match="'nvidia', 'bf16' and 'mxfp4'"):
        Recipe.of(name)


def test_something_else_than_a_recipe_or_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="not 16"):
        Recipe.of(16)  # type: ignore[arg-type]


def test_an_unknown_role_is_refused_with_the_roles_there_are() -> None:
    with pytest.raises(ConfigError, match=r"fprop.*forward, dgrad, wgrad"):
        Recipe().gemm("fprop")  # type: ignore[arg-type]
