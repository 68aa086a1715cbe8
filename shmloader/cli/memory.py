"""``python -m shmloader memory``: who in a training program has how much memory, how it grows, and why."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from shmloader.cli.options import MOST_PID, whole_number
from shmloader.cli.programs import (
    command_parser,
    exit_status,
    forwarded_signals,
    live_display,
    parse_with_program,
    say,
    show_live,
    start_program,
    terminal_width,
    write_files,
)
from shmloader.memory.process_memory import read_memory
from shmloader.monitor import Monitor, start
from shmloader.monitor.findings import About
from shmloader.monitor.inside import REPORTS
from shmloader.monitor.view import render

DESCRIPTION = """\
Follow the memory of a program and of all processes that descend from it: private, shared and
proportional, growth per minute, shared memory by owner, the limit and the time until it is reached.
Growth of a loader's workers is explained from inside the program, with the line that cures it.

    python -m shmloader memory -- python train.py
    python -m shmloader memory --pid 1234

The program's output, signals and exit status stay its own; what this command says goes to standard
error. Ctrl-C ends both, and with --pid this command alone. docs/memory.md explains the figures.
"""
_TABLE_EVERY_S = 60.0  # where the table is not live


def main(words: Sequence[str]) -> int:
    """Follow a program until it ends; gives its exit status, or 128 and the signal that ended it.

    It is 1 instead of 0 if a file could not be written, or the program not be followed to its end.
    """
    arguments = parse(words)
    if arguments.command:
        return _launch(arguments)
    with contextlib.ExitStack() as stack:
        ends = []
        for pid in arguments.pid:
            try:
                ends.append(os.pidfd_open(pid))
            except OSError as error:
                say(f"error: process {pid} does not exist, or cannot be followed: {error.strerror}")
                return 1
            stack.callback(os.close, ends[-1])
            if not read_memory(pid):
                say(f"error: process {pid} may not be read: it is another user's, or has just ended")
                return 1
        try:
            monitor = Monitor(*arguments.pid, every_s=arguments.every)
        except psutil.NoSuchProcess as error:
            say(f"error: process {error.pid} has just ended")
            return 1
        with contextlib.suppress(KeyboardInterrupt):
            _follow(monitor, ends, live_display(sys.stderr, transient=True))
    return 0 if _finish(monitor, arguments) else 1


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser("memory", DESCRIPTION)
    add = parser.add_argument
    pid = whole_number(1, MOST_PID)
    add("--pid", type=pid, action="append", default=[], help="follow this process; may be repeated")
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
            try:
                monitor = _followed(program.pid, arguments.every, reports)
            except Exception:  # noqa: BLE001 - the program is not to lose its parent
                say(f"error: the program runs on, and is followed no more: {traceback.format_exc()}")
                monitor = None
            status = exit_status(program)
            written = monitor is not None and _finish(monitor, arguments)
    return status if written else status or 1


def _followed(pid: int, every_s: float, reports: Path) -> Monitor:
    """Follow the program to its end; returns what was read."""
    monitor = Monitor(pid, every_s=every_s, reports=reports)
    end = os.pidfd_open(pid)
    try:  # not live where the program may write to the terminal
        display = None if sys.stdout.isatty() else live_display(sys.stderr, transient=True)
        _follow(monitor, [end], display)
    finally:
        os.close(end)
    return monitor


def _follow(monitor: Monitor, ends: Sequence[int], display: Any) -> None:
    """Read and show until all processes of the descriptors ``ends`` have ended.

    Without a `live_display` the table is shown now and then, and findings at once.
    """
    waiting, said, shown_s = list(ends), dict[About, int](), time.monotonic()
    with display or contextlib.nullcontext():
        while waiting:
            monitor.read()
            if display is not None:
                width, height = display.console.size
                show_live(display, render(monitor, monitor.last, width, max(4, height - 14)))
            else:
                _say_findings(monitor, said)
                if time.monotonic() - shown_s >= _TABLE_EVERY_S:
                    shown_s = time.monotonic()
                    say(render(monitor, monitor.last, terminal_width(2) or 100))
            ended, _, _ = select.select(waiting, [], [], monitor.wait_s)
            waiting = [fd for fd in waiting if fd not in ended]


def _say_findings(monitor: Monitor, said: dict[About, int]) -> None:
    """Say the findings that are new, or about twice as much as when they were ``said``."""
    for finding in monitor.findings():
        if finding.nbytes > 2 * said.get(finding.about, -1):
            said[finding.about] = finding.nbytes
            say(f"shmloader memory: {finding.text}")


def _finish(monitor: Monitor, arguments: argparse.Namespace) -> bool:
    """Print the last table, and write what was asked for; returns whether that could be written."""
    peak = monitor.peak
    say(f"\nat its peak, {peak.time_s:.0f} s after the start:")
    say(render(monitor, peak, terminal_width(2) or 100))
    return write_files(
        (arguments.json, lambda path: path.write_text(_as_json(monitor), encoding="utf-8")),
        (arguments.picture, lambda path: _draw(monitor, path)),
    )


def _as_json(monitor: Monitor) -> str:
    readings = [asdict(reading) | {"pss_nbytes": reading.pss_nbytes} for reading in monitor.readings]
    report = {"peak_nbytes": monitor.peak.pss_nbytes, "cost_s": monitor.cost_s, "readings": readings}
    report["findings"] = list(map(asdict, monitor.findings()))
    return json.dumps(report)


def _draw(monitor: Monitor, path: Path) -> None:
    from shmloader.monitor.picture import draw

    draw(monitor, path)
