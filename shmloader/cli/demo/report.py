"""The demo's table: what each loader measured, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shmloader.cli.demo.run import RunResult, RunSpec
from shmloader.host.process_memory import MemorySample

MIB = 2**20

_LABEL_WIDTH = 42
_COLUMN_WIDTH = 13


@dataclass(frozen=True)
class Run:
    """One loader's finished run.

    Attributes:
        spec: What was asked.
        result: What the run measured.
        memory: Memory of its processes over time; empty where PSS is not available.
    """

    spec: RunSpec
    result: RunResult
    memory: Sequence[MemorySample]


def describe_work(spec: RunSpec) -> str:
    """Say in one line what every loader is asked to do."""
    start = f" ({spec.start_method})" if spec.workers else ""
    return (
        f"{spec.steps} training steps of {spec.batch_size} shuffled samples, "
        f"{spec.workers} workers{start}, seed {spec.seed}"
    )


def format_table(runs: Sequence[Run]) -> str:
    """Lay the measurements out, one column per loader."""
    rule = "-" * (_LABEL_WIDTH + _COLUMN_WIDTH * len(runs))
    lines = [_row("", [run.spec.loader for run in runs]), rule]
    lines += [_row(label, [cell(run) for run in runs]) for label, cell in _ROWS]
    return "\n".join([*lines, rule])


def runs_agree(runs: Sequence[Run]) -> bool:
    """Tell whether all runs gave the same batches and the same losses, bit for bit."""
    outcomes = {
        (run.result.checksum, run.result.loss_before.hex(), run.result.loss_after.hex()) for run in runs
    }
    return len(outcomes) == 1


def _row(label: str, cells: Sequence[str]) -> str:
    return f"{label:<{_LABEL_WIDTH}}" + "".join(f"{cell:>{_COLUMN_WIDTH}}" for cell in cells)


def _peak_memory(run: Run) -> str:
    if not run.memory:
        return "not available"
    return f"{max(sample.pss_nbytes for sample in run.memory) / MIB:,.0f}"


_ROWS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("time to first batch, s", lambda run: f"{run.result.first_batch_s:.3f}"),
    ("training: samples/s", lambda run: f"{run.result.training_rate:,.0f}"),
    ("training: waited for data, s in all", lambda run: f"{run.result.waited_s:.3f}"),
    ("held-out loss before, nats/byte", lambda run: f"{run.result.loss_before:.6f}"),
    ("held-out loss after, nats/byte", lambda run: f"{run.result.loss_after:.6f}"),
    ("loader alone, no model: samples/s", lambda run: f"{run.result.loader_alone_rate:,.0f}"),
    ("peak memory of all processes, MiB (PSS)", _peak_memory),
)
