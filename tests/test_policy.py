"""Which weights stay bf16 and why; what the compiled graph gets to know when it asks by name."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import DIM, GPT, HIDDEN, VOCABULARY, Block, Conv1D, Experts, Functional, Mixer
from torch import nn

from fp4compile.errors import ConfigError, Fp4Warning, RewriteError
from fp4compile.modules import ModuleTree
from fp4compile.policy import Choice, Decision, Decisions, Policy, clean_name, default_ends, resolve

ROLES = ("forward", "dgrad", "wgrad")
RECIPE, BF16 = ("recipe",) * 3, ("bf16",) * 3


def precisions(decisions: Decisions, name: str) -> tuple[str, str, str]:
    return decisions.of_parameter(name).precisions()


def reason(decisions: Decisions, name: str) -> str:
    return decisions.of_parameter(name).forward.reason


def kept(decisions: Decisions, suffix: str = ".up.weight") -> list[str]:
    """The parameters with this suffix that stay bf16 in all three GEMMs."""
    return [name for name, decision in decisions.parameters if name.endswith(suffix) and decision.precisions() == BF16]


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """A test that does not ask for a warning of ours fails if there is one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fp4Warning)
        yield


# --- the default rule for the first and last blocks -----------------------------------------------


def test_the_papers_62_blocks_keep_2_first_and_8_last() -> None:
    assert default_ends(62) == (2, 8)


@pytest.mark.parametrize(("blocks", "ends"), [(0, (0, 0)), (3, (0, 0)), (4, (0, 1)), (12, (0, 2)), (24, (1, 3))])
def test_default_ends_of_small_models(blocks: int, ends: tuple[int, int]) -> None:
    assert default_ends(blocks) == ends


@given(st.integers(0, 500))
def test_the_default_keeps_no_more_blocks_than_there_are_and_never_less_for_more(blocks: int) -> None:
    (first, last), (more_first, more_last) = default_ends(blocks), default_ends(blocks + 1)
    assert 0 <= first + last <= blocks
    assert first <= more_first
    assert last <= more_last


@given(st.integers(12, 500))
def test_the_default_keeps_the_papers_share_to_within_one_block(blocks: int) -> None:
    assert abs(sum(default_ends(blocks)) - 10 / 62 * blocks) <= 1


# --- which blocks there are -----------------------------------------------------------------------


def test_by_default_the_last_block_of_8_and_embeddings_and_head_stay_bf16() -> None:
    decisions = resolve(GPT(blocks=8), Policy())
    assert kept(decisions) == ["layers.7.up.weight"]
    assert reason(decisions, "layers.7.attn.wo.weight") == "last 1 of 8 blocks"
    assert reason(decisions, "tok.weight") == "embedding"
    assert reason(decisions, "pos.weight") == "embedding"
    assert reason(decisions, "lm_head.weight") == "output head: tied to tok"
    assert precisions(decisions, "layers.0.up.weight") == RECIPE


def test_first_and_last_count_blocks_in_model_order_past_ten() -> None:
    decisions = resolve(GPT(blocks=12), Policy(first=1, last=3))
    assert set(kept(decisions)) == {f"layers.{i}.up.weight" for i in (0, 9, 10, 11)}
    assert reason(decisions, "layers.0.up.weight") == "first 1 of 12 blocks"


def test_zero_turns_the_rule_off() -> None:
    assert kept(resolve(GPT(blocks=20), Policy())) != []
    assert kept(resolve(GPT(blocks=20), Policy(first=0, last=0))) == []


def test_more_ends_than_blocks_keep_every_block() -> None:
    assert len(kept(resolve(GPT(blocks=3), Policy(first=2, last=2)))) == 3


def test_the_list_of_blocks_wins_over_longer_lists_inside_a_block() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(Experts(8) for _ in range(4))
    assert ModuleTree(model).find_blocks() == ("layers.0", "layers.1", "layers.2", "layers.3")


