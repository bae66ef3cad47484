"""What benchmarks/gpu_check.py does with its parts; their own work needs a GPU."""

import importlib.metadata
import json
import os
import subprocess
import sys

import gpu_check
import pytest
import torch
from gpu_check import Part


def says(text, code=0):
    return ("python", "-c", f"print({text!r}); raise SystemExit({code})")


def test_a_part_that_fails_keeps_none_from_running(tmp_path):
    parts = [
        Part("first", says("nothing to see", 3)),
        Part("second", says("12 launches"), (r"\d+ launches",)),
        Part("third", says("done"), (r"\d+ launches",)),
    ]
    first, second, third = gpu_check.check(parts, tmp_path)
    assert not first.ok and first.result == "exit code 3"
    assert second.ok and second.result == "12 launches"
    assert not third.ok and "does not say" in third.result
    record = json.loads((tmp_path / "summary.json").read_text())
    assert not record["ok"] and [part["ok"] for part in record["parts"]] == [False, True, False]
    assert record["environment"]["versions"]["torch"]
    assert "12 launches" in (tmp_path / "second.log").read_text()


def test_all_is_well_where_every_part_is(tmp_path):
    (outcome,) = gpu_check.check([Part("one", says("12 launches"), (r"\d+ launches",))], tmp_path)
    assert outcome.ok and json.loads((tmp_path / "summary.json").read_text())["ok"]


def test_a_part_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "LIMIT", 0.2)
    (outcome,) = gpu_check.check([Part("one", ("python", "-c", "import time; time.sleep(60)"))], tmp_path)
    assert not outcome.ok and "not done within" in outcome.result and outcome.seconds < 30


def test_tests_that_were_all_skipped_are_a_failure(tmp_path):
    (part,) = (part for part in gpu_check.PARTS if part.name == "tests")
    skipped = Part("tests", says("===== 102 skipped, 2392 deselected in 61.20s ====="), part.says)
    passed = Part("tests", says("===== 101 passed, 1 skipped in 61.20s (0:01:01) ====="), part.says)
    assert [outcome.ok for outcome in gpu_check.check([skipped, passed], tmp_path)] == [False, True]


def sanitizer(name):
    return next(part for part in gpu_check.PARTS if part.name == name)


def test_a_sanitizer_that_is_not_there_is_a_failure_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (outcome,) = gpu_check.check([sanitizer("memcheck")], tmp_path)
    assert not outcome.ok and "not on PATH" in outcome.result and "CUDA toolkit" in outcome.result


@pytest.mark.parametrize(
    ("name", "last", "ok"),
    [
        ("memcheck", "========= ERROR SUMMARY: 0 errors", True),
        ("memcheck", "========= ERROR SUMMARY: 10 errors", False),
        ("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", True),
        ("racecheck", "========= RACECHECK SUMMARY: 10 hazards displayed (10 errors, 0 warnings)", False),
    ],
)
def test_a_sanitizer_runs_every_kernel_and_what_it_found_counts(tmp_path, monkeypatch, name, last, ok):
    """A script in its place notes its arguments."""
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho "120 launches"\necho "{last}"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (outcome,) = gpu_check.check([sanitizer(name)], tmp_path)
    assert outcome.ok == ok
    words = (tmp_path / "arguments").read_text().split()
    assert words[-5:] == ["--tool", name, sys.executable, "benchmarks/kernels_gpu.py", "--sanitize"]


def step(folder, **changes):
    losses = [9.0, 8.9, 8.8]
    variants = {
        "bf16": {"losses": losses, "held bytes": 100},
        "nvfp4": {"losses": losses, "held bytes": 80},
        "eager": {"losses": losses[:2], "held bytes": 200},
    }
    for name, change in changes.items():
        variants[name] = variants[name] | change
    record = {"variants": variants, "left out": {}}
    path = folder / f"train_step_{gpu_check.SETUP}.json"
    path.write_text(json.dumps({"setups": {gpu_check.SETUP: record}}))
    return path


def test_a_step_agrees_with_the_eager_recipe(tmp_path):
    step(tmp_path)
    assert not gpu_check.disagreements(tmp_path)
    step(tmp_path, nvfp4={"losses": [9.0, 8.905, 8.0]})  # where the eager recipe has no step, none is compared
    assert not gpu_check.disagreements(tmp_path)
    for losses in ([9.1, 8.9, 8.8], [9.0, 8.88, 8.8], [float("nan"), 8.9, 8.8]):
        step(tmp_path, nvfp4={"losses": losses})
        assert len(gpu_check.disagreements(tmp_path)) == 1
    step(tmp_path, nvfp4={"held bytes": 100})
    assert "bytes" in gpu_check.disagreements(tmp_path)[0]


def test_a_variant_that_did_not_run_is_a_disagreement(tmp_path):
    path = step(tmp_path)
    record = json.loads(path.read_text())
    del record["setups"][gpu_check.SETUP]["variants"]["eager"]
    record["setups"][gpu_check.SETUP]["left out"] = {"eager": "no time left"}
    path.write_text(json.dumps(record))
    assert gpu_check.disagreements(tmp_path) == ["eager did not run: no time left"]


def test_without_a_device_nothing_passes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        gpu_check.main()


def test_a_part_that_failed_is_the_exit_code(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu_check, "environment", dict)
    for code in (0, 1):
        monkeypatch.setattr(gpu_check, "PARTS", (Part("one", says("", code)), Part("other", says("", 1))))
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--parts", "one", "--out", str(tmp_path)])
        if code:
            with pytest.raises(SystemExit, match="1"):
                gpu_check.main()
        else:
            gpu_check.main()
    assert "one: exit code 1" in capsys.readouterr().out


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_where_the_package_is_not_installed_the_backend_is_found_all_the_same(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: ())
    program = (
        "import importlib.metadata as m; print(m.version('fp4compile'), *m.entry_points(group='torch_dynamo_backends'))"
    )
    with gpu_check.entry_point() as paths:
        variables = {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-S", "-c", program]  # -S: without what is installed
        said = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    assert "nvfp4" in said and "fp4compile.backend:nvfp4" in said
