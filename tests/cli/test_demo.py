"""The demo on real input, made small: its output, its files, and the processes that it leaves.

The leak guard checks after every test that no shared memory is left.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shmloader.cli import main
from shmloader.cli.demo.corpus import (
    HELD_OUT_SAMPLES,
    MAX_SAMPLE_NBYTES,
    Corpus,
    SourceDataset,
    library_folders,
    pad_batch,
    split_source,
)
from shmloader.memory.process_memory import read_memory

needs_pss = pytest.mark.skipif(
    "Pss" not in read_memory(os.getpid()), reason="the platform does not report PSS"
)

_MARK = "SHMLOADER_TEST_MARK"
_SMALL = ["--max-bytes", "200K", "--batch-size", "8"]


class MarkedRun:
    """Runs the command line so that every process it starts, however deep, can be found again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self._mark = uuid.uuid4().hex
        self._environment = os.environ | {_MARK: self._mark, "TMPDIR": str(folder)}

    def start(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "shmloader", *words],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def finish(self, *words: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words)
        output, errors = process.communicate(timeout=200)
        return subprocess.CompletedProcess(words, process.returncode, output, errors)

    def living_processes(self) -> list[psutil.Process]:
        living = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark:
                    living.append(process)
            except psutil.Error:
                continue
        return living

    def end(self) -> None:
        """Kill and reap the processes that a failed test left."""
        for process in self.living_processes():
            process.kill()
        for started in self._started:
            if started.returncode is None:
                started.communicate()


@pytest.fixture
def marked_run(tmp_path: Path) -> Iterator[MarkedRun]:
    run = MarkedRun(tmp_path)
    yield run
    run.end()


def wait_for(condition: object, timeout_s: float) -> bool:
    assert callable(condition)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.05)
    return False


def cells(output: str, label: str) -> list[str]:
    (row,) = re.findall(rf"^{re.escape(label)}.*$", output, re.MULTILINE)
    return row[len(label) :].split()


def test_both_loaders_give_equal_losses_and_leave_nothing_behind(marked_run: MarkedRun) -> None:
    done = marked_run.finish("demo", "--steps", "4", *_SMALL)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "equal, bit for bit: yes" in done.stdout
    before, after = (
        [float(loss) for loss in cells(done.stdout, f"held-out loss {when}, nats/byte")]
        for when in ("before", "after")
    )
    assert before[0] == before[1]
    assert after[0] == after[1] < before[0]
    assert "Traceback" not in done.stderr
    assert marked_run.living_processes() == []


@needs_pss
def test_zero_workers_work_and_memory_is_known(marked_run: MarkedRun) -> None:
    done = marked_run.finish("demo", "--loader", "shmloader", "--workers", "0", "--steps", "2", *_SMALL)
    assert done.returncode == 0, done.stderr
    (peak,) = cells(done.stdout, "peak memory of all processes, MiB (PSS)")
    assert int(peak.replace(",", "")) > 20


def test_a_failed_run_is_told_by_the_exit_status_and_one_message(marked_run: MarkedRun) -> None:
    done = marked_run.finish("demo", "--max-bytes", "100", "--steps", "2")
    assert done.returncode == 1
    assert "raise --max-bytes" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="SIGINT as a terminal sends it")
@pytest.mark.parametrize("loader", ["torch", "shmloader"])
def test_ctrl_c_is_quiet_and_leaves_no_process(marked_run: MarkedRun, loader: str) -> None:
    process = marked_run.start("demo", "--loader", loader, "--steps", "100000", *_SMALL)
    # The demo, the run and two workers.
    assert wait_for(lambda: len(marked_run.living_processes()) >= 4, timeout_s=120)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    assert wait_for(lambda: not marked_run.living_processes(), timeout_s=60)


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_run_ends_when_the_demo_itself_is_killed(marked_run: MarkedRun) -> None:
    process = marked_run.start("demo", "--loader", "torch", "--steps", "100000", *_SMALL)
    assert wait_for(lambda: len(marked_run.living_processes()) >= 4, timeout_s=120)
    process.kill()
    process.communicate()
    assert wait_for(lambda: not marked_run.living_processes(), timeout_s=30)


def test_the_demos_help_explains_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["demo", "--help"])
    assert end.value.code == 0
    output = capsys.readouterr().out
    for word in ("--max-bytes", "--start-method", "PSS", "bit for bit"):
        assert word in output


@pytest.mark.parametrize(
    "words", [["--steps", "0"], ["--workers", "-1"], ["--max-bytes", "5X"], ["--max-bytes", ""]]
)
def test_bad_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["demo", *words])
    assert end.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_the_corpus_is_the_same_every_time_and_keeps_to_its_size() -> None:
    first, second = (Corpus(library_folders(), 300_000) for _ in range(2))
    pieces = list(first.training_pieces())
    assert pieces == list(second.training_pieces())
    assert first.held_out == second.held_out
    assert 0 < first.nbytes <= 300_000
    assert len(pieces) + len(first.held_out) == first.samples
    assert len({len(piece) for piece in pieces}) > 20, "the samples should be ragged"


def test_a_corpus_keeps_any_encoding_and_leaves_out_what_it_cannot_read(tmp_path: Path) -> None:
    latin = "# coding: latin-1\nname = 'é'\n".encode("latin-1")
    (tmp_path / "a.py").write_bytes(latin)
    (tmp_path / "b.py").symlink_to(tmp_path / "missing.py")
    (tmp_path / "c.py").symlink_to(tmp_path / "a.py")
    corpus = Corpus([tmp_path], 10_000)
    pieces = list(corpus.training_pieces())
    assert b"".join(corpus.held_out + pieces) == latin
    assert (corpus.files, corpus.lines) == (1, 2)


def test_the_pieces_of_a_file_are_bounded_and_make_up_the_file() -> None:
    source = Path(subprocess.__file__).read_bytes()
    pieces = list(split_source(source))
    assert b"".join(pieces) == source
    assert max(map(len, pieces)) <= MAX_SAMPLE_NBYTES


def test_held_out_pieces_are_not_trained_on(tmp_path: Path) -> None:
    functions = [f"def number_{number}(): pass\n".encode() for number in range(64 * HELD_OUT_SAMPLES + 1000)]
    (tmp_path / "a.py").write_bytes(b"".join(functions))
    corpus = Corpus([tmp_path], 10_000_000)
    training = list(corpus.training_pieces())
    assert corpus.held_out == functions[: 64 * HELD_OUT_SAMPLES : 64]
    assert sorted(training + corpus.held_out) == sorted(functions)


def test_a_batch_is_padded_to_its_longest_sample() -> None:
    dataset = SourceDataset([b"ab", b"abcd"])
    batch = pad_batch([dataset[0], dataset[1]])
    assert batch.tokens.tolist() == [[97, 98, 0, 0], [97, 98, 99, 100]]
    assert batch.lengths.tolist() == [2, 4]
