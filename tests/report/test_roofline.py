"""The roofline: calibration, bytes counted by hand, what moves it which way, and how explain and the command show it.

Nothing here measures anything: the numbers are predictions, and the tests hold them to the model's own rules.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import K, N, tokens
from torch import nn

import fp4compile
from fp4compile import Policy, Recipe, Report
from fp4compile.__main__ import main
from fp4compile.errors import ConfigError
from fp4compile.report.roofline import (
    EFFICIENCY,
    GPUS,
    PUBLISHED,
    Efficiency,
    Gpu,
    Model,
    Roofline,
    benchmark_quantization,
    calibration,
    predict,
    published_products,
)

ROWS, IN, OUT = 64, 32, 128
"""T, K and N of the layer that is counted by hand."""

B300 = Model(GPUS["B300"])


@functools.cache
def linear(target: str = "B300") -> Report:
    layer = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    return fp4compile.explain(layer, tokens(ROWS, IN, dtype=torch.bfloat16), target=target)


def predicted(report: Report, gpu: Gpu, efficiency: Efficiency = EFFICIENCY) -> float:
    """Milliseconds of a report's graphs on another GPU."""
    graphs = ((report.graphs[name].graph, lambda node: "") for name in ("forward", "backward"))
    return predict(graphs, Model(gpu, efficiency)).total.total_ms


# --- calibration


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_layer_is_reproduced_within_half_a_percent(name: str) -> None:
    assert calibration(B300)[name] == pytest.approx(PUBLISHED[name], rel=5e-3)


def test_the_published_layer_has_as_many_facts_as_the_model_has_shares() -> None:
    assert len(PUBLISHED) == len(dataclasses.fields(Efficiency))


@pytest.mark.parametrize(("first", "published"), [(0, 1.932e-3), (1, 2.189e-3), (2, 2.331e-3)])
def test_forward_dgrad_and_wgrad_were_not_fitted_and_are_within_four_percent(first: int, published: float) -> None:
    shapes = published_products()[first::3]
    seconds = sum(B300.product(*shape, "fp4") + benchmark_quantization(B300, *shape) for shape in shapes)
    assert seconds == pytest.approx(published, rel=0.04)


@pytest.mark.parametrize("published", [6.812e-3, 7.161e-3])
def test_fp8_products_were_not_fitted_and_are_within_twelve_percent(published: float) -> None:
    seconds = sum(B300.product(*shape, "fp8") for shape in published_products())
    assert seconds == pytest.approx(published, rel=0.12)


# --- one linear layer by hand


def test_the_bytes_of_a_linear_layer_are_those_counted_by_hand() -> None:
    report = linear()
    assert report.roofline is not None
    x, w, dy = ROWS * IN, OUT * IN, ROWS * OUT
    packed = 9 / 16  # codes and scales of an element
    quantized_twice = 2 + 2 * (2 + packed)  # both amaxes in one read; rows; rotated columns
    quantizers = quantized_twice * x + quantized_twice * dy + 2 * (2 + 2 + packed) * w  # W in forward and backward
    products = packed * 2 * (x + w + dy) + 2 * (ROWS * OUT + ROWS * IN + OUT * IN)
    (row,) = report.roofline.rows
    scalars = 250  # tensor scales and seeds
    assert quantizers + products <= row.bytes <= quantizers + products + scalars
    assert row.flops == 3 * 2 * ROWS * IN * OUT


class Gated(nn.Module):
    """Two activations that Inductor computes: one behind a product, one behind a norm."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
        self.second = nn.Linear(OUT, IN, bias=False, dtype=torch.bfloat16)
        self.norm = nn.RMSNorm(OUT, dtype=torch.bfloat16) if norm else nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


def quantizers_bytes(model: nn.Module, scale: str, target: str) -> float:
    options = {"recipe": Recipe.nvidia(rotated_scale=scale)}
    roofline = fp4compile.explain(
        model, tokens(ROWS, IN, dtype=torch.bfloat16), options=options, target=target
    ).roofline
    assert roofline is not None
    gpu = Model(GPUS[target])
    return sum(row.quantization_ms for row in roofline.rows) / (1e3 * gpu.memory(1))


def test_a_bound_of_graph_inputs_costs_what_both_amaxes_in_one_read_do() -> None:
    layer = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    amax, bound = (quantizers_bytes(layer, scale, "B300") for scale in ("amax", "bound"))
    assert bound == pytest.approx(amax, abs=50)


@pytest.fixture
def template(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the template multiplies what cuBLAS would."""
    if request.param:
        monkeypatch.setattr("fp4compile.report.roofline.unfit", lambda product: "a test says so")
    return bool(request.param)


