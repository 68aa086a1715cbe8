"""Files that a run writes at its end. They are checked before anything is measured.

Figures may take hours. A path that cannot be written is an error at once. If writing fails at the end (the
disk is full by then, say), only that file is lost.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class UnusablePathError(Exception):
    """A path on the command line that cannot be written; the text says why, and what to change."""


def check_file(path: Path) -> None:
    """Checks that a file can be written; leaves nothing behind, and an existing file unchanged.

    Raises:
        UnusablePathError: It cannot.
    """
    try:
        if path.is_dir():
            raise UnusablePathError(f"{path} is a folder: name a file in it")
        if path.is_file():
            path.open("ab").close()
        elif path.exists():  # a pipe or a device: opening it may block, or disturb its reader
            if not os.access(path, os.W_OK):
                raise UnusablePathError(f"{path} may not be written by this user")
        else:
            _check_place(path.resolve().parent, path)
    except OSError as error:
        raise UnusablePathError(f"{path} cannot be written: {error.strerror or error}") from error


def check_folder(path: Path) -> None:
    """Checks that files can be written to a folder, which is made at the end if it does not exist.

    Raises:
        UnusablePathError: They cannot.
    """
    try:
        if path.exists() and not path.is_dir():
            raise UnusablePathError(f"{path} is a file: name a folder")
        there = path.resolve()
        _check_place(next(folder for folder in (there, *there.parents) if folder.exists()), path)
    except OSError as error:
        raise UnusablePathError(f"{path} cannot be written to: {error.strerror or error}") from error


def _check_place(folder: Path, path: Path) -> None:
    if not folder.exists():
        raise UnusablePathError(f"{path} cannot be written: there is no folder {folder}, make it first")
    if not folder.is_dir():
        raise UnusablePathError(f"{path} cannot be written: {folder} is a file and not a folder")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        why = error.strerror or error
        raise UnusablePathError(
            f"{path} cannot be written: no file can be made in {folder}: {why}"
        ) from error


def check_drawing(module: str) -> None:
    """Checks that a module that draws can be imported.

    Raises:
        UnusablePathError: It cannot, since matplotlib is missing or does not work.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise UnusablePathError(
            f"pictures need matplotlib ({error}): pip install -c constraints.txt -e '.[plots]'"
        ) from error


def result_file(text: str) -> Path:
    """Reads the path of a file to be written, as a type for argparse."""
    path = Path(text)
    try:
        check_file(path)
    except UnusablePathError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


@contextlib.contextmanager
def noted(what: str, failures: list[str]) -> Iterator[None]:
    """Prints and notes errors of writing one output; the other outputs are still written.

    Args:
        what: Name of the output.
        failures: Receives the name if writing fails.
    """
    try:
        yield
    except OSError as error:
        failures.append(what)
        print(f"error: {what} could not be written: {error}", file=sys.stderr, flush=True)


def write_json(path: Path, value: Any) -> bool:
    """Writes plain data as JSON; if that fails, prints why and gives False."""
    failures: list[str] = []
    with noted(str(path), failures):
        path.write_text(json.dumps(value, indent=1, default=str), encoding="utf-8")
    return not failures
