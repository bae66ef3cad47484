"""fp4compile: NVFP4 training for any PyTorch model by ``torch.compile(model, backend="nvfp4")``."""

from .backend import nvfp4
from .policy import Policy
from .prepare import Plan, compile_blocks, prepare
from .recipe import Recipe
from .report import Report, explain
from .tensor import QuantizedTensor, quantize, scaled_mm

__all__ = [
    "Plan",
    "Policy",
    "QuantizedTensor",
    "Recipe",
    "Report",
    "compile_blocks",
    "explain",
    "nvfp4",
    "prepare",
    "quantize",
    "scaled_mm",
]