@pytest.mark.parametrize(
    ("norm", "target", "template", "folded"),
    [(True, "B300", True, 2), (False, "H200", False, 2), (False, "B300", False, 2), (False, "B300", True, 0)],
    indirect=["template"],
)
def test_an_amax_that_is_folded_into_its_producer_reads_nothing(
    norm: bool, target: str, template: bool, folded: int
) -> None:
    """The second layer's input and the first's gradient. Behind a template their producer is the product's epilogue,
    and they are read."""
    model = Gated(norm)
    amax, bound = (quantizers_bytes(model, scale, target) for scale in ("amax", "bound"))
    assert amax - bound == pytest.approx(folded * 2 * ROWS * OUT, abs=50)


def scales(recipes: tuple[Recipe, Recipe], model: nn.Module, target: str) -> list[Roofline]:
    """Predictions of one model by two recipes."""
    x = tokens(ROWS, IN, dtype=torch.bfloat16)
    found = [fp4compile.explain(model, x, options={"recipe": recipe}, target=target).roofline for recipe in recipes]
    assert found[0] is not None and found[1] is not None
    return [one for one in found if one is not None]


def of_rows(changes: dict[str, Any]) -> tuple[Recipe, Recipe]:
    return Recipe.nvidia(**changes), Recipe.nvidia(**changes, activation_scale="row")


@pytest.mark.parametrize("norm", [None, True, False], ids=["graph input", "norm", "SiLU"])
def test_rows_with_scales_of_their_own_are_read_once_or_not_at_all(norm: bool | None) -> None:
    """Of the activations without gradients: a graph input is read once for amaxes and codes; what a kernel computes is
    not read, where with a scale a tensor its amax alone is folded."""
    layer = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    recipes = of_rows({"dgrad": "bf16", "wgrad": "bf16"})
    tensor, row = scales(recipes, layer if norm is None else Gated(norm), "H200")
    memory = Model(GPUS["H200"]).memory
    amaxes = memory(2 * 2 * 2 * ROWS)  # written and read
    saved = 2 * ROWS * IN + (0 if norm is None else 2 * ROWS * OUT)
    difference = (tensor.total.quantization_ms - row.total.quantization_ms) / 1e3
    assert difference == pytest.approx(memory(saved), abs=amaxes)
    assert row.other_ms == pytest.approx(tensor.other_ms, rel=1e-6)
    (first, *others) = row.rows
    weight = (2 + 2 + 9 / 16) * OUT * IN  # the first one is read for its amax and to be quantized
    assert first.quantization_ms / 1e3 == pytest.approx(memory((2 + 9 / 16) * ROWS * IN + weight), abs=amaxes)
    for second in others:
        expected = 9 / 16 * ROWS * OUT + (2 + 2 + 9 / 16) * OUT * IN
        assert second.quantization_ms / 1e3 == pytest.approx(memory(expected), abs=amaxes)


@pytest.mark.parametrize("template", [False, True], indirect=True)
def test_a_product_with_scales_of_rows_is_one_of_codes_where_there_are_such(template: bool) -> None:
    """cuBLAS's is written in float32, and read so by what multiplies the rows; a template's is not written before."""
    layer = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    (tensor,), (row,) = (one.rows for one in scales(of_rows({"dgrad": "bf16", "wgrad": "bf16"}), layer, "B300"))
    more = 0.0 if template else 1e3 * Model(GPUS["B300"]).memory(2 * ROWS * OUT)
    assert row.decode_ms == pytest.approx(more)
    # The amaxes of the rows are read, too.
    assert row.product_ms == pytest.approx(tensor.product_ms + more, rel=2e-3)


@pytest.mark.parametrize("save", ["auto", "packed"])
def test_products_of_what_is_kept_packed_are_native(save: str) -> None:
    layer = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    roofline = fp4compile.explain(
        layer, tokens(ROWS, IN, dtype=torch.bfloat16), options={"policy": Policy(), "save": save}, target="B300"
    ).roofline
    assert roofline is not None
    (row,) = roofline.rows
    assert row.decode_ms == 0 and row.flops > 0


def test_what_no_kernel_joins_is_read_twice() -> None:
    """Stochastic rounding of x: its rows are found by Inductor and read again."""
    row = functools.partial(Recipe.nvidia, activation_scale="row", dgrad="bf16", wgrad="bf16")
    nearest, noisy = scales((row(stochastic=()), row(stochastic=("forward.x",))), Gated(True), "H200")
    memory = Model(GPUS["H200"]).memory
    difference = (noisy.total.quantization_ms - nearest.total.quantization_ms) / 1e3
    expected = memory(2 * ROWS * IN + 2 * ROWS * OUT)  # but for the seed and amaxes
    assert difference == pytest.approx(expected, rel=1e-2)


