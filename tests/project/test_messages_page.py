"""The headings of docs/messages.md are word for word what programs end with, and its cures cure them.

Most are provoked, by `message_programs`; where that takes a GPU or a place that tests do not have, the text
is looked up in the source that raises it.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from small_places import with_shm

import shmloader

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "messages.md").read_text(encoding="utf-8")
PROGRAMS = REPOSITORY / "tests" / "message_programs.py"

TORCHS = {
    "Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm)."
    "": "bus_error",
    "unable to allocate shared memory(shm) for file …: No space left on device": "no_space",
    "DataLoader worker (pid …) is killed by signal: Killed.": "killed",
    "DataLoader worker (pid(s) …) exited unexpectedly": "guard",
    "Too many open files. Communication with the workers is no longer possible.": "files",
    "received 0 items of ancdata": "ancdata",
    "Caught KeyError in DataLoader worker process 0.": "key_error",
    "Can't pickle local object": "local_object",
    "torch_shm_manager at …: could not generate a random directory for manager socket": "manager",
    "unable to open shared memory object … in read-write mode": "object_gone",
    "DataLoader timed out after … seconds": "timed_out",
    "can only test a child process": "child",
    "An attempt has been made to start a new process before the current process has finished its "
    "bootstrapping phase.": "guard",
    "Connection reset by peer": "reset",
}
"""Messages of torch and Python, each with the program that ends with it under torch's loader."""

CURED = {"no_space", "files", "ancdata", "local_object", "manager", "object_gone", "child"}
"""Programs that load all batches with shmloader's loader, unchanged."""

OURS = {
    "shmloader worker … was killed by signal 9 (SIGKILL)": "killed",
    "the program keeps … batches, the most that slots are made for": "keeps",
    "this iterator cannot go on: …": "closed",
    "each of … workers rebuilds the dataset's Python objects from a pickle": "rebuilt",
    "the state does not fit this loader": "other_state",
    "needs … more bytes of shared memory, but only … of … bytes are available in": "exhausted",
}
"""Messages of shmloader, each with the program that ends with it."""

SHM = {"no_space": "16m", "manager": "256m", "object_gone": "256m"}
"""Programs that get a /dev/shm of their own, of this size: torch's loader leaves files there."""

IN_SOURCE = {
    "Pin memory thread exited unexpectedly": "torch.utils.data.dataloader",
    "Cannot re-initialize CUDA in forked subprocess.": "torch.cuda",
    "which is defined in an interactive session": "shmloader.workers.spawn_payload",
}
"""Messages that are not provoked here, each with the module that has its words."""


def run(name: str, loader: str) -> tuple[int, str]:
    """Run a program of `message_programs` with a loader; its exit status and all that it prints."""
    place = with_shm(SHM[name]) if name in SHM else []
    command = [*place, sys.executable, str(PROGRAMS), name, loader]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=240, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).decode(errors="replace").split())


def words(heading: str) -> re.Pattern[str]:
    """A pattern of the message, with anything in place of each ellipsis."""
    return re.compile(".{1,300}?".join(map(re.escape, heading.strip("… ").split("…"))))


def test_every_heading_is_checked() -> None:
    found = re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
    assert sorted(found) == sorted([*TORCHS, *OURS, *IN_SOURCE])
    assert len(TORCHS) + 2 >= 15


@pytest.mark.long
@pytest.mark.parametrize("heading", TORCHS)
def test_a_program_with_torchs_loader_ends_with_the_message(heading: str) -> None:
    for _ in range(5):  # of two messages about one death, torch gives the one that it hears of first
        status, said = run(TORCHS[heading], "torch")
        assert status or heading.startswith("can only test")  # which is ignored, and printed
        if words(heading).search(said):
            return
    pytest.fail(said[-2000:])


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(CURED))
def test_the_same_program_loads_with_this_loader(name: str) -> None:
    status, said = run(name, "shmloader")
    assert (status, said) == (0, "loaded")


@pytest.mark.long
@pytest.mark.parametrize("heading", OURS)
def test_a_program_with_this_loader_says_the_message(heading: str) -> None:
    _, said = run(OURS[heading], "shmloader")
    assert words(heading).search(said), said[-2000:]


@pytest.mark.parametrize("heading", IN_SOURCE)
def test_a_message_that_is_not_provoked_is_in_the_source(heading: str) -> None:
    file = importlib.import_module(IN_SOURCE[heading]).__file__ or ""
    texts = " ".join(
        node.value
        for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    assert all(part.strip() in texts for part in heading.strip("… ").split("…")), heading


def test_messages_lead_to_the_page() -> None:
    assert "(docs/messages.md)" in (REPOSITORY / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
    package = Path(shmloader.__file__).parent
    for module in ("workers/deaths.py", "exchange/recovery.py", "memory/limits.py"):
        assert "docs/messages.md" in (package / module).read_text(encoding="utf-8")
