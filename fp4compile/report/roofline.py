"""PREDICTION, not measurement: how long a GPU would take for the matrix products and quantizers of a rewritten graph.

A roofline: an operator takes the longer of its bytes at memory bandwidth and its operations at the tensor cores' peak,
each at a fixed share (``Efficiency``) of what the data sheet promises:

    time = max(bytes / (bandwidth * share), operations / (peak * share))

Bytes: every input read once, every output written once, as the graph has them. Graphs captured on a CPU are counted as
``passes/fuse.py`` fuses them for a GPU, on a copy, and an amax that ``lowering/fold.py`` folds into the kernel that
computes its tensor reads nothing; nor do rows that ``lowering/produce.py`` has quantized there. Operations: 2 M N K for
a product. There is nothing in it for the start of a kernel, for caches, for communication or for the optimizer.

Calibration: three shares, fitted to three published numbers of one layer, so they are reproduced by construction.
Transformer Engine's GEMM benchmark on a B300: 15,872 tokens, hidden 4096, ffn 16384, the 12 products of QKV, attention
output, MLP up and down (https://github.com/NVIDIA/TransformerEngine, docs/examples/gemm_profiling/gemm_profiling.rst):

| a layer's 12 products | published ms | this model ms | what it fixes |
|---|---|---|---|
| bf16 | 12.758 | 12.76 | ``Efficiency.bf16`` |
| NVFP4, operands quantized before | 3.764 | 3.77 | ``Efficiency.fp4`` |
| NVFP4 | 6.453 | 6.46 | ``Efficiency.memory`` |

What the benchmark quantizes for each product is read from its source and is ours to get wrong: it calls the forward of
a linear layer, whose [M, K] input gets its two amaxes and then its rows and rotated columns, each in one read, and
whose [N, K] weight gets its amax and its rows. Not fitted, and so a check: docs/roofline.md.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import fx

from .. import compat
from ..errors import ConfigError
from ..graph import LAYOUT, aten, has_row_scales, laid_out
from ..lowering.fold import finds_row_maxima, foldable
from ..lowering.produce import WIDEST_ALONE, is_by_row
from ..lowering.product import product_of, unfit
from ..passes.classify import MATMULS
from ..passes.fuse import fuse
from ..passes.tile import native_products
from ..table import table

TILED = "fp4_tiled"
"""Key in a node's metadata: a product that tensor cores with FP4 would multiply themselves."""

Precision = Literal["bf16", "fp8", "fp4"]
Kind = Literal["product", "decode", "quantization"]

BYTES = {"bf16": 2.0, "fp8": 33 / 32, "fp4": 9 / 16}
"""Bytes of an element of an operand with its scale: one of 8 bits for 32 (MXFP8) or for 16 elements (NVFP4)."""


