"""examples/train_gpt.py: its text, its batches, its schedule, and a short run of the whole program."""

import json
import lzma
import socket
import subprocess
import sys
from pathlib import Path

import corpus
import pytest
import torch
from gpt import GPT, GPTConfig

ROOT = Path(__file__).parent.parent
TINY = ["--steps", "3", "--batch", "2", "--seq", "32", "--dim", "64", "--layers", "2", "--heads", "2"]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the corpus opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)


def test_the_default_text_is_the_same_every_time_and_needs_no_network(no_network):
    text = corpus.library_source(1 << 20)
    assert len(text) == 1 << 20
    assert text == corpus.library_source(1 << 20)
    assert b"def " in text


def test_a_longer_default_text_starts_with_the_shorter_one(no_network):
    assert corpus.library_source(1 << 20).startswith(corpus.library_source(1 << 16))


def test_an_xz_file_is_the_text_it_packs(tmp_path):
    text = b"four bits are enough\n" * 100
    plain, packed = tmp_path / "text.txt", tmp_path / "text.txt.xz"
    plain.write_bytes(text)
    packed.write_bytes(lzma.compress(text))
    assert corpus.read_text(plain) == corpus.read_text(packed) == text


def test_training_and_validation_text_do_not_overlap_and_lose_nothing():
    text = bytes(range(256)) * 10
    train, val = corpus.split(text)
    assert bytes(train.tolist()) + bytes(val.tolist()) == text
    assert len(val) == pytest.approx(len(text) * corpus.VALIDATION_PART, abs=1)


def test_batches_repeat_with_the_seed_and_targets_are_one_byte_further_on():
    data = torch.arange(200, dtype=torch.uint8)
    first, again, other = (corpus.batches(data, batch=4, seq=16, seed=seed) for seed in (5, 5, 6))
    tokens, targets = next(first)
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens, next(again)[0])
    assert not torch.equal(tokens, next(other)[0])
    assert not torch.equal(tokens, next(first)[0])


def test_a_text_shorter_than_a_sequence_is_refused():
    with pytest.raises(ValueError, match="16 bytes: too short for sequences of 16"):
        next(corpus.batches(torch.zeros(16, dtype=torch.uint8), batch=1, seq=16, seed=0))


def test_the_model_does_not_look_ahead():
    torch.manual_seed(0)
    model = GPT(GPTConfig(seq=16, dim=32, layers=2, heads=2))
    tokens = torch.randint(256, (1, 16))
    embedded = model.embed(tokens).detach().requires_grad_()
    model.embed.forward = lambda _: embedded  # type: ignore[method-assign]
    ignore_after_8 = torch.full((1, 16), -100)
    ignore_after_8[:, 8] = 1
    model(tokens, ignore_after_8).backward()
    assert embedded.grad is not None
    reached = embedded.grad.abs().sum(-1)[0] > 0
    assert reached.tolist() == [True] * 9 + [False] * 7


def run_example(out: Path, precision: str) -> str:
    command = [sys.executable, ROOT / "examples/train_gpt.py", *TINY, "--precision", precision, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_short_run_of_both_precisions_writes_losses_a_picture_and_a_report(tmp_path):
    printed = run_example(tmp_path / "demo", "both")
    steps = [json.loads(line) for line in (tmp_path / "demo/losses.jsonl").read_text().splitlines()]
    report = (tmp_path / "demo/report.txt").read_text()

    assert [(s["precision"], s["step"]) for s in steps] == [(p, i) for p in ("bf16", "nvfp4") for i in (1, 2, 3)]
    assert all(s.keys() == {"step", "precision", "loss", "lr", "seconds"} for s in steps)
    bf16, nvfp4 = ([s["loss"] for s in steps if s["precision"] == p] for p in ("bf16", "nvfp4"))
    assert bf16 != nvfp4, "nvfp4 computed exactly what bf16 did"
    assert nvfp4 == pytest.approx(bf16, rel=0.05)
    assert (tmp_path / "demo/losses.png").read_bytes().startswith(PNG)
    assert report in printed
    for part in ("blocks.0.mlp.down", "saved for backward", "nvfp4 - bf16"):
        assert part in report
