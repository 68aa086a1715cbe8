"""Samples of tar archives beside the same files one by one, in random order: as bytes, or JPEGs decoded.

``python -m benchmarks.tar_archives`` writes both, and reads them in turn, with torch's loader and this one,
in workers that stay, and by WebDataset if it is installed. It prints medians, of the ratios within each turn,
too, and of those by processor time. Files are in the page cache. ``--memory`` prints the memory of a process
and its worker that read archives of three sizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import multiprocessing
import statistics
import tarfile
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import Dataset

from benchmarks.options import whole_number
from benchmarks.tables import render_table
from shmloader import DataLoader, TarDataset
from shmloader.tar import DECODERS

_ARCHIVES = 4
_BATCH = 32
_MEASURED = 60  # batches after which memory is measured


class Files(Dataset[dict[str, Any]]):
    """Samples that are a file each."""

    def __init__(self, paths: list[Path], *, decode: bool) -> None:
        self.paths = paths
        self._decode = DECODERS["jpg"] if decode else as_they_are

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self.paths[index]
        return {"__key__": path.stem, "jpg": self._decode(path.read_bytes())}


def as_they_are(samples: Any) -> Any:
    return samples


def jpeg(chance: np.random.Generator, nbytes: int) -> bytes:
    """A JPEG of about so many bytes: smooth noise."""
    from PIL import Image

    side, file = int((nbytes * 3) ** 0.5), io.BytesIO()
    noise = Image.fromarray(chance.integers(0, 256, (side // 4, side // 4, 3), np.uint8))
    noise.resize((side, side), Image.Resampling.BICUBIC).save(file, "jpeg", quality=90)
    return file.getvalue()


def write(folder: Path, samples: int, mean_nbytes: int, *, decode: bool = False) -> tuple[Files, TarDataset]:
    chance = np.random.default_rng(0)
    paths = [folder / f"{number:06}.jpg" for number in range(samples)]
    for part in range(_ARCHIVES):
        with tarfile.open(folder / f"{part}.tar", "w") as archive:
            for path in paths[part * samples // _ARCHIVES : (part + 1) * samples // _ARCHIVES]:
                nbytes = int(chance.integers(mean_nbytes // 2, mean_nbytes * 3 // 2))
                data = jpeg(chance, nbytes) if decode else chance.bytes(nbytes)
                path.write_bytes(data)
                info = tarfile.TarInfo(path.name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    began_s = time.perf_counter()
    tars = [folder / f"{part}.tar" for part in range(_ARCHIVES)]
    archives = TarDataset(tars, decoders=None if decode else {})
    print(f"The index of {samples:,} samples was made in {time.perf_counter() - began_s:.2f} s")
    return Files(paths, decode=decode), archives


def web_loader(archives: TarDataset, workers: int, *, decode: bool) -> Any:
    """WebDataset as its page advises: shards shuffled and divided among workers, and a buffer of 1,000."""
    import webdataset

    stream = webdataset.WebDataset([str(path) for path in archives.paths], shardshuffle=_ARCHIVES)
    stream = stream.shuffle(1000)
    if decode:
        stream = stream.decode("rgb8")
    stream = stream.batched(_BATCH, collation_fn=None)
    return torch.utils.data.DataLoader(
        stream,
        batch_size=None,
        num_workers=workers,
        collate_fn=as_they_are,
        persistent_workers=workers > 0,
    )


def processor_s() -> float:
    """Processor time of this process and its workers so far."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in family)


def samples_per_s(loader: Any) -> tuple[float, float]:
    """Samples a second, and for each second of a processor."""
    began_s, processor_began_s = time.perf_counter(), processor_s()
    sizes = [len(sample["jpg"]) for batch in loader for sample in batch]
    took_s, processor_took_s = time.perf_counter() - began_s, processor_s() - processor_began_s
    assert all(sizes)
    return len(sizes) / took_s, len(sizes) / processor_took_s


def memory_nbytes(paths: list[Path]) -> list[int]:
    """Private bytes that a process has more with a loader of archives; its worker's, private and shared."""
    before_nbytes = psutil.Process().memory_full_info().uss
    archives = TarDataset(paths, decoders={})
    with DataLoader(archives, _BATCH, shuffle=True, num_workers=1, collate_fn=as_they_are) as loader:
        batches = iter(loader)
        assert sum(map(len, itertools.islice(batches, _MEASURED)))
        main, (worker,) = psutil.Process().memory_full_info(), psutil.Process().children()
        of_worker = worker.memory_full_info()
        return [main.uss - before_nbytes, of_worker.uss, of_worker.rss - of_worker.uss]


def print_memory(folder: Path, samples: int, nbytes: int) -> None:
    """Memory with archives of ten times as many samples, or ten times as many bytes in each."""
    head = "samples|bytes of each|archives, MiB|process, MiB more|worker, MiB|worker, shared MiB"
    table = [head.split("|")]
    for place, (count, size) in enumerate(
        ((samples, nbytes), (10 * samples, nbytes), (samples, 10 * nbytes))
    ):
        (folder / str(place)).mkdir()
        _, archives = write(folder / str(place), count, size)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found = process.submit(memory_nbytes, archives.paths).result()
        whole = sum(path.stat().st_size for path in archives.paths)
        table.append([f"{count:,}", f"{size:,}", *(f"{each / 2**20:,.1f}" for each in (whole, *found))])
    print(render_table(table, texts=0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=whole_number(100), default=10_000, help="(%(default)s)")
    parser.add_argument("--nbytes", type=whole_number(2), default=40_000, help="of a member (%(default)s)")
    parser.add_argument("--decode", action="store_true", help="JPEGs to arrays, not bytes")
    parser.add_argument("--memory", action="store_true", help="memory by the archives' size, not speed")
    parser.add_argument("--workers", type=whole_number(0), default=2, help="(%(default)s)")
    parser.add_argument("--turns", type=whole_number(1), default=5, help="(%(default)s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.memory:
            print_memory(Path(folder), given.samples, given.nbytes)
            return
        files, archives = write(Path(folder), given.samples, given.nbytes, decode=given.decode)
        common: dict[str, Any] = {
            "batch_size": _BATCH,
            "shuffle": True,
            "num_workers": given.workers,
            "collate_fn": as_they_are,
            "persistent_workers": given.workers > 0,
        }
        loaders: dict[str, Any] = {
            "torch's loader, files": torch.utils.data.DataLoader(files, **common),
            "torch's loader, archives": torch.utils.data.DataLoader(archives, **common),
            "shmloader, files": DataLoader(files, **common),
            "shmloader, archives": DataLoader(archives, **common),
        }
        if importlib.util.find_spec("webdataset") is not None:
            loaders["WebDataset"] = web_loader(archives, given.workers, decode=given.decode)
        for loader in loaders.values():
            samples_per_s(loader)  # its workers start
        turns = [
            {name: samples_per_s(loader) for name, loader in loaders.items()} for _ in range(given.turns)
        ]
    base = next(iter(loaders))
    table = [["way", "samples/s", "beside torch", "by processor time"]]
    for name in loaders:
        rate = statistics.median(turn[name][0] for turn in turns)
        ratios = [statistics.median(turn[name][of] / turn[base][of] for turn in turns) for of in (0, 1)]
        table.append([name, f"{rate:,.0f}", *(f"{ratio:.2f}" for ratio in ratios)])
    print(render_table(table, texts=1))


if __name__ == "__main__":
    main()