def test_a_module_dict_of_numbered_blocks_is_a_list() -> None:
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): Block() for i in range(3)})
    assert ModuleTree(model).find_blocks() == ("layers.0", "layers.1", "layers.2")


def test_a_list_may_hold_blocks_of_several_classes() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Mixer(), Block(), Mixer(), nn.Dropout()])
    assert ModuleTree(model).find_blocks() == ("layers.0", "layers.1", "layers.2")


def test_a_sequential_that_is_a_whole_model_lends_only_its_blocks() -> None:
    model = nn.Sequential(nn.Embedding(VOCABULARY, DIM), Block(), Block(), nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY))
    assert ModuleTree(model).find_blocks() == ("1", "2")
    assert reason(resolve(model, Policy()), "4.weight") == f"output head: {VOCABULARY} outputs, like an embedding"


def test_a_dict_of_lists_is_no_list_of_blocks() -> None:
    model = nn.ModuleDict({"encoder": nn.ModuleList([Block()]), "decoder": nn.ModuleList([Block(), Block()])})
    assert ModuleTree(model).find_blocks() == ("decoder.0", "decoder.1")


def test_a_block_that_stands_in_the_list_twice_counts_once() -> None:
    model, shared = nn.Module(), Block()
    model.layers = nn.ModuleList([shared, Block(), shared])
    assert ModuleTree(model).find_blocks() == ("layers.0", "layers.1")


def test_the_largest_of_several_lists_has_the_blocks() -> None:
    model = nn.Module()
    model.stem = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(5)))
    model.layers = nn.ModuleList(Block() for _ in range(2))
    model.tail = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(5))
    assert ModuleTree(model).find_blocks() == ("layers.0", "layers.1")


def test_a_model_without_repeated_modules_has_no_blocks() -> None:
    assert ModuleTree(Functional()).find_blocks() == ()
    assert ModuleTree(GPT(blocks=1)).find_blocks() == ()
    assert resolve(Functional(), Policy()).parameters


@pytest.mark.parametrize("pattern", ["layers", "layers.*", "lay*"])
def test_blocks_may_be_named_by_the_list_or_by_a_glob(pattern: str) -> None:
    assert ModuleTree(GPT(blocks=3)).find_blocks(pattern) == ("layers.0", "layers.1", "layers.2")


def test_a_glob_over_two_lists_counts_through_both() -> None:
    model = nn.Module()
    model.encoder, model.decoder = GPT(blocks=2), GPT(blocks=2)
    decisions = resolve(model, Policy(blocks="*.layers", first=0, last=2))
    assert kept(decisions) == ["decoder.layers.0.up.weight", "decoder.layers.1.up.weight"]


def test_a_sequential_named_alone_stands_for_its_children_but_not_as_one_of_many() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
    assert ModuleTree(model).find_blocks("stages.0") == ("stages.0.0", "stages.0.1")
    assert ModuleTree(model).find_blocks("stages.*") == ("stages.0", "stages.1")


def test_ends_without_a_list_of_blocks_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"first=None, last=2.*Functional.*blocks=.*prepare\(\)"):
        resolve(Functional(), Policy(last=2))


# --- patterns -------------------------------------------------------------------------------------


def test_skip_by_module_by_parameter_and_by_enclosing_module() -> None:
    decisions = resolve(GPT(), Policy(skip=["layers.1.up", "layers.2.down.weight", "layers.3"], last=0))
    for name in (
        "layers.1.up.weight",
        "layers.2.down.weight",
        "layers.3.attn.qkv.weight",
        "layers.3.up.weight",
    ):
        assert precisions(decisions, name) == BF16
    assert reason(decisions, "layers.3.attn.qkv.weight") == "skip 'layers.3'"
    for name in ("layers.1.down.weight", "layers.2.up.weight", "layers.4.up.weight"):
        assert precisions(decisions, name) == RECIPE


