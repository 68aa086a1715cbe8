"""``python -m shmloader doctor``: a check of loading on this host, with advice.

The doctor reads the host's limits, advises arguments that fit in them (:mod:`~shmloader.cli.doctor.advice`),
loads a few batches in processes of their own (:mod:`~shmloader.cli.doctor.trial`), and judges all of it in a
list of checks (:mod:`~shmloader.cli.doctor.checks`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

import shmloader
from shmloader.cli.doctor.advice import Advice, Room, advise, describe_advice
from shmloader.cli.doctor.checks import CHECKS, Check, Finding, Host, check_loading
from shmloader.cli.doctor.trial import try_cuda, try_loading
from shmloader.cli.options import parse_nbytes, whole_number
from shmloader.cli.programs import command_parser, print_out, say
from shmloader.memory.limits import cores, memory_headroom, open_files

DESCRIPTION = """\
Look at everything on this host that loading depends on, load a few batches for real with the
platform's start method and with spawn, and say for each thing whether it is ok or what to change.

The exit status is 0 if loading works, 1 if it does not, 3 if the report could not be written, and 130
after Ctrl-C. docs/doctor.md explains the checks and lists the keys of --json.
"""
NOT_WRITTEN = 3
"""Exit status if standard output could not be written to, whether loading works or not."""
USUAL_BATCH_NBYTES = 1 << 20
"""Bytes of the batches that are loaded if no size is given, or the given size does not fit."""

_MARGIN = 9 + 20  # columns of status and title
_LEAST_BESIDE = 60  # columns, for a text beside its title
_MOST = 1_000_000  # workers, and seconds


@dataclass(frozen=True)
class Report:
    """The doctor's findings and advice."""

    findings: Sequence[tuple[Check, Finding]]  # in the order in which they are printed
    advice: Advice

    @property
    def loading_works(self) -> bool:
        """Whether no check has failed."""
        return all(finding.status != "fail" for _, finding in self.findings)


def main(words: Sequence[str]) -> int:
    """Examine the host and print the report; 0 if loading works, 1 if it does not."""
    arguments = parse(words)
    report = examine(arguments.batch_bytes, arguments.workers, arguments.timeout)
    if not print_out(as_json(report) if arguments.json else as_text(report), "the report"):
        say(f"Loading {'works' if report.loading_works else 'does not work'} here.")
        return NOT_WRITTEN
    return 0 if report.loading_works else 1


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser("doctor", DESCRIPTION)
    number = whole_number(1, _MOST)
    size = "size of the largest batch, as 500000, 38MB or 36MiB: load such batches, and advise for them"
    parser.add_argument("--batch-bytes", type=parse_nbytes, metavar="SIZE", help=size)
    workers = "workers that you want (default: as many as the host has cores for)"
    parser.add_argument("--workers", type=number, metavar="N", help=workers)
    timeout = "most seconds for each attempt to load (default: %(default)s)"
    parser.add_argument("--timeout", type=number, default=60, metavar="S", help=timeout)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser.parse_args(words)


def examine(batch_nbytes: int | None, workers: int | None, limit_s: float) -> Report:
    """Read the host's limits, try loading for ``limit_s`` at most, and judge both."""
    default = multiprocessing.get_all_start_methods()[0]  # documented: the first is the default
    memory, usable, (used, limit) = memory_headroom(), cores(), open_files()
    left = None if used is None or limit is None else max(0, limit - used)
    room = Room(usable.usable, memory.available_nbytes, left, default)
    advice = advise(room, batch_nbytes, workers)
    tried_nbytes = batch_nbytes if batch_nbytes and advice.fits else USUAL_BATCH_NBYTES
    loading = {}
    for method in dict.fromkeys((default, "spawn")):
        print(f"loading with {method} ...", file=sys.stderr, flush=True)
        loading[method] = try_loading(method, tried_nbytes, limit_s)
    cuda = None
    if torch.version.cuda or torch.version.hip:
        print("registering memory with CUDA ...", file=sys.stderr, flush=True)
        cuda = try_cuda(limit_s)
    working = [method for method, trial in loading.items() if trial.works]
    if working and default not in working:
        advice = replace(advice, multiprocessing_context=working[0])
    host = Host(
        cores=usable,
        memory=memory,
        open_files=(used, limit),
        default_start_method=default,
        advice=advice,
        num_workers=workers or advice.num_workers,
        loading=loading,
        cuda=cuda,
    )
    findings = [(check, check.run(host)) for check in CHECKS]
    for method in loading:
        run = partial(check_loading, start_method=method)
        check = Check(f"loading_{method}", f"loading, {method}", run)
        findings.append((check, check.run(host)))
    return Report(findings, advice)


def as_json(report: Report) -> str:
    """The report as one JSON object; docs/doctor.md lists its keys."""
    answer = {
        "version": shmloader.__version__,
        "loading_works": report.loading_works,
        "checks": {check.name: {"title": check.title, **asdict(found)} for check, found in report.findings},
        "advice": asdict(report.advice),
    }
    return json.dumps(answer, indent=2)


def as_text(report: Report) -> str:
    """The report for people: a row per check, then the advice and a verdict."""
    width = max(40, min(120, shutil.get_terminal_size((100, 24)).columns))
    lines = [f"shmloader {shmloader.__version__} on {platform.platform(terse=True)}", ""]
    for check, finding in report.findings:
        lines += _paragraph(f"{finding.status:<9}{check.title:<20}", finding.found, width)
        if finding.change:
            lines += _paragraph(" " * _MARGIN, f"-> {finding.change}", width)
    lines += ["", "advised configuration"]
    for line in describe_advice(report.advice):
        lines += _paragraph("    ", line, width)
    failed = [check.title for check, finding in report.findings if finding.status == "fail"]
    warned = sum(finding.status == "warning" for _, finding in report.findings)
    if failed:
        verdict = f"Loading does not work here: see {', '.join(failed)}."
    else:
        verdict = f"Loading works here{f', with {warned} warning(s)' if warned else ''}."
    return "\n".join([*lines, "", verdict])


def _paragraph(head: str, text: str, width: int) -> list[str]:
    if len(head) == _MARGIN and width < _LEAST_BESIDE:  # the text goes below its title
        return [*filter(None, [head.rstrip()]), *_paragraph("    ", text, width)]
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
