"""``python -m shmloader serve``: a process that serves a loader of a file to other programs."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shmloader
from shmloader.cli.programs import command_parser, say
from shmloader.serving.server import WINDOW

DESCRIPTION = """\
Serve the batches of a loader to other processes of this host, until Ctrl-C or SIGTERM:

    python -m shmloader serve train.py:loader --name imagenet

`loader` is a loader, or a function without arguments that returns one, in the module of that file. What the
file does under `if __name__ == "__main__"` is not run. Other programs read it as

    loader = shmloader.attach("imagenet")

docs/serving.md explains the options, which are arguments of shmloader.serve.
"""


def main(words: Sequence[str]) -> int:
    """Serve; gives 0 once that is over, or 1 with the reason. What the file raises has its traceback."""
    arguments = parse(words)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("shmloader.serving").setLevel(logging.INFO)  # it says when readers can attach
    path, found = arguments.loader
    loader, name = load(path, found), arguments.name or found
    if loader is None:
        say(f"error: {path} has no {found!r}, or it gives None")
        return 1
    try:
        shmloader.serve(
            loader,
            name,
            readers=arguments.readers,
            window=arguments.window,
            policy=arguments.policy,
            epochs=arguments.epochs,
            job=arguments.job,
        )
    except (shmloader.LoaderError, TypeError, ValueError) as error:
        say(f"error: {error}")
        return 1
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = command_parser("serve", DESCRIPTION)
    add = parser.add_argument
    add("loader", type=_place, metavar="FILE:NAME", help="a loader, or a function that returns one")
    add("--name", help="that readers attach to (NAME)")
    add("--readers", type=int, metavar="N", help="readers in step; without it any number, at any time")
    add("--window", type=int, default=WINDOW, metavar="N", help="batches ahead for a reader (%(default)s)")
    add("--policy", choices=("wait", "drop"), default="wait", help="for a slow reader (%(default)s)")
    add("--epochs", type=int, metavar="N", help="epochs to serve; without it any number")
    add("--job", metavar="TEXT", help="stands for the run, if readers belong to several")
    arguments = parser.parse_args(words)
    if not arguments.loader[0].is_file():
        parser.error(f"{arguments.loader[0]}: there is no such file")
    return arguments


def _place(text: str) -> tuple[Path, str]:
    path, _, name = text.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not like train.py:loader")
    return Path(path), name


def load(path: Path, name: str) -> Any:
    """The loader of that name in a file, or None; it is imported as a module: workers import it too."""
    sys.path.insert(0, str(path.absolute().parent))
    found = getattr(importlib.import_module(path.stem), name, None)
    return found() if callable(found) else found