def test_a_name_does_not_match_a_longer_number() -> None:
    decisions = resolve(GPT(blocks=12), Policy(skip="layers.1", last=0))
    assert kept(decisions) == ["layers.1.up.weight"]


def test_what_is_not_included_stays_bf16() -> None:
    decisions = resolve(GPT(), Policy(include="*.attn", last=0))
    assert precisions(decisions, "layers.0.attn.wo.weight") == RECIPE
    assert reason(decisions, "layers.0.up.weight") == "not in include"


def test_patterns_are_case_sensitive() -> None:
    with pytest.warns(Fp4Warning, match="'LAYERS.1'"):
        decisions = resolve(GPT(), Policy(skip="LAYERS.1", last=0))
    assert kept(decisions) == []


@pytest.mark.parametrize(
    ("policy", "field", "close"),
    [
        (Policy(skip="*.dwon"), "skip pattern '*.dwon'", "down"),
        (Policy(include=("*", "lmhead")), "include pattern 'lmhead'", "lm_head"),
        (Policy(overrides={"layer.0.up": "bf16"}), "overrides pattern 'layer.0.up'", "layers.0.up"),
        (Policy(blocks="blocks"), "blocks pattern 'blocks'", ""),
    ],
)
def test_a_pattern_that_matches_nothing_warns_and_names_what_is_close(policy: Policy, field: str, close: str) -> None:
    with pytest.warns(Fp4Warning) as caught:
        resolve(GPT(), policy)
    (warning,) = caught
    assert f"Policy.{field}" in str(warning.message)
    assert close in str(warning.message)


# --- overrides and precedence ---------------------------------------------------------------------


def test_an_override_wins_over_skip_include_head_and_ends() -> None:
    policy = Policy(include="*.attn", skip="*.wo", overrides={"lm_head": "nvfp4", "*.wo": "mxfp4", "*.7.up": "recipe"})
    decisions = resolve(GPT(), policy)
    assert precisions(decisions, "lm_head.weight") == ("nvfp4",) * 3
    assert precisions(decisions, "layers.7.attn.wo.weight") == ("mxfp4",) * 3
    assert precisions(decisions, "layers.7.up.weight") == RECIPE


def test_an_override_of_one_role_leaves_the_others_to_the_other_rules() -> None:
    decisions = resolve(GPT(), Policy(overrides={"*.wo": {"forward": "bf16"}, "*.7.up": {"wgrad": "nvfp4"}}))
    assert precisions(decisions, "layers.0.attn.wo.weight") == ("bf16", "recipe", "recipe")
    assert precisions(decisions, "layers.7.up.weight") == ("bf16", "bf16", "nvfp4")
    assert decisions.of_parameter("layers.0.attn.wo.weight").forward.reason == "override '*.wo'"


def test_the_first_override_that_names_the_role_decides() -> None:
    overrides = {"layers.0.*": {"forward": "mxfp4"}, "*.up": "nvfp4"}
    assert precisions(resolve(GPT(), Policy(overrides=overrides)), "layers.0.up.weight") == (
        "mxfp4",
        "nvfp4",
        "nvfp4",
    )
    reverse = Policy(overrides=dict(reversed(overrides.items())))
    assert precisions(resolve(GPT(), reverse), "layers.0.up.weight") == ("nvfp4",) * 3


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Policy(skip="lm_head", include="layers", last=8), "skip 'lm_head'"),
        (Policy(include="layers", last=8), "not in include"),
        (Policy(last=8), "output head: tied to tok"),
    ],
)
def test_the_first_rule_that_applies_gives_the_reason(policy: Policy, why: str) -> None:
    assert reason(resolve(GPT(), policy), "lm_head.weight") == why


# --- head, embeddings, other weights --------------------------------------------------------------


