"""The command line of shmloader: ``python -m shmloader COMMAND``.

A command is one module with two functions, :func:`add_arguments` and :func:`run`, and one line in
:data:`COMMANDS`. Only the module of the command that was asked for is imported, so that help is
quick and one command's optional dependencies never break another.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast


class CommandModule(Protocol):
    """What a command's module provides."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's description and options to its parser."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Carry the command out and return the process's exit status."""


@dataclass(frozen=True)
class Command:
    """One command of the command line.

    Attributes:
        name: The word typed after ``python -m shmloader``.
        summary: One line for the list of commands.
        module: Dotted name of its :class:`CommandModule`.
    """

    name: str
    summary: str
    module: str


COMMANDS: tuple[Command, ...] = (
    Command(
        "demo",
        "train a small language model with torch's loader and this one, side by side",
        "shmloader.cli.demo",
    ),
    Command(
        "doctor",
        "say whether loading works on this host, what to change, and what to configure",
        "shmloader.cli.doctor",
    ),
    Command(
        "bench",
        "compare loaders with each other and with the limit of this machine (in a checkout)",
        "shmloader.cli.bench",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; ``sys.argv[1:]`` when None.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    asked_for = next((word for word in words if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="python -m shmloader",
        description="Tools of shmloader, the shared-memory DataLoader for PyTorch.",
    )
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    module: CommandModule | None = None
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if command.name == asked_for:
            module = cast(CommandModule, importlib.import_module(command.module))
            module.add_arguments(subparser)
    arguments = parser.parse_args(words)
    if module is None:
        parser.print_help()
        return 0
    return module.run(arguments)
