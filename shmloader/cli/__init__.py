"""The command line of shmloader: ``python -m shmloader COMMAND``.

A command is a module with a function ``main(words) -> int`` and one line in :data:`COMMANDS`. Only the module
of the chosen command is imported, so that help is quick and one command's optional dependencies never break
another.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import shmloader
from shmloader.cli.bench import checkout
from shmloader.messages import page

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""

COMMANDS = {
    "demo": "train a small language model with torch's loader and this one, side by side",
    "doctor": "say whether loading works on this host, what to change, and what to configure",
    "memory": "show who in a training program has how much memory, how it grows, and why",
    "profile": "measure where the time of a program's loaders goes, and say what holds them up",
    "serve": "make the batches of one loader for several programs of this host",
    "top": "show the figures of a program that runs under `profile`, live",
    "bench": "compare loaders with each other and with the limit of this machine",
}
"""Commands with a summary each. Command ``NAME`` is the module ``shmloader.cli.NAME``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's; gives the exit status, which is 130 after Ctrl-C."""
    with _open_streams():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shmloader",
        description="Tools of shmloader, the shared-memory DataLoader for PyTorch.",
        epilog="\n".join(["commands:", *_summaries(), "", f"pages: {page('docs/index.md')}"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shmloader {shmloader.__version__}")
    parser.add_argument(
        "command", nargs="?", choices=COMMANDS, metavar="COMMAND", help="one of the commands below"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    command = importlib.import_module(f"shmloader.cli.{arguments.command}")
    try:
        status: int = command.main(arguments.words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


@contextlib.contextmanager
def _open_streams() -> Iterator[None]:
    """Let what is for a stream go nowhere if the process was started without it: it is None then."""
    with contextlib.ExitStack() as stack:
        redirects = (sys.stdout, contextlib.redirect_stdout), (sys.stderr, contextlib.redirect_stderr)
        for redirect in (redirect for stream, redirect in redirects if stream is None):
            nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(redirect(nowhere))
        yield


def _summaries() -> Iterator[str]:
    for name, summary in COMMANDS.items():
        is_missing = name == "bench" and checkout() is None
        yield f"  {name:<8} {summary}{' (not in an installed package: in a checkout)' if is_missing else ''}"
