"""Texts for messages: values of the program, on one line and cut at a length; endings of processes; pages."""

import contextlib
import signal
from importlib import metadata
from pathlib import Path

LINE = 200
"""Most characters that indices, keys and other values take in a message."""


def shown(value: object, most: int = LINE) -> str:
    """The ``repr`` of a value, on one line of at most so many characters."""
    try:
        if isinstance(value, memoryview):  # of packed indices
            value = value.tolist()
        return shorten(" ".join(repr(value).split()), most)
    except Exception as reason:  # noqa: BLE001 - the program's own __repr__
        return f"<repr() raises {type(reason).__name__}>"


def shorten(text: str, most: int) -> str:
    """A text, cut at a number of characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def ending_of(exit_code: int | None) -> str:
    """The ending of a process in words, by its exit code: negative is minus the signal, None unknown."""
    if exit_code is None:
        return "ended"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    with contextlib.suppress(ValueError):
        return f"was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"was killed by signal {-exit_code}"


def page(name: str) -> str:
    """The path of a page such as ``"docs/messages.md"``: in the checkout, or from pip; else its name."""
    checkout = Path(__file__).parents[1]
    if (checkout / "mkdocs.yml").is_file():
        return str(checkout / name)
    try:
        files = metadata.files("shmloader") or []
    except (metadata.PackageNotFoundError, OSError):  # not installed; no descriptor left to look
        return name
    found = (file for file in files if file.as_posix().endswith(f"share/doc/shmloader/{name}"))
    return next((str(Path(str(file.locate())).resolve()) for file in found), name)