def test_a_head_is_known_by_its_size_or_its_name_too() -> None:
    model = GPT(tied=False)
    assert reason(resolve(model, Policy()), "lm_head.weight") == f"output head: {VOCABULARY} outputs, like an embedding"
    model.score = nn.Linear(DIM, 5)
    assert reason(resolve(model, Policy()), "score.weight") == "output head: called score"


def test_a_linear_of_vocabulary_size_inside_a_block_is_no_head() -> None:
    model = GPT()
    model.layers[0].head = nn.Linear(DIM, VOCABULARY)
    assert precisions(resolve(model, Policy()), "layers.0.head.weight") == RECIPE


def test_a_linear_inside_the_blocks_of_another_list_is_no_head_by_its_outputs() -> None:
    model = nn.Module()
    model.positions = nn.Embedding(HIDDEN, DIM)  # as many as the blocks' wide layer has outputs
    model.encoder = nn.ModuleList(Block() for _ in range(2))
    model.decoder = nn.ModuleList(Block() for _ in range(3))
    decisions = resolve(model, Policy())
    assert {precisions(decisions, f"encoder.{i}.up.weight") for i in range(2)} == {RECIPE}


def test_heads_in_a_list_are_known_by_their_outputs() -> None:
    model = GPT()
    model.heads = nn.ModuleList(nn.Linear(DIM, VOCABULARY) for _ in range(2))
    assert reason(resolve(model, Policy()), "heads.1.weight") == f"output head: {VOCABULARY} outputs, like an embedding"


def test_an_in_out_weight_is_a_head_by_its_outputs_and_not_by_its_inputs() -> None:
    model = nn.Module()
    model.tok = nn.Embedding(VOCABULARY, DIM)
    model.out, model.back = Conv1D(VOCABULARY, DIM), Conv1D(DIM, VOCABULARY)
    decisions = resolve(model, Policy())
    assert precisions(decisions, "out.weight") == BF16
    assert precisions(decisions, "back.weight") == RECIPE


def test_keep_head_false_gives_head_and_embeddings_to_the_recipe() -> None:
    decisions = resolve(GPT(), Policy(keep_head=False))
    assert precisions(decisions, "lm_head.weight") == precisions(decisions, "tok.weight") == RECIPE


def test_convolutions_and_norms_are_no_matmuls() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(Mixer() for _ in range(2))
    model.norm = nn.LayerNorm((4, DIM))
    decisions = resolve(model, Policy())
    assert reason(decisions, "layers.0.conv.weight") == "Conv1d, not a matmul"
    assert reason(decisions, "norm.weight") == "LayerNorm, not a matmul"
    assert precisions(decisions, "layers.0.in_proj.weight") == RECIPE


# --- lookups from a graph -------------------------------------------------------------------------


def test_a_module_that_owns_its_weight_names_the_site() -> None:
    name, decision = resolve(GPT(), Policy()).lookup("layers.0.attn.wo", ["layers.0.attn.wo.weight"])
    assert (name, decision.precisions()) == ("layers.0.attn.wo", RECIPE)


def test_a_tied_weight_is_decided_by_the_module_that_executes() -> None:
    decisions = resolve(GPT(), Policy(overrides={"lm_head": "nvfp4"}))
    name, decision = decisions.lookup("lm_head", ["tok.weight"])  # torch keeps the first name of a tied parameter
    assert (name, decision.precisions()) == ("lm_head", ("nvfp4",) * 3)


def test_a_tied_weight_used_in_a_function_is_bf16_if_one_of_its_names_is() -> None:
    decisions = resolve(GPT(), Policy(overrides={"lm_head": "nvfp4"}))
    name, decision = decisions.lookup("", ["tok.weight"])
    assert (name, decision.precisions()) == ("tok", BF16)
    assert decision.forward.reason == "embedding"


