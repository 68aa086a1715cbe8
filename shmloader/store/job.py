"""The run that a process is a rank of: only ranks of one run meet in `share_on_host`.

A run is identified by variables of its launcher, or by the process that started its ranks. The environment at
a process's start is read, not the present one: Lightning's rank 0 sets its address late, when it has started
the others, and frameworks set variables in all of them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import multiprocessing
import os
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from shmloader.errors import LoaderError

_RANK_VARIABLES = ("LOCAL_RANK", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_AT_IMPORT = dict(os.environ)
_PLAIN = (str, bytes, int, float, bool, type(None), Path)


def job_of_process(name: str) -> list[str]:
    """The identity of the run that this process is a rank of; LoaderError if its launcher gives it none."""
    initial = _initial_environment()
    if "TORCHELASTIC_RUN_ID" in initial:
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        return ["torchrun", *(initial.get(name, "") for name in names)]
    if "SLURM_JOB_ID" in initial and initial.get("SLURM_STEP_ID", "").isdigit():  # started by srun
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
    """A fingerprint of a function without arguments: its place, and plain values that it is bound to."""
    text = "\0".join(_parts_of(build))
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:32]


def _parts_of(value: Any) -> list[str]:
    """Texts that tell a value from others, the same in each process."""
    if isinstance(value, functools.partial):
        return _parts_of((value.func, *value.args, *sorted(value.keywords.items())))
    if isinstance(value, types.MethodType):
        return _parts_of(value.__func__)
    if isinstance(value, types.FunctionType):
        bound = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty one
                bound.append(cell.cell_contents)
        place = value.__module__, value.__qualname__, value.__code__.co_firstlineno
        return [*map(str, place), *_parts_of(tuple(one for one in bound if isinstance(one, _PLAIN)))]
    if isinstance(value, tuple):
        return [part for item in value for part in _parts_of(item)]
    return [repr(value)] if isinstance(value, _PLAIN) else [type(value).__qualname__]
