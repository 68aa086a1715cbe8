"""The tables of a comparison, as text that is Markdown too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.loaders import LOADERS
from benchmarks.records import Measurement
from benchmarks.summary import Row, Runs
from benchmarks.tables import Columns, or_empty, render_table, table_of
from benchmarks.verdicts import Verdict, render_verdicts
from benchmarks.workloads import STARTUP, THROUGHPUT, TRAINING, Workload


@dataclass(frozen=True)
class LeftOut:
    """A contestant that has no figure on a workload, and why."""

    workload: str
    contestant: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """The results of one workload.

    Attributes:
        workload: As it was run: small, in a quick run.
        rows: The figures of each contestant.
        runs: Every measurement.
        verdicts: The targets.
    """

    workload: Workload
    rows: list[Row]
    runs: Runs
    verdicts: list[Verdict]


def _descriptors(row: Row) -> str:
    low, high = row.descriptors_min, row.descriptors_max
    return f"{low}" if low == high else f"{low} to {high}"


def _slots(row: Row) -> str:
    if row.reserved_nbytes is None or row.slot_bound_nbytes is None:
        return ""
    return f"{row.reserved_nbytes / 1e6:,.3f} / {row.slot_bound_nbytes / 1e6:,.3f}"


CONTESTANT: Columns[Row] = (
    ("workload", lambda row: row.workload),
    ("loader", lambda row: row.contestant),
)
RATIOS: Columns[Row] = (
    ("spread", lambda row: format(row.spread, ".0%")),
    ("vs torch", lambda row: or_empty(row.vs_torch, ".2f")),
    ("vs best peer", lambda row: or_empty(row.vs_peer if _is_own(row) else None, ".2f")),
)
FOREIGN: Columns[Row] = (("foreign CPU", lambda row: format(row.foreign_share, ".0%")),)

COLUMNS: dict[str, Columns[Row]] = {
    THROUGHPUT: (
        *CONTESTANT,
        ("samples/s", lambda row: format(row.samples_per_s, ",.0f")),
        ("batches/s", lambda row: format(row.batches_per_s, ",.1f")),
        ("GB/s", lambda row: format(row.nbytes_per_s / 1e9, ".3f")),
        *RATIOS,
        ("of limit", lambda row: or_empty(row.of_limit, ".1%")),
        ("CPU us/batch", lambda row: format(row.cpu_s_per_batch * 1e6, ",.0f") if row.cpu_s else ""),
        *FOREIGN,
        ("descriptors", lambda row: _descriptors(row) if row.descriptors_min is not None else ""),
        ("slots / bound, MB", _slots),
    ),
    STARTUP: (
        *CONTESTANT,
        ("first batch, s", lambda row: or_empty(row.first_batch_s, ".3f")),
        ("making the loader (part of it), s", lambda row: or_empty(row.made_s, ".3f")),
        *RATIOS,
        ("CPU s", lambda row: format(row.cpu_s, ".2f")),
        *FOREIGN,
    ),
    TRAINING: (
        *CONTESTANT,
        ("waits", lambda row: or_empty(row.wait_share, ".2%")),
        ("steps/s", lambda row: format(row.batches_per_s, ".1f")),
        *RATIOS,
        ("of limit", lambda row: or_empty(row.of_limit, ".1%")),
        ("CPU us/step", lambda row: format(row.cpu_s_per_batch * 1e6, ",.0f")),
        *FOREIGN,
    ),
}

HEADINGS = {
    THROUGHPUT: "Throughput",
    STARTUP: "Time to the first batch",
    TRAINING: "A training loop",
}


def _is_own(row: Row) -> bool:
    return row.contestant in LOADERS and LOADERS[row.contestant].is_own


def render(
    described: dict[str, Any],
    copying: Sequence[Measurement],
    outcomes: Sequence[Outcome],
    left_out: Sequence[LeftOut],
) -> str:
    """Renders everything: the machine, a table per kind, the contestants left out and why, the targets."""
    parts = [machine.describe_in_words(described), render_copying(copying)]
    for kind, columns in COLUMNS.items():
        rows = [row for one in outcomes if one.workload.kind == kind for row in shown_rows(one)]
        if rows:
            parts.append(f"{HEADINGS[kind]}\n\n{table_of(columns, rows, texts=2)}\n")
    if outcomes:
        parts.append("Checksums: all loaders in the tables delivered the same data.\n")
    if left_out:
        table = [["workload", "loader", "why it has no figure"]]
        table += [[one.workload, one.contestant, one.reason.replace("|", "/")] for one in left_out]
        parts.append(f"Left out\n\n{render_table(table, texts=3)}\n")
    verdicts = [verdict for one in outcomes for verdict in one.verdicts]
    if verdicts:
        parts.append(f"Targets\n\n{render_verdicts(verdicts)}\n")
    return "\n".join(filter(None, parts))


def shown_rows(outcome: Outcome) -> list[Row]:
    """Gives the rows that mean something; for a start-up, the limit (which starts no loader) is left out."""
    return [row for row in outcome.rows if outcome.workload.kind != STARTUP or row.contestant != "limit"]


def render_copying(copying: Sequence[Measurement]) -> str:
    """Says how fast memory was copied."""
    if not copying:
        return ""
    rates = [one.nbytes_per_s / 1e9 for one in copying]
    spread = (max(rates) - min(rates)) / median(rates)
    foreign = median(one.foreign_share for one in copying)
    return (
        f"memcpy, a process per worker at once: {median(rates):.1f} GB/s together "
        f"(spread {spread:.0%}, foreign CPU {foreign:.0%})\n"
    )


def figures_of(outcome: Outcome) -> tuple[str, list[str], list[list[float]]]:
    """Gives the contents of a workload's plot: the axis, the contestants, and the figures of each turn."""
    kind = outcome.workload.kind
    names = [row.contestant for row in shown_rows(outcome)]
    per_turn: dict[str, tuple[str, Callable[[Measurement], float]]] = {
        THROUGHPUT: ("samples/s", lambda one: one.samples_per_s),
        STARTUP: ("seconds to the first batch", lambda one: one.first_batch_s or 0.0),
        TRAINING: ("share of time that the loop waits, %", lambda one: 100 * (one.wait_share or 0.0)),
    }
    label, figure = per_turn[kind]
    return label, names, [[figure(one) for one in outcome.runs[name]] for name in names]
