"""The demo's dataset: the Python sources that come with the running interpreter.

Sources are kept as bytes. A byte-level model needs no text, and a file's declared encoding (PEP
263) may be anything, so nothing is decoded, replaced or dropped.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

MAX_SAMPLE_NBYTES = 256
"""Longer pieces continue in the next sample, which bounds the time of one training step."""

MIN_SAMPLE_NBYTES = 2
"""A next-byte model needs one byte to read and one to predict."""

_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
# A piece begins at a function, method, class or decorator, at most one level deep.
_PIECE_START = re.compile(rb"^(?= {0,4}(?:async def|def|class|@)\b)", re.MULTILINE)

HELD_OUT_SAMPLES = 256
"""At most so many pieces judge the model; it is trained on the others."""

_HELD_OUT_STRIDE = 64


class Batch(NamedTuple):
    """One padded batch."""

    tokens: torch.Tensor  # uint8, (samples, longest sample), filled up with zeros
    lengths: torch.Tensor  # int64, (samples,), each sample's own length in bytes


class SourceDataset(Dataset[torch.Tensor]):
    """Map-style dataset of ragged uint8 token sequences, over any sequence of bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self._pieces[index]), dtype=torch.uint8)


def pad_batch(samples: list[torch.Tensor]) -> Batch:
    """The batch of samples, each padded to the length of the longest."""
    lengths = torch.tensor([len(sample) for sample in samples])
    return Batch(pad_sequence(samples, batch_first=True), lengths)


def library_folders() -> list[Path]:
    """The interpreter's library folders: the standard library, then installed packages."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [Path(sysconfig.get_path(name)) for name in names]
    return list(dict.fromkeys(folders))


def source_files(folders: Sequence[Path]) -> Iterator[Path]:
    """The Python files under some folders: folder by folder, sorted by path, none twice."""
    seen: set[Path] = set()
    for folder in folders:
        for parent, subfolders, names in os.walk(folder):
            # Sorted in place, which also settles the order of the walk. The package folders lie
            # inside the standard library's; they are roots of their own if they are in use.
            subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
            for name in sorted(names):
                path = Path(parent, name)
                if path.suffix == ".py" and path.resolve() not in seen:
                    seen.add(path.resolve())
                    yield path


def split_source(source: bytes) -> Iterator[bytes]:
    """The function-sized pieces of one file, of bounded length; together they are the file."""
    for piece in _PIECE_START.split(source):
        for start in range(0, len(piece), MAX_SAMPLE_NBYTES):
            yield piece[start : start + MAX_SAMPLE_NBYTES]


class Corpus:
    """Variable-length pieces of source text, read file after file: the same pieces on every run.

    At most ``max_nbytes`` are taken from the folders; a first file larger than this is cut.
    """

    def __init__(self, folders: Sequence[Path], max_nbytes: int) -> None:
        self._folders = folders
        self._max_nbytes = max_nbytes
        self.files = self.lines = self.nbytes = 0  # that were read so far
        self.samples = 0  # pieces that were read so far, the held-out ones included
        self.held_out: list[bytes] = []  # pieces left out of `training_pieces` so far

    def __str__(self) -> str:
        return (
            f"{self.files:,} Python files, {self.lines:,} lines, {self.nbytes / 2**20:.1f} MiB: "
            f"{self.samples:,} samples of {MIN_SAMPLE_NBYTES} to {MAX_SAMPLE_NBYTES} bytes"
        )

    def training_pieces(self) -> Iterator[bytes]:
        """The pieces of the files, in order of file and place; to be read once.

        The first of every 64 pieces is held out, until there are `HELD_OUT_SAMPLES`.
        """
        for source in self._sources():
            for piece in split_source(source):
                if len(piece) < MIN_SAMPLE_NBYTES:
                    continue
                is_held_out = not self.samples % _HELD_OUT_STRIDE and len(self.held_out) < HELD_OUT_SAMPLES
                self.samples += 1
                if is_held_out:
                    self.held_out.append(piece)
                else:
                    yield piece

    def _sources(self) -> Iterator[bytes]:
        """The text of files, in order, until the next one would exceed the size."""
        for path in source_files(self._folders):
            try:
                source = path.read_bytes()
            except OSError:
                continue
            if self.nbytes + len(source) > self._max_nbytes:
                if self.files:
                    break
                source = source[: self._max_nbytes]
            self.files += 1
            self.lines += source.count(b"\n")
            self.nbytes += len(source)
            yield source
