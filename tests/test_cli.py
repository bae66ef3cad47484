"""The command line: explain and doctor."""

import json
import sys

import pytest

from fp4compile.__main__ import main

MODELS = """
import torch
from torch import nn

def tiny():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), (torch.ones(4, 32),)

def with_keywords():
    return nn.Linear(32, 32), (), {"input": torch.ones(4, 32)}

def wrong():
    return nn.Linear(32, 32)
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A directory with a module of factories, as the working directory of the command."""
    (tmp_path / "cli_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("cli_models", None)


def test_explain_prints_the_table_and_writes_json_and_graphs(models, capsys):
    assert main(["explain", "cli_models:tiny", "--json", "report.json", "--graphs", "graphs"]) == 0
    printed = capsys.readouterr().out
    assert "4 x 32 x 64" in printed
    assert "2 of 2 weight matmuls rewritten" in printed
    report = json.loads((models / "report.json").read_text())
    assert [site["fqn"] for site in report["sites"]] == ["0", "2"]
    assert "fp4.quantize" in (models / "graphs" / "joint_after.py").read_text()
    assert "fp4.quantize" not in (models / "graphs" / "joint_before.py").read_text()


def test_explain_takes_recipe_policy_and_keyword_arguments(models, capsys):
    policy = '{"overrides": {"*": {"forward": "bf16"}}}'
    assert main(["explain", "cli_models:with_keywords", "--recipe", "mxfp4", "--policy", policy]) == 0
    assert "mxfp4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("cli_models", "not of the form module:factory"),
        ("cli_models:missing", "cannot import"),
        ("no_such_module:tiny", "cannot import"),
        ("cli_models:wrong", "must return (model, args)"),
    ],
)
def test_a_wrong_factory_is_named(models, capsys, factory, words):
    assert main(["explain", factory]) == 2
    assert words in capsys.readouterr().err


def test_doctor_names_versions_devices_and_reasons(tmp_path, capsys):
    code = main(["doctor", "--json", str(tmp_path / "doctor.json")])
    facts = json.loads((tmp_path / "doctor.json").read_text())
    printed = capsys.readouterr().out
    assert code == 0, facts["problems"]
    assert facts["problems"] == []
    assert facts["devices"][0]["device"] == "cpu"
    assert facts["devices"][0]["lowering"] == "compiled"
    assert facts["torch"] in printed
    assert facts["devices"][0]["reason"] in printed
