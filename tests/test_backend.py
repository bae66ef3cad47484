"""What a user of torch.compile(model, backend="nvfp4") gets: numbers, randomness, torch.compile's features, errors."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import by_hand
import compiling
import graphs
import models
import pytest
import torch
from compiling import compiled, gradients, interpreted, step
from models import K, N, Weights, tokens
from torch import Tensor, nn

import fp4compile
from fp4compile import Policy, Recipe
from fp4compile.errors import Fp4Warning, UnsupportedDtypeError

NEAREST = Recipe.nvidia(stochastic=())
WAYS = {"interpreted": interpreted, "inductor": compiling.inductor, "lowered": compiling.lowered}


def linear(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    return models.seeded(nn.Linear, K, N, bias=bias).to(dtype)


def gradient(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@functools.cache
def sites() -> tuple[int, int]:
    """The site numbers that tell dgrad's and wgrad's rounding of one linear layer apart."""
    found = graphs.gemms(fp4compile.explain(linear(bias=False), tokens(24, K)).graphs["joint_after"])
    by_shape = {gemm.shape: gemm.left.site for gemm in found}
    return by_shape[24, K, N], by_shape[N, K, 24]


# --- numbers


@pytest.mark.parametrize("rows", [0, 1, 15, 17, 33])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_has_the_bits_of_the_written_out_formulas(dtype: torch.dtype, bias: bool, rows: int) -> None:
    model, x, dy = linear(dtype, bias), tokens(rows, K, dtype=dtype), gradient(rows, N, dtype=dtype)
    with interpreted():
        y = step(compiled(model, recipe=NEAREST), x, dy)
    _assert_by_hand(model, x, dy, y)
    if rows == 0:
        assert y.shape == (0, N)
        assert not model.weight.grad.any()


@pytest.mark.parametrize("way", ["inductor", pytest.param("lowered", marks=pytest.mark.slow)])
def test_generated_code_has_the_same_bits(way: str) -> None:
    model, x, dy = linear(bias=False), tokens(33, K), gradient(33, N)
    with WAYS[way]():
        compiled_model = compiled(model)
        for seed in (4, 5):
            model.zero_grad()
            x.grad = None
            torch.manual_seed(seed)
            y = step(compiled_model, x, dy)
            torch.manual_seed(seed)
            _assert_by_hand(model, x, dy, y, by_hand.drawn_seed(generated_code=True))


def test_stochastic_rounding_has_the_bits_of_the_written_out_formulas_step_by_step() -> None:
    model, dy = linear(), gradient(33, N)
    with interpreted():
        compiled_model = compiled(model)
        torch.manual_seed(11)
        inputs = [tokens(33, K) for _ in range(3)]
        results = [(step(compiled_model, x, dy), gradients(model)) for x in inputs]
    torch.manual_seed(11)
    for x, (y, found) in zip(inputs, results, strict=True):
        for name, value in found.items():
            model.get_parameter(name).grad = value
        _assert_by_hand(model, x, dy, y, by_hand.drawn_seed(generated_code=False))


def _assert_by_hand(model: nn.Linear, x: Tensor, dy: Tensor, y: Tensor, seed: Tensor | None = None) -> None:
    dgrad_site, wgrad_site = (0, 0) if seed is None else sites()
    with torch.no_grad():
        assert torch.equal(y, by_hand.forward(x, model.weight, model.bias))
        assert torch.equal(x.grad, by_hand.dgrad(dy, model.weight, seed, dgrad_site))
        assert torch.equal(model.weight.grad, by_hand.wgrad(dy, x, model.weight.dtype, seed, wgrad_site))
        if model.bias is not None:
            assert torch.allclose(model.bias.grad, dy.sum(0))


def test_under_autocast_the_weights_gradient_keeps_float32s_precision() -> None:
    model, x, dy = linear(bias=False), tokens(33, K), gradient(33, N, dtype=torch.bfloat16)
    with interpreted(), torch.autocast("cpu", torch.bfloat16):
        y = step(compiled(model, recipe=NEAREST), x, dy)
    assert y.dtype is torch.bfloat16
    rounded = x.detach().bfloat16()
    with torch.no_grad():
        assert torch.equal(y, by_hand.forward(rounded, model.weight))
        assert torch.equal(x.grad, by_hand.dgrad(dy, model.weight).float())
        assert torch.equal(model.weight.grad, by_hand.wgrad(dy, rounded, torch.float32))
    assert not torch.equal(model.weight.grad, model.weight.grad.bfloat16().float())


@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (2.0, 0.5), (0.25, 0), (-1, 3)])
def test_addmm_scales_product_and_bias_in_float32(alpha: float, beta: float) -> None:
    model = Weights(lambda m, x: torch.addmm(m.w1, x, m.w0, beta=beta, alpha=alpha), (K, N), (N,)).bfloat16()
    x = tokens(17, K, dtype=torch.bfloat16)
    with interpreted(), torch.no_grad():
        y = compiled(model)(x)
        expected = by_hand.gemm(x, model.w0.t(), square_b=True) * alpha
        expected = expected + model.w1.float() * beta if beta else expected
    assert torch.equal(y, expected.bfloat16())


def test_further_rows_do_not_change_the_first_ones() -> None:
    """33 rows end in blocks and groups that are mostly padding; the first 32 fill theirs."""
    model, x = linear(bias=False), tokens(33, K, grad=False)
    x[0, 0] = 8.0  # amax of both, also rotated
    x[32] *= 0.1
    dy = gradient(33, N)
    dy[0, 0] = 8.0
    dy[32] = 0.0
    with interpreted():
        compiled_model = compiled(model, recipe=NEAREST)
        long = step(compiled_model, x, dy), gradients(model)["weight"]
        short = step(compiled_model, x[:32], dy[:32]), gradients(model)["weight"]
    assert torch.equal(long[0][:32], short[0])
    assert torch.equal(long[1], short[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_get_lost(bad: float) -> None:
    model, x = linear(), tokens(17, K, grad=False)
    x[3, 5] = bad
    dy = gradient(17, N)
    with interpreted():
        y = step(compiled(model), x, dy)
    assert not y.isfinite().any()
    assert not model.weight.grad.isfinite().any()


def test_an_infinite_gradient_reaches_the_weight() -> None:
    model, x, dy = linear(bias=False), tokens(17, K), gradient(17, N)
    dy[2, 2] = float("inf")
    with interpreted():
        y = step(compiled(model), x, dy)
    assert y.isfinite().all()
    assert not x.grad.isfinite().any()
    assert not model.weight.grad.isfinite().any()


# --- randomness


def test_gradients_repeat_with_the_seed_and_differ_from_step_to_step() -> None:
    model, x = models.seeded(models.QKV), tokens()
    with interpreted():
        compiled_model = compiled(model)
        results = []
        for seed in (1, None, 1):
            if seed is not None:
                torch.manual_seed(seed)
            results.append((step(compiled_model, x), gradients(model)))
    (y, first), (y_next, following), (_, again) = results
    assert torch.equal(y, y_next)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert not torch.equal(value, following[name])


@pytest.mark.parametrize("recipe", [NEAREST, Recipe.nvidia()], ids=["nearest", "stochastic"])
def test_checkpointing_changes_no_bit(recipe: Recipe) -> None:
    results = []
    for wrap in (lambda inner: inner, models.Checkpointed):
        block, x = models.seeded(models.Block), tokens()
        with interpreted():
            torch.manual_seed(0)
            y = step(compiled(wrap(block), recipe=recipe), x)
        results.append([y, x.grad, *gradients(block).values()])
    assert graphs.same_bits(*results)


# --- torch.compile's features


def test_a_transformer_is_one_graph_and_trains() -> None:
    model, ids = models.seeded(models.Transformer), models.ids()
    reference = models.seeded(models.Transformer)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, reference)]
    losses: list[list[float]] = [[], []]
    with interpreted() as plans:
        compiled_model = torch.compile(model, backend="nvfp4", fullgraph=True)
        for _ in range(4):
            for index, run in enumerate((compiled_model, reference)):
                loss = nn.functional.cross_entropy(run(ids).flatten(0, 1), ids.flatten())
                loss.backward()
                optimizers[index].step()
                optimizers[index].zero_grad()
                losses[index].append(loss.item())
    assert len(plans) == 1
    assert sum(site.rewritten for site in plans[0].outcome.sites) == 12
    assert losses[0] != losses[1], "nothing was in FP4"
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0][-1] < 0.9 * losses[0][0]


def test_gradients_accumulate_over_micro_batches() -> None:
    model, batches = linear(), [tokens(24, K), tokens(24, K) * 2]
    with interpreted():
        compiled_model = compiled(model, recipe=NEAREST)
        each = [(step(compiled_model, x.detach()), gradients(model))[1] for x in batches]
        for x in batches:
            step(compiled_model, x.detach())
        total = gradients(model)
    for name, value in total.items():
        assert torch.equal(value, each[0][name] + each[1][name])


def test_evaluation_after_training_has_the_forwards_bits() -> None:
    model, x = models.seeded(models.QKV), tokens()
    with interpreted() as plans:
        compiled_model = compiled(model)
        trained = step(compiled_model, x)
        with torch.no_grad():
            evaluated = compiled_model(x)
        with torch.inference_mode():
            inferred = compiled_model(x)
    assert torch.equal(trained, evaluated)
    assert torch.equal(trained, inferred)
    assert all(site.dgrad.precision == "absent" for site in plans[-1].outcome.sites)


def test_a_dynamic_batch_is_one_graph_with_the_bits_of_each_static_one() -> None:
    model = linear()

    def results(run: Callable[[Tensor], Tensor], batch: int) -> list[Tensor]:
        x = tokens(batch, 12, K)
        return [step(run, x), x.grad, *gradients(model).values()]

    with interpreted() as plans:
        dynamic = torch.compile(model, backend="nvfp4", dynamic=True, options={"recipe": NEAREST})
        found = {batch: results(dynamic, batch) for batch in (2, 3, 5)}
    assert len({plan.digest for plan in plans}) == 1
    for batch, values in found.items():
        with interpreted():
            assert graphs.same_bits(values, results(compiled(model, recipe=NEAREST), batch))


def test_a_changing_batch_is_compiled_at_most_twice() -> None:
    model = linear()
    with interpreted() as plans:
        run = compiled(model)
        for batch in (2, 3, 5):
            step(run, tokens(batch, 12, K))
    assert len(plans) == 2


def test_a_graph_break_gives_two_graphs_with_names_in_both() -> None:
    model = models.seeded(models.Broken)
    with interpreted() as plans:
        step(compiled(model), tokens())
    assert [[site.fqn for site in plan.outcome.sites] for plan in plans] == [["first"], ["second"]]
    assert set(gradients(model)) == {"first.weight", "second.weight"}


def test_a_function_with_loose_weights_is_compiled_too() -> None:
    w = nn.Parameter(gradient(N, K))
    x = tokens(24, K)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x) @ w.t()

    with interpreted() as plans, torch.no_grad():
        y = torch.compile(function, backend="nvfp4", options={"policy": Policy(include="w")})(x, w)
    assert [site.rewritten for site in plans[0].outcome.sites] == [True]
    assert torch.equal(y, by_hand.forward(torch.relu(x.detach()), w.detach()))


def test_double_backward_is_refused_with_the_way_out() -> None:
    model, x = linear(), tokens()
    with interpreted():
        y = compiled(model)(x)
        with pytest.raises(RuntimeError, match=r"double backward .*'nvfp4' is not supported(.|\n)*uncompiled model"):
            torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_single_backward_after_a_refused_one_still_works() -> None:
    model, x = linear(), tokens()
    with interpreted():
        compiled_model = compiled(model)
        with pytest.raises(RuntimeError, match="double backward"):
            torch.autograd.grad(compiled_model(x).sum(), x, create_graph=True)
        step(compiled_model, x)
    assert x.grad.isfinite().all()


# --- what cannot be honoured, and what is probably not meant


def test_a_dtype_without_fp4_is_an_error_by_default() -> None:
    with interpreted(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(linear(torch.float64))(tokens(dtype=torch.float64))
    assert isinstance(caught.value.inner_exception, UnsupportedDtypeError)


def test_with_strict_off_such_a_graph_runs_as_it_is_with_a_warning() -> None:
    model, x = linear(torch.float64), tokens(dtype=torch.float64)
    with interpreted(), pytest.warns(Fp4Warning, match=r"stays as it is.*torch\.float64") as caught:
        y = step(compiled(model, strict=False), x)
    assert len([one for one in caught if issubclass(one.category, Fp4Warning)]) == 1
    assert torch.allclose(y, model(x))
    assert torch.allclose(model.weight.grad, gradient_of(model, x))


def gradient_of(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    step(model, x)
    return model.weight.grad


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"policy": Policy(skip=["weight"])}, "skip 'weight'"),
        ({"policy": {"min_size": 128}}, "below the policy's min_size 128"),
        ({"recipe": "bf16"}, "the recipe keeps this GEMM in bf16"),
    ],
)
def test_a_graph_in_which_nothing_is_rewritten_warns_with_the_reason(options: dict[str, Any], reason: str) -> None:
    with interpreted(), pytest.warns(Fp4Warning, match=f"(?s)rewrote nothing.*{reason}.*fp4compile.explain"):
        compiled(linear(), **options)(tokens())


class Numbered(nn.Module):
    """A block that knows its place, which Dynamo compiles it for."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (self.number + 1)


