"""``python -m shmloader profile``: where the time of a program's loaders goes."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shmloader.cli.programs import (
    command_parser,
    exit_status,
    forwarded_signals,
    parse_with_program,
    say,
    start_program,
    terminal_width,
    write_files,
)
from shmloader.profiling.program import FOLDER, REPLAY, read_reports
from shmloader.profiling.report import render, wrapped, write_trace

DESCRIPTION = """\
Run a program and measure each of its loaders, batch by batch: those of shmloader, and with
shmloader.install() all loaders of torch's class. When it ends, a report on each says what held it up.

    python -m shmloader profile -- python train.py

The program's output, signals and exit status stay its own; the report goes to standard error.
Meanwhile `python -m shmloader top PID` shows the figures so far. docs/profile.md explains them.
"""
_PICTURES = (".png", ".svg", ".pdf")


def main(words: Sequence[str]) -> int:
    """Run the program; gives its exit status, or 128 and the signal that ended it.

    It is 1 instead of 0 if a file could not be written.
    """
    arguments = parse(words)
    with tempfile.TemporaryDirectory(prefix="shmloader-profile-") as folder:
        given = {FOLDER: folder, REPLAY: "1" if arguments.replay else ""}
        program = start_program(arguments.command, os.environ | given)
        if isinstance(program, int):
            return program
        with forwarded_signals(program):
            status = exit_status(program)
        reports = read_reports(Path(folder))
    say(render_all(reports, terminal_width(2)))
    return status if _write(arguments, reports) else status or 1


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser("profile", DESCRIPTION)
    add = parser.add_argument
    add("--picture", type=Path, metavar="FILE", help="draw the longest loading (.png, .svg or .pdf)")
    add("--trace", type=Path, metavar="FILE", help="write its last 300 batches as Chrome trace events")
    add("--replay", action="store_true", help="give each epoch's first batch again and again: the bound")
    add("--json", type=Path, metavar="FILE", help="write the figures of all loaders")
    arguments = parse_with_program(parser, words, ("picture", "trace", "json"))
    if not arguments.command:
        parser.error("give a program after --")
    if arguments.picture and arguments.picture.suffix.lower() not in _PICTURES:
        parser.error(f"argument --picture: {arguments.picture} has to end in one of {', '.join(_PICTURES)}")
    return arguments


def render_all(reports: Sequence[dict[str, Any]], width: int | None) -> str:
    """The reports as text, in lines of at most ``width`` columns if that is not None."""
    if not reports:
        return wrapped(
            "No loader of shmloader has returned a batch: the program has to import it, and to load with "
            "shmloader.DataLoader or after shmloader.install().",
            width,
        )
    return "\n".join(f"\n{wrapped(report['title'], width)}\n{render(report, width)}" for report in reports)


def _write(arguments: argparse.Namespace, reports: list[dict[str, Any]]) -> bool:
    spans = [report.pop("spans", []) for report in reports]
    figures = arguments.json, lambda path: path.write_text(json.dumps(reports), encoding="utf-8")
    if not reports:
        return write_files(figures)
    title = f"{reports[0]['title']}\n{reports[0]['verdict']['text']}"
    return write_files(
        figures,
        (arguments.trace, lambda path: write_trace(path, spans[0])),
        (arguments.picture, lambda path: _draw(path, title, spans[0])),
    )


def _draw(path: Path, title: str, spans: list[Any]) -> None:
    from shmloader.profiling.picture import draw

    draw(path, title, spans)
