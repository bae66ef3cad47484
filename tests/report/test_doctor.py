"""``python -m fp4compile doctor`` on GPUs that are not there."""

from __future__ import annotations

import pytest
import torch

from fp4compile import compat
from fp4compile.report import doctor


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data-centre Blackwell and a GPU too old for kernels."""
    capabilities = [(10, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[torch.device(device).index])


def test_each_gpu_is_judged_by_its_capability(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cpu, blackwell, old = doctor.examine()["devices"]
    assert cpu["lowering"] == "compiled"
    assert (blackwell["name"], blackwell["lowering"]) == ("GPU 0, compute capability 10.0", "kernels")
    assert blackwell["native_fp4"]
    assert (old["lowering"], old["native_fp4"]) == ("reference", False)
    assert "sm_75" in old["reason"]


def test_a_gpu_of_another_maker_has_no_compute_capability(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert [gpu["lowering"] for gpu in doctor.examine()["devices"][1:]] == ["reference", "reference"]
    assert doctor.examine()["devices"][1]["name"] == "GPU 0"


def test_the_self_test_can_be_asked_twice() -> None:
    assert compat.self_test() == compat.self_test() == []
