"""The doctor's probes: they really load, or really register memory with CUDA, in a process of their own.

``python -m shmloader.cli.doctor.probe load LIMIT_S START_METHOD BATCH_NBYTES`` loads, ``... cuda LIMIT_S``
registers; each prints one JSON object. A process of its own may hang, crash, run out of memory or leave
CUDA's sticky errors behind without harm to the doctor.
"""

from __future__ import annotations

import faulthandler
import json
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


class Numbered(Dataset[torch.Tensor]):
    """Sample ``i`` is full of ``i``: uint8."""

    def __init__(self, sample_nbytes: int) -> None:
        self.sample_nbytes = sample_nbytes

    def __len__(self) -> int:
        return BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.sample_nbytes,), index, dtype=torch.uint8)


def load(start_method: str, batch_nbytes: int, limit_s: float, num_workers: int = 1) -> dict[str, Any]:
    """Load one epoch with the smallest prefetch factor and look at every value.

    Args:
        start_method: How the workers are started.
        batch_nbytes: Bytes of a batch, rounded up to a whole number for each of its samples.
        limit_s: Most seconds to wait for a batch.
        num_workers: How many workers there are.

    Returns:
        ``batches``, ``batch_nbytes``, ``first_batch_s`` (from ``iter()`` on) and ``seconds_s``.

    Raises:
        AssertionError: If a batch is not what it should be.
        SpillWarning: If batches are copied because the host does not give slots what they need.
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
    """Page-lock a few pages of a segment with CUDA and undo it.

    Returns:
        ``available``; where True also ``device`` (its name), ``registered`` and ``is_pinned``.
    """
    if not torch.cuda.is_available():
        return {"available": False}
    from shmloader.shared_memory import PAGE_NBYTES, MemfdSegment

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


def main(what: str, limit: str, start_method: str = "", batch_nbytes: str = "0") -> int:
    """Run a probe and print its outcome; after ``limit`` seconds end by force and say where it hangs."""
    limit_s = float(limit)
    faulthandler.dump_traceback_later(limit_s, exit=True)
    answer = load(start_method, int(batch_nbytes), limit_s) if what == "load" else register()
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
