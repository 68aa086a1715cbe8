"""``python -m shmloader demo``: train a small model with torch's loader and with this one."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from shmloader.cli.demo.run import RunResult, RunSpec
from shmloader.cli.options import parse_nbytes, whole_number
from shmloader.cli.programs import command_parser, end_session
from shmloader.monitor.processes import ProcessTree

DESCRIPTION = """\
Train a small byte-level language model on the Python sources of this interpreter, with
torch.utils.data.DataLoader and with shmloader.DataLoader, and compare the two.

Both loaders get the same samples, seed, workers and collate function, and each runs in a fresh
process. The table shows:

  time to first batch   from iter(loader) on, so starting the workers is part of it
  training              samples/s with the model, and how long the model waited for data;
                        the model's arithmetic takes most of this time with either loader
  loader alone          samples/s without the model, over 5,000 batches or one epoch
  loss                  on held-out samples; equal, bit for bit, for both loaders
  peak memory           proportional set size (PSS), summed over main process and workers

PSS needs Linux.
"""

_SAMPLING_INTERVAL_S = 0.2
_STOP_GRACE_S = 5.0
# glibc raises these thresholds by what it happens to see freed, which moves the memory of equal runs
# by tens of MiB. Fixed and large, they let the model's buffers be used again in every step.
_ALLOCATOR_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20)}

_LABEL_WIDTH = 42
_COLUMN_WIDTH = 13
_ROWS: tuple[tuple[str, Callable[[RunResult], str]], ...] = (
    ("time to first batch, s", lambda result: f"{result.first_batch_s:.3f}"),
    ("training: samples/s", lambda result: f"{result.training_rate:,.0f}"),
    ("training: waited for data, s in total", lambda result: f"{result.waited_s:.3f}"),
    ("held-out loss before, nats/byte", lambda result: f"{result.loss_before:.6f}"),
    ("held-out loss after, nats/byte", lambda result: f"{result.loss_after:.6f}"),
    ("loader alone, no model: samples/s", lambda result: f"{result.loader_alone_rate:,.0f}"),
    (
        "peak memory of all processes, MiB (PSS)",
        lambda result: f"{result.peak_nbytes / 2**20:,.0f}" if result.peak_nbytes else "not available",
    ),
)


class RunFailedError(Exception):
    """The end of a run's process without a result; it has said why on standard error."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser("demo", DESCRIPTION)
    loaders = "which loader to run (default: both, one after the other)"
    parser.add_argument("--loader", choices=["both", "torch", "shmloader"], default="both", help=loaders)
    methods, own = multiprocessing.get_all_start_methods(), multiprocessing.get_start_method()
    start = "how workers start (default: Python's own, here %(default)s)"
    parser.add_argument("--start-method", choices=methods, default=own, help=start)
    for name, kind, default, metavar, text in (
        ("--steps", whole_number(1), 100, "N", "training steps for each loader"),
        ("--max-bytes", parse_nbytes, "128M", "SIZE", "most source text to read, as 500K, 128M or 1G"),
        ("--batch-size", whole_number(1), 32, "N", "samples per batch"),
        ("--workers", whole_number(0), 2, "N", "worker processes; 0 loads in the main process"),
    ):
        help_text = f"{text} (default: %(default)s)"
        parser.add_argument(name, type=kind, default=default, metavar=metavar, help=help_text)
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Run the demo; gives 0, or 1 if a run failed or the two loaders disagreed."""
    arguments = parse(words)
    names = ["torch", "shmloader"] if arguments.loader == "both" else [arguments.loader]
    start = f" ({arguments.start_method})" if arguments.workers else ""
    print(
        "shmloader demo: a byte-level language model on this interpreter's Python sources\n"
        f"{arguments.steps} training steps of {arguments.batch_size} shuffled samples, {arguments.workers} "
        f"workers{start}",
        flush=True,
    )
    settings = {name: value for name, value in vars(arguments).items() if name != "loader"}
    results: dict[str, RunResult] = {}
    try:
        for name in names:
            print(f"running {name} ...", file=sys.stderr, flush=True)
            results[name] = _run_in_process(RunSpec(name, **settings, demo_pid=os.getpid()))
    except RunFailedError as failure:
        print(failure, file=sys.stderr)
        return 1
    print(f"{results[names[0]].corpus}\n\n{_format_table(results)}")
    outcomes = {(one.checksum, one.loss_before, one.loss_after) for one in results.values()}
    if len(names) > 1:
        print(f"batches and losses equal, bit for bit: {'yes' if len(outcomes) == 1 else 'NO'}")
    return len(outcomes) - 1


def _run_in_process(spec: RunSpec) -> RunResult:
    """Run one spec in a fresh process and watch the memory of its tree."""
    with tempfile.TemporaryDirectory(prefix="shmloader-demo-") as folder:
        result_path = Path(folder, "result.json")
        command = [sys.executable, "-m", "shmloader.cli.demo"]
        # A session of its own, or Ctrl-C would also reach the workers and garble their output.
        process = subprocess.Popen(
            [*command, json.dumps(asdict(spec)), str(result_path)],
            env=_ALLOCATOR_SETTINGS | os.environ,
            start_new_session=True,
        )
        tree, peak_nbytes = ProcessTree([process.pid]), 0
        try:
            while process.poll() is None:
                peak_nbytes = max(peak_nbytes, sum(one.pss_nbytes for one in tree.read()))
                time.sleep(_SAMPLING_INTERVAL_S)
        finally:
            end_session(process, _STOP_GRACE_S)
        if process.returncode:
            raise RunFailedError(f"the run with {spec.loader} failed (exit status {process.returncode})")
        values = json.loads(result_path.read_text(encoding="utf-8"))
        return RunResult(**(values | {"peak_nbytes": peak_nbytes}))


def _format_table(results: Mapping[str, RunResult]) -> str:
    """The results by the loader's name as text, one column for each."""
    rule = "-" * (_LABEL_WIDTH + _COLUMN_WIDTH * len(results))
    rows = [("", list(results)), *((label, list(map(cell, results.values()))) for label, cell in _ROWS)]
    lines = [
        f"{label:<{_LABEL_WIDTH}}" + "".join(f"{cell:>{_COLUMN_WIDTH}}" for cell in row)
        for label, row in rows
    ]
    return "\n".join([lines[0], rule, *lines[1:], rule])
