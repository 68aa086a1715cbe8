"""Draws the pictures of docs/: what commands show in a terminal, and what they draw.

``python -m benchmarks.pictures docs`` runs each command over a program, in a terminal of 100 columns. So does
`make docs` for the site.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.text import Text
from torch.utils.data import Dataset

from benchmarks.fresh_process import ROOT
from benchmarks.options import finite_number
from shmloader import DataLoader

PICTURES = ("memory-growth.png", "memory-live.svg", "profile.png", "profile.svg", "top.svg")
COLUMNS, LINES = 100, 40
SHMLOADER = (sys.executable, "-m", "shmloader")
ERASED = re.compile(r"\r?\x1b\[2K(?:\x1b\[1A\x1b\[2K)*")  # where a live view is drawn anew
ESCAPES = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")


class OneSlow(Dataset[torch.Tensor]):
    """320 samples of a millisecond. One in eighty takes 60, which holds up the others."""

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.06 if index % 80 == 41 else 0.001)
        return torch.full((3, 64, 64), index)


def be_program(seconds: float) -> None:
    """The program that is profiled."""
    end_s = time.monotonic() + seconds
    with DataLoader(OneSlow(), 8, num_workers=2, persistent_workers=True) as loader:
        while time.monotonic() < end_s:
            for _ in loader:
                time.sleep(0.003)


class Terminal:
    """A process whose output (1) or errors (2) go to a terminal; what it does not show there goes nowhere."""

    def __init__(self, words: Sequence[str], shown: int) -> None:
        self._fd, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        streams = [theirs if number == shown else subprocess.DEVNULL for number in (1, 2)]
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        self.process = subprocess.Popen(
            words, cwd=ROOT, stdout=streams[0], stderr=streams[1], env=environment | {"TERM": "xterm"}
        )
        os.close(theirs)
        self._written = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self._written += os.read(self._fd, 1 << 16)
            except OSError:  # the process has ended
                return

    def screens(self) -> list[str]:
        """Waits for the end; returns what was shown: each state of a live view, and what came after it."""
        self._reader.join()
        os.close(self._fd)
        if self.process.wait():
            raise SystemExit(f"error: {self.process.args!r} ended with {self.process.returncode}")
        text = self._written.decode().replace("\r\n", "\n")
        return [ESCAPES.sub("", one).strip("\n") for one in ERASED.split(text)]


def save(path: Path, screen: str, title: str) -> None:
    """Draws a terminal's text as an SVG that loads nothing from elsewhere."""
    console = Console(record=True, file=io.StringIO(), width=COLUMNS)
    console.print(Text(screen))
    svg = console.export_svg(title=title, unique_id=path.stem)
    path.write_text(re.sub(r"@font-face \{[^}]*\}\s*|<!--.*?-->\s*", "", svg), encoding="utf-8")


def draw_memory(folder: Path, rows: int, seconds: float) -> None:
    """Follows torch's loader over a list of dicts with `shmloader memory`."""
    program = [
        sys.executable,
        "-m",
        "benchmarks.memory_command",
        "--program",
        "fork",
        str(rows),
        "2",
        str(seconds),
    ]
    options = ["--picture", str(folder / "memory-growth.png")]
    screens = Terminal([*SHMLOADER, "memory", *options, "--", *program], shown=2).screens()
    live = [screen for screen in screens if "worker 0 of train" in screen and "peak" not in screen]
    save(folder / "memory-live.svg", live[-1], "python -m shmloader memory -- python train.py > log")


def draw_profile(folder: Path, seconds: float) -> None:
    """Follows this module's program with `shmloader profile` and `top`."""
    program = [sys.executable, "-m", "benchmarks.pictures", "--program", str(seconds)]
    options = ["--picture", str(folder / "profile.png")]
    profile = Terminal([*SHMLOADER, "profile", *options, "--", *program], shown=2)
    while not psutil.Process(profile.process.pid).children():  # the program
        time.sleep(0.1)
    top = Terminal([*SHMLOADER, "top", str(profile.process.pid)], shown=1)
    save(folder / "profile.svg", profile.screens()[-1], "python -m shmloader profile -- python train.py")
    live = [screen for screen in top.screens() if "batches/s" in screen]
    save(folder / "top.svg", live[-1], "python -m shmloader top PID")


def main(words: Sequence[str] | None = None) -> None:
    """Draws all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="where to write them")
    parser.add_argument("--program", type=finite_number(0.0), metavar="S", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.program:
        be_program(arguments.program)
        return
    if arguments.folder is None or not arguments.folder.is_dir():
        parser.error("a folder is needed")
    folder = arguments.folder.absolute()
    draw_memory(folder, 500_000, 15.0)
    draw_profile(folder, 10.0)
    print(*(folder / name for name in PICTURES), sep="\n")


if __name__ == "__main__":
    main()
