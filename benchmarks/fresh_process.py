"""Fresh processes: all benchmarks start their measurements this way.

A measurement runs as `python -m MODULE WORDS` with an interpreter and a session of its own: it inherits no
caches, descriptors or warmed-up allocator, and its workers can be ended with it. It answers with lines of
JSON, and may be asked for more with lines of JSON. The benchmark uses `FreshProcess`, the measurement uses
`claim_output`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent

END_S = 15.0
"""Time for a measurement that has answered to end by itself."""

OTHERS_END_S = 5.0
"""Time for the rest of its session after it, before it is killed."""


class MeasurementFailedError(Exception):
    """A measurement's process ended without an answer, or took too long; the text says why."""


class FreshProcess:
    """A measurement's process. Leaving the `with` block kills what is left of its session.

    Args:
        what: The measurement's name, for errors.
        module: The module that it runs.
        words: Its command line.
        environment: Variables that it gets besides this process's.
        folder: Its current folder, from which it also imports; that of the checkout by default.
        prefix: A command that runs it: `strace`, say.
        setup: Called first in its process, which is then a fork of this one.
    """

    def __init__(
        self,
        what: str,
        module: str,
        *words: str,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
        prefix: tuple[str, ...] = (),
        setup: Callable[[], None] | None = None,
    ) -> None:
        self.what = what
        self._late = False
        # As in an installed package, modules are compiled once, and not in each spawned worker.
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the exit
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, *words],
            cwd=folder,
            env=variables | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            preexec_fn=setup,  # noqa: PLW1509
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()
        with self._errors, contextlib.suppress(BrokenPipeError), self.process:
            pass  # closes the pipes, and waits

    def ask(self, question: Any) -> None:
        """Sends a question. If the process has ended, `answer` raises."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self, timeout_s: float | None = None) -> Any:
        """Waits for the next answer.

        Raises:
            MeasurementFailedError: The process ended without an answer, or took too long.
        """
        assert self.process.stdout is not None
        with self._killed_after(timeout_s):
            line = self.process.stdout.readline()
        if not line:
            raise self._failure()
        return json.loads(line)

    def finish(self, timeout_s: float = END_S) -> None:
        """Sends the end of the questions, and waits until the process has ended.

        Raises:
            MeasurementFailedError: It ended with an error, or took too long.
        """
        assert self.process.stdin is not None
        self.process.stdin.close()
        with self._killed_after(timeout_s):
            self.process.wait()
        if self.process.returncode:
            raise self._failure()
        self._await_others()

    def _await_others(self) -> None:
        """Waits for the rest of its session: a resource tracker removes shared memory that is left."""
        end_s = time.monotonic() + OTHERS_END_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < end_s:
                os.killpg(self.process.pid, 0)
                time.sleep(0.01)

    @contextlib.contextmanager
    def _killed_after(self, timeout_s: float | None) -> Iterator[None]:
        timer = threading.Timer(timeout_s, self._kill_late) if timeout_s is not None else None
        if timer is not None:
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    def _kill_late(self) -> None:
        self._late = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _failure(self) -> MeasurementFailedError:
        code = self.process.wait()
        self._errors.seek(0)
        errors = self._errors.read().decode(errors="replace")[-4000:]
        how = "hung" if self._late else f"ended with {code}"
        return MeasurementFailedError(f"{self.what} {how}:\n{errors}")


def run_fresh(what: str, module: str, *words: str, timeout_s: float | None = None) -> Any:
    """Runs a measurement with one answer, and returns the answer.

    Raises:
        MeasurementFailedError: It failed, or was not done in time.
    """
    with FreshProcess(what, module, *words) as fresh:
        answer = fresh.answer(timeout_s)
        fresh.finish()
        return answer


def claim_output() -> Callable[[Any], None]:
    """Keeps this process's standard output for answers; other output goes to standard error.

    Returns:
        A function that gives one answer: plain data.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(value: Any) -> None:
        print(json.dumps(value, default=str), file=answers, flush=True)

    return answer