# --- GPUs ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What a data sheet promises of one GPU: dense peaks in operations a second, bandwidth in bytes a second.

    ``fp4`` is None where the tensor cores have no FP4: operands are decoded and multiplied in bf16 there.
    """

    name: str
    bf16: float
    fp8: float
    fp4: float | None
    bandwidth: float
    source: str


_BLACKWELL = "NVIDIA's Blackwell data sheet, a GPU, half of its figures with sparsity"
_ULTRA = "NVIDIA's GB300 NVL72 data sheet, a rack's figures by 72: dense FP4 1080 PFLOP/s, 576 TB/s"

GPUS = {
    gpu.name: gpu
    for gpu in (
        # Data sheet: 1979 TFLOP/s of bf16 and 3958 of FP8 with sparsity, 4.8 TB/s.
        Gpu("H200", 0.9895e15, 1.979e15, None, 4.8e12, "NVIDIA's H200 SXM data sheet, half of its figures"),
        # Data sheet, with sparsity: 18, 9, 4.5 PFLOP/s, 7.7 TB/s (HGX B200); 20, 10, 5 PFLOP/s, 8 TB/s (GB200 NVL72).
        # Read at https://zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html
        Gpu("B200", 2.25e15, 4.5e15, 9e15, 7.7e12, _BLACKWELL),
        Gpu("GB200", 2.5e15, 5e15, 10e15, 8e12, _BLACKWELL),
        # Not from a data sheet: dense FP4 of HGX B300 is 13.1 in an early table (105 of eight GPUs) and 13.5 to 14
        # later; the bandwidth is that of https://verda.com/blog/gb300-nvl72-architecture, and 8 TB/s elsewhere.
        # The calibration is made against these very numbers, so on a B300 it takes up what is wrong with them.
        Gpu("B300", 2.25e15, 4.5e15, 13.5e15, 7.7e12, "HGX B300; FP4 peak and bandwidth from secondary sources"),
        # Read at https://verda.com/blog/gb300-nvl72-architecture
        Gpu("GB300", 2.5e15, 5e15, 15e15, 8e12, _ULTRA),
    )
}


def gpu_named(name: object) -> Gpu:
    """The GPU of ``explain``'s ``target``.

    Raises:
        ConfigError: there are no figures for it.
    """
    if not isinstance(name, str) or name not in GPUS:
        given = repr(name) if isinstance(name, str) else f"a {type(name).__name__}"
        raise ConfigError(
            f"target is {given}; known are {', '.join(GPUS)}. An argument of the model that is called target goes to "
            "explain by position."
        )
    return GPUS[name]


# --- the model -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet's figures that are reached. FP8 products take bf16's."""

    bf16: float
    fp4: float
    memory: float

    def of(self, precision: Precision) -> float:
        return self.fp4 if precision == "fp4" else self.bf16


EFFICIENCY = Efficiency(bf16=0.668, fp4=0.377, memory=0.588)
"""Fitted to the published B300 layer: see above. They are Transformer Engine's kernels, not this package's."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A GPU and the shares of its figures that are reached."""

    gpu: Gpu
    efficiency: Efficiency = EFFICIENCY

    def memory(self, bytes: float) -> float:
        """Seconds to move ``bytes``."""
        return bytes / (self.gpu.bandwidth * self.efficiency.memory)

    def compute(self, flops: float, precision: Precision) -> float:
        """Seconds of the tensor cores."""
        peak: float | None = getattr(self.gpu, precision)
        assert peak is not None, f"{self.gpu.name} does not multiply {precision}"
        return flops / (peak * self.efficiency.of(precision))

    def product(self, m: int, n: int, k: int, precision: Precision, out: float | None = None) -> float:
        """Seconds of [m, k] x [n, k]^T with operands ready; ``out``: bytes of the result, bf16 by default."""
        moved = (m + n) * k * BYTES[precision] + (2 * m * n if out is None else out)
        return max(self.memory(moved), self.compute(2 * m * n * k, precision))


PUBLISHED = {"bf16": 12.758e-3, "fp4": 6.453e-3, "fp4 ready": 3.764e-3}
"""Seconds of the 12 products of a layer on a B300, by Transformer Engine's benchmark (source above)."""

TOKENS = 15872
WEIGHTS = ((12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384))
"""[N, K] of the layer's weights: QKV, attention output, MLP up, MLP down."""


def published_products() -> list[tuple[int, int, int]]:
    """(M, N, K) of the benchmark: forward, dgrad and wgrad of each weight."""
    return [
        shape for n, k in WEIGHTS for shape in ((TOKENS, n, k), (TOKENS, k, n), (k, n, TOKENS))
    ]  # wgrad is timed as [K, tokens] x [tokens, N]


def benchmark_quantization(model: Model, m: int, n: int, k: int) -> float:
    """Seconds in which the benchmark quantizes before a product: the [m, k] input both ways, the [n, k] weight once."""
    amax, code = BYTES["bf16"], BYTES["fp4"]
    read = BYTES["bf16"]
    return model.memory((amax + read + 2 * code) * m * k + (amax + read + code) * n * k)


def calibration(model: Model) -> dict[str, float]:
    """What the model gives for ``PUBLISHED``, seconds."""
    shapes = published_products()
    ready = sum(model.product(*shape, "fp4") for shape in shapes)
    return {
        "bf16": sum(model.product(*shape, "bf16") for shape in shapes),
        "fp4": ready + sum(benchmark_quantization(model, *shape) for shape in shapes),
        "fp4 ready": ready,
    }


