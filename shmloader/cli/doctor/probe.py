"""The doctor's probes: they really load, or really register memory with CUDA, in a process of their own.

``python -m shmloader.cli.doctor.probe load LIMIT_S START_METHOD BATCH_NBYTES`` loads, ``... cuda LIMIT_S``
registers; each prints one JSON object. A process of its own may hang, crash, run out of memory or leave
CUDA's sticky errors behind without harm to the doctor.
"""

from __future__ import annotations

import faulthandler
import json
import statistics
import sys
import time
import warnings
from typing import Any

import torch
from torch.utils.data import Dataset

from shmloader import DataLoader, SpillWarning

BATCHES = 4
"""One more than the smallest loader has slots, so that one slot is used again."""
BATCH_SIZE = 8

TRIED_NBYTES = 64 << 20
"""Bytes of memory that are page-locked and copied."""


class Numbered(Dataset[torch.Tensor]):
    """Sample ``i`` is full of ``i``: uint8."""

    def __init__(self, sample_nbytes: int) -> None:
        self.sample_nbytes = sample_nbytes

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.sample_nbytes,), index, dtype=torch.uint8)


def load(start_method: str, batch_nbytes: int, limit_s: float, num_workers: int = 1) -> dict[str, Any]:
    """Load one epoch with the smallest prefetch factor and check every value.

    Returns:
        ``batches``, ``batch_nbytes``, ``first_batch_s`` (from ``iter()`` on) and ``seconds_s``.

    Raises:
        AssertionError: If a batch is not what it should be.
        SpillWarning: If batches are copied because the host has too little memory for slots.
    """
    warnings.simplefilter("error", SpillWarning)
    dataset = Numbered(-(-batch_nbytes // BATCH_SIZE))
    loader = DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        num_workers=num_workers,
        prefetch_factor=1,
        multiprocessing_context=start_method,
        timeout=limit_s,
    )
    began_s, first_batch_s, batches = time.monotonic(), 0.0, 0
    with loader:
        for batch in loader:
            first_batch_s = first_batch_s or time.monotonic() - began_s
            first = batches * BATCH_SIZE
            expected = torch.arange(first, first + BATCH_SIZE, dtype=torch.uint8)
            if not torch.equal(batch, expected[:, None].expand(-1, dataset.sample_nbytes)):
                raise AssertionError(f"batch {batches} arrived with wrong values")
            batches += 1
    if batches != BATCHES:
        raise AssertionError(f"{batches} batches arrived instead of {BATCHES}")
    return {
        "batches": batches,
        "batch_nbytes": BATCH_SIZE * dataset.sample_nbytes,
        "first_batch_s": round(first_batch_s, 3),
        "seconds_s": round(time.monotonic() - began_s, 3),
    }


def register() -> dict[str, Any]:
    """Page-lock a slot with CUDA as loaders do, copy it to the device, and undo it.

    Returns:
        ``available``; if True also ``device`` (its name), ``registered``, and either ``error``, with
        ``refused`` (whether memory could not be registered), or ``is_pinned``, ``driver`` (the newest CUDA
        that the driver supports: 12080 is 12.8), ``tried_nbytes``, ``register_s`` and ``copy_s``, copying as
        the median of five.
    """
    if not torch.cuda.is_available():
        return {"available": False}
    from shmloader.device.driver import CudaDriver, DriverError, open_driver
    from shmloader.memory import Segment

    answer: dict[str, Any] = {"available": True, "device": torch.cuda.get_device_name(), "registered": False}
    driver = open_driver()
    if not isinstance(driver, CudaDriver):
        return answer | {"error": str(driver), "refused": False}
    segment = Segment()
    extent = segment.map(0, segment.reserve(0, 0, TRIED_NBYTES))
    source = torch.frombuffer(extent.view, dtype=torch.uint8).random_()
    target = torch.empty(TRIED_NBYTES, dtype=torch.uint8, device="cuda")
    began_s = time.perf_counter()
    try:
        driver.register(extent.address, TRIED_NBYTES)
    except DriverError as error:
        return answer | {"error": str(error), "refused": True}
    answer |= {"registered": True, "register_s": time.perf_counter() - began_s}
    answer |= {"driver": driver.version(), "tried_nbytes": TRIED_NBYTES}
    answer["is_pinned"] = source.is_pinned()
    copies_s = []
    for _ in range(5):
        began_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        copies_s.append(time.perf_counter() - began_s)
    answer["copy_s"] = statistics.median(copies_s)
    if not torch.equal(target.cpu(), source):
        answer |= {"registered": False, "error": "bytes arrived changed on the device", "refused": False}
    driver.unregister(extent.address)
    segment.close()
    return answer


def main(what: str, limit: str, start_method: str = "", batch_nbytes: str = "0") -> int:
    """Run a probe and print its outcome; after ``limit`` seconds end by force and say where it hangs."""
    limit_s = float(limit)
    faulthandler.dump_traceback_later(limit_s, exit=True)
    answer = load(start_method, int(batch_nbytes), limit_s) if what == "load" else register()
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
