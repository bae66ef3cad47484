"""The plan shows every weight's decision, and blocks compiled by it share graphs exactly where decisions are
equal."""

from __future__ import annotations

import copy
import json
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_models import DIM, GPT, VOCABULARY, Block, Conv1D, Functional, Mixer
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fp4compile.errors import ConfigError, Fp4Warning
from fp4compile.policy import Policy, resolve
from fp4compile.prepare import Plan, Row, compile_blocks, prepare
from fp4compile.recipe import Recipe

Compiled = list[tuple[nn.Module, dict[str, Any]]]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """What compile_blocks hands to nn.Module.compile, in order, instead of compiling."""
    calls: Compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **kwargs: calls.append((module, kwargs)))
    return calls


@pytest.fixture
def limit_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    compat = types.ModuleType("fp4compile.compat")
    compat.recompile_limit = lambda: 2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fp4compile.compat", compat)


def row(plan: Plan, name: str) -> Row:
    (found,) = [row for row in plan.rows if row.name == name]
    return found


def formats(plan: Plan, name: str) -> tuple[str, str, str]:
    found = row(plan, name)
    return found.forward, found.dgrad, found.wgrad


# --- rows -----------------------------------------------------------------------------------------


def test_a_row_has_the_formats_that_recipe_and_policy_make_together() -> None:
    plan = prepare(GPT(), Recipe(forward="bf16", wgrad=("nvfp4", "bf16")), Policy(overrides={"*.wo": "mxfp4"}))
    assert formats(plan, "layers.0.up") == ("bf16", "nvfp4", "nvfp4/bf16")
    assert formats(plan, "layers.0.attn.wo") == ("mxfp4", "mxfp4", "mxfp4")
    assert formats(plan, "layers.7.up") == ("bf16", "bf16", "bf16")


def test_a_row_says_why_and_by_role_where_the_reasons_differ() -> None:
    plan = prepare(GPT(), Recipe(forward="bf16"), Policy(overrides={"*.wo": {"wgrad": "bf16"}}))
    assert row(plan, "layers.7.up").reason == "last 1 of 8 blocks"
    assert row(plan, "layers.0.attn.wo").reason == (
        "forward: the recipe keeps this GEMM in bf16; dgrad: recipe; wgrad: override '*.wo'"
    )


def test_there_is_a_row_for_every_parameter_of_two_dimensions_under_each_name() -> None:
    model = GPT(blocks=2)
    names = [row.name for row in prepare(model).rows]
    sites = ["attn.qkv", "attn.wo", "up", "down"]
    assert names == ["tok", "pos", *[f"layers.{i}.{site}" for i in range(2) for site in sites], "lm_head"]


def test_functional_and_in_out_weights_have_rows_of_their_own_shape() -> None:
    plan = prepare(Functional())
    assert [(row.name, row.shape, row.forward) for row in plan.rows] == [
        ("w1", (64, DIM), "nvfp4"),
        ("w2", (DIM, 64), "nvfp4"),
    ]
    assert row(prepare(nn.Sequential(Conv1D(64, DIM))), "0").shape == (DIM, 64)


def test_a_weight_with_a_side_below_min_size_stays_bf16_unless_an_override_names_its_format() -> None:
    model = nn.Module()
    model.router, model.gate = nn.Linear(DIM, 8), nn.Linear(DIM, 8)
    plan = prepare(model, policy=Policy(overrides={"gate": "nvfp4"}))
    assert row(plan, "router").reason == "a side of 8, below min_size 16"
    assert formats(plan, "router") == ("bf16", "bf16", "bf16")
    assert formats(plan, "gate") == ("nvfp4", "nvfp4", "nvfp4")
    assert formats(prepare(model, policy=Policy(min_size=8)), "router") == ("nvfp4", "nvfp4", "nvfp4")


# --- arguments ------------------------------------------------------------------------------------


def test_recipe_by_name_and_policy_as_a_dict_are_the_same_plan_as_the_objects() -> None:
    model = GPT()
    by_value = prepare(model, "mxfp4", {"last": 2})
    assert by_value == prepare(model, Recipe.named("mxfp4"), Policy(last=2))
    assert hash(by_value) == hash(prepare(model, Recipe.named("mxfp4"), Policy(last=2)))
    assert prepare(model) == prepare(model, Recipe.nvidia(), Policy())