def test_tied_weights_with_two_formats_used_in_a_function_are_bf16_and_say_so() -> None:
    decisions = resolve(GPT(), Policy(overrides={"lm_head": "nvfp4", "tok": "mxfp4"}))
    _, decision = decisions.lookup("", ["tok.weight"])
    assert decision.precisions() == BF16
    assert "nvfp4" in decision.forward.reason
    assert "mxfp4" in decision.forward.reason


def test_functional_parameters_are_their_own_sites() -> None:
    decisions = resolve(Functional(), Policy(skip="w2"))
    assert decisions.lookup("", ["w1"]) == ("w1", Decision.all_roles(Choice("recipe", "")))
    assert decisions.lookup("", ["w2"]) == ("w2", Decision.all_roles(Choice("bf16", "")))


def test_a_parameter_used_by_another_module_is_named_after_its_owner() -> None:
    decisions = resolve(GPT(), Policy())
    assert decisions.lookup("layers.0", ["layers.0.attn.wo.weight"])[0] == "layers.0.attn.wo"


def test_a_parameter_that_is_not_called_weight_keeps_its_whole_name() -> None:
    model = nn.Module()
    model.attention = nn.MultiheadAttention(DIM, 2)
    name, _ = resolve(model, Policy()).lookup("attention", ["attention.in_proj_weight"])
    assert name == "attention.in_proj_weight"


def test_a_weight_made_of_several_parameters_is_bf16_if_one_of_them_is() -> None:
    decisions = resolve(GPT(), Policy(skip="layers.0.up"))
    name, decision = decisions.lookup("layers.0", ["layers.0.attn.wo.weight", "layers.0.up.weight"])
    assert (name, decision.precisions()) == ("layers.0.attn.wo+layers.0.up", BF16)


def test_a_weight_that_is_no_parameter_is_decided_by_its_module() -> None:
    decisions = resolve(GPT(), Policy(skip="layers.0.attn", last=0))
    assert decisions.lookup("layers.0.attn", [])[1].precisions() == BF16
    assert decisions.lookup("layers.1.attn", [])[1].precisions() == RECIPE
    assert decisions.lookup("", [])[1].precisions() == RECIPE


def test_a_vector_or_scalar_used_as_a_weight_is_found() -> None:
    model = Functional()
    model.scale = nn.Parameter(torch.tensor(1.0))
    model.tok = nn.Embedding(VOCABULARY, DIM)
    assert resolve(model, Policy()).lookup("", ["gain"])[0] == "gain"
    assert resolve(model, Policy()).lookup("", ["scale"])[0] == "scale"


@pytest.mark.parametrize(
    ("module", "params", "name"), [("", ["layers.0.wq.weight"], "wq"), ("layers.9", [], "layers.9")]
)
def test_an_unknown_name_is_an_error_with_the_way_out(module: str, params: list[str], name: str) -> None:
    with pytest.raises(RewriteError, match=rf"{name}.*prepare\(\)"):
        resolve(GPT(), Policy()).lookup(module, params)


# --- wrappers -------------------------------------------------------------------------------------


def test_clean_name_drops_what_wrappers_put_in() -> None:
    wrapped = "_orig_mod.layers.0._checkpoint_wrapped_module._fsdp_wrapped_module.attn.weight"
    assert clean_name(wrapped) == "layers.0.attn.weight"
    assert clean_name("_orig_mod") == ""
    assert clean_name("module.module_list") == "module.module_list"


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, lambda model: compiled(nn.DataParallel(model))])
def test_a_wrapped_model_has_the_decisions_of_the_model(wrap) -> None:
    model = GPT()
    assert resolve(wrap(model), Policy(skip="layers.1")) == resolve(model, Policy(skip="layers.1"))