def test_without_them_it_is_of_decoded_operands_and_float32() -> None:
    layer = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    (tensor,), (row,) = (one.rows for one in scales(of_rows({"dgrad": "bf16", "wgrad": "bf16"}), layer, "H200"))
    memory = Model(GPUS["H200"]).memory
    decoded = (2 + 9 / 16) * (ROWS * IN + OUT * IN) + 2 * ROWS * OUT
    assert row.decode_ms / 1e3 == pytest.approx(memory(decoded))
    plain = 2 * (ROWS * IN + OUT * IN)
    others = 2 * 2 * (ROWS * IN + OUT * IN + ROWS * OUT)  # dgrad and wgrad
    assert row.product_ms / 1e3 == pytest.approx(memory(plain + 4 * ROWS * OUT + others))
    assert row.bf16_ms == tensor.bf16_ms and row.fp8_ms == pytest.approx(tensor.fp8_ms, rel=1e-2)
    assert tensor.decode_ms > 0


def test_the_times_of_a_linear_layer_follow_from_its_bytes() -> None:
    """It is so small that every operator waits for memory."""
    roofline = linear().roofline
    assert roofline is not None
    (row,) = roofline.rows
    seconds = row.bytes / (GPUS["B300"].bandwidth * EFFICIENCY.memory)
    assert row.total_ms == pytest.approx(seconds * 1e3)
    in_bf16 = 2 * 3 * (ROWS * IN + OUT * IN + ROWS * OUT)
    assert row.bf16_ms == pytest.approx(B300.memory(in_bf16) * 1e3)
    converted = 2 * (2 + 33 / 32) * (ROWS * IN + OUT * IN + ROWS * OUT)
    in_fp8 = converted + (2 * 33 / 32 + 2) * (ROWS * IN + OUT * IN + ROWS * OUT)
    assert row.fp8_ms == pytest.approx(B300.memory(in_fp8) * 1e3, rel=1e-3)


def test_without_fp4_tensor_cores_operands_are_decoded() -> None:
    roofline = linear("H200").roofline
    assert roofline is not None
    (row,) = roofline.rows
    elements = 2 * (ROWS * IN + OUT * IN + ROWS * OUT)
    assert row.decode_ms == pytest.approx(Model(GPUS["H200"]).memory((2 + 9 / 16) * elements) * 1e3)
    assert row.product_ms == row.bf16_ms
    assert "decoding ms" in str(roofline)
    assert "decoding ms" not in str(linear().roofline)


def test_what_is_quantized_once_counts_once_and_for_the_first() -> None:
    report = fp4compile.explain(models.seeded(models.QKV), tokens(), target="GB200")
    assert report.roofline is not None
    rows = {row.site: row for row in report.roofline.rows}
    assert list(rows) == ["q", "k", "v"]
    assert rows["q"].quantization_ms > rows["k"].quantization_ms > 0


# --- what moves it


@pytest.mark.parametrize("figure", ["bandwidth", "bf16", "fp4"])
def test_a_faster_gpu_is_never_slower(figure: str) -> None:
    gpu = GPUS["GB200"]
    times = [
        predicted(linear(), dataclasses.replace(gpu, **{figure: factor * getattr(gpu, figure)})) for factor in (1, 2, 4)
    ]
    assert times == sorted(times, reverse=True)
    if figure == "bandwidth":
        assert times[0] == pytest.approx(2 * times[1]) == pytest.approx(4 * times[2])


def test_products_of_many_operations_are_bound_by_the_peak() -> None:
    assert B300.product(8192, 8192, 8192, "bf16") == pytest.approx(2 * 8192**3 / (2.25e15 * EFFICIENCY.bf16))
    assert B300.product(8192, 8192, 16, "bf16") == pytest.approx(B300.memory(2 * (2 * 8192 * 16 + 8192 * 8192)))


@pytest.mark.parametrize("target", GPUS)
def test_every_target_gives_a_prediction(target: str) -> None:
    roofline = linear(target).roofline
    assert roofline is not None
    assert roofline.gpu is GPUS[target]
    total = roofline.total
    assert 0 < total.quantization_share < 1
    assert total.fp8_ms > 0
    assert 0 < total.bf16_ms < total.total_ms, "operands this small are not worth quantizing"
    assert GPUS[target].source


# --- products that stay in bf16


