"""The command line: ``python -m fp4compile explain module:factory``, ``... doctor`` and ``... kernels``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .errors import ConfigError, Fp4Error


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if all is well, 1 if ``doctor`` or ``kernels`` found a problem, 2 for a wrong call."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (Fp4Error, OSError) as error:
        print(f"fp4compile: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp4compile", description="Train any PyTorch model with NVFP4 matrix products."
    )
    commands = parser.add_subparsers(required=True)
    explain = commands.add_parser(
        "explain", help="show which matmuls of a model are rewritten, and why the others are not"
    )
    explain.add_argument(
        "factory", metavar="module:factory", help="a function that returns (model, args) or (model, args, kwargs)"
    )
    explain.add_argument("--recipe", default="nvidia", help="name of a recipe: nvidia, bf16 or mxfp4")
    explain.add_argument(
        "--policy", type=json.loads, help='fields of a Policy as JSON, for example \'{"skip": ["*.gate"]}\''
    )
    explain.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    explain.add_argument("--graphs", type=Path, metavar="DIR", help="also write the captured graphs as readable Python")
    explain.add_argument("--target", metavar="GPU", help="also predict times on H200, B200, GB200, B300 or GB300")
    explain.set_defaults(run=_explain)
    doctor = commands.add_parser("doctor", help="show what this machine will do: devices, lowering, versions")
    doctor.add_argument("--json", type=Path, metavar="FILE", help="also write the findings as JSON")
    doctor.set_defaults(run=_doctor)
    kernels = commands.add_parser(
        "kernels", help="compile the generated GPU kernels, without a GPU, and show their size"
    )
    kernels.add_argument("--arch", default="sm_100a", help="architecture to compile for (default: sm_100a)")
    kernels.add_argument("--family", default="*", metavar="GLOB", help="only the kernels of these families")
    kernels.add_argument(
        "--out", type=Path, metavar="DIR", help="also write each kernel's source, TTGIR, PTX, cubin and SASS"
    )
    kernels.add_argument("--json", type=Path, metavar="FILE", help="also write the facts as JSON")
    kernels.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one for each CPU)"
    )
    kernels.set_defaults(run=_kernels)
    return parser


def _explain(arguments: argparse.Namespace) -> int:
    from .report import explain

    model, args, kwargs = _call_factory(arguments.factory)
    options: dict[str, Any] = {"recipe": arguments.recipe}
    if arguments.policy is not None:
        options["policy"] = arguments.policy
    report = explain(model, *args, options=options, target=arguments.target, **kwargs)
    print(report)
    _write_json(arguments.json, report.to_dict())
    if arguments.graphs is not None:
        arguments.graphs.mkdir(parents=True, exist_ok=True)
        for name, graph in report.graphs.items():
            (arguments.graphs / f"{name}.py").write_text(graph.print_readable(print_output=False))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from .report.doctor import examine, to_text

    facts = examine()
    print(to_text(facts))
    _write_json(arguments.json, facts)
    return 1 if facts["problems"] else 0


def _kernels(arguments: argparse.Namespace) -> int:
    from .report.kernels import examine, to_text

    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)  # not after minutes of compiling
    _write_json(arguments.json, {})
    facts = examine(arguments.arch, arguments.family, arguments.jobs, arguments.out)
    print(to_text(facts))
    _write_json(arguments.json, facts)
    return 1 if facts["problems"] else 0


def _write_json(path: Path | None, value: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(value, indent=2) + "\n")


def _call_factory(name: str) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
    """The model and its arguments from ``package.module:function``, looked up from the working directory too."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"{name!r} is not of the form module:factory, for example my_models:tiny_gpt")
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory: Callable[[], Any] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot import {name!r}: {error}") from error
    made = factory()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ConfigError(f"{name!r} must return (model, args) or (model, args, kwargs), not {type(made).__name__}")
    model, args, *rest = made
    return model, args if isinstance(args, (tuple, list)) else (args,), rest[0] if rest else {}


if __name__ == "__main__":
    sys.exit(main())