def test_the_last_variant_that_torch_compiles_warns() -> None:
    """The third block runs without FP4, of which torch only logs a line."""
    with interpreted(), torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            block = Numbered(number)
            block.compile(backend="nvfp4", options={"policy": Policy()})
            block(tokens())
    found = [str(one.message) for one in caught if one.category is Fp4Warning]
    assert len(found) == 1 and "variant 2 of one function" in found[0] and "allow_unspec_int_on_nn_module" in found[0]


def test_a_variant_more_of_something_else_does_not_warn() -> None:
    """As many functions as there may be variants of one."""
    with interpreted(), torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings():
        warnings.simplefilter("error", Fp4Warning)
        for size in (K, 2 * K, 3 * K):
            torch._dynamo.reset()
            compiled(nn.Linear(size, N), policy=Policy())(torch.randn(16, size))


def test_experts_in_one_bmm_warn_with_the_reason() -> None:
    model = Weights(lambda m, x: torch.bmm(x, m.w0), (2, K, N))
    with interpreted(), pytest.warns(Fp4Warning, match="rewrote nothing.*experts"):
        compiled(model)(tokens())


@pytest.mark.parametrize("model", [linear(), nn.Sequential(nn.GELU())], ids=["rewritten", "no matmul"])
def test_a_graph_with_nothing_to_complain_about_is_silent(model: nn.Module) -> None:
    with interpreted(), warnings.catch_warnings():
        warnings.simplefilter("error", Fp4Warning)
        step(compiled(model), tokens())


def test_decisions_made_by_prepare_do_not_warn_again() -> None:
    model = linear()
    plan = fp4compile.prepare(model, policy=Policy(skip=["weight"]))
    with interpreted(), warnings.catch_warnings():
        warnings.simplefilter("error", Fp4Warning)
        compiled(model, **plan.options)(tokens())
