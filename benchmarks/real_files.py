"""Data sets of real files: the interpreter's Python sources, and files that the benchmark writes.

Written files lie in the folder that the environment names. The process that starts the measurements makes and
removes it, so that the files are written once and not by each measurement.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.made_data import Repeated

FOLDER = "SHMLOADER_BENCH_FOLDER"
"""The environment variable that names the folder for written files."""

MOST_CODE_POINTS = 8192
"""Longer sources are cut, so that one file does not decide a batch's size."""


class Files(Repeated):
    """One sample per file: read, decoded, and made a tensor."""

    def __init__(self, paths: list[str], decode: Callable[[str], torch.Tensor]) -> None:
        super().__init__(len(paths))
        self.paths, self.decode = paths, decode

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.decode(self.paths[index % self.period])


def decode_source(path: str) -> torch.Tensor:
    """Reads a Python source and gives the code points of its text, as int32."""
    text = Path(path).read_bytes().decode("utf-8", errors="replace")[:MOST_CODE_POINTS]
    return torch.frombuffer(bytearray((text or "\n").encode("utf-32-le")), dtype=torch.int32)


def decode_npy(path: str) -> torch.Tensor:
    """Reads an npy file."""
    return torch.from_numpy(np.load(path))


def decode_png(path: str) -> torch.Tensor:
    """Reads a PNG file and gives its pixels, height x width x colours."""
    from PIL import Image

    with Image.open(path) as image:
        return torch.from_numpy(np.array(image))


def make_sources(samples: int) -> Files:
    """Takes the standard library's sources, in order of path; they repeat if there are fewer."""
    library = Path(sysconfig.get_path("stdlib"))
    found = sorted(
        str(path) for path in library.rglob("*.py") if "site-packages" not in path.parts and path.is_file()
    )
    return Files([found[number % len(found)] for number in range(samples)], decode_source)


def make_npy(samples: int) -> Files:
    """Writes arrays of 3x64x64 float32, which are 49 kB each."""
    return Files(_written("npy", samples, np.save), decode_npy)


def make_png(samples: int) -> Files:
    """Writes pictures of 128x128 pixels in three colours."""
    return Files(_written("png", samples, _save_png), decode_png)


def png_missing() -> str | None:
    """Says what has to be installed to read PNG files; None if nothing."""
    if importlib.util.find_spec("PIL") is None:
        return "pillow is not installed: pip install -c constraints.txt pillow"
    return None


def _save_png(path: Path, array: NDArray[Any]) -> None:
    from PIL import Image

    # Smooth, with little noise: pure noise would be stored and not compressed.
    rows = np.linspace(0, 200, 128)[:, None, None]
    pixels = rows + 40 * array[:, :1, :1].transpose(1, 2, 0) + 8 * _noise(array)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def _noise(array: NDArray[Any]) -> NDArray[Any]:
    return np.resize(array, (128, 128, 3))


def _written(suffix: str, count: int, save: Callable[[Path, NDArray[Any]], object]) -> list[str]:
    """Gives the paths of that many files, and writes those that are not there yet."""
    folder = _folder()
    paths = [folder / f"{number:06d}.{suffix}" for number in range(count)]
    draw = np.random.default_rng(0)
    for path in paths:
        array = draw.random(
            (3, 64, 64), np.float32
        )  # drawn even if not needed, so that each file has its own
        if not path.exists():
            half = path.with_suffix(f".half.{suffix}")
            save(half, array)
            half.rename(path)  # so the file is whole, or not there
    return [str(path) for path in paths]


def _folder() -> Path:
    """Gives the folder for written files; if none was named, one of this process's own."""
    if FOLDER not in os.environ:
        own, maker = tempfile.mkdtemp(prefix="shmloader-bench-"), os.getpid()
        os.environ[FOLDER] = own
        # Forked workers inherit the hook.
        atexit.register(lambda: shutil.rmtree(own, ignore_errors=True) if os.getpid() == maker else None)
    return Path(os.environ[FOLDER])
