"""A generated kernel: its source text, how it is launched, and the Triton function made of it.

Sources are written from the templates beside this package, one for each recipe, target and shape class, because much of
a kernel is register arithmetic that differs by constants: which signs are flipped, which instruction rounds, how many
rows are held. They can be read: ``python -m fp4compile kernels --out DIR`` writes them to files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import linecache
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from typing import Any

import jinja2
import torch
from torch import Tensor

from ...errors import ConfigError

Odd = tuple[int, ...]
"""Places of arguments that are no multiples of 16 though ``aligned`` names them."""
_Key = tuple[int, Odd]
"""A device, and that."""
_collected: ContextVar[list[tuple[Kernel, Odd]] | None] = ContextVar("fp4compile_collected", default=None)
_NO_OPTIONS: Mapping[str, Any] = {}
_POINTERS = {
    "*i32": torch.int32,
    "*i64": torch.int64,
    "*u8": torch.uint8,
    "*fp32": torch.float32,
    "*fp16": torch.float16,
    "*i16": torch.int16,
}


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
    _binaries: dict[_Key, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)
    _pending: dict[_Key, Future[Any]] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def run(self, programs: int, *arguments: Any) -> None:
        """Launch on the current device, with all arguments but the constants.

        Of a tensor only the memory counts: it is read as ``signature`` says.
        """
        collected = _collected.get()
        if collected is not None:
            collected.append((self, self._odd(arguments)))
            return
        if _is_interpreted(self.function):
            typed = map(_typed, self.signature.values(), arguments)
            self.function[(programs,)](*typed, **self.constants, **self.options)
            return
        values = [_address(one) if isinstance(one, Tensor) else one for one in arguments]
        binary = self._binary(torch.cuda.current_device(), self._odd(values))
        binary[(programs, 1, 1)](*values, *self.constants.values())

    def _odd(self, values: Sequence[Any]) -> Odd:
        """Of addresses and numbers; tensors are taken to be aligned."""
        return tuple(at for at in self._aligned_places if not isinstance(values[at], Tensor) and values[at] % 16)

    @functools.cached_property
    def _aligned_places(self) -> tuple[int, ...]:
        names = list(self.signature)
        return tuple(names.index(name) for name in self.aligned)

    def _binary(self, device: int, odd: Odd = ()) -> Any:
        """The ``triton.compiler.CompiledKernel`` for a device. odd: places of arguments that are not ``aligned``.

        Triton's own dispatcher would find the same from the arguments, at several times the cost of a launch.
        """
        found = self._binaries.get((device, odd))
        if found is None:
            pending = self._pending.get((device, odd))
            found = pending.result() if pending else self.compile(torch.cuda.get_device_capability(device), odd)
            self._binaries[device, odd] = found
        return found

    def compile_in(self, pool: Executor, device: int, odd: Odd = ()) -> None:
        """Begin to compile for a device; the first launch there waits for it."""
        key = device, odd
        if key not in self._binaries and key not in self._pending:
            capability = torch.cuda.get_device_capability(device)
            self._pending[key] = pool.submit(_with_launcher, self, capability, odd)

    def compile(self, capability: tuple[int, int], odd: Odd = (), options: Mapping[str, Any] = _NO_OPTIONS) -> Any:
        """The binary for a compute capability; no GPU and no driver is looked for. options: more for Triton."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        divisible = {(at,): [["tt.divisibility", 16]] for at in self._aligned_places if at not in odd}
        source = ASTSource(self.function, dict(self.signature), dict(self.constants), divisible)
        target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        return triton.compile(source, target=target, options={**self.options, **options})

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told beside the arguments."""
        limits = {} if self.maxnreg is None else {"maxnreg": self.maxnreg}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limits}

    @property
    def function(self) -> Any:
        """The ``triton.JITFunction``, or the interpreter's function where TRITON_INTERPRET=1."""
        return load(self.name, self.source)


def _address(tensor: Tensor) -> int:
    if not tensor.is_cuda:
        raise ConfigError(
            f"a tensor on {tensor.device} is used together with tensors on a GPU; move it to the same device"
        )
    return tensor.data_ptr()


def _with_launcher(kernel: Kernel, capability: tuple[int, int], odd: Odd) -> Any:
    """A binary. Triton 3.6 has a C function for each signature, too, which a first launch would have to wait for: it is
    built into Triton's cache."""
    from triton.backends.nvidia import driver

    binary = kernel.compile(capability, odd)
    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(binary.src, binary.metadata)
    return binary


@contextlib.contextmanager
def collecting() -> Iterator[list[tuple[Kernel, Odd]]]:
    """Inside, ``run`` launches nothing: what it would launch is gathered in the list."""
    found: list[tuple[Kernel, Odd]] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def is_collecting() -> bool:
    return _collected.get() is not None


def _is_interpreted(function: Any) -> bool:
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(function, InterpretedFunction)


def _typed(kind: str, argument: Any) -> Any:
    """What Triton's interpreter, which goes by dtypes, gets for an argument."""
    return argument.view(_POINTERS[kind]) if isinstance(argument, Tensor) else argument


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
