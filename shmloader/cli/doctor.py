"""``python -m shmloader doctor``: whether loading works on this host, and what to change."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

import torch

from shmloader.cli.doctor_advice import Advice, Room, advise, describe_advice
from shmloader.cli.doctor_checks import (
    Check,
    check_address_space,
    check_cores,
    check_cuda,
    check_huge_pages,
    check_loading,
    check_locked_memory,
    check_mappings,
    check_memory,
    check_open_files,
    check_pidfd,
    check_segment,
    check_shm_mount,
    check_start_method,
    check_versions,
    default_start_method,
)
from shmloader.cli.doctor_descriptors import Descriptors, count_descriptors
from shmloader.cli.doctor_sizes import parse_nbytes
from shmloader.cli.doctor_trial import Trial, try_out
from shmloader.host.limits import cores, memory_headroom, open_files

DESCRIPTION = """\
Look at everything on this host that loading depends on, load a few batches for real with the
platform's start method and with spawn, and say for each thing whether it is ok or what to change.

The exit status is 0 if loading works, 1 if it does not, and 130 after Ctrl-C. docs/doctor.md explains
the checks and lists the keys of --json.
"""
INTERRUPTED = 130

_MARGIN = 9 + 20  # columns of status and title
_MOST = 1_000_000  # workers, and seconds


@dataclass(frozen=True)
class Report:
    """All that the doctor found.

    Attributes:
        checks: In the order in which they are printed.
        advice: The loader's configuration.
    """

    checks: Sequence[Check]
    advice: Advice

    @property
    def loading_works(self) -> bool:
        """Whether nothing has failed."""
        return all(check.status != "fail" for check in self.checks)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the doctor's description and options to its parser."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "--batch-bytes",
        type=parse_nbytes,
        metavar="SIZE",
        help="size of the largest batch, as 500000, 38MB or 36MiB: advise for it, and check the memory",
    )
    parser.add_argument(
        "--workers",
        type=_num_workers,
        metavar="N",
        help="workers that you want (default: as many as the host has cores for)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="most seconds for each attempt to load (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Examine the host and print the report.

    Args:
        arguments: Parsed options, see :func:`add_arguments`.

    Returns:
        0 if loading works, 1 if it does not, 130 after Ctrl-C.
    """
    try:
        report = examine(arguments.batch_bytes, arguments.workers, arguments.timeout)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    print(as_json(report) if arguments.json else as_text(report))
    return 0 if report.loading_works else 1


def examine(batch_nbytes: int | None, workers: int | None, limit_s: float) -> Report:
    """Try loading, read the host's limits, and judge them.

    Args:
        batch_nbytes: Bytes of the largest batch, or None if not known.
        workers: Workers that the user wants, or None.
        limit_s: Most seconds for each trial.
    """
    default = default_start_method()
    trials = {}
    for method in dict.fromkeys((default, "spawn")):
        print(f"loading with {method} ...", file=sys.stderr, flush=True)
        trials[method] = try_out("load", method, limit_s)
    cuda = None
    if torch.version.cuda or torch.version.hip:
        print("registering memory with CUDA ...", file=sys.stderr, flush=True)
        cuda = try_out("cuda", "-", limit_s)
    working = [method for method, trial in trials.items() if trial.works]
    method = default if default in working or not working else working[0]
    memory, usable = memory_headroom(), cores()
    room = Room(
        cores=usable.usable,
        available_nbytes=memory.available_nbytes,
        descriptors=_descriptors(method, trials[method], limit_s),
        other_start_method=method if method != default else "",
    )
    advice = advise(room, batch_nbytes, workers)
    segment_check = check_segment()
    checks = [
        check_versions(),
        check_start_method(),
        check_cores(usable, workers or advice.num_workers),
        check_memory(memory, advice),
        segment_check,
        check_shm_mount(),
        check_huge_pages(),
        check_pidfd(),
        check_open_files(room.descriptors, workers or advice.num_workers),
        check_address_space(advice),
        check_mappings(advice),
        check_locked_memory(),
        check_cuda(cuda),
        *(check_loading(method, trial, method == default) for method, trial in trials.items()),
    ]
    return Report(checks, advice)


def _descriptors(start_method: str, one: Trial, limit_s: float) -> Descriptors:
    """What a loader takes with the start method that it would use, by a second trial with two workers.

    Args:
        start_method: How workers start.
        one: The trial with one worker.
        limit_s: Most seconds for the second trial.
    """
    two = None
    if one.works and one.answer["descriptors"] is not None:
        print(f"counting open files with {start_method} ...", file=sys.stderr, flush=True)
        two = try_out("load-with-two", start_method, limit_s)
    files = open_files()
    return count_descriptors(files and files.left, start_method, one, two)


def as_json(report: Report) -> str:
    """The report as one JSON object; docs/doctor.md lists its keys."""
    checks = {}
    for check in report.checks:
        checks[check.name] = {key: value for key, value in asdict(check).items() if key != "name"}
    answer = {
        "version": _version(),
        "loading_works": report.loading_works,
        "checks": checks,
        "advice": asdict(report.advice),
    }
    return json.dumps(answer, indent=2)


def _version() -> str:
    try:
        return metadata.version("shmloader")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def as_text(report: Report) -> str:
    """The report for people: a paragraph per check, then the advice and a verdict."""
    width = max(60, min(120, shutil.get_terminal_size((100, 24)).columns))
    lines = [f"shmloader {_version()} on {platform.platform(terse=True)}", ""]
    for check in report.checks:
        lines += _paragraph(f"{check.status:<9}{check.title:<20}", check.found, width)
        if check.change:
            lines += _paragraph(" " * _MARGIN, f"-> {check.change}", width)
    lines += ["", "advised configuration"]
    for line in describe_advice(report.advice):
        lines += _paragraph("    ", line, width)
    failed = [check.title for check in report.checks if check.status == "fail"]
    warned = sum(check.status == "warning" for check in report.checks)
    if failed:
        verdict = f"Loading does not work here: see {', '.join(failed)}."
    else:
        verdict = f"Loading works here{f', with {warned} warning(s)' if warned else ''}."
    return "\n".join([*lines, "", verdict])


def _paragraph(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _num_workers(text: str) -> int:
    """Read a number of workers for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {_MOST:,}")
    return number


def _seconds(text: str) -> float:
    """Read a time for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= _MOST:  # nan neither
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and up to {_MOST:,}")
    return number
