"""The run that a process is a rank of: only ranks of one run meet in `share_on_host`.

A run is identified by variables of its launcher, or by the process that started its ranks. The environment at
a process's start is read, not the present one: Lightning's rank 0 sets its address late, when it has started
the others, and frameworks set variables in all of them.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import enum
import functools
import hashlib
import itertools
import multiprocessing
import os
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import psutil

from shmloader.errors import LoaderError

_RANK_VARIABLES = ("LOCAL_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_AT_IMPORT = dict(os.environ)  # if the initial environment cannot be read
_PLAIN = (str, bytes, int, float, complex, bool, type(None), range, PurePath, dt.date, dt.timedelta)
_VALUES = (*_PLAIN, enum.Enum, type, list, tuple, set, frozenset)
_MOST_PARTS = 1_000_000  # of a fingerprint, which takes some seconds then


def job_of_process(name: str) -> list[str]:
    """The identity of the run that this process is a rank of; LoaderError if its launcher gives it none."""
    initial = _initial_environment()
    if "TORCHELASTIC_RUN_ID" in initial:
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        return ["torchrun", *(initial.get(name, "") for name in names)]
    tasks = initial.get("SLURM_STEP_NUM_TASKS", initial.get("SLURM_NTASKS"))
    # Started by srun. All programs of a shell that it has started inherit its step, of one task.
    if "SLURM_JOB_ID" in initial and initial.get("SLURM_STEP_ID", "").isdigit() and tasks != "1":
        return ["slurm", initial["SLURM_JOB_ID"], initial["SLURM_STEP_ID"]]
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:  # torch.multiprocessing.spawn, notebooks' launchers
        return ["process", _process(parent.pid)]
    if not any(variable in initial for variable in _RANK_VARIABLES):
        return ["process", _process(os.getpid())]  # alone, or the first of Lightning's ranks
    if _is_python(os.getppid()):  # Lightning's other ranks, and those of launchers written in Python
        return ["process", _process(os.getppid())]
    if "MASTER_ADDR" in initial and "MASTER_PORT" in initial:
        return ["address", initial["MASTER_ADDR"], initial["MASTER_PORT"]]
    raise LoaderError(
        f"share_on_host(name={name!r}): this process is a rank of a run, but its launcher does not tell runs "
        "apart: two at a time would get each other's data. Name the run: share_on_host(..., job=...), with "
        "what all of its ranks know and no other run has, such as its output folder"
    )


def _initial_environment() -> Mapping[str, str]:
    """The environment that this process was started with."""
    try:
        *entries, last = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return _AT_IMPORT
    if last or not all(b"=" in entry for entry in entries):  # setproctitle has written over it
        return _AT_IMPORT
    return dict(entry.decode(errors="replace").split("=", 1) for entry in entries)


def _process(pid: int) -> str:
    """A process, distinguished from a later one with the same id by its start, in ticks since the boot.

    A time of day would change when the clock is set between two ranks' looks.
    """
    try:
        stat = Path("/proc", str(pid), "stat").read_text(errors="replace")
    except OSError:
        return str(pid)
    return f"{pid} {stat.rpartition(')')[2].split()[19]}"


def _is_python(pid: int) -> bool:
    try:
        return Path(psutil.Process(pid).exe()).name.startswith("python")
    except psutil.Error:
        return False


def fingerprint_of(build: Callable[[], Any]) -> str:
    """A fingerprint of a function without arguments: its place, and the values that it is bound to.

    Dicts and attributes of objects do not count. They differ between the ranks of one run, as the rank in a
    configuration and `self.device` do, and between objects that share rightly.
    """
    text = _Walk().text_of(build)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:32]


class _Walk:
    """A walk through the values that a function is bound to, of `_MOST_PARTS` texts at most."""

    def __init__(self) -> None:
        self._left = _MOST_PARTS

    def text_of(self, value: Any) -> str:
        """A text that tells a value from others, the same in each process."""
        parts = []
        for part in self._parts_of(value):
            parts.append(part)
            self._left -= 1
            if self._left <= 0:
                break
        return "\0".join(parts)

    def _parts_of(self, value: Any) -> Iterator[str]:
        # All arguments come before the elements of the first: a long one does not hide those behind it.
        todo = deque([value])
        while todo:
            value = todo.popleft()
            is_plain = isinstance(value, _PLAIN)
            yield repr(value) if is_plain else type(value).__qualname__
            if isinstance(value, enum.Enum):
                yield str(value.name)
            elif is_plain:
                continue
            elif callable(value):
                line = getattr(getattr(value, "__code__", None), "co_firstlineno", None)
                place = getattr(value, "__module__", None), getattr(value, "__qualname__", None), line
                yield from map(str, place)
            if isinstance(value, set | frozenset):
                yield str(len(value))
                yield from self._texts_in(value)
                continue
            held = _held_by(value)
            yield str(len(held))
            todo.extend(itertools.islice(held, max(0, self._left - len(todo))))

    def _texts_in(self, values: Iterable[Any]) -> list[str]:
        """The texts of a set's elements, sorted; none if they are too many, whatever their order is."""
        texts = []
        for one in values:
            if self._left <= 0:
                return []
            texts.append(self.text_of(one))
        return sorted(texts) if self._left > 0 else []


def _held_by(value: Any) -> Sequence[Any]:
    """The values that a function is bound to, or the elements of a list, in the same order anywhere."""
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *sorted(value.keywords.items()))
    if isinstance(value, types.MethodType):
        return (value.__func__,)
    if isinstance(value, types.FunctionType):
        bound = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                bound.append(cell.cell_contents)
        return [one for one in bound if isinstance(one, _VALUES)]
    return value if isinstance(value, list | tuple) else ()