def test_a_mistake_in_a_pattern_is_blamed_on_the_line_that_calls_prepare() -> None:
    with pytest.warns(Fp4Warning, match="'*.dwon'") as caught:
        prepare(GPT(), policy={"skip": "*.dwon"})
    assert caught[0].filename == __file__


def test_a_mistake_in_recipe_or_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="recipe named 'fp4'"):
        prepare(GPT(), "fp4")
    with pytest.raises(ConfigError, match="no field 'skips'"):
        prepare(GPT(), policy={"skips": "a"})


def test_preparing_and_planning_leave_the_model_as_it_was() -> None:
    model = GPT()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    str(prepare(model))
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_a_model_on_the_meta_device_can_be_planned() -> None:
    with torch.device("meta"):
        model = GPT()
    assert prepare(model) == prepare(GPT())


# --- options --------------------------------------------------------------------------------------


def test_options_carry_the_recipe_and_the_resolved_decisions() -> None:
    model = GPT()
    plan = prepare(model, policy=Policy(last=2))
    assert plan.options == {"recipe": Recipe.nvidia(), "policy": resolve(model, Policy(last=2))}


def test_block_options_are_equal_exactly_where_decisions_are() -> None:
    plan = prepare(GPT(blocks=8), policy=Policy(last=2))
    options = [plan.block_options(name) for name in plan.blocks]
    assert all(options[i] == options[0] for i in range(6))
    assert options[6] == options[7] != options[0]


def test_what_is_no_block_has_no_block_options() -> None:
    with pytest.raises(ConfigError, match=r"'lm_head' is no block.*layers\.\[0-7\]"):
        prepare(GPT()).block_options("lm_head")


def test_a_copied_plan_is_an_equal_plan() -> None:
    plan = prepare(GPT())
    plan.options["policy"].lookup("", ["tok.weight"])  # fills the table's index
    assert copy.deepcopy(plan) == plan


# --- text -----------------------------------------------------------------------------------------


def test_the_text_merges_blocks_that_are_decided_alike_and_gives_totals() -> None:
    lines = str(prepare(GPT(blocks=8), policy=Policy(skip="layers.2.up"))).splitlines()
    assert lines[0] == "Recipe.nvidia()"
    assert lines[1] == "Policy(skip=('layers.2.up',))"
    assert lines[2] == "blocks (8): layers.[0-7]"
    table = {line.split()[0]: line for line in lines[5:] if line}
    assert table["layers.[0-6].attn.qkv"].split() == [
        *("layers.[0-6].attn.qkv", "96", "x", "32", "nvfp4", "nvfp4", "nvfp4", "recipe")
    ]
    assert table["layers.[0-1,3-6].up"].split()[4:] == ["nvfp4", "nvfp4", "nvfp4", "recipe"]
    assert table["layers.2.up"].endswith("skip 'layers.2.up'")
    assert table["layers.7.up"].endswith("last 1 of 8 blocks")
    assert table["tok"].endswith("embedding")


def test_the_totals_count_what_a_matmul_may_read() -> None:
    plan = prepare(GPT(blocks=4))  # a block has 96*32 + 32*32 + 2*64*32 = 8192 elements, the head 96*32
    total = 4 * 8192 + VOCABULARY * DIM
    share = f"{3 * 8192 / total:.1%}"
    assert str(plan).splitlines()[-2:] == [
        f"17 weights that a matmul may read, {total:,} elements; in FP4, forward {share}, dgrad {share}, wgrad {share}",
        "outside the blocks, so left eager by compile_blocks: lm_head",
    ]


def test_the_text_says_if_there_are_no_blocks_or_no_weights() -> None:
    assert "blocks (0): none found" in str(prepare(Functional()))
    assert "0 weights that a matmul may read, 0 elements" in str(prepare(nn.Embedding(4, 4)))


def test_convolutions_are_in_the_text_with_the_reason_they_are_left() -> None:
    (line,) = [line for line in str(prepare(nn.ModuleList([Mixer(), Mixer()]))).splitlines() if "conv" in line]
    assert line.split(maxsplit=6)[0] == "[0-1].conv"
    assert line.endswith("Conv1d, not a matmul")


def test_the_plan_as_a_dict_is_json_and_rebuilds_recipe_and_policy() -> None:
    plan = prepare(GPT(), Recipe(rotation=32), Policy(last=2))
    value = json.loads(json.dumps(plan.to_dict()))
    assert Recipe.from_dict(value["recipe"]) == plan.recipe
    assert Policy.from_dict(value["policy"]) == plan.policy
    assert value["blocks"] == [f"layers.{i}" for i in range(8)]
    assert value["rows"][0]["shape"] == [VOCABULARY, DIM]


