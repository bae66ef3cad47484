"""A generated kernel: its source text, how it is launched, and the Triton function made of it.

Sources are written from the templates beside this package, one for each recipe, target and shape class, because much of
a kernel is register arithmetic that differs by constants: which signs are flipped, which instruction rounds, how many
rows are held. They can be read: ``python -m fp4compile kernels --out DIR`` writes them to files.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import linecache
from collections.abc import Mapping
from typing import Any

import jinja2


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One generated kernel in one configuration.

    family: what it does, the same for all its configurations. name: of the entry function in ``source``.
    signature: argument -> Triton type ("*bf16", "*i32", "i32", "constexpr", "tensordesc<u8[128, 128]>").
    constants: values of the "constexpr" arguments. aligned: arguments that are multiples of 16 (pointers: aligned to 16
    bytes).
    """

    family: str
    name: str
    source: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int = 1
    warp_specialize: bool = False
    maxnreg: int | None = None

    def run(self, programs: int, *arguments: Any) -> None:
        """Launch on the current device, with all arguments but the constants."""
        self.function[(programs,)](*arguments, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told beside the arguments."""
        limits = {} if self.maxnreg is None else {"maxnreg": self.maxnreg}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limits}

    @property
    def function(self) -> Any:
        """The ``triton.JITFunction``, or the interpreter's function where TRITON_INTERPRET=1."""
        return load(self.name, self.source)


@functools.cache
def load(name: str, source: str) -> Any:
    """The function ``name`` of a generated source.

    Triton reads a function's source through ``inspect``, which looks in ``linecache``: no file is written.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()
    filename = f"<fp4compile kernel {name} {digest[:12]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"fp4compile.generated.{name}"}
    exec(compile(source, filename, "exec"), namespace)
    return namespace[name]


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fp4compile.lowering.kernels", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["names"] = _names
    return environment


def _names(pattern: str, count: int, start: int = 0) -> str:
    """ "x{}", 3 -> "x0, x1, x2"."""
    return ", ".join(pattern.format(i) for i in range(start, start + count))


def render(template: str, **values: Any) -> str:
    """The source that a template makes of ``values``."""
    return _environment().get_template(template).render(**values)
