"""Specifications that tests of the benchmarks measure in a moment. Importable when `benchmarks` is."""

from __future__ import annotations

from benchmarks.records import Spec


def tiny(workload: str, contestant: str) -> Spec:
    """A measurement of a few small batches, whose figures mean nothing."""
    return Spec(
        workload=workload,
        contestant=contestant,
        workers=2,
        prefetch_factor=2,
        seconds=0.05,
        warmup_s=0.02,
        min_batches=3,
        descriptor_batches=2,
        timeout_s=100,
        quick=True,
    )
