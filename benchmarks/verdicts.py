"""Targets of workloads, and whether they were reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.loaders import LOADERS
from benchmarks.records import Measurement
from benchmarks.summary import Row, Runs
from benchmarks.tables import render_table
from benchmarks.workloads import STARTUP, Targets, Workload


@dataclass(frozen=True)
class Verdict:
    """One target, and whether it was met."""

    workload: str
    target: str
    figure: str
    ok: bool


def judge(workload: Workload, rows: list[Row], runs: Runs) -> list[Verdict]:
    """Compares a workload's targets with the row of the loader that they are for."""
    verdicts: list[Verdict] = []
    for row in rows:
        if _is_subject(workload.targets, row):
            verdicts += _judge_rates(workload.targets, row, rows)
            verdicts += _judge_costs(workload, row, rows)
            verdicts += _judge_memory(workload.targets, row, runs[row.contestant])
    return verdicts


def _judge_rates(targets: Targets, row: Row, rows: list[Row]) -> Iterable[Verdict]:
    """The loader's rate, against torch's, the limit and others."""
    if targets.vs_torch is not None and row.vs_torch is not None:
        yield Verdict(
            row.workload,
            f"at least {targets.vs_torch:g} times torch",
            f"{row.vs_torch:.1f} times",
            row.vs_torch >= targets.vs_torch,
        )
    if targets.of_limit is not None and row.of_limit is not None:
        yield Verdict(
            row.workload,
            f"at least {targets.of_limit:.0%} of the limit",
            f"{row.of_limit:.1%}",
            row.of_limit >= targets.of_limit,
        )
    if targets.batches_per_s is not None:
        yield Verdict(
            row.workload,
            f"at least {targets.batches_per_s:,.0f} batches/s",
            f"{row.batches_per_s:,.0f}",
            row.batches_per_s >= targets.batches_per_s,
        )
    if targets.vs_best_peer is not None and row.vs_peer is not None and _has_peers(rows):
        yield Verdict(
            row.workload,
            f"at least {targets.vs_best_peer:g} times the best peer",
            f"{row.vs_peer:.2f} times",
            row.vs_peer >= targets.vs_best_peer,
        )


def _judge_costs(workload: Workload, row: Row, rows: list[Row]) -> Iterable[Verdict]:
    """The loader's costs: processor time, waiting, and the time before the first batch."""
    targets = workload.targets
    if targets.most_wait_share is not None and row.wait_share is not None:
        yield Verdict(
            row.workload,
            f"waits under {targets.most_wait_share:.0%} of the time",
            f"{row.wait_share:.2%}",
            row.wait_share < targets.most_wait_share,
        )
    others = [one for one in rows if one.contestant in LOADERS and not LOADERS[one.contestant].is_own]
    if workload.kind == STARTUP:
        torchs = [one.first_batch_s for one in others if LOADERS[one.contestant].is_baseline]
        least_s = min((seconds for seconds in torchs if seconds is not None), default=None)
        if least_s is not None and row.first_batch_s is not None:
            figure = f"{row.first_batch_s:.2f} s, torch {least_s:.2f} s"
            yield Verdict(row.workload, "the first batch before torch's", figure, row.first_batch_s < least_s)
    elif row.cpu_s_per_batch and _has_peers(rows):
        least = min(others, key=lambda one: one.cpu_s_per_batch)
        own_us, least_us = row.cpu_s_per_batch * 1e6, least.cpu_s_per_batch * 1e6
        yield Verdict(
            row.workload,
            "processor time below all others'",
            f"{own_us:,.0f} us a batch, {least.contestant} {least_us:,.0f}",
            own_us < least_us,
        )


def _judge_memory(targets: Targets, row: Row, measurements: list[Measurement]) -> Iterable[Verdict]:
    if targets.constant_descriptors:
        # Within each epoch: the number may differ from one process to the next.
        changes = max((m.descriptors_max or 0) - (m.descriptors_min or 0) for m in measurements)
        yield Verdict(row.workload, "a constant number of descriptors", f"changes by {changes}", changes == 0)
    # With dynamic dispatch there may be more slots, within the loader's budget.
    bounded = targets.loader is None
    if bounded and row.reserved_nbytes is not None and row.slot_bound_nbytes is not None:
        yield Verdict(
            row.workload,
            "slots at most (prefetch_factor x workers + 2) x largest batch",
            f"{row.reserved_nbytes:,} of {row.slot_bound_nbytes:,} bytes",
            row.reserved_nbytes <= row.slot_bound_nbytes,
        )


def compare_startups(workload: Workload, rows: Mapping[str, list[Row]]) -> list[Verdict]:
    """Compares a start-up with that of another workload, if its targets name one.

    Args:
        workload: The workload.
        rows: All workloads' rows so far, by name.
    """
    targets = workload.targets
    if targets.startup_within is None or targets.startup_within[0] not in rows:
        return []
    other, most = targets.startup_within
    first_s, other_s = (
        next((one.first_batch_s for one in rows[name] if _is_subject(targets, one)), None)
        for name in (workload.name, other)
    )
    if first_s is None or other_s is None:
        return []
    figure = f"{first_s:.2f} s, {other} {other_s:.2f} s ({first_s / other_s - 1:+.0%})"
    target = f"the first batch at most {most - 1:.0%} later than with {other}"
    return [Verdict(workload.name, target, figure, first_s <= most * other_s)]


def _is_subject(targets: Targets, row: Row) -> bool:
    """Whether a row is of the loader that the targets are for."""
    loader = LOADERS.get(row.contestant)
    if loader is None or targets.loader is None:
        return loader is not None and loader.is_subject
    return loader.name == targets.loader


def _has_peers(rows: list[Row]) -> bool:
    """Whether there is another loader than torch's: being better than torch is a target of its own."""
    known = [LOADERS[row.contestant] for row in rows if row.contestant in LOADERS]
    return any(not (loader.is_own or loader.is_baseline) for loader in known)


def render_verdicts(verdicts: list[Verdict]) -> str:
    """Renders the targets, and whether they were reached."""
    table = [["workload", "target", "figure", "verdict"]]
    table += [[v.workload, v.target, v.figure, "ok" if v.ok else "missed"] for v in verdicts]
    return render_table(table, texts=4)