# --- a graph's operators ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Work:
    """One operator, or the decoding before one: seconds as the graph has it, and for bf16 and FP8 in its place."""

    site: str
    kind: Kind
    seconds: float
    bf16: float
    fp8: float
    bytes: float
    flops: float


def fused(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph with its FP4 operators merged as for a GPU."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    fuse(copy, eligible=lambda device: True)
    for product in native_products(copy, lambda device: True):
        product.meta[TILED] = True
    return copy


def folded(graph: fx.Graph, gpu: Gpu) -> set[fx.Node]:
    """The amaxes that cost nothing on a GPU: kernels that compute their tensors find them, or quantize their rows."""

    def is_template(product: fx.Node) -> bool:
        return _is_template(product, gpu)

    free = set(foldable(graph, lambda device: True, is_template))
    for node in graph.find_nodes(op="call_function", target=torch.ops.fp4.row_amax.default):
        x = node.all_input_nodes[0]
        found = finds_row_maxima(laid_out(x, copies=False), is_template)
        read_once = x.meta["val"].shape[1] <= WIDEST_ALONE and any(map(_quantizes_by_row, node.users))
        if found or read_once:
            free.add(node)
    return free


def _is_native(product: fx.Node, gpu: Gpu) -> bool:
    """Whether tensor cores multiply the codes themselves (passes/tile.py)."""
    return gpu.fp4 is not None and product.meta.get(TILED, False)


def _is_template(product: fx.Node, gpu: Gpu) -> bool:
    """Whether its kernel computes what follows it: cuBLAS's does not, which gets what it can take
    (lowering/product.py)."""
    return _is_native(product, gpu) and unfit(product_of(product)) is not None


def work_of(node: fx.Node, site: str, model: Model) -> list[Work]:
    """What a node costs; nothing for a node that is neither a product nor a quantizer."""
    if node.target == torch.ops.fp4.scaled_mm.default:
        return _scaled_product(node, site, model)
    if node.target == torch.ops.fp4.decode.default:
        moved = _bytes_moved(node)
        return [Work(site, "decode", model.memory(moved), 0.0, 0.0, moved, 0.0)]
    if str(node.target).startswith("fp4."):
        return [_quantizer(node, site, model)]
    flops = _plain_flops(node)
    return [_plain_product(node, site, model, flops)] if flops else []


def _quantizer(node: fx.Node, site: str, model: Model) -> Work:
    """amax, rotation, quantization. FP8 in its place: the same tensor read once and written, without an amax."""
    moved = _bytes_moved(node)
    if _is_joined(node, model.gpu):
        moved -= _bytes(node.args[0].meta["val"])  # type: ignore[union-attr]
    elements = sum(2 * _numel(value) for value in _tensors(node) if value.dtype is torch.uint8)
    read = sum(_bytes(value) for source in node.all_input_nodes for value in _tensors(source))
    fp8 = model.memory(read + elements * BYTES["fp8"]) if elements else 0.0
    return Work(site, "quantization", model.memory(moved), 0.0, fp8, moved, 0.0)


def _is_joined(quantizer: fx.Node, gpu: Gpu) -> bool:
    """Whether the kernel that computes a tensor quantizes it (lowering/produce.py)."""
    if not _quantizes_by_row(quantizer):
        return False
    return finds_row_maxima(laid_out(quantizer.all_input_nodes[0], copies=False), lambda node: _is_template(node, gpu))


def _quantizes_by_row(node: fx.Node) -> bool:
    return node.target == torch.ops.fp4.quantize.default and is_by_row(node)


def _scaled_product(node: fx.Node, site: str, model: Model) -> list[Work]:
    """A product of two operands in one FP4 format, on tensor cores that have it; else of decoded bf16 operands. Of a
    library, its result with a scale a row is float32, and what follows reads that: counted as decoding."""
    left, right = node.args[:4], node.args[4:8]
    m, n = (_size(operand[0], 0) for operand in (left, right))
    k = min(_contraction(*operand) for operand in (left, right))
    out = sum(map(_bytes, _tensors(node)))
    flops = 2.0 * m * n * k
    bf16, fp8 = (model.product(m, n, k, precision, out) for precision in ("bf16", "fp8"))
    written = 4.0 * m * n if has_row_scales(node) and not _is_template(node, model.gpu) else float(out)
    if _is_native(node, model.gpu):
        moved = _bytes_moved(node) + written - out
        seconds = max(model.memory(moved), model.compute(flops, "fp4"))
        product = Work(site, "product", seconds, bf16, fp8, moved, flops)
        read = Work(site, "decode", model.memory(written - out), 0.0, 0.0, written - out, 0.0)
        return [product, read] if written > out else [product]
    packed = [operand for operand in (left, right) if operand[3] != "bf16"]
    decoded = sum(
        sum(_bytes(value) for part in operand[:2] for value in _tensors(part))
        + BYTES["bf16"] * _size(operand[0], 0) * _contraction(*operand)
        for operand in packed
    )
    decoded += written - out
    moved = (m + n) * k * BYTES["bf16"] + written
    seconds = model.product(m, n, k, "bf16", written)
    return [
        Work(site, "decode", model.memory(decoded), 0.0, 0.0, decoded, 0.0),
        Work(site, "product", seconds, bf16, fp8, moved, flops),
    ]


def _contraction(values: Any, scales: Any, amax: Any, format: Any) -> int:
    return _size(values, 1) * (1 if format == "bf16" else 2)


def _plain_product(node: fx.Node, site: str, model: Model, flops: float) -> Work:
    """A product that stays as it is, at bf16's peak whatever its type; bf16 and FP8 in its place change nothing."""
    moved = _bytes_moved(node)
    seconds = max(model.memory(moved), model.compute(flops, "bf16"))
    return Work(site, "product", seconds, seconds, seconds, moved, flops)


def _plain_flops(node: fx.Node) -> float:
    """Operations of a matmul or of attention in one operator (causal or not: all of it); 0 for other nodes."""
    name = str(node.target)
    if node.target in MATMULS:
        left, _ = MATMULS[node.target]
        return 2.0 * sum(map(_numel, _tensors(node))) * _size(node.args[left], -1)
    if name.startswith("aten._scaled_dot_product"):
        backward = "backward" in name
        query, key = node.args[1:3] if backward else node.args[:2]
        products = 5 if backward else 2  # the backward makes the scores again
        return products * 2.0 * _numel(query.meta["val"]) * _size(key, -2)  # type: ignore[union-attr]
    return 0.0


def _is_free(node: fx.Node) -> bool:
    """Nodes that move nothing: views, items of a tuple, random seeds."""
    layout = node.target in LAYOUT and node.target is not aten.clone.default
    return layout or node.target in (operator.getitem, compat.SEEDS, compat.LOOKUP_SEED)


def _bytes_moved(node: fx.Node) -> float:
    return float(sum(_bytes(value) for one in (*node.all_input_nodes, node) for value in _tensors(one)))


def _tensors(node: Any) -> list[torch.Tensor]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    values = value if isinstance(value, (list, tuple)) else [value]
    return [one for one in values if isinstance(one, torch.Tensor)]


def _numel(value: torch.Tensor) -> int:
    return compat.size_hint(value.numel())


def _bytes(value: torch.Tensor) -> int:
    return _numel(value) * value.element_size()


def _size(node: Any, dim: int) -> int:
    return compat.size_hint(node.meta["val"].shape[dim])


# --- the prediction --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RooflineRow:
    """PREDICTED milliseconds of a module's products and of what they need, forward and backward together.

    ``bf16_ms`` and ``fp8_ms``: the same products in bf16, and in FP8 with their operands quantized. Products that are
    not FP4 here take the same time in all three.
    """

    site: str
    product_ms: float
    decode_ms: float
    quantization_ms: float
    bf16_ms: float
    fp8_ms: float
    bytes: float
    flops: float

    @property
    def total_ms(self) -> float:
        return self.product_ms + self.decode_ms + self.quantization_ms

    @property
    def quantization_share(self) -> float:
        return self.quantization_ms / self.total_ms if self.total_ms else 0.0

    def to_dict(self) -> dict[str, Any]:
        derived = {"total_ms": self.total_ms, "quantization_share": self.quantization_share}
        return dataclasses.asdict(self) | derived


@dataclasses.dataclass(frozen=True)
class Roofline:
    """PREDICTED, not measured: time of a training step's products and quantizers on a GPU, by module.

    ``other_ms``: all other operators, each reading and writing everything it names. No two of them are fused there, so
    it is more than they will take, and it is in no total.
    """

    gpu: Gpu
    efficiency: Efficiency
    rows: tuple[RooflineRow, ...]
    other_ms: float

    @property
    def total(self) -> RooflineRow:
        names = [field.name for field in dataclasses.fields(RooflineRow) if field.name != "site"]
        return RooflineRow("total", **{name: sum(getattr(row, name) for row in self.rows) for name in names})

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.gpu.name,
            "predicted": True,
            "gpu": dataclasses.asdict(self.gpu),
            "efficiency": dataclasses.asdict(self.efficiency),
            "rows": [row.to_dict() for row in self.rows],
            "total": self.total.to_dict(),
            "other_ms": self.other_ms,
        }

    def __str__(self) -> str:
        decodes = self.total.decode_ms > 0
        columns = ["module", "products ms", *(["decoding ms"] if decodes else []), "quantization ms", "share"]
        columns += ["as planned ms", "in bf16 ms", "in FP8 ms", "bf16 / planned"]
        rows = [_cells(row, decodes) for row in (*self.rows, self.total)]
        gpu, share = self.gpu, self.efficiency
        title = f"PREDICTED, not measured: matrix products and quantization of a step on one {gpu.name}"
        lines = [
            table(title, columns, rows),
            f"Taken, fitted to a published layer on a B300: {share.bf16:.1%} of the peak for bf16 and FP8, "
            f"{share.fp4:.1%} for FP4, {share.memory:.1%} of {gpu.bandwidth / 1e12:.1f} TB/s.",
            f"In no total: other operators, at most {_ms(self.other_ms)} ms if nothing is fused; kernel launches, "
            "communication, the optimizer.",
        ]
        return "\n".join(lines)


