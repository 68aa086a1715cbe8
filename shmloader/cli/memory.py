"""``python -m shmloader memory``: who in a training program has how much memory, how it grows, and why."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import select
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from shmloader.cli.options import MOST_PID, whole_number
from shmloader.cli.programs import (
    command_parser,
    exit_status,
    forwarded_signals,
    parse_with_program,
    say,
    start_program,
    terminal_width,
)
from shmloader.memory.process_memory import read_memory
from shmloader.monitor import Monitor, start
from shmloader.monitor.inside import REPORTS
from shmloader.monitor.view import render

DESCRIPTION = """\
Follow the memory of a program and of all processes that descend from it: private, shared and
proportional, growth per minute, shared memory by owner, the limit and the time until it is reached.
Growth of a loader's workers is explained from inside the program, with the line that cures it.

    python -m shmloader memory -- python train.py
    python -m shmloader memory --pid 1234

The program's output, signals and exit status stay its own; what this command says goes to standard
error. Ctrl-C ends both. docs/memory.md explains the figures.
"""
_TABLE_EVERY_S = 60.0  # where the table is not live


def main(words: Sequence[str]) -> int:
    """Follow a program until it ends; gives its exit status, or 128 and the signal that ended it."""
    arguments = parse(words)
    if arguments.command:
        return _launch(arguments)
    for pid in arguments.pid:
        if not psutil.pid_exists(pid) or not read_memory(pid):
            why = "may not be read: it is another user's" if psutil.pid_exists(pid) else "does not exist"
            print(f"error: process {pid} {why}", file=sys.stderr)
            return 1
    monitor = Monitor(*arguments.pid, every_s=arguments.every)
    ends = [os.pidfd_open(pid) for pid in arguments.pid]
    try:
        with contextlib.suppress(KeyboardInterrupt):
            _follow(monitor, ends, arguments, is_terminal_free=True)
    finally:
        for fd in ends:
            os.close(fd)
    return 0 if _finish(monitor, arguments) else 1


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser("memory", DESCRIPTION)
    add = parser.add_argument
    add(
        "--pid",
        type=whole_number(1, MOST_PID),
        action="append",
        default=[],
        help="follow this process; may be repeated",
    )
    add("--every", type=float, default=1.0, metavar="S", help="least seconds between readings (default 1)")
    add("--picture", type=Path, metavar="PNG", help="draw memory over time when it ends (needs matplotlib)")
    add("--json", type=Path, metavar="FILE", help="write all readings and findings when it ends")
    arguments = parse_with_program(parser, words, ("picture", "json"))
    if bool(arguments.pid) == bool(arguments.command):
        parser.error("give either a program after --, or --pid")
    if not 0.1 <= arguments.every <= 3600:
        parser.error("argument --every: a number of seconds from 0.1 to 3600 is needed")
    return arguments


def _launch(arguments: argparse.Namespace) -> int:
    """Start the program with the start hook, and follow it."""
    with tempfile.TemporaryDirectory(prefix="shmloader-memory-") as folder:
        reports = Path(folder) / "reports"
        reports.touch()
        paths = [str(Path(start.__path__[0])), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), REPORTS: str(reports)}
        program = start_program(arguments.command, environment)
        if isinstance(program, int):
            return program
        with forwarded_signals(program):
            monitor = Monitor(program.pid, every_s=arguments.every, reports=reports)
            end = os.pidfd_open(program.pid)
            try:
                _follow(monitor, [end], arguments, is_terminal_free=not sys.stdout.isatty())
            finally:
                os.close(end)
            status = exit_status(program)
            _finish(monitor, arguments)
    return status


def _follow(
    monitor: Monitor, ends: Sequence[int], arguments: argparse.Namespace, *, is_terminal_free: bool
) -> None:
    """Read and show until all processes of the descriptors ``ends`` have ended."""
    waiting = list(ends)
    with _View(monitor, is_terminal_free=is_terminal_free) as view:
        while waiting:
            monitor.read()
            view.show()
            ended, _, _ = select.select(waiting, [], [], monitor.wait_s)
            waiting = [fd for fd in waiting if fd not in ended]


class _View:
    """Shows the table live if the terminal is free for it; otherwise now and then, and findings at once."""

    def __init__(self, monitor: Monitor, *, is_terminal_free: bool) -> None:
        self._monitor = monitor
        self._live: Any = None
        self._said: dict[tuple[int, int], int] = {}
        self._shown_s = time.monotonic()
        if is_terminal_free and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self) -> None:
        """Show what has been read."""
        if self._live is not None:
            from rich.text import Text

            width, height = self._live.console.size
            self._live.update(
                Text(render(self._monitor, self._monitor.last, width, max(4, height - 14))), refresh=True
            )
            return
        for finding in self._monitor.findings():
            if finding.nbytes > 2 * self._said.get(finding.about, -1):  # new, or twice as large
                self._said[finding.about] = finding.nbytes
                say(f"shmloader memory: {finding.text}")
        if time.monotonic() - self._shown_s >= _TABLE_EVERY_S:
            self._shown_s = time.monotonic()
            say(render(self._monitor, self._monitor.last, terminal_width(2) or 100))


def _finish(monitor: Monitor, arguments: argparse.Namespace) -> bool:
    """Print the last table, and write what was asked for; returns whether that could be written."""
    peak = monitor.peak
    say(f"\nat its peak, {peak.time_s:.0f} s after the start:")
    say(render(monitor, peak, terminal_width(2) or 100))
    try:
        if arguments.json:
            readings = [asdict(reading) | {"pss_nbytes": reading.pss_nbytes} for reading in monitor.readings]
            report = {"peak_nbytes": peak.pss_nbytes, "cost_s": monitor.cost_s, "readings": readings}
            report["findings"] = list(map(asdict, monitor.findings()))
            arguments.json.write_text(json.dumps(report), encoding="utf-8")
        if arguments.picture:
            from shmloader.monitor.picture import draw

            draw(monitor, arguments.picture)
    except OSError as error:
        say(f"error: {error.filename}: {error.strerror}")
        return False
    return True
