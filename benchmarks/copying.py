"""The rate at which memory can be copied here, in as many processes at once as there are workers."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import numpy as np

from benchmarks.machine import CpuMeter
from benchmarks.records import Measurement, Spec

MEMCPY = "memcpy"
"""The contestant's name."""

BLOCK_NBYTES = 64 << 20
"""Larger than a cache, so that memory is what is measured."""


def measure_copying(spec: Spec) -> Measurement:
    """Copies one block to another in each process, over and over; each copied byte counts once."""
    context = multiprocessing.get_context()
    copied = [context.Value("q", 0, lock=False) for _ in range(spec.workers)]
    stop = context.Value("b", 0, lock=False)
    barrier = context.Barrier(spec.workers + 1)
    block_nbytes = BLOCK_NBYTES // 16 if spec.quick else BLOCK_NBYTES
    processes = [
        context.Process(target=copy, args=(block_nbytes, count, stop, barrier), daemon=True)
        for count in copied
    ]
    for process in processes:
        process.start()
    barrier.wait(timeout=60)
    time.sleep(spec.warmup_s)
    meter = CpuMeter()
    start_s, before = time.perf_counter(), sum(count.value for count in copied)
    time.sleep(spec.seconds)
    nbytes = (sum(count.value for count in copied) - before) * block_nbytes
    window_s = time.perf_counter() - start_s
    cpu_s, foreign_s = meter.read()
    stop.value = 1
    for process in processes:
        process.join()
    blocks = nbytes // block_nbytes
    return Measurement(
        contestant=MEMCPY,
        batches=blocks,
        window_s=window_s,
        batches_per_s=blocks / window_s,
        samples_per_s=blocks / window_s,
        nbytes_per_s=nbytes / window_s,
        cpu_s=cpu_s,
        foreign_share=foreign_s / window_s / (os.cpu_count() or 1),
        batch_nbytes=block_nbytes,
        checksum="",
    )


def copy(nbytes: int, count: Any, stop: Any, barrier: Any) -> None:
    """Copies until told to stop."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    np.copyto(target, source)
    barrier.wait()
    while not stop.value:
        np.copyto(target, source)
        count.value += 1
