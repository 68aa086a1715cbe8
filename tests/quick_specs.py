"""Specifications for tests of the benchmarks that are measured in a moment; importable if `benchmarks` is."""

from __future__ import annotations

from benchmarks.records import Spec


def tiny(workload: str, contestant: str) -> Spec:
    """A measurement of a few small batches; its figures mean nothing."""
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