def test_matmuls_that_are_left_take_the_same_time_in_every_precision() -> None:
    options = {"policy": Policy(skip=["v"])}
    model = models.seeded(models.Attention, K, fused=False)
    roofline = fp4compile.explain(model, tokens(), options=options, target="B200").roofline
    assert roofline is not None
    rows = {row.site: row for row in roofline.rows}
    assert set(rows) == {"q", "k", "v", "o", ""}  # the last: attention's own products
    for name in ("v", ""):
        assert rows[name].total_ms == rows[name].bf16_ms == rows[name].fp8_ms > 0
        assert rows[name].quantization_ms == 0


def test_attention_in_one_operator_is_a_product() -> None:
    model = models.seeded(models.Attention, K, fused=True)
    apart = models.seeded(models.Attention, K, fused=False)
    flops = []
    for one in (model, apart):
        roofline = fp4compile.explain(one, tokens(), target="B200").roofline
        assert roofline is not None
        flops.append({row.site: row for row in roofline.rows}[""].flops)
    scores_again = flops[1] / 6  # fused attention makes them a second time in its backward
    assert flops[0] == flops[1] + scores_again


def test_a_model_with_graph_breaks_is_predicted_whole() -> None:
    roofline = fp4compile.explain(models.Broken(), tokens(), target="GB300").roofline
    assert roofline is not None
    assert [row.site for row in roofline.rows] == ["first", "second"]


def test_sizes_that_change_are_taken_as_they_are_in_the_example() -> None:
    x = tokens()
    torch._dynamo.mark_dynamic(x, 0)
    changing, fixed = (fp4compile.explain(nn.Linear(K, N), one, target="B300").roofline for one in (x, tokens()))
    assert changing is not None and fixed is not None
    assert changing.total.flops == fixed.total.flops


def test_inputs_as_large_as_in_training_are_not_computed() -> None:
    with torch.device("meta"):
        layer = nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16)
    x = torch.empty(32768, 8192, dtype=torch.bfloat16, requires_grad=True)
    roofline = fp4compile.explain(layer.to_empty(device="cpu"), x, target="GB300").roofline
    assert roofline is not None
    assert roofline.total.flops == 3 * 2 * 32768 * 8192 * 8192
    assert roofline.total.bf16_ms > 2 * roofline.total.total_ms


class Writing(nn.Module):
    """Changes its buffer, a parameter and its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(K, N)
        self.norm = nn.BatchNorm1d(N)
        self.code = nn.Parameter(torch.ones(N), requires_grad=False)

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x))
        with torch.no_grad():
            self.code.mul_(2)
            cache.copy_(y.detach())
        return y


def test_graphs_that_are_not_run_change_nothing() -> None:
    model, cache = Writing(), torch.full((16, N), 7.0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fp4compile.explain(model, tokens(16, K), cache, target="B200")
    assert torch.equal(cache, torch.full((16, N), 7.0))
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


# --- explain and the command


def test_only_a_target_brings_a_prediction() -> None:
    report = fp4compile.explain(nn.Linear(K, N), tokens())
    assert report.roofline is None
    assert "roofline" not in report.to_dict()
    assert "PREDICTED" not in str(report)


def test_the_report_marks_the_prediction_as_one() -> None:
    report = linear()
    text, found = str(report), report.to_dict()
    assert "PREDICTED, not measured" in text
    assert "B300" in text and "quantization ms" in text and "total" in text
    assert found["roofline"]["predicted"] is True
    assert found["roofline"]["target"] == "B300"
    assert found["roofline"]["total"]["total_ms"] == sum(row["total_ms"] for row in found["roofline"]["rows"])
    assert json.loads(json.dumps(found)) == found


def test_the_graphs_of_the_report_are_not_fused() -> None:
    assert "rotate_quantize" not in linear().graphs["forward"].code


@pytest.mark.parametrize("target", ["H100", "gb200", "", tokens()])
def test_an_unknown_target_is_refused_with_the_known_ones(target: object) -> None:
    with pytest.raises(ConfigError, match="known are H200, B200, GB200, B300, GB300"):
        fp4compile.explain(nn.Linear(K, N), tokens(), target=target)  # type: ignore[arg-type]


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    text = "import torch\n\ndef tiny():\n    return torch.nn.Linear(32, 64), (torch.ones(4, 32),)\n"
    (tmp_path / "roofline_models.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "roofline_models", raising=False)
    return "roofline_models:tiny"


def test_the_command_predicts(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", factory, "--target", "GB200", "--json", "report.json"]) == 0
    assert "PREDICTED, not measured" in capsys.readouterr().out
    assert json.loads(Path("report.json").read_text())["roofline"]["target"] == "GB200"


def test_the_command_names_the_known_targets(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", factory, "--target", "A100"]) == 2
    assert "known are H200" in capsys.readouterr().err
