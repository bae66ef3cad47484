"""Text as bytes, cut into training batches. No network: the default text is Python's own library source."""

import lzma
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]

LIBRARY_BYTES = 8 << 20
VALIDATION_PART = 0.05


def library_source(limit: int = LIBRARY_BYTES) -> bytes:
    """The first `limit` bytes of the running Python's library source, files in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    not_library = {"site-packages", "dist-packages", "test"}
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    text = bytearray()
    for name in sorted(file.as_posix() for file in files if not_library.isdisjoint(file.parts)):
        text += (root / name).read_bytes()
        if len(text) >= limit:
            break
    return bytes(text[:limit])


def read_text(path: Path | None) -> bytes:
    """A text file, unpacked if its name ends in .xz; without a path the library source."""
    if path is None:
        return library_source()
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def split(text: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and validation part, each uint8 [bytes]; the validation part is the end of the text."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = int(len(data) * (1 - VALIDATION_PART))
    return data[:cut], data[cut:]


def batches(data: torch.Tensor, batch: int, seq: int, seed: int) -> Batches:
    """Endless (tokens, targets), each int64 [batch, seq]: random windows; targets are one byte further on."""
    if len(data) <= seq:
        raise ValueError(f"a part of the text has {len(data)} bytes: too short for sequences of {seq}")
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(len(data) - seq, (batch, 1), generator=generator)
        window = data[start + torch.arange(seq + 1)].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
