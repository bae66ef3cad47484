"""``python -m fp4compile kernels``: files, table and facts; with small kernels in the registry's place."""

from __future__ import annotations

import builtins
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_kernels

from fp4compile.__main__ import main
from fp4compile.lowering.kernels.kernel import Kernel

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET compiles nothing")


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets what the registry has."""

    def register(*kernels: Kernel) -> None:
        registry = importlib.import_module("fp4compile.lowering.kernels")
        monkeypatch.setattr(registry, "all_kernels", lambda arch: list(kernels), raising=False)

    return register


def run(*arguments: str | Path) -> int:
    return main(["kernels", *map(str, arguments)])


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def names(directory: Path) -> Sequence[str]:
    return sorted(path.name for path in directory.iterdir())


def test_files_table_and_facts(registered: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registered(tiny_kernels.NEAREST, tiny_kernels.PRODUCT)
    out, facts = tmp_path / "deep" / "out", tmp_path / "facts.json"
    assert run("--arch", "sm_100a", "--out", out, "--json", facts, "--jobs", "1") == 0
    endings = ("cubin", "ptx", "py", "sass", "ttgir")
    assert names(out) == [f"{name}.{end}" for name in ("tiny_e2m1", "tiny_product") for end in endings]
    assert (out / "tiny_e2m1.py").read_text() == tiny_kernels.NEAREST.source
    assert "E2M1" in (out / "tiny_e2m1.sass").read_text()

    found = read(facts)
    assert (found["arch"], found["triton"], found["problems"]) == ("sm_100a", triton.__version__, [])
    nearest, product = found["kernels"]
    assert nearest["constants"] == {"BLOCK": 1024}
    assert nearest["counts"]["E2M1 nearest"] == 8
    assert nearest["main_instructions"] == sum(nearest["main_pipes"].values())
    assert nearest["instructions"] == sum(nearest["opcodes"].values())
    assert product["tensor_memory"] > 0 and product["counts"]["FP4 MMA"] > 0

    words = capsys.readouterr().out.split()
    assert {"tiny_e2m1", "tiny_product", "BLOCK=1024", "SIZE=128", "FP4"} <= set(words)
    assert "warpgroup" not in words  # neither kernel has any: no column


def test_configurations_of_one_name_have_files_each(registered: Any, tmp_path: Path) -> None:
    registered(tiny_kernels.DIVIDE, tiny_kernels.SPILLING)
    assert run("--arch", "sm_90", "--out", tmp_path / "out", "--jobs", "1") == 0
    assert {"tiny_divide.1.sass", "tiny_divide.2.sass"} <= set(names(tmp_path / "out"))


def test_both_names_of_hoppers_target_have_the_same_facts(
    registered: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registered(tiny_kernels.DIVIDE)
    for arch in ("sm_90", "sm_90a"):
        assert run("--arch", arch, "--out", tmp_path / arch, "--json", tmp_path / f"{arch}.json", "--jobs", "1") == 0
    found = read(tmp_path / "sm_90.json")
    assert found == read(tmp_path / "sm_90a.json") and found["arch"] == "sm_90"
    assert capsys.readouterr().out.count("for sm_90,") == 2
    for name in names(tmp_path / "sm_90"):
        assert (tmp_path / "sm_90" / name).read_bytes() == (tmp_path / "sm_90a" / name).read_bytes()


def test_hoppers_registry_has_one_set_of_kernels_under_both_names() -> None:
    all_kernels = importlib.import_module("fp4compile.lowering.kernels").all_kernels
    assert [one.name for one in all_kernels("sm_90a")] == [one.name for one in all_kernels("sm_90")]


def test_a_kernel_that_does_not_compile_does_not_hide_the_others(
    registered: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registered(tiny_kernels.STOCHASTIC, tiny_kernels.DIVIDE)
    facts = tmp_path / "facts.json"
    assert run("--arch", "sm_120a", "--out", tmp_path / "out", "--json", facts, "--jobs", "1") == 1
    refused, compiled = read(facts)["kernels"]
    assert "cvt with .rs" in refused["error"] or "ptxas" in refused["error"]
    assert compiled["error"] is None and compiled["registers"] > 0
    assert "failed: tiny_stochastic" in capsys.readouterr().out
    assert {"tiny_stochastic.py", "tiny_divide.cubin"} <= set(names(tmp_path / "out"))
    assert "tiny_stochastic.cubin" not in names(tmp_path / "out")


def test_processes_find_the_same_as_one(registered: Any, tmp_path: Path) -> None:
    registered(tiny_kernels.DIVIDE, tiny_kernels.NEAREST)
    for jobs in ("1", "2"):
        assert run("--json", tmp_path / jobs, "--jobs", jobs) == 0
    assert read(tmp_path / "1") == read(tmp_path / "2")


def test_a_family_is_chosen_by_a_glob(registered: Any, tmp_path: Path) -> None:
    registered(tiny_kernels.DIVIDE, tiny_kernels.E4M3)
    assert run("--family", "*_e4*", "--json", tmp_path / "facts.json", "--jobs", "1") == 0
    assert [kernel["family"] for kernel in read(tmp_path / "facts.json")["kernels"]] == ["tiny_e4m3"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--arch", "sm_1"], "known: sm_80"), (["--family", "nothing"], "there are: tiny_divide")],
)
def test_a_wrong_choice_names_the_right_ones(
    registered: Any, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    registered(tiny_kernels.DIVIDE)
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err


def test_without_triton_the_error_says_how_to_get_it(
    registered: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registered(tiny_kernels.DIVIDE)
    original = builtins.__import__

    def without_triton(name: str, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "triton":
            raise ImportError("No module named 'triton'")
        return original(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_triton)
    assert run() == 2
    assert "pip install triton" in capsys.readouterr().err
