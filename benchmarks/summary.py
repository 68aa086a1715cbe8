"""From measurements to figures: agreement of checksums, medians, ratios."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.loaders import LOADERS
from benchmarks.records import Measurement
from benchmarks.workloads import Workload


class WrongDataError(Exception):
    """A contestant delivered other data than the others."""


@dataclass(frozen=True)
class Row:
    """The figures of one contestant on one workload: medians over the repeats.

    Ratios are taken within a repeat, between measurements that ran one after the other; the figure is their
    median. On a machine whose speed drifts that is more accurate than a ratio of medians.
    """

    workload: str
    contestant: str
    batches_per_s: float
    samples_per_s: float
    nbytes_per_s: float
    spread: float
    vs_torch: float | None
    of_limit: float | None
    cpu_s: float
    cpu_s_per_batch: float
    foreign_share: float
    descriptors_min: int | None
    descriptors_max: int | None
    reserved_nbytes: int | None
    slot_bound_nbytes: int | None
    checksum: str
    vs_peer: float | None = None
    first_batch_s: float | None = None
    made_s: float | None = None
    wait_share: float | None = None


Runs = dict[str, list[Measurement]]
"""The measurements of one workload by contestant, a list over the repeats."""


def check_agreement(workload: str, runs: Runs) -> str:
    """Compares the batches of all contestants.

    Returns:
        The checksum that all have.

    Raises:
        WrongDataError: A checksum differs, or a timed batch was not the one that was due.
    """
    reference = runs["limit"][0].checksum  # made without any loader
    for contestant, measurements in runs.items():
        for measurement in measurements:
            if measurement.checksum != reference:
                raise WrongDataError(
                    f"{workload}: checksum {measurement.checksum} of {contestant} differs "
                    f"from {reference}, which a plain fetch and collate gives"
                )
            if measurement.wrong_batches:
                raise WrongDataError(
                    f"{workload}: {contestant} delivered {measurement.wrong_batches} batches "
                    f"that were not the ones due at their places"
                )
    return reference


def make_rows(workload: str, runs: Runs) -> list[Row]:
    """Makes a row per contestant, in the order in which they ran."""
    baselines = [name for name in runs if name in LOADERS and LOADERS[name].is_baseline]
    peers = [name for name in runs if name in LOADERS and not LOADERS[name].is_own]
    best, best_peer = _fastest(baselines, runs), _fastest(peers, runs)
    rows = []
    for contestant, measurements in runs.items():
        rates = [m.samples_per_s for m in measurements]
        minima = [m.descriptors_min for m in measurements if m.descriptors_min is not None]
        maxima = [m.descriptors_max for m in measurements if m.descriptors_max is not None]
        reserved = [m.reserved_nbytes for m in measurements if m.reserved_nbytes is not None]
        rows.append(
            Row(
                workload=workload,
                contestant=contestant,
                batches_per_s=median(m.batches_per_s for m in measurements),
                samples_per_s=median(rates),
                nbytes_per_s=median(m.nbytes_per_s for m in measurements),
                spread=(max(rates) - min(rates)) / median(rates),
                vs_torch=_ratio(measurements, runs[best]) if best else None,
                of_limit=_ratio(measurements, runs["limit"]),
                cpu_s=median(m.cpu_s for m in measurements),
                cpu_s_per_batch=median(m.cpu_s / max(1, m.batches) for m in measurements),
                foreign_share=median(m.foreign_share for m in measurements),
                descriptors_min=min(minima, default=None),
                descriptors_max=max(maxima, default=None),
                reserved_nbytes=max(reserved, default=None),
                slot_bound_nbytes=measurements[0].slot_bound_nbytes,
                checksum=measurements[0].checksum,
                vs_peer=_ratio(measurements, runs[best_peer]) if best_peer else None,
                first_batch_s=_median(m.first_batch_s for m in measurements),
                made_s=_median(m.made_s for m in measurements),
                wait_share=_median(m.wait_share for m in measurements),
            )
        )
    return rows


def _fastest(names: list[str], runs: Runs) -> str | None:
    return max(names, key=lambda name: median(m.samples_per_s for m in runs[name]), default=None)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _ratio(measurements: list[Measurement], others: list[Measurement]) -> float:
    return median(
        one.samples_per_s / other.samples_per_s for one, other in zip(measurements, others, strict=True)
    )


def to_json(workload: Workload, rows: list[Row], runs: Runs) -> Any:
    """Gives everything about one workload, except its verdicts, as plain data."""
    return {
        "batch_size": workload.batch_size,
        "batch_nbytes": runs["limit"][0].batch_nbytes,
        "checksum": runs["limit"][0].checksum,
        "contestants": {
            row.contestant: {**asdict(row), "runs": [asdict(m) for m in runs[row.contestant]]} for row in rows
        },
    }
