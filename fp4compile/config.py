"""What the configuration classes share: canonical JSON, and errors that name field, value and what is
allowed."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from .errors import ConfigError


def canonical_json(value: Any) -> str:
    """One text for one value: sorted keys, no spaces. Equal configurations give equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def bad_value(owner: type, field: str, value: object, allowed: str) -> ConfigError:
    """The error for a field whose value cannot be honoured; ``allowed`` says what can."""
    return ConfigError(f"{owner.__name__}.{field} = {value!r} is not possible: it must be {allowed}")


def check_fields(owner: type, names: Iterable[object]) -> None:
    """ConfigError if a name is no field of the dataclass ``owner``; the message lists the fields and the
    closest."""
    known = [field.name for field in dataclasses.fields(owner)]
    for name in names:
        if name not in known:
            hint = difflib.get_close_matches(str(name), known, n=1)
            meant = f" (did you mean {hint[0]!r}?)" if hint else ""
            raise ConfigError(f"{owner.__name__} has no field {name!r}{meant}; its fields are {', '.join(known)}")


def read_object(owner: type, text: str) -> dict[str, Any]:
    """The JSON object in ``text``, its keys checked against the fields of ``owner``."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{owner.__name__}.from_json got no JSON: {error}") from error
    return as_object(owner, value)


def as_object(owner: type, value: object) -> dict[str, Any]:
    """``value`` as keyword arguments of ``owner``; ConfigError if it is no mapping or has unknown keys."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{owner.__name__} is made from a mapping of its fields, not from {value!r}")
    check_fields(owner, value)
    return dict(value)


def is_count(value: object, least: int = 0) -> bool:
    """An int of at least ``least``; bool, which Python counts as int, is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
