"""The doctor's trials: probes that run in a session of their own, with a limit to their time."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shmloader.cli.programs import end_session
from shmloader.interrupts import HeldInterrupts
from shmloader.memory.limits import oom_kills


@dataclass(frozen=True)
class Trial:
    """The outcome of a probe."""

    works: bool
    answer: dict[str, Any] = field(default_factory=dict)  # see `probe.load` and `probe.register`
    error: str = ""  # its last lines of output, or that it hung, for people
    out_of_memory: bool = False  # whether the kernel killed a process for lack of memory meanwhile


def try_loading(start_method: str, batch_nbytes: int, limit_s: float, grace_s: float = 5.0) -> Trial:
    """Load a few batches with one worker and check every value.

    It may take ``limit_s`` once it has begun, and ``grace_s`` more for the interpreter to start and to end.
    Never raises for what the probe does, and leaves no process behind.
    """
    return _try(["load", str(limit_s), start_method, str(batch_nbytes)], limit_s, grace_s)


def try_cuda(limit_s: float, grace_s: float = 5.0) -> Trial:
    """Register 64 MiB of shared memory with CUDA, and copy them; otherwise as `try_loading`."""
    return _try(["cuda", str(limit_s)], limit_s, grace_s)


def _try(words: list[str], limit_s: float, grace_s: float) -> Trial:
    kills_before = oom_kills()
    late = ""
    try:
        with contextlib.ExitStack() as stack:
            with HeldInterrupts():  # one that came while it is started would leave it
                process = stack.enter_context(_start(words))
                session = stack.enter_context(contextlib.ExitStack())
                session.callback(end_session, process)
            with session:
                try:
                    # Not for the end of its output: a worker that hangs would keep that open.
                    process.wait(limit_s + grace_s)
                except subprocess.TimeoutExpired:
                    late = f"\nit was still not done after {limit_s + grace_s:g} s"
            output, errors = process.communicate()
    except OSError as error:
        return Trial(False, error=f"no process could be started: {error}")
    kills_after = oom_kills()
    out_of_memory = None not in (kills_before, kills_after) and kills_before != kills_after
    with contextlib.suppress(ValueError):
        if process.returncode == 0:
            return Trial(True, json.loads(output))
    error_text = _last_words(errors + late, process.returncode, limit_s)
    return Trial(False, error=error_text, out_of_memory=out_of_memory)


def _start(words: list[str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "shmloader.cli.doctor.probe", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that its workers can be ended with it
    )
    with contextlib.suppress(OSError):
        # If memory runs out, the kernel should choose the probe or its worker, and not the doctor.
        Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
    return process


def _last_words(errors: str, code: int, limit_s: float) -> str:
    """The end of a failed probe's output, and how the probe ended."""
    lines = [line.rstrip() for line in errors.splitlines() if line.strip()]
    hung = next((line for line in lines if line.startswith("Timeout (")), None)
    if hung is not None:  # faulthandler's words; what follows is where each thread is
        where = next((line.strip() for line in lines[lines.index(hung) + 1 :] if "File" in line), "")
        return f"it hung, and was ended after {limit_s:g} s; last seen in {where.removeprefix('File ')}"
    ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
    if not lines:
        return f"the process {ended} and said nothing"
    # An exception's message is the last line that does not belong to a traceback, notes come after it.
    start = max((i for i, line in enumerate(lines) if line.startswith("Traceback (")), default=-1)
    message = [line for line in lines[start + 1 :] if not line.startswith(" ")]
    return f"{' '.join(message or lines[-1:])[:600]} (the process {ended})"