def test_an_inner_data_parallel_is_dropped_and_an_authors_module_is_not() -> None:
    model, net = nn.Module(), nn.Module()
    net.module = nn.Linear(DIM, DIM)
    model.net = nn.DataParallel(net)
    assert [name for name, _ in resolve(model, Policy()).parameters] == [
        "net.module.bias",
        "net.module.weight",
    ]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_lookups_find_names_of_wrappers_that_came_later(prefix: str) -> None:
    decisions = resolve(GPT(), Policy())
    name, _ = decisions.lookup(f"{prefix}layers.0.up", [f"{prefix}layers.0.up.weight"])
    assert name == "layers.0.up"


# --- one block ------------------------------------------------------------------------------------


def test_blocks_with_equal_decisions_give_equal_tables_and_others_do_not() -> None:
    decisions = resolve(GPT(blocks=8), Policy(overrides={"layers.2.up": {"wgrad": "bf16"}}))
    tables = [decisions.for_block(f"layers.{i}") for i in range(8)]
    assert len(set(tables)) == 3
    assert tables[0] == tables[5]
    assert hash(tables[0]) == hash(tables[5])
    assert tables[0].to_json() == tables[5].to_json()
    assert len({tables[i].to_json() for i in (0, 2, 7)}) == 3


def test_blocks_whose_reasons_differ_share_a_table() -> None:
    decisions = resolve(GPT(blocks=4), Policy(skip="layers.0", last=1))
    assert reason(decisions, "layers.0.up.weight") != reason(decisions, "layers.3.up.weight")
    assert decisions.for_block("layers.0") == decisions.for_block("layers.3")


@given(st.integers(0, 3), st.sampled_from(["attn.qkv", "attn.wo", "up", "down"]), st.booleans())
def test_a_block_is_told_what_the_whole_model_is_told(block: int, site: str, functional: bool) -> None:
    model = GPT(blocks=4)
    model.layers[3].up.weight = model.layers[0].up.weight  # last block: bf16; the first: not
    model.layers[1].down.weight = model.layers[1].up.weight
    decisions = resolve(model, Policy(overrides={"layers.1.up": {"dgrad": "mxfp4"}}))
    prefix = f"layers.{block}"
    inside = decisions.for_block(prefix).lookup("" if functional else site, [f"{site}.weight"])
    whole = decisions.lookup(prefix if functional else f"{prefix}.{site}", [f"{prefix}.{site}.weight"])
    assert (f"{prefix}.{inside[0]}", inside[1]) == whole


def test_a_block_finds_its_names_under_a_checkpoint_wrapper() -> None:
    table = resolve(GPT(), Policy()).for_block("layers.0._checkpoint_wrapped_module")
    assert table.lookup("_checkpoint_wrapped_module.up", ["_checkpoint_wrapped_module.up.weight"])[0] == "up"


def test_a_block_has_nothing_of_one_whose_number_starts_alike() -> None:
    decisions = resolve(GPT(blocks=12), Policy(last=0))
    assert decisions.for_block("layers.1") == decisions.for_block("layers.2")


def test_a_blocks_table_has_the_policys_min_size() -> None:
    assert resolve(GPT(), Policy(min_size=32)).for_block("layers.1").min_size == 32


def test_a_block_that_is_a_linear_layer_has_a_site_with_a_name() -> None:
    decisions = resolve(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)), Policy())
    assert decisions.for_block("1").lookup("", ["weight"]) == ("weight", decisions.of_parameter("1.weight"))


