"""Ctrl-C: one traceback, nothing left, and a program that catches it can continue."""

import contextlib
import fcntl
import gc
import os
import random
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import psutil
import pytest
from interrupted_lines import alone
from loading import Numbered

import shmloader
import shmloader.iterator
from robustness.datasets import first_indices
from robustness.processes import ENVIRONMENT, LONG, wait_gone, workers_of
from shmloader import DataLoader

SOURCES = os.path.dirname(shmloader.__file__)

PROGRAM = """
    import fcntl, sys, termios
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # this terminal's Ctrl-C comes to this session

    from loading import Numbered
    from robustness.datasets import first_indices
    from shmloader import DataLoader

    def main():
        method, stage = sys.argv[1:]
        loader = DataLoader(
            Numbered(80, delay_s=0.02), batch_size=4, num_workers=2, persistent_workers=True,
            multiprocessing_context=method,
        )
        iterator = None  # it may come in iter()
        try:
            if stage != "working":
                print("ready", flush=True)
            iterator = iter(loader)
            next(iterator)
            if stage == "working":
                print("ready", flush=True)
            while True:
                for batch in iterator:
                    pass
                iterator = iter(loader)
        except KeyboardInterrupt:
            if stage != "caught":
                raise
        del iterator
        assert first_indices(loader) == list(range(0, 80, 4))
        print("exact", flush=True)

    if __name__ == "__main__":
        main()
    """


class Outcome(NamedTuple):
    """The behaviour of a program after Ctrl-C.

    Attributes:
        text: Output on the terminal after it was ready, its own and its workers'.
        exit_code: Its exit code.
        seconds: From the last Ctrl-C to its end.
        left: Processes that outlived it.
    """

    text: str
    exit_code: int
    seconds: float
    left: list[psutil.Process]


def press_ctrl_c(method: str, stage: str, after_s: float, again_after_s: float | None = None) -> Outcome:
    """Run the program on a terminal of its own, and press Ctrl-C there."""
    terminal, program_side = os.openpty()
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), method, stage]
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), program_side)
    program = subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True, **ends)
    os.close(program_side)
    try:
        read = b""
        while b"ready" not in read:
            read += os.read(terminal, 4096)
        time.sleep(after_s)
        family = workers_of(program.pid)
        os.write(terminal, b"\x03")
        pressed = time.monotonic()
        if again_after_s is not None:
            time.sleep(again_after_s)
            with contextlib.suppress(OSError):
                os.write(terminal, b"\x03")
        read = read.partition(b"ready")[2] + _read_to_end(terminal)
        exit_code = program.wait(30)
        seconds = time.monotonic() - pressed
        _, left = wait_gone(family, 2)
    finally:
        program.kill()
        program.wait()
        os.close(terminal)
    return Outcome(read.decode().replace("\r\n", "\n").replace("^C", ""), exit_code, seconds, left)


def _read_to_end(terminal: int, timeout_s: float = 30.0) -> bytes:
    """The output until the last process on the terminal has ended, for ``timeout_s`` at most."""
    read, deadline = b"", time.monotonic() + timeout_s
    with contextlib.suppress(OSError):  # EIO: no process has the other side open
        while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
            read += os.read(terminal, 4096)
    return read


def test_the_terminal_is_a_real_one() -> None:
    terminal, program_side = os.openpty()
    assert os.isatty(program_side)
    assert fcntl.fcntl(terminal, fcntl.F_GETFL) & os.O_RDWR
    os.close(terminal)
    os.close(program_side)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_ctrl_c_in_an_epoch_gives_one_traceback_and_no_noise(method: str) -> None:
    outcome = press_ctrl_c(method, "working", after_s=0.3)
    assert outcome.text.count("Traceback (most recent call last)") == 1, outcome.text
    assert outcome.text.strip().splitlines()[0].startswith("Traceback"), outcome.text
    assert outcome.text.strip().endswith("KeyboardInterrupt"), outcome.text
    assert outcome.exit_code == -signal.SIGINT
    assert not outcome.left
    assert outcome.seconds < 20


def test_ctrl_c_while_workers_start_leaves_nothing() -> None:
    outcome = press_ctrl_c("forkserver", "starting", 0.05)
    assert outcome.text.strip().endswith("KeyboardInterrupt"), outcome.text
    assert not outcome.left


def test_ctrl_c_while_spawned_workers_import_gives_one_traceback_and_no_noise() -> None:
    outcome = press_ctrl_c("spawn", "starting", 0.8)
    assert not outcome.left
    assert outcome.text.count("Traceback (most recent call last)") == 1, outcome.text


@pytest.mark.parametrize("again_after_s", [0.0, 0.02, 0.2])
def test_ctrl_c_twice_ends_all_without_noise_of_workers(again_after_s: float) -> None:
    outcome = press_ctrl_c("fork", "working", 0.3, again_after_s)
    assert "Process " not in outcome.text, outcome.text
    assert "worker.py" not in outcome.text, outcome.text
    assert "KeyboardInterrupt" in outcome.text
    assert not outcome.left
    assert outcome.seconds < 20


