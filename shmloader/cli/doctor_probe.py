"""What the doctor tries out in a process of its own: really loading, and really registering with CUDA.

``python -m shmloader.cli.doctor_probe load fork 60`` loads with one worker, ``... load-with-two fork 60``
with two, ``... cuda - 60`` registers; each prints one JSON object. A process of its own may hang, crash, run
out of memory or leave CUDA's sticky errors behind without harm to the doctor.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from typing import Any

import torch
from torch.utils.data import Dataset

from shmloader import DataLoader
from shmloader.host.limits import open_files
from shmloader.shared_memory import PAGE_NBYTES, MemfdSegment

BATCHES = 8
WORKERS = {"load": 1, "load-with-two": 2}
_BATCH_SIZE = 8
_SAMPLE_ITEMS = 16384  # of int64: a batch is 1 MiB


class Numbered(Dataset[torch.Tensor]):
    """Sample ``i`` is full of ``i``: int64, 128 KiB."""

    def __len__(self) -> int:
        return BATCHES * _BATCH_SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((_SAMPLE_ITEMS,), index)


def load(start_method: str, limit_s: float, num_workers: int) -> dict[str, Any]:
    """Load one epoch and look at every value.

    Args:
        start_method: How the workers are started.
        limit_s: Most seconds to wait for a batch.
        num_workers: How many there are.

    Returns:
        ``batches``, ``first_batch_s`` (from ``iter()`` on), ``seconds_s`` and ``descriptors``: how many more
        are open in the main process while it loads.

    Raises:
        AssertionError: If a batch is not what it should be.
    """
    before, during = open_files(), None
    loader = DataLoader(
        Numbered(),
        batch_size=_BATCH_SIZE,
        num_workers=num_workers,
        multiprocessing_context=start_method,
        timeout=limit_s,
    )
    began_s, first_batch_s, batches = time.monotonic(), 0.0, 0
    with loader:
        for batch in loader:
            first_batch_s = first_batch_s or time.monotonic() - began_s
            expected = torch.arange(batches * _BATCH_SIZE, (batches + 1) * _BATCH_SIZE)
            if not torch.equal(batch, expected[:, None].expand(-1, _SAMPLE_ITEMS)):
                raise AssertionError(f"batch {batches} arrived with wrong values")
            batches += 1
            during = during or open_files()
    if batches != BATCHES:
        raise AssertionError(f"{batches} batches arrived instead of {BATCHES}")
    known = before and during and before.used is not None and during.used is not None
    return {
        "batches": batches,
        "first_batch_s": round(first_batch_s, 3),
        "seconds_s": round(time.monotonic() - began_s, 3),
        "descriptors": during.used - before.used if known else None,  # type: ignore[union-attr, operator]
    }


def register() -> dict[str, Any]:
    """Page-lock a few pages of a segment with CUDA and undo it.

    Returns:
        ``available``; where True also ``device`` (its name), ``registered`` and ``is_pinned``.
    """
    if not torch.cuda.is_available():
        return {"available": False}
    segment = MemfdSegment()
    nbytes = segment.reserve(0, 0, 4 * PAGE_NBYTES)
    extent = segment.map(0, nbytes)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = cudart.cudaHostRegister(extent.address, nbytes, 0)
    answer = {"available": True, "device": torch.cuda.get_device_name(), "registered": int(code) == 0}
    if answer["registered"]:
        answer["is_pinned"] = torch.frombuffer(extent.view, dtype=torch.uint8).is_pinned()
        cudart.cudaHostUnregister(extent.address)
    else:
        answer["error"] = str(cudart.cudaGetErrorString(code))
    segment.discard(0, nbytes)
    segment.close()
    return answer


def main(what: str, start_method: str, limit_s: float) -> int:
    """Try it, print the outcome, and end by force, saying where it hangs, after ``limit_s`` seconds."""
    faulthandler.dump_traceback_later(limit_s, exit=True)
    num_workers = WORKERS.get(what)
    answer = load(start_method, limit_s, num_workers) if num_workers else register()
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
