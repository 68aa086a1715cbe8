"""Programs that a command starts: output, signals and exit status stay their own."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)  # which it sends to both
_FORWARDED = (*_FROM_TERMINAL, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as shells have it


def command_parser(name: str, description: str) -> argparse.ArgumentParser:
    """The parser of a command, whose description keeps its lines."""
    return argparse.ArgumentParser(
        prog=f"python -m shmloader {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse_with_program(
    parser: argparse.ArgumentParser, words: Sequence[str], outputs: Sequence[str]
) -> argparse.Namespace:
    """Read a command line with a program after ``--``; checks the files that the options ``outputs`` name."""
    what = "the program to start, after --"
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help=what)
    arguments = parser.parse_args(words)
    if arguments.command[:1] == ["--"]:  # kept or dropped, by the version of Python
        del arguments.command[0]
    if arguments.picture and importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --picture: matplotlib is not installed: pip install 'shmloader[plots]'")
    for path in filter(None, (getattr(arguments, name) for name in outputs)):
        if not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no such folder")
    return arguments


def say(text: str) -> None:
    """Print to standard error. If nobody reads that any more, the program still goes on to its end."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(2)


def print_out(text: str, what: str) -> bool:
    """Print to standard output; returns whether that is where the text is now.

    A reader that has gone, such as ``head``, has what it wanted. If it cannot be written (a full disk),
    standard error says so.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard(1)
    except OSError as error:
        discard(1)
        say(f"error: {what} could not be written to standard output: {error.strerror}")
        return False
    return True


def write_files(*files: tuple[Path | None, Callable[[Path], object]]) -> bool:
    """Write the files that were asked for, each by a function; returns whether all could be.

    Says which one could not: an error of a full disk does not name it.
    """
    written = True
    for path, write in files:
        try:
            if path is not None:
                write(path)
        except OSError as error:
            say(f"error: {path}: {error.strerror}")
            written = False
    return written


def discard(fd: int) -> None:
    """Send a stream nowhere, with what is still to be flushed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)


def terminal_width(fd: int) -> int | None:
    """The columns of the terminal that a stream goes to, at least 40; None if it is none."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return max(40, int(columns))
    try:
        return max(40, os.get_terminal_size(fd).columns)
    except OSError:
        return None


def live_display(stream: TextIO, *, transient: bool = False) -> Any:
    """A display of rich's for one text that is replaced; None if there is no terminal, or no rich.

    It is a context manager; with ``transient`` the text is gone after it.
    """
    if not stream.isatty() or importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console
    from rich.live import Live

    return Live(console=Console(file=stream), auto_refresh=False, transient=transient)


def show_live(display: Any, text: str) -> None:
    """Replace the text of a `live_display`."""
    from rich.text import Text

    display.update(Text(text), refresh=True)


def start_program(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes] | int:
    """Start a program; if that fails, say why, and return the exit status."""
    try:
        return subprocess.Popen(command, env=environment)
    except OSError as error:
        cure = f". Start it by: python {command[0]}" if command[0].endswith(".py") else ""
        print(f"error: {command[0]}: {error.strerror}{cure}", file=sys.stderr)
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE


def exit_status(program: subprocess.Popen[bytes]) -> int:
    """Wait for a program's end; returns its exit status, or 128 and the signal that ended it."""
    status = program.wait()
    return status if status >= 0 else 128 - status


def end_session(process: subprocess.Popen[Any], grace_s: float = 0.0) -> None:
    """End a process that leads a session, unless it has succeeded, and all in its session that is left.

    With a grace it may end what it has started itself, before all are killed.
    """
    if grace_s and process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.terminate()
            process.wait(grace_s)
    if process.poll() != 0:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
    process.wait()


@contextlib.contextmanager
def forwarded_signals(program: subprocess.Popen[bytes]) -> Iterator[None]:
    """Send the program the signals that this process gets, except those that the terminal sends to both."""

    def forward(number: int, _: FrameType | None) -> None:
        if not (number in _FROM_TERMINAL and _is_in_foreground()):
            program.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    try:
        fd = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    finally:
        os.close(fd)
