"""The heap of a worker process stays warm: a large batch costs no page faults after the first ones."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import torch
from robustness.processes import LONG
from torch.utils.data import Dataset, Subset
from warm_python import warm_python

import shmloader
from shmloader.worker import heap as heap_module
from shmloader.worker.heap import WarmHeap, warm_heap

SAMPLE_NBYTES = 1 << 20
PAGES_OF_A_BATCH = 40 * SAMPLE_NBYTES // resource.getpagesize()

_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
IN_HUGE_PAGES = _HUGE.exists() and "[always]" in _HUGE.read_text()
"""Whether memory that nobody has asked huge pages for lies in them all the same."""

pytestmark = pytest.mark.skipif(
    not (sys.platform == "linux" and "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")),
    reason="needs glibc",
)


class Faults(Dataset[Any]):
    """Samples of 1 MiB, with the page faults that their process has had so far in front."""

    def __len__(self) -> int:
        return 40 * 24

    def __getitem__(self, index: int) -> Any:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt, torch.full((SAMPLE_NBYTES // 4,), index)


def join_twice(samples: list[Any]) -> tuple[int, torch.Tensor]:
    """Makes a large result that is in no batch, so that no slot could hold it."""
    faults, rows = zip(*samples, strict=True)
    return faults[0], torch.stack(rows).to(torch.int32)[:, :8].clone()


def faults_of_a_batch(**options: Any) -> float:
    """Page faults for one of the last batches; the median, as pages of the parent are copied now and then."""
    loader = shmloader.DataLoader(Faults(), batch_size=40, num_workers=1, collate_fn=join_twice, **options)
    counts = [count for count, _ in loader]
    return median(after - before for before, after in pairwise(counts[12:]))


def test_a_workers_large_results_cost_no_page_faults() -> None:
    """A forked worker has its parent's heap: the parent here is a program, without what other tests left."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    program = subprocess.run(
        [*warm_python(), __file__], env=environment, check=True, capture_output=True, text=True
    )
    assert float(program.stdout) < PAGES_OF_A_BATCH / 20


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_nor_do_they_in_workers_that_are_not_forked(method: str, warm_helpers: None) -> None:
    assert faults_of_a_batch(multiprocessing_context=method) < PAGES_OF_A_BATCH / 20


@pytest.mark.in_ci(1)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SHMLOADER_WARM_MEMORY", "0"),
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072"),
    ],
)
def test_the_environment_switches_it_off(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert warm_heap(2) is None
    if (LONG or name == "SHMLOADER_WARM_MEMORY") and not IN_HUGE_PAGES:
        assert faults_of_a_batch() > PAGES_OF_A_BATCH


def set_small_heap(worker_id: int) -> None:
    ctypes.CDLL(None).mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD
    ctypes.CDLL(None).mallopt(-4, 65536)  # M_MMAP_MAX


@pytest.mark.in_ci
@pytest.mark.skipif(IN_HUGE_PAGES, reason="a fault brings 512 pages here")
def test_a_worker_init_fn_has_the_last_word() -> None:
    assert faults_of_a_batch(worker_init_fn=set_small_heap) > PAGES_OF_A_BATCH


def test_the_main_process_and_worker_threads_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(heap_module, "warm_heap", called.append)
    monkeypatch.setattr("shmloader.workers.launch.warm_heap", called.append)
    some = Subset(Faults(), range(80))
    list(shmloader.DataLoader(some, batch_size=40, num_workers=1, worker_type="thread"))
    list(shmloader.DataLoader(some, batch_size=40))
    assert called == []


class Recorded:
    """glibc's own functions, and what they were called with."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.trims = 0

    def mallopt(self, name: int, value: int) -> int:
        self.kept += [value] * (name == -1)
        return 1

    def malloc_trim(self, spare: int) -> int:
        self.trims += 1
        return 1


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [([1], [256]), ([63, 64], [256]), ([100, 50, 120], [256, 400, 480]), ([500, 600, 700], [256, 1024])],
)
def test_a_heap_keeps_four_of_the_largest_batches_within_bounds(sizes: list[int], kept: list[int]) -> None:
    glibc = Recorded()
    heap = WarmHeap(glibc, 2)
    for size in sizes:
        heap.note_batch(size << 20)
    assert [nbytes >> 20 for nbytes in glibc.kept] == kept


@pytest.mark.parametrize(("available", "trims"), [(511 << 20, 1), (512 << 20, 0)])
def test_a_heap_is_trimmed_if_the_host_is_short(
    available: int, trims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    glibc = Recorded()
    heap = WarmHeap(glibc, 2)
    room = heap_module.memory_headroom()._replace(available_nbytes=available)
    monkeypatch.setattr(heap_module, "memory_headroom", lambda: room)
    heap.trim_if_short()
    assert glibc.trims == trims


class Settled(Dataset[Any]):
    """One kept object above a large freed one: its process gives the memory back only when it is trimmed."""

    kept: Any = None

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        large = torch.ones(160 << 20, dtype=torch.uint8)
        self.kept = torch.ones(1 << 20, dtype=torch.uint8)
        del large
        return psutil.Process().memory_info().rss


def test_free_memory_goes_back_before_an_epoch_on_a_host_that_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = heap_module.memory_headroom()._replace(available_nbytes=0)
    monkeypatch.setattr(heap_module, "memory_headroom", lambda: room)
    trimmed: list[int] = []
    trim: Callable[[WarmHeap], None] = WarmHeap.trim_if_short

    def measured(self: WarmHeap) -> None:
        before = psutil.Process().memory_info().rss
        trim(self)
        if before - psutil.Process().memory_info().rss < 100 << 20:
            os._exit(3)  # the loader reports it

    monkeypatch.setattr(WarmHeap, "trim_if_short", measured)
    loader = shmloader.DataLoader(
        Settled(), num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    for _ in range(2):
        trimmed += [int(rss) for rss in loader]
    assert len(trimmed) == 4


ASKS = "from shmloader.worker.heap import warm_heap; print(warm_heap(1) is None)"


@pytest.mark.in_ci
def test_nothing_happens_with_another_allocator(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler to build an allocator")
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(
        "#include <stddef.h>\nextern void *__libc_malloc(size_t);\n"
        "void *malloc(size_t nbytes) { return __libc_malloc(nbytes); }\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    for preloaded, expected in (("", "False"), (str(library), "True")):
        environment = os.environ | {"LD_PRELOAD": preloaded}
        made = subprocess.run(
            [sys.executable, "-c", ASKS], env=environment, check=True, capture_output=True, text=True
        )
        assert made.stdout.strip() == expected


if __name__ == "__main__":
    print(faults_of_a_batch(multiprocessing_context="fork"))