def _cells(row: RooflineRow, decodes: bool) -> list[str]:
    times = [row.product_ms, *([row.decode_ms] if decodes else []), row.quantization_ms]
    ratio = f"{row.bf16_ms / row.total_ms:.2f}" if row.total_ms else ""
    ends = [_ms(row.total_ms), _ms(row.bf16_ms), _ms(row.fp8_ms), ratio]
    return [row.site or "(model)", *map(_ms, times), f"{row.quantization_share:.0%}", *ends]


def _ms(value: float) -> str:
    return f"{value:.3g}"


def predict(graphs: Iterable[tuple[fx.Graph, Callable[[fx.Node], str]]], model: Model) -> Roofline:
    """The prediction for rewritten forward and backward graphs, each with what names the module of a node.

    What is quantized once for several sites counts for the first of them.
    """
    works: list[Work] = []
    other = 0.0
    for graph, name_of in graphs:
        copy = fused(graph)
        free = folded(copy, model.gpu)
        for node in copy.nodes:
            if node.op != "call_function" or node in free:
                continue
            found = work_of(node, name_of(node), model)
            works += found
            if not found and not _is_free(node):
                other += model.memory(_bytes_moved(node))
    return Roofline(model.gpu, model.efficiency, tuple(_rows(works)), other * 1e3)


def _rows(works: list[Work]) -> Iterator[RooflineRow]:
    for site in dict.fromkeys(work.site for work in works):
        mine = [work for work in works if work.site == site]
        kinds = {
            f"{kind}_ms": 1e3 * sum(work.seconds for work in mine if work.kind == kind)
            for kind in ("product", "decode", "quantization")
        }
        yield RooflineRow(
            site,
            **kinds,
            bf16_ms=1e3 * sum(work.bf16 for work in mine),
            fp8_ms=1e3 * sum(work.fp8 for work in mine),
            bytes=sum(work.bytes for work in mine),
            flops=sum(work.flops for work in mine),
        )
