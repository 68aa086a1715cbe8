"""The processor time of a batch, by process and function: the profile used in docs/performance.md.

``python -m benchmarks.processor_time --workload rows`` loads with this project's loader, in a process of its
own. For the main process and for its workers it prints the processor time of each batch, in user code and in
the kernel, and the numbers of sleeps, preemptions and page faults. Beside them it prints the cost of fetching
and collating alone, in one process while nothing else runs. The difference to the workers is the cost of
sharing the cores and of the loader's own code. Afterwards py-spy, if it is installed (the extra ``bench``
brings it), samples the main process, which slows it down, and its functions are listed.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import shmloader
from benchmarks.fresh_process import END_S, FreshProcess, MeasurementFailedError, claim_output
from benchmarks.limit import make_into, outputs_like
from benchmarks.loaders import batching
from benchmarks.options import SHORTEST_WINDOW_S, finite_number, whole_number
from benchmarks.reading import touch
from benchmarks.real_files import FOLDER
from benchmarks.tables import render_table
from benchmarks.workloads import STARTUP, WORKLOADS, Workload

SAMPLES_PER_S = 500
LEAST_SHARE = 0.02
"""Share of the samples: a function that was seen less often is not listed."""


@dataclass
class Cost:
    """Cost of a batch in some processes: µs of a core, and counts of events."""

    user_us: float
    system_us: float
    sleeps: float
    preempted: float
    page_faults: float


def costs(processes: list[psutil.Process], work: Callable[[], int]) -> list[Cost]:
    """Does some work, which returns a number of batches; gives each process's cost per batch."""
    before = [_read(process) for process in processes]
    batches = work()
    after = [_read(process) for process in processes]
    return [
        Cost(*((new - old) / batches for old, new in zip(*pair, strict=True)))
        for pair in zip(before, after, strict=True)
    ]


def _read(process: psutil.Process) -> tuple[float, ...]:
    times, switches = process.cpu_times(), process.num_ctx_switches()
    # The command may have spaces in it; the tenth field is the number of minor faults.
    fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    faults = float(fields[7])
    return 1e6 * times.user, 1e6 * times.system, switches.voluntary, switches.involuntary, faults


def measure(workload: Workload, seconds: float, workers: int, *, sampled: bool) -> None:
    """Measures in this process and answers with the figures; if it is sampled, loads as long again."""
    answer = claim_output()
    torch.set_num_threads(1)
    dataset = workload.dataset(workload.batch_size * workload.period_batches)
    (alone,) = costs([psutil.Process()], lambda: _make_alone(workload, dataset, seconds / 2))
    with shmloader.DataLoader(
        dataset,
        num_workers=workers,
        prefetch_factor=workload.prefetch_factor,
        persistent_workers=True,
        **batching(workload.batch_size, workload.options()),
    ) as loader:
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        _consume(batches, 0.5, workload.compute_s)
        main = psutil.Process()
        began_s = time.perf_counter()
        counted = 0

        def load() -> int:
            nonlocal counted
            counted = _consume(batches, seconds, workload.compute_s)
            return counted

        cost, *of_workers = costs([main, *main.children()], load)
        rate = counted / (time.perf_counter() - began_s)
        together = Cost(*map(sum, zip(*map(astuple, of_workers), strict=True)))
        rows = {"alone": asdict(alone), "main process": asdict(cost), "workers": asdict(together)}
        answer({"batches_per_s": rate, "rows": rows})
        if sampled:
            _consume(batches, seconds, workload.compute_s)


def _make_alone(workload: Workload, dataset: Any, seconds: float) -> int:
    make = workload.make_into or make_into
    out = outputs_like(workload.reference_batch(dataset, 0))
    until_s = time.perf_counter() + seconds
    for number in itertools.count():
        make(dataset, workload.index_batch(number % workload.period_batches), out)
        if time.perf_counter() > until_s:
            break
    return number + 1