@pytest.mark.parametrize("after_s", [0.1, 0.31])
def test_a_program_that_catches_ctrl_c_gets_an_exact_next_epoch(after_s: float) -> None:
    outcome = press_ctrl_c("fork", "caught", after_s)
    assert outcome.text.strip() == "exact"
    assert outcome.exit_code == 0
    assert not outcome.left


# At every line: signals come at any time, so each line of ours that runs in the main process is tried.


class Interrupted(NamedTuple):
    """The place where a call was interrupted; None if it ended before that line."""

    place: tuple[str, int] | None
    hit: bool


def interrupt_at(line: int, call: Callable[[], object]) -> Interrupted:
    """Call, and raise SIGINT before the ``line``-th line of shmloader that runs in the call."""
    count, place = 0, None

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count, place
        if event == "line":
            count += 1
            if count == line:
                sys.settrace(None)
                place = (os.path.basename(frame.f_code.co_filename), frame.f_lineno)
                signal.raise_signal(signal.SIGINT)
        return at_line

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        return at_line if frame.f_code.co_filename.startswith(SOURCES) else None

    sys.settrace(at_call)
    try:
        alone(call)
    except KeyboardInterrupt:
        return Interrupted(place, True)
    finally:
        sys.settrace(None)
    return Interrupted(place, False)


EXPECTED = list(range(0, 48, 4))


def _lines_of(call: Callable[[Any, Any], object]) -> int:
    """The number of lines of shmloader that run in a call."""
    count = 0

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return at_line

    loader, iterator = _begun()
    sys.settrace(lambda frame, *_: at_line if frame.f_code.co_filename.startswith(SOURCES) else None)
    try:
        call(loader, iterator)
    finally:
        sys.settrace(None)
    loader.close()
    return count


def _begun() -> tuple[DataLoader, Any]:
    loader = DataLoader(Numbered(48), batch_size=4, num_workers=2, persistent_workers=True, timeout=20)
    iterator = iter(loader)
    assert first_indices([next(iterator), next(iterator)]) == EXPECTED[:2]
    return loader, iterator


def _lines_to_try(total: int, short: int, seed: int) -> list[int]:
    lines = list(range(1, total + 1))
    return lines if LONG else sorted(random.Random(seed).sample(lines, min(short, total)))


@pytest.mark.timeout(1200)  # a minute, with every line tried; many, beside other programs
def test_an_interrupt_at_any_line_of_next_loses_nothing() -> None:
    """The same epoch continues exactly or says that it cannot; the next epoch is exact; no slot is lost."""
    for line in _lines_to_try(_lines_of(lambda _, iterator: next(iterator)), 15, seed=7):
        loader, iterator = _begun()
        interrupted = interrupt_at(line, lambda iterator=iterator: next(iterator))
        if interrupted.hit:
            with contextlib.suppress(shmloader.LoaderClosed):
                rest = first_indices(iterator)
                assert rest == EXPECTED[2:], f"after an interrupt at {interrupted.place}: {rest}"
        del iterator
        for _ in range(2):
            assert first_indices(loader) == EXPECTED, f"after an interrupt at {interrupted.place}"
        table = loader._iterator.table
        assert len(table.places) <= table.budget.base_slots + 1, f"slots were lost at {interrupted.place}"
        loader.close()


@pytest.mark.timeout(1200)  # a minute, with every line tried; many, beside other programs
def test_an_interrupt_at_any_line_of_iter_loses_nothing() -> None:
    for line in _lines_to_try(_lines_of(lambda loader, _: iter(loader)), 15, seed=8):
        loader, iterator = _begun()
        interrupted = interrupt_at(line, lambda loader=loader: iter(loader))
        del iterator
        for _ in range(2):
            assert first_indices(loader) == EXPECTED, f"after an interrupt at {interrupted.place}"
        table = loader._iterator.table
        assert len(table.places) <= table.budget.base_slots + 1, f"slots were lost at {interrupted.place}"
        loader.close()


@pytest.mark.timeout(1200)  # a minute, with every line tried; many, beside other programs
def test_an_interrupt_at_any_line_of_the_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reports an interrupt that comes while the iterator is being finalized."""
    # pytest would keep such a report, with the frames whose end stops the workers.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    def start() -> None:
        with DataLoader(Numbered(48), batch_size=4, num_workers=1) as loader:
            next(iter(loader))

    count = _lines_of(lambda *_: start())
    for line in _lines_to_try(count, 15, seed=9):
        interrupt_at(line, start)
    gc.collect()
    left = workers_of(os.getpid())
    for worker in left:
        worker.kill()
    wait_gone(left, 5)
    assert not left


def test_a_storm_of_signals_disturbs_nothing() -> None:
    """Handlers that return (profilers, progress bars) interrupt system calls, and nothing else."""
    caught = []
    before = signal.signal(signal.SIGALRM, lambda *_: caught.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for _ in range(3):
            loader = DataLoader(Numbered(4000, items=512), batch_size=4, num_workers=2)
            assert first_indices(loader) == list(range(0, 4000, 4))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(caught) > 100
