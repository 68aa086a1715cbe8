"""The programs in docs/serving.md run as printed, and so does the command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from serving_programs import WAIT_S, new_name
from warm_python import warm_python

import shmloader
from shmloader.cli.serve import load

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, str]:
    """The page's files, with a name for the loader that no other test has."""
    name = new_name()
    for file, code in re.findall(
        r"^```py(?:thon)?\n# (\w+\.py)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    ):
        (tmp_path / file).write_text(code.replace('"images"', repr(name)))
    return tmp_path, name


def run(*words: str, cwd: Path, head: list[str] | None = None) -> subprocess.Popen[str]:
    command = [*(head or warm_python()), *words]
    return subprocess.Popen(command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("way", ["program", "command"])
def test_the_pages_programs_read_the_same_batches(way: str, folder: tuple[Path, str]) -> None:
    path, name = folder
    words = ["serve.py"]
    if way == "command":
        words = ["-m", "shmloader", "serve", "dataset.py:make_loader", "--name", name, "--readers", "2"]
    programs = [run(*words, cwd=path), *(run("train.py", cwd=path) for _ in range(2))]
    (_, said), (one, _), (other, _) = (program.communicate(timeout=WAIT_S) for program in programs)
    assert [program.returncode for program in programs] == [0, 0, 0], said
    assert one == other
    assert len(one.splitlines()) == 8
    indices = [int(number) for line in one.splitlines()[:4] for number in re.findall(r"\d+", line)[1:]]
    assert sorted(indices) == list(range(32))


def test_the_command_ends_by_ctrl_c_and_says_what_it_does(folder: tuple[Path, str]) -> None:
    path, name = folder
    words = ["-m", "shmloader", "serve", "dataset.py:make_loader", "--name", name]
    with run(*words, cwd=path, head=[sys.executable]) as program:
        with shmloader.attach(name, timeout_s=WAIT_S) as reader:
            assert len(list(reader)) == 4
            os.kill(program.pid, signal.SIGINT)
            with pytest.raises(shmloader.LoaderClosed, match="KeyboardInterrupt"):
                list(reader)
        _, said = program.communicate(timeout=WAIT_S)
        assert program.returncode == 130
        assert said.splitlines() == [f"serve {name!r}: readers can attach now", "interrupted"]


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["dataset.py"], 2, "is not like train.py:loader"),
        (["none.py:loader"], 2, "none.py: there is no such file"),
        (["dataset.py:missing"], 1, "error: dataset.py has no 'missing'"),
        (["dataset.py:make_loader", "--window", "99"], 1, "error: window is 1 to 32 batches, and got 99"),
    ],
)
def test_the_command_refuses_what_it_cannot_serve(
    words: list[str], status: int, says: str, folder: tuple[Path, str]
) -> None:
    program = run("-m", "shmloader", "serve", *words, cwd=folder[0])
    _, said = program.communicate(timeout=WAIT_S)
    assert program.returncode == status
    assert says in said
    assert "can attach" not in said


def test_a_loader_that_is_no_function_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "of_test_page.py").write_text("loader = [1]\ndef made(): return [2]")
    assert [load(tmp_path / "of_test_page.py", name) for name in ("loader", "made")] == [[1], [2]]
    del sys.modules["of_test_page"]