def _consume(batches: Any, seconds: float, compute_s: float) -> int:
    until_s = time.perf_counter() + seconds
    for number, batch in enumerate(batches):
        touch(batch)
        now_s = time.perf_counter()
        if now_s > until_s:
            return number + 1
        while time.perf_counter() < now_s + compute_s:
            sum(range(100))
    raise AssertionError("the batches never end")


def run(name: str, arguments: argparse.Namespace) -> None:
    """Measures one workload in a process of its own, samples that, and prints both."""
    words = ["--measure", "--workload", name]
    words += ["--seconds", str(arguments.seconds), "--workers", str(arguments.workers)]
    can_sample = shutil.which(_PY_SPY) is not None
    with tempfile.TemporaryDirectory(prefix="shmloader-bench-") as folder:
        samples = Path(folder) / "samples"
        with FreshProcess(
            f"measuring {name}",
            "benchmarks.processor_time",
            *words,
            *["--sampled"] * can_sample,
            environment={FOLDER: folder},
        ) as fresh:
            measured = fresh.answer()
            if can_sample:
                _sample(fresh.process.pid, arguments.seconds, samples)
            fresh.finish(END_S + arguments.seconds)
        _print(name, measured, samples.read_text(encoding="utf-8") if samples.exists() else "")


_PY_SPY = str(Path(sys.executable).with_name("py-spy"))


def _sample(pid: int, seconds: float, into: Path) -> None:
    duration_s = str(max(1, int(seconds) - 1))
    command = [_PY_SPY, "record", "--pid", str(pid), "--rate", str(SAMPLES_PER_S), "--duration", duration_s]
    done = subprocess.run(
        [*command, "--function", "--format", "raw", "--output", str(into)],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print(f"not sampled: {done.stderr.strip()[-300:]}", file=sys.stderr)


def _print(name: str, measured: dict[str, Any], samples: str) -> None:
    head = ["", "user us", "system us", "sleeps", "preempted", "page faults"]
    table = [[who, *(f"{figure:,.2f}" for figure in row.values())] for who, row in measured["rows"].items()]
    rate = measured["batches_per_s"]
    print(f"{name}, {rate:,.1f} batches/s; for each batch\n\n{render_table([head, *table], texts=1)}\n")
    shares = functions_of(samples)
    table = [
        [function, f"{share:.0%}"]
        for function, share in shares.items()
        if share >= LEAST_SHARE and ("shmloader/" in function or "benchmarks/reading" in function)
    ]
    if table:
        head = ["function of the main process, with what it calls", "of its samples"]
        print(f"{render_table([head, *table], texts=1)}\n")


def functions_of(samples: str) -> dict[str, float]:
    """Reads py-spy's raw format, a stack and a number of samples on each line.

    Returns:
        For each function the share of the samples that it was in, the most frequent first.
    """
    seen: Counter[str] = Counter()
    total = 0
    for line in samples.splitlines():
        stack, _, count = line.rpartition(" ")
        total += int(count)
        for function in set(stack.split(";")):
            seen[function] += int(count)
    return {function: count / total for function, count in seen.most_common()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name, workload in WORKLOADS.items() if workload.kind != STARTUP]
    add = parser.add_argument
    add("--workload", action="append", choices=names, help="what to load; may be repeated (default: rows)")
    seconds = finite_number(SHORTEST_WINDOW_S)
    add("--seconds", type=seconds, default=6.0, help="how long each is loaded (%(default)s)")
    add("--workers", type=whole_number(1), default=2, help="worker processes (%(default)s)")
    add("--measure", action="store_true", help=argparse.SUPPRESS)
    add("--sampled", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for name in arguments.workload or ["rows"]:
        if arguments.measure:
            measure(WORKLOADS[name], arguments.seconds, arguments.workers, sampled=arguments.sampled)
            continue
        try:
            run(name, arguments)
        except MeasurementFailedError as failure:
            sys.exit(f"error: {failure}")


if __name__ == "__main__":
    main()
