"""What the tables of docs/performance.md are made with: results, cells, where they were measured."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MISSING = "*Not measured yet: benchmarks/results/{}.json.*"

Record = Mapping[str, Any]


class NotMeasured(Exception):
    """The script that would have written it has not run."""


def load(name: str) -> Record:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise NotMeasured(MISSING.format(name))
    return json.loads(path.read_text())


def part(name: str, key: str) -> Any:
    found = load(name).get(key)
    if not found:
        raise NotMeasured(MISSING.format(name))
    return found


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def number(value: float | str | None, digits: int = 3) -> str:
    """A text in the place of a number says why there is none; its first words do."""
    if value is None:
        return ""
    return value.partition(":")[0] if isinstance(value, str) else f"{value:.{digits}f}"


def yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "**no**"


def span(values: Sequence[float], digits: int) -> str:
    return " to ".join(f"{value:.{digits}f}" for value in values)


def environment(record: Record) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    command = re.sub(r" --out \S+", "", record["command"])
    return f"{record['gpu']}, CUDA {record['cuda']}, {versions}, Python {record['python']}; `{command}`."
