"""Writes the tables of docs/performance.md from the JSON under benchmarks/results/, so that no figure is typed by hand.

A table stands between ``<!-- name -->`` and ``<!-- end name -->``, where name is one of ``SECTIONS``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import render_base as base
import render_step

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"


def speed() -> str:
    measured = base.part("kernels_gpu", "speed")
    first, rows = measured["rows"][0], []
    for row in measured["rows"]:
        rows.append(
            [
                row["kernel"],
                row["size"],
                base.number(row["ms"]),
                base.number(row["TB/s"], 2),
                base.percent(row["share"]),
                base.percent(row["mark"]),
                base.yes(row["met"]),
                base.percent(row["TB/s"] / row["copy TB/s"]),
                base.number(row["compiled ms"]),
                base.number(row["eager ms"]),
            ]
        )
    header = ["kernel", "size", "ms", "TB/s", "share", "mark", "met", "of a copy of that size"]
    header += ["`torch.compile` ms", "eager ms"]
    notes = f"Shares are of {first['TB/s'] / first['share']:.2f} TB/s, the copy bandwidth of the same run."
    return f"{base.environment(measured['environment'])} {notes}\n\n{base.table(header, rows)}"


def products() -> str:
    rows = [
        [
            row["product"],
            row["m, n, k"],
            base.number(row["ms"]),
            base.number(row["of bf16"], 2),
            base.number(row["TFLOP/s"], 0),
            base.number(row["mark"], 2),
            base.yes(row["met"]),
        ]
        for row in base.part("kernels_gpu", "speed")["products"]
    ]
    return base.table(["product", "M, N, K", "ms", "of bf16", "TFLOP/s", "mark", "met"], rows)


def candidates() -> str:
    found = base.part("kernels_gpu", "speed")["candidates"]
    rows = [[row["kernel"], f"`{row['configuration']}`", base.number(row["ms"])] for row in found]
    return base.table(["kernel", "configuration", "ms"], rows)


def missed() -> str:
    """Those rows of the tables that are below their mark."""
    measured = base.part("kernels_gpu", "speed")
    kernels = [
        f"- {row['kernel']}, {row['size']}: {base.percent(row['share'])} of {base.percent(row['mark'])}"
        for row in measured["rows"]
        if row["met"] is False
    ]
    slow = [
        f"- {row['product']}, {row['m, n, k']}: {row['of bf16']:.2f} of {row['mark']:.2f}"
        for row in measured["products"]
        if row["met"] is False
    ]
    return "\n".join(kernels + slow) or "Nothing misses its mark."


def check() -> str:
    found = base.part("kernels_gpu", "check")
    rows = [
        [
            row["kernel"],
            str(row["comparisons"]),
            base.number(row["MB"], 1),
            "" if row["kernel"].startswith("operator") else str(row["in poisoned memory"]),
            str(row["differing bytes"]),
            str(row["errors"]),
        ]
        for row in found["kernels"]
    ]
    header = ["kernel", "comparisons", "MB", "into poisoned memory", "differing bytes", "errors"]
    return f"{base.environment(found['environment'])}\n\n{base.table(header, rows)}"


def check_products() -> str:
    rows = [
        [
            row["product"],
            row["format"],
            row["m, n, k"],
            row["result"],
            f"{row['max error / allowed']:.1e}" if "max error / allowed" in row else "",
            f"{row['rms error / rms']:.1e}" if "rms error / rms" in row else "",
            base.yes(row["ok"]),
        ]
        for row in base.part("kernels_gpu", "check")["products"]
    ]
    header = [
        "product",
        "format",
        "M, N, K",
        "result",
        "largest error, of the allowed",
        "RMS error, of the RMS",
        "within",
    ]
    return base.table(header, rows)


def sanitizer() -> str:
    record = base.load("sanitizer")
    rows = [[row["tool"], str(row["launches"]), str(row["errors"])] for row in record["rows"]]
    return f"{base.environment(record['environment'])}\n\n{base.table(['tool', 'launches', 'errors'], rows)}"


def rotated_scale() -> str:
    record = base.load("rotated_scale")
    environment, rows = record["environment"], []
    for row in record["rows"]:
        larger = [base.number(row[name], 1) for name in ("x scale", "dy scale")]
        dw = [base.number(row[name], 4) for name in ("error, amax", "error, bound")]
        each = [base.number(row[name], 4) for name in ("row error, amax", "row error, bound")]
        ratios = [base.number(row[name], 3) for name in ("error ratio", "row error ratio")]
        rows.append([row["data"], row["tokens, N, K"], *larger, *dw, ratios[0], *each, ratios[1]])
    header = ["data", "tokens, N, K", "bound / amax of x", "of dy", "error of dw, amax", "bound", "ratio"]
    header += ["mean error of its rows, amax", "bound", "ratio"]
    return (
        f"On a CPU, torch {environment['versions']['torch']}; `{environment['command']}`.\n\n{base.table(header, rows)}"
    )


def produced() -> str:
    record = base.load("produced_gpu")
    rows = [
        [
            row["case"],
            row["size"],
            base.number(row["one ms"]),
            base.number(row["two ms"]),
            base.number(row["one / two"], 2),
            base.number(row["bytes an element"], 1),
            base.number(row["one TB/s"], 2),
        ]
        for row in record["rows"]
    ]
    header = ["computed", "size", "one kernel, ms", "two, ms", "ratio", "bytes an element", "one kernel, TB/s"]
    return f"{base.environment(record['environment'])}\n\n{base.table(header, rows)}"


def columns_profile() -> str:
    profile = base.part("columns_tried", "profile")
    rows = [[name, *(f"{kernel[name]:g}" for kernel in profile.values())] for name in profile["columns"]]
    return base.table(["nearest, by Nsight Compute", "rotated columns", "rows and columns in one kernel"], rows)


def columns_tried() -> str:
    rows = [
        [
            row["tried"],
            row["of"],
            base.span(row["ms"], 3) if row["ms"] else "not faster",
            row["kept"],
            base.number(row["kept ms"]),
        ]
        for row in base.part("columns_tried", "rows")
    ]
    return base.table(["tried", "of", "ms", "instead of", "ms"], rows)


MODEL = (
    ("bytes an element", 4),
    ("instructions an element", 1),
    ("memory ms", 3),
    ("issue ms", 3),
    ("pipe ms", 3),
    ("predicted ms", 3),
)


def blackwell() -> str:
    rows = [
        [
            row["kernel"],
            *(base.number(row[name], digits) for name, digits in MODEL),
            row["bound by"],
            base.percent(row["predicted share of bandwidth"]),
        ]
        for row in base.part("blackwell_model", "rows")
    ]
    header = ["kernel (predicted)", *(name for name, _ in MODEL), "bound by", "share of bandwidth"]
    return f"{_device('B200')}\n\n{base.table(header, rows)}"


def blackwell_products() -> str:
    rows = [
        [
            f"`{row['configuration']}`",
            base.number(row["tensor cores ms"]),
            base.number(row["memory ms"]),
            row["bound by"],
            base.number(row["GB loaded"], 2),
            base.number(row["bytes a clock and SM"], 0),
            *(str(row[name]) for name in ("FP4 MMA", "scale copies", "TMA loads", "spilled bytes")),
        ]
        for row in base.part("blackwell_model", "products")
    ]
    header = ["configuration (predicted)", "tensor cores ms", "memory ms", "bound by", "GB loaded by tiles"]
    header += ["bytes a clock and SM for that", "FP4 MMA", "scale copies", "TMA loads", "spilled bytes"]
    return base.table(header, rows)


def validation() -> str:
    rows = [
        [
            row["kernel"],
            *(base.number(row[name], digits) for name, digits in MODEL),
            row["bound by"],
            base.number(row["measured ms"]),
            base.percent(row["predicted / measured"]),
        ]
        for row in base.part("blackwell_model", "validation")
    ]
    header = ["kernel (H200)", *(name for name, _ in MODEL), "bound by", "measured ms", "predicted / measured"]
    return f"{_device('H200')}\n\n{base.table(header, rows)}"


def _device(name: str) -> str:
    device = base.part("blackwell_model", "devices")[name]
    size = " x ".join(map(str, base.part("blackwell_model", "size")))
    return (
        f"bf16, {size}; {name} taken as {device['processors']} multiprocessors at {device['clock'] / 1e9:.2f} GHz with "
        f"{device['bandwidth'] / 1e12:.2f} TB/s; code for {device['arch']}."
    )


SECTIONS: dict[str, Callable[[], str]] = {
    **render_step.SECTIONS,
    "speed": speed,
    "products": products,
    "candidates": candidates,
    "missed": missed,
    "check": check,
    "check products": check_products,
    "sanitizer": sanitizer,
    "rotated scale": rotated_scale,
    "produced": produced,
    "columns profile": columns_profile,
    "columns tried": columns_tried,
    "blackwell": blackwell,
    "blackwell products": blackwell_products,
    "validation": validation,
}

_MARKED = re.compile(r"<!-- (?P<name>[a-z ]+) -->\n.*?<!-- end (?P=name) -->", re.DOTALL)


def render(page: str) -> str:
    """The page with every table made anew. A table without a marker in the page is an error."""
    found = [match["name"] for match in _MARKED.finditer(page)]
    if sorted(found) != sorted(SECTIONS):
        raise ValueError(f"the page has the tables {sorted(found)}, expected {sorted(SECTIONS)}")
    return _MARKED.sub(lambda match: _section(match["name"]), page)


def _section(name: str) -> str:
    try:
        text = SECTIONS[name]()
    except base.NotMeasured as reason:
        text = str(reason)
    return f"<!-- {name} -->\n{text}\n<!-- end {name} -->"


def main() -> None:
    PAGE.write_text(render(PAGE.read_text()))
    print(f"wrote docs/{PAGE.name}")


if __name__ == "__main__":
    main()