def test_an_unknown_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no module 'layer.1' \(closest: 'layers.1'"):
        resolve(GPT(), Policy()).for_block("layer.1")


# --- value semantics ------------------------------------------------------------------------------

patterns = st.lists(st.text("ab.*[]?", max_size=4), max_size=3)
precision = st.sampled_from(["recipe", "nvfp4", "mxfp4", "bf16"])
overrides = st.dictionaries(
    st.text("ab.*", max_size=3),
    precision | st.dictionaries(st.sampled_from(ROLES), precision, min_size=1),
    max_size=3,
)
policies = st.fixed_dictionaries(
    {},
    optional={
        "include": patterns | st.text("ab*", max_size=3),
        "skip": patterns,
        "first": st.none() | st.integers(0, 9),
        "last": st.none() | st.integers(0, 9),
        "blocks": st.none() | st.text("ab*", max_size=3),
        "overrides": overrides,
        "min_size": st.integers(1, 64),
        "keep_head": st.booleans(),
    },
)


@given(policies)
def test_policies_round_trip_through_json_dict_and_repr(fields: dict) -> None:
    policy = Policy(**fields)
    for again in (
        Policy.from_json(policy.to_json()),
        Policy.from_dict(policy.to_dict()),
        eval(repr(policy), {"Policy": Policy}),
    ):
        assert again == policy
        assert hash(again) == hash(policy)
        assert again.to_json() == policy.to_json()


@given(policies, policies)
def test_json_tells_unequal_policies_apart(one: dict, other: dict) -> None:
    assert (Policy(**one) == Policy(**other)) == (Policy(**one).to_json() == Policy(**other).to_json())


def test_the_order_of_overrides_is_kept_and_has_a_meaning() -> None:
    one = Policy(overrides={"b": "bf16", "a": "nvfp4"})
    assert one != Policy(overrides={"a": "nvfp4", "b": "bf16"})
    assert Policy.from_json(one.to_json()).to_dict()["overrides"][0][0] == "b"


def test_one_pattern_may_be_a_string_and_lists_become_tuples() -> None:
    assert Policy(skip="a") == Policy(skip=["a"]) == Policy(skip=("a",))


def test_the_repr_shows_only_what_differs_from_the_default() -> None:
    assert repr(Policy()) == "Policy()"
    assert repr(Policy(skip="a", last=4)) == "Policy(skip=('a',), last=4)"


def test_decisions_depend_on_min_size_and_their_json_has_no_reasons() -> None:
    one, other = (resolve(GPT(), Policy(min_size=size)) for size in (16, 32))
    assert one != other
    assert one.to_json() != other.to_json()
    assert "blocks" not in one.to_json()
    assert json.loads(one.to_json())["parameters"]["layers.7.up.weight"] == ["bf16"] * 3


def test_resolving_does_not_change_the_model() -> None:
    model = GPT()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    resolve(model, Policy())
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("include", None, "a glob"),
        ("skip", 3, "a glob"),
        ("skip", ["a", 3], "a glob"),
        ("skip", {"a"}, "a glob"),  # a set has no order, so no canonical form
        ("first", -1, "a number of blocks"),
        ("last", True, "a number of blocks"),
        ("last", 0.15, "a number of blocks"),
        ("blocks", ["layers"], "name or a glob"),
        ("min_size", 0, "at least 1"),
        ("keep_head", "no", "True or False"),
        ("overrides", "bf16", "a mapping"),
    ],
)
def test_an_impossible_value_is_refused_by_field_value_and_what_is_allowed(
    field: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Policy(**{field: value})
    for part in (f"Policy.{field}", repr(value), allowed):
        assert part in str(caught.value)


@pytest.mark.parametrize("value", ["fp8", {"fprop": "bf16"}, {"forward": "fp8"}, {}, None, 4])
def test_an_impossible_override_is_refused_with_what_is_allowed(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"Policy.overrides.*'recipe', 'nvfp4', 'mxfp4', 'bf16'.*forward, dgrad, wgrad"
    ):
        Policy(overrides={"*": value})


def test_an_override_needs_a_glob_for_its_key() -> None:
    with pytest.raises(ConfigError, match="keyed by globs"):
        Policy(overrides={3: "bf16"})  # type: ignore[dict-item]


def test_an_unknown_field_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'skips' \(did you mean 'skip'\?\).*include.*keep_head"):
        Policy.of({"skips": "lm_head"})


def test_something_else_than_a_policy_or_a_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="from a mapping"):
        Policy.of("lm_head")  # type: ignore[arg-type]
