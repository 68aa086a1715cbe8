"""``python -m shmloader top PID``: the profile of a running program, live."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from shmloader.cli.options import MOST_PID, whole_number
from shmloader.cli.profile import render_all
from shmloader.cli.programs import command_parser, discard, live_display, print_out, show_live, terminal_width
from shmloader.profiling.program import FOLDER, read_reports

DESCRIPTION = f"""\
Show where the time of a program's loaders goes, live. The program runs under
`python -m shmloader profile`, or with {FOLDER}=FOLDER in its environment.
"""
_EVERY_S = 1.0
_MOST = 3  # reports, those on the longest loading


def main(words: Sequence[str]) -> int:
    """Show the reports until the program ends; 1 if it is not profiled."""
    parser = command_parser("top", DESCRIPTION)
    parser.add_argument("pid", type=whole_number(1, MOST_PID), help="the program, or its profile command")
    parser.add_argument("--once", action="store_true", help="print the figures so far, and end")
    arguments = parser.parse_args(words)
    folder = _folder_of(arguments.pid)
    if folder is None:
        print(
            f"error: process {arguments.pid} and those that it started are not profiled, or may not be read: "
            "start the program with `python -m shmloader profile -- ...`",
            file=sys.stderr,
        )
        return 1
    if arguments.once:
        return 0 if print_out(_text(folder, terminal_width(1)), "the report") else 1
    with contextlib.suppress(KeyboardInterrupt):
        _follow(arguments.pid, folder)
    return 0


def _folder_of(pid: int) -> Path | None:
    """The folder for the reports of a process, or of one that it has started."""
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return None
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            folder = process.environ().get(FOLDER)
            if folder:
                return Path(folder)
    return None


def _text(folder: Path, width: int | None) -> str:
    return render_all(read_reports(folder)[:_MOST], width)


def _follow(pid: int, folder: Path) -> None:
    live = live_display(sys.stdout)
    with live or contextlib.nullcontext():
        while psutil.pid_exists(pid) and folder.is_dir():
            if live is not None:
                show_live(live, _text(folder, live.console.width))
            else:
                try:
                    print(_text(folder, terminal_width(1)), flush=True)
                except OSError:  # nobody reads it any more
                    discard(1)
                    return
            time.sleep(_EVERY_S)
