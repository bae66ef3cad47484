"""What benchmarks/train_step_gpu.py works out itself, and the model that it trains."""

from collections import Counter

import by_hand
import pytest
import torch
import train_step_gpu as bench
from llama import Llama, LlamaConfig, bfloat16_llama

from fp4compile import Policy
from fp4compile.formats import nvfp4
from fp4compile.lowering.kernels import Kernel, all_kernels

TINY = bench.SETUPS["tiny"]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("amax_both_bf16", "fp4 amax"),
        ("quantize_rows_nvfp4_stochastic_bf16", "fp4 rows"),
        ("quantize_rotated_columns_nvfp4_nearest_bf16_tile", "fp4 rotated columns"),
        ("quantize_weights_both_bf16", "fp4 weights"),
        ("decode_nvfp4_bf16", "fp4 decode"),
        ("gemm_factor_2", "fp4 factor"),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("triton_red_fused__to_copy_add_amax_mul_3", "pointwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "pointwise"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<c10::BFloat16, 4>>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "other"),
    ],
)
def test_kernels_are_grouped_by_their_names(kernel, group):
    assert bench.group_of(kernel) == group


def test_every_generated_kernel_has_a_group_of_its_own():
    groups = {kernel.family: bench.group_of(kernel.name) for kernel in all_kernels("sm_90")}
    assert groups.pop("gemm") == "matrix products"
    assert len(set(groups.values())) == len(groups) and "fp4 other" not in groups.values()
    assert all(group.startswith("fp4 ") for group in groups.values())


def test_a_profile_counts_what_ran_on_the_gpu():
    def event(name, start, microseconds, kind="kernel"):
        return {"name": name, "cat": kind, "ts": start, "dur": microseconds}

    trace = [
        event("nvjet_a", 0, 1000),
        event("amax_bf16", 1500, 500),
        event("nvjet_a", 2000, 3000),
        event("Memset (Device)", 5000, 100, "gpu_memset"),
        event("aten::mm", 0, 9000, "cpu_op"),
        event("Optimizer.step", 0, 9000, "gpu_user_annotation"),
        {"name": "process_name", "ph": "M"},
    ]
    profile = bench.profile_of({"traceEvents": trace}, top=2)
    assert profile.groups == {"matrix products": 4.0, "fp4 amax": 0.5, "other": 0.1}
    assert [(row["kernel"], row["ms"], row["launches"]) for row in profile.kernels] == [
        ("nvjet_a", 4.0, 2),
        ("amax_bf16", 0.5, 1),
    ]
    assert profile.busy_ms == pytest.approx(4.6)
    assert profile.span_ms == pytest.approx(5.1)


def test_the_floor_is_bf16_and_the_bytes_at_the_copy_bandwidth():
    base = {"matrix products": 100.0, "pointwise": 20.0}
    moved = {"fp4 rows": 8 * 10**9, "fp4 decode": 4 * 10**9}
    assert bench.floor(base, moved, 4e12) == {**base, "fp4 rows": 2.0, "fp4 decode": 1.0}

    ours = bench.Profile({"matrix products": 101.0, "pointwise": 21.0, "fp4 rows": 3.0}, [], 125.0, 130.0)
    rows = bench.compared(bench.Profile(base, [], 120.0, 121.0), ours, {"fp4 rows": 7}, moved, 4e12)
    by_group = {row["group"]: row for row in rows}
    assert by_group["fp4 rows"] == {
        "group": "fp4 rows", "bf16 ms": 0.0, "ms": 3.0, "floor ms": 2.0, "launches": 7, "GB": 8.0
    }  # fmt: skip
    assert by_group["total"]["floor ms"] == pytest.approx(123.0)
    assert by_group["total"]["ms"] == pytest.approx(125.0)


def test_memory_given_twice_to_a_kernel_counts_once():
    x = torch.zeros(8, 4, dtype=torch.bfloat16)
    assert bench.bytes_of((x, x.t(), torch.zeros(3), None, 5)) == 8 * 4 * 2 + 3 * 4