# --- compile_blocks -------------------------------------------------------------------------------


def test_every_block_is_compiled_with_its_options_and_nothing_else_is(compiled: Compiled) -> None:
    model = GPT(blocks=4)
    plan = prepare(model)
    compile_blocks(model, plan, dynamic=False, options={"strict": False})
    assert [module for module, _ in compiled] == list(model.layers)
    for name, (_, kwargs) in zip(plan.blocks, compiled, strict=True):
        assert kwargs == {
            "backend": "nvfp4",
            "dynamic": False,
            "options": {"strict": False, **plan.block_options(name)},
        }


def test_blocks_are_found_under_checkpoint_wrappers_put_on_later(compiled: Compiled) -> None:
    model = GPT(blocks=4)
    plan = prepare(model)
    for i, block in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(block)
    compile_blocks(nn.DataParallel(model), plan)
    assert [module for module, _ in compiled] == list(model.layers)
    assert prepare(model) == plan


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_sharded_blocks_keep_their_names_decisions_and_whole_shapes(compiled: Compiled) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = GPT(blocks=4)
    plan = prepare(model)
    mesh = init_device_mesh("cpu", (1,))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    compile_blocks(model, plan)
    assert [module for module, _ in compiled] == list(model.layers)
    assert prepare(model) == plan


def test_a_missing_block_is_refused_and_no_other_is_compiled(compiled: Compiled) -> None:
    plan = prepare(GPT(blocks=4))
    with pytest.raises(ConfigError, match=r"no module 'layers\.3'"):
        compile_blocks(GPT(blocks=3), plan)
    assert not compiled


def test_a_plan_without_blocks_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"no blocks.*Policy\(blocks=.*torch\.compile\(model"):
        compile_blocks(Functional(), prepare(Functional()))


def test_a_block_under_torch_compile_is_refused() -> None:
    model = GPT(blocks=4)
    plan = prepare(model)
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    with pytest.raises(ConfigError, match=r"'layers\.1' is compiled already"):
        compile_blocks(model, plan)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"backend": "inductor"}, "nvfp4 backend"),
        ({"mode": "max-autotune"}, r'options=\{"mode"'),
        ({"options": {"policy": Policy()}}, r"'policy'.*prepare\(\)"),
    ],
)
def test_arguments_that_contradict_the_plan_are_refused(kwargs: dict[str, Any], message: str) -> None:
    model = GPT(blocks=4)
    with pytest.raises(ConfigError, match=message):
        compile_blocks(model, prepare(model), **kwargs)


@pytest.mark.usefixtures("limit_of_two")
def test_more_variants_than_torch_compiles_are_refused_before_it_runs_some_eagerly(
    compiled: Compiled,
) -> None:
    model = GPT(blocks=6)
    overrides = {"layers.0.up": "mxfp4", "layers.1.up": "bf16"}
    with pytest.raises(ConfigError, match=r"Block.forward have 4 different.*compiles 2 variants"):
        compile_blocks(model, prepare(model, policy=Policy(overrides=overrides)))
    assert not compiled
    compile_blocks(model, prepare(model))
    assert len(compiled) == 6


@pytest.mark.usefixtures("limit_of_two")
def test_variants_are_counted_by_class_of_block(compiled: Compiled) -> None:
    class Other(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = nn.ModuleList([Block(), Other(), Block(), Other()])
    plan = prepare(model, policy=Policy(overrides={"0.up": "bf16", "1.down": "bf16"}, last=0))
    assert len({plan.block_options(name)["policy"] for name in plan.blocks}) == 3
    compile_blocks(model, plan)
    assert len(compiled) == 4


@pytest.mark.parametrize(("last", "graphs"), [(0, 1), (2, 2)])
def test_torch_compiles_as_many_graphs_as_there_are_different_decisions(last: int, graphs: int) -> None:
    torch.compiler.reset()
    count = 0

    def backend(gm: torch.fx.GraphModule, _: object, options: object) -> Callable[..., Any]:
        nonlocal count
        count += 1
        return gm.forward

    model = GPT(blocks=6)
    plan = prepare(model, policy=Policy(last=last))
    for name in plan.blocks:
        model.get_submodule(name).compile(backend=backend, options=plan.block_options(name))
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert count == graphs
