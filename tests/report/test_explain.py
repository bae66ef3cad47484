"""explain: what the report says, in which form, and that the model and its surroundings are afterwards as they were."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import graphs
import models
import pytest
import torch
from models import K, N, T, tokens
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fp4compile
from fp4compile import Policy, Recipe, Report
from fp4compile.errors import ConfigError
from fp4compile.report import SavedTensor

ROLE = {"precision": "nvfp4", "reason": "recipe"}


@functools.cache
def attention() -> Report:
    return fp4compile.explain(models.seeded(models.Attention, K, fused=True), tokens())


class Counting(nn.Module):
    """Changes a buffer, draws random numbers, and may fail half way."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(K, N)
        self.norm = nn.BatchNorm1d(N)
        self.dropout = nn.Dropout(0.5)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.norm(self.linear(x)))
        torch._dynamo.graph_break()
        if self.fails:
            raise KeyError("half way")
        return y * 2


# --- to_dict


def test_to_dict_has_exactly_the_documented_form() -> None:
    found = attention().to_dict()
    assert set(found) == {"sites", "saved_for_backward", "matmuls_left"}
    assert found["sites"] == [
        {
            "site": index,
            "fqn": name,
            "kind": "linear",
            "shape": {"T": T, "K": K, "N": K},
            "forward": ROLE,
            "dgrad": ROLE,
            "wgrad": ROLE,
        }
        for index, name in enumerate("qkvo")
    ]
    assert found["matmuls_left"] == [
        {
            "fqn": "",
            "kind": "scaled_dot_product_attention",
            "reason": "attention's own matmuls stay in high precision",
        }
    ]
    saved = found["saved_for_backward"]
    assert set(saved) == {"bytes", "packed_bytes", "baseline_bytes", "tensors"}
    assert all(isinstance(saved[name], int) and saved[name] > 0 for name in ("bytes", "packed_bytes", "baseline_bytes"))
    assert {
        "what": "linear",
        "module": "q",
        "dtype": "float32",
        "shape": [T, K],
        "bytes": 4 * T * K,
        "packed": False,
        "needed_by": [{"operation": "scaled_dot_product_attention backward", "module": ""}],
    } in saved["tensors"]
    assert sum(tensor["bytes"] for tensor in saved["tensors"]) == saved["bytes"]


def test_to_dict_is_json() -> None:
    found = attention().to_dict()
    assert json.loads(json.dumps(found)) == found


def test_sizes_that_change_are_symbols_in_the_report() -> None:
    x = tokens()
    torch._dynamo.mark_dynamic(x, 0)
    found = fp4compile.explain(nn.Linear(K, N), x).to_dict()
    (site,) = found["sites"]
    assert isinstance(site["shape"]["T"], str)
    assert (site["shape"]["K"], site["shape"]["N"]) == (K, N)
    assert json.loads(json.dumps(found)) == found


def test_sites_are_numbered_through_several_graphs() -> None:
    report = fp4compile.explain(models.Broken(), tokens())
    assert [(site.site, site.fqn) for site in report.sites] == [(0, "first"), (1, "second")]