def test_the_model_gives_a_loss_and_every_weight_a_gradient():
    model = bfloat16_llama(TINY.model, CPU)
    assert model.cos.dtype is torch.float32
    tokens, targets = bench.batches(TINY, CPU)[0]
    assert tokens.shape == (TINY.batch, TINY.model.seq)
    x = model.embed(tokens)
    assert model.layers[0](x, model.cos, model.sin).shape == (TINY.batch, TINY.model.seq, TINY.model.dim)
    loss = model(tokens, targets)
    assert loss.dtype is torch.float32 and loss.dim() == 0
    loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_weights_are_counted():
    config = LlamaConfig(dim=32, layers=2, heads=2, hidden=48, vocab=64, seq=16)
    model = Llama(config)
    assert config.weights == sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n)


@pytest.mark.parametrize("butterfly", [True, False])
def test_the_eager_recipe_is_the_one_by_hand(butterfly):
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 32, bias=False, dtype=torch.bfloat16)
    layer = bench.FakeQuantizedLinear(linear, butterfly)
    x = torch.randn(64, 48, dtype=torch.bfloat16, requires_grad=True)
    dy, seed = torch.randn(64, 32, dtype=torch.bfloat16), torch.tensor(1234567)
    y = bench.FakeQuantized.apply(x, layer.weight, layer.hadamard, seed)
    dx, dw = torch.autograd.grad(y, (x, layer.weight), dy)
    with torch.no_grad():
        assert torch.equal(y, by_hand.forward(x, layer.weight))
        assert torch.equal(dx, by_hand.dgrad(dy, layer.weight, seed, 0))
        expected = by_hand.wgrad(dy, x, torch.bfloat16, seed, 1)
    if butterfly:
        assert torch.equal(dw, expected)
    else:  # a few codes differ, because the sum of a rotation has another order
        assert torch.nn.functional.cosine_similarity(dw.flatten().float(), expected.flatten().float(), 0) > 0.999


def test_the_fake_quantizer_is_quantize_and_decode():
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    amax = nvfp4.amax(x)
    for how in ({}, {"square": True}, {"seed": torch.tensor(5), "site": 3}):
        expected = nvfp4.decode(*nvfp4.quantize(x, amax, **how), torch.bfloat16)
        assert torch.equal(bench.fake_quantize(x, amax, **how), expected)


def test_the_layers_that_take_part_are_the_policy_s():
    default = bench.layers(bench.SETUPS["2048"], Policy())
    assert default["blocks"] == list(range(1, 14)) and default["linear layers"] == 7 * 13
    everything = bench.layers(bench.SETUPS["4096"], bench.OPTIONS["nvfp4-all"]["policy"])
    assert everything["blocks"] == [0, 1, 2, 3]
    model = bfloat16_llama(TINY.model, CPU)
    bench.replace_linears(model, butterfly=False)
    replaced = sum(isinstance(module, bench.FakeQuantizedLinear) for module in model.modules())
    assert replaced == bench.layers(TINY, Policy())["linear layers"]


def test_what_is_saved_counts_memory_once_and_no_weights():
    x = torch.randn(4, 8)
    w, v = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    hidden = x @ w
    loss = (hidden.view(2, 16).view(4, 8) @ v).sum() + hidden.square().sum()
    found = bench.saved_for_backward(loss, [x, w, v])
    assert found["saved bytes"] == 4 * 8 * 4
    assert found["saved by dtype"] == {"float32": 4 * 8 * 4}


def test_marks_say_what_was_reached():
    rows = [
        {"variant": "nvfp4", "of bf16": 1.2, "saved of bf16": 0.9, "peak of bf16": None},
        {"variant": "eager", "of nvfp4": 14.0},
    ]
    assert [mark["met"] for mark in bench.marks(rows)] == [True, False, True]


def test_launches_are_counted_with_their_bytes(monkeypatch):
    launched = []
    monkeypatch.setattr(Kernel, "run", lambda self, programs, *arguments: launched.append((self.name, programs)))
    kernel = next(kernel for kernel in all_kernels("sm_90") if kernel.family == "decode")
    launches, moved = Counter(), Counter()
    with bench.counted(launches, moved):
        for _ in range(2):
            kernel.run(3, torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 1), None, 7)
    assert launched == [(kernel.name, 3)] * 2
    assert launches == {"fp4 decode": 2} and moved == {"fp4 decode": 2 * (32 + 16)}
