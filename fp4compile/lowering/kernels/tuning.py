"""Which of a kernel's configurations is launched: the one a pure function chose, or under max-autotune the fastest."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

from .kernel import is_collecting

Config = TypeVar("Config")

_active = contextvars.ContextVar("fp4compile_tuning", default=False)
_fastest: dict[Hashable, object] = {}


@contextlib.contextmanager
def tuning() -> Iterator[None]:
    """Inside, ``launch`` measures at its first call of a kind, and remembers for the process."""
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def launch(kind: Hashable, configs: Sequence[Config], run: Callable[[Config], None]) -> None:
    """``run`` one configuration. ``kind``: all that the fastest depends on: family, variant, shape and device."""
    if not _active.get():
        run(configs[0])
        return
    if is_collecting():
        for config in configs:
            run(config)
        return
    if kind not in _fastest:
        _fastest[kind] = min(configs, key=lambda config: _milliseconds(lambda: run(config)))
    run(_fastest[kind])  # type: ignore[arg-type]


def _milliseconds(call: Callable[[], None]) -> float:
    from triton.testing import do_bench

    return do_bench(call, warmup=5, rep=20, return_mode="median")