# --- saved for backward


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(K, N, bias=False)
        self.up = nn.Linear(K, N, bias=False)
        self.down = nn.Linear(N, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def saved(report: Report) -> dict[tuple[str, str], SavedTensor]:
    """By what it is and its module; no two are equal in both."""
    tensors = report.saved_for_backward.tensors
    found = {(tensor.what, tensor.module): tensor for tensor in tensors}
    assert len(found) == len(tensors)
    return found


def test_attention_needs_its_operands_and_its_results() -> None:
    found = saved(attention())
    backward = ("scaled_dot_product_attention backward", "")
    for what in (("linear", "q"), ("linear", "k"), ("linear", "v"), ("scaled_dot_product_attention logsumexp", "")):
        assert found[what].needed_by == (backward,)
        assert not found[what].packed
    # which is the input of o too: saved as it is, it is quantized once more for the gradient of o's weight
    assert set(found["scaled_dot_product_attention output", ""].needed_by) == {backward, ("fp4.rotate", "o")}


def test_packed_tensors_are_needed_by_the_gradients_of_all_weights_that_share_the_input() -> None:
    found = saved(fp4compile.explain(models.seeded(SwiGLU), tokens()))
    packed = {what: tensor for what, tensor in found.items() if tensor.packed}
    assert set(packed) == {(f"fp4.quantize {part}", name) for part in ("codes", "scales") for name in ("gate", "down")}
    for (_, name), tensor in packed.items():
        layers = {"gate", "up"} if name == "gate" else {"down"}
        assert set(tensor.needed_by) == {("fp4.scaled_mm", layer) for layer in layers}


def test_a_gate_is_needed_by_the_gradient_of_its_activation_and_what_it_gates_by_the_product() -> None:
    found = saved(fp4compile.explain(models.seeded(SwiGLU).bfloat16(), tokens(dtype=torch.bfloat16)))
    assert set(found["linear", "gate"].needed_by) == {("silu recomputed", ""), ("silu backward", "")}
    assert found["linear", "up"].needed_by == (("mul backward", ""),)
    assert found["linear", "gate"].dtype == "bfloat16"
    assert found["linear", "gate"].bytes == 2 * T * N


def test_the_input_of_a_layer_kept_in_bf16_is_needed_by_its_weights_gradient() -> None:
    found = saved(fp4compile.explain(models.seeded(SwiGLU), tokens(), options={"policy": Policy(skip=["down"])}))
    assert found["mul", ""].needed_by == (("mm", "down"),)


def test_sizes_that_change_do_not_mix_up_what_reads_a_tensor() -> None:
    """The forward hands them over behind the tensors, the backward takes them before."""
    x = tokens()
    torch._dynamo.mark_dynamic(x, 0)
    changing, fixed = (fp4compile.explain(models.seeded(SwiGLU), one) for one in (x, tokens()))
    assert any(isinstance(size, str) for tensor in changing.saved_for_backward.tensors for size in tensor.shape)
    readers = {what: tensor.needed_by for what, tensor in saved(fixed).items()}
    found = {what: tensor.needed_by for what, tensor in saved(changing).items() if what in readers}
    assert found == readers


def test_tensors_of_all_graphs_are_listed() -> None:
    report = fp4compile.explain(models.Broken(), tokens())
    layers = {module for tensor in report.saved_for_backward.tensors for _, module in tensor.needed_by}
    assert layers == {"first", "second"}


def test_the_printed_report_merges_equal_blocks() -> None:
    first, second = (fp4compile.explain(models.seeded(models.Transformer, blocks), models.ids()) for blocks in (2, 3))
    row = re.compile(r"^ linear +layers\.\*\.attn\.q, .* (\d+) +[\d,]+ +[\d.]+%$", re.MULTILINE)
    assert row.findall(str(first)) == ["6"]
    assert row.findall(str(second)) == ["9"]
    assert str(first).index("Saved for backward: ") < str(first).index("Saved for backward\n")


# --- graphs


def test_graphs_of_training() -> None:
    found = attention().graphs
    assert set(found) == {"joint_before", "joint_after", "forward", "backward"}
    assert all(isinstance(graph, fx.GraphModule) for graph in found.values())
    quantized = {name: len(graphs.calls(graph, graphs.fp4.quantize.default)) for name, graph in found.items()}
    assert quantized["joint_before"] == 0
    assert quantized["joint_after"] == quantized["forward"] + quantized["backward"] > 0
    assert {name: len(graphs.gemms(graph)) for name, graph in found.items() if name.startswith("joint")} == {
        "joint_before": 0,
        "joint_after": 12,
    }


def test_graphs_after_a_graph_break_are_numbered() -> None:
    names = {"joint_before", "joint_after", "forward", "backward"}
    found = fp4compile.explain(models.Broken(), tokens()).graphs
    assert set(found) == names | {f"{name}.1" for name in names}


def test_the_graph_before_is_not_touched_by_what_comes_after() -> None:
    report = attention()
    assert graphs.matmuls(report.graphs["joint_before"]) == 12
    assert graphs.matmuls(report.graphs["joint_after"]) == 0


# --- text


def test_the_printed_report_shows_every_site_reason_and_total() -> None:
    options = {"policy": Policy(overrides={"o": {"forward": "bf16"}}, skip=["v"])}
    report = fp4compile.explain(models.seeded(models.Attention, K, fused=False), tokens(), options=options)
    lines = str(report).splitlines()

    def line(*words: str) -> bool:
        return any(all(word in line for word in words) for line in lines)

    assert line("q", "linear", f"{T} x {K} x {K}", "nvfp4", "recipe")
    assert line("v", "bf16", "skip 'v'")
    assert line("o", "bf16", "forward: override 'o'; dgrad: recipe; wgrad: recipe")
    assert line("matmul", "2", "both operands are activations")
    assert line("3 of 4 weight matmuls rewritten, 8 GEMMs in FP4")
    saved = report.saved_for_backward
    assert line(
        f"{saved.bytes:,} bytes", f"{saved.packed_bytes:,} packed FP4", f"{saved.baseline_bytes:,} bytes without"
    )


def test_a_report_without_matmuls_prints_too() -> None:
    assert "0 of 0 weight matmuls rewritten" in str(fp4compile.explain(nn.GELU(), tokens()))


# --- what it leaves behind


@pytest.mark.parametrize("fails", [False, True])
def test_buffers_random_state_and_gradients_are_as_they_were(fails: bool) -> None:
    model, x = Counting(fails), tokens(T, K)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    if fails:
        with pytest.raises(KeyError, match="half way"):
            fp4compile.explain(model, x)
    else:
        fp4compile.explain(model, x)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(torch.get_rng_state(), random)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


def test_the_model_still_runs_as_before() -> None:
    model, x = models.seeded(models.QKV), tokens()
    before = model(x)
    fp4compile.explain(model, x)
    assert torch.equal(model(x), before)


def test_two_explanations_are_equal() -> None:
    model = models.seeded(models.QKV)
    first, second = (fp4compile.explain(model, tokens()) for _ in range(2))
    assert first.to_dict() == second.to_dict()
    assert first.graphs["joint_after"].code == second.graphs["joint_after"].code


# --- arguments


def test_keyword_arguments_reach_the_model() -> None:
    (site,) = fp4compile.explain(nn.Linear(K, N), input=tokens()).sites
    assert site.shape == {"T": T, "K": K, "N": N}


@pytest.mark.parametrize("recipe", ["mxfp4", Recipe.named("mxfp4")])
def test_options_are_those_of_the_backend(recipe: Any) -> None:
    (site,) = fp4compile.explain(nn.Linear(K, N), tokens(), options={"recipe": recipe}).sites
    assert site.forward.precision == "mxfp4"


def test_a_plans_options_are_accepted() -> None:
    model = models.seeded(models.Transformer)
    plan = fp4compile.prepare(model, policy=Policy(skip=["*.up"]))
    report = fp4compile.explain(model, models.ids(), options=plan.options)
    kept = [site.fqn for site in report.sites if not site.rewritten]
    assert kept == ["layers.0.up", "layers.1.up", "lm_head"]
    rows = {row.name: row for row in plan.rows}
    for site in report.sites:
        assert site.forward.precision == rows[site.fqn].forward, site.fqn


def test_a_wrong_option_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="unknown option 'recipies'"):
        fp4compile.explain(Counting(fails=True), tokens(), options={"recipies": "nvidia"})


def test_a_model_that_is_compiled_already_is_explained_like_the_model() -> None:
    model = models.seeded(models.QKV)
    compiled = torch.compile(model, backend="nvfp4")
    assert [site.fqn for site in fp4compile.explain(compiled, tokens()).sites] == ["q", "k", "v"]
