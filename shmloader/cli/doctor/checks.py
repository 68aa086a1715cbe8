"""The doctor's checks: one function for each thing that loading depends on.

A check reads the host, or judges what was read and tried before, and returns a :class:`Finding`.
:data:`CHECKS` lists them. All run in the main process.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Literal, NamedTuple

import psutil
import torch

from shmloader.cli.doctor.advice import (
    Advice,
    describe_lack,
    describe_remedy,
    descriptors_held,
    descriptors_needed,
    most_workers,
)
from shmloader.cli.doctor.trial import Trial
from shmloader.cli.options import format_nbytes
from shmloader.memory import why_unavailable
from shmloader.memory.limits import Cores, Headroom, locked_memory_limits, oom_kills

Status = Literal["ok", "warning", "fail"]
Value = str | int | float | bool | None

LIBRARIES = ("numpy", "psutil", "pyarrow", "torch")
"""Libraries that shmloader needs."""
_MANY_FILES = 64  # descriptors that a program should have left for files of its own
_GOOD_FILES = 4096


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    status: Status  # ``warning``: loading works, but something will hurt; ``fail``: it does not work
    found: str  # a sentence or two for people
    change: str = ""  # advice; empty when all is well
    values: Mapping[str, Value] = field(default_factory=dict)  # the figures in ``found``, for programs


@dataclass(frozen=True)
class Host:
    """All that the checks judge: limits of the host, outcomes of trials, the request and the advice."""

    cores: Cores
    memory: Headroom
    open_files: tuple[int | None, int | None]  # open descriptors, and the limit on them
    default_start_method: str  # of the platform
    advice: Advice
    num_workers: int  # that were asked for, else those advised
    loading: Mapping[str, Trial]  # by start method
    cuda: Trial | None = None  # of registering memory with it; None if torch is built without it


def check_versions(host: Host) -> Finding:
    """Python, and the libraries that shmloader needs, by importing them."""
    versions: dict[str, Value] = {"python": platform.python_version()}
    trouble = []
    for name in LIBRARIES:
        try:
            importlib.import_module(name)
            versions[name] = metadata.version(name)
        except (ImportError, OSError) as error:  # OSError: a shared library that does not load
            versions[name] = None
            trouble.append(f"{name} cannot be imported: {error}")
    found = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    if not trouble:
        return Finding("ok", found, values=versions)
    change = f"{'; '.join(trouble)}: reinstall shmloader and its dependencies"
    return Finding("warning", found, change, versions)


def check_cores(host: Host) -> Finding:
    """Cores, affinity and quota, against the workers and torch's own threads."""
    cores, threads = host.cores, torch.get_num_threads()
    found = f"{cores.affinity} of {cores.machine} cores"
    if cores.quota is not None:
        found += f", and a cgroup quota of {cores.quota:.2g} cores"
    values: dict[str, Value] = {**cores._asdict(), "usable": cores.usable, "torch_threads": threads}
    change = []
    if host.num_workers > cores.usable:
        change.append(
            f"{host.num_workers} workers share {cores.usable}: fewer are as fast, unless samples wait for a "
            "disk or a network"
        )
    if threads > cores.usable:
        change.append(
            f"torch computes with {threads} threads, which the quota throttles: torch.set_num_threads"
            f"({cores.usable}) or OMP_NUM_THREADS={cores.usable}"
        )
    return Finding("warning" if change else "ok", found, "; ".join(change), values)


def check_memory(host: Host) -> Finding:
    """Available memory of the machine and its cgroups, against the memory that the slots need."""
    room, advice, kills = host.memory, host.advice, oom_kills()
    found = (
        f"{format_nbytes(room.available_nbytes)} of {format_nbytes(room.limit_nbytes)} available, bounded by "
        f"{room.source}"
    )
    if kills:
        found += f"; {kills} process(es) have been killed here for lack of memory"
    values: dict[str, Value] = {**room._asdict(), "oom_kills": kills, "slots_nbytes": advice.slots_nbytes}
    if not advice.fits:
        return Finding("fail", found, describe_lack(advice), values)
    if advice.slots_nbytes is not None and advice.slots_nbytes > room.available_nbytes // 2:
        change = f"the slots take {format_nbytes(advice.slots_nbytes)} of it. {describe_remedy(advice)}"
        return Finding("warning", found, change, values)
    if kills:
        change = (
            "if it was a worker: DataLoader(..., share_dataset=True) keeps the dataset's Python objects in "
            "memory once; `python -m shmloader memory -- python train.py` names the attribute that workers "
            "copy, and each process's memory. Else use fewer workers or raise the memory limit"
        )
        return Finding("warning", found, change, values)
    return Finding("ok", found, values=values)


def check_open_files(host: Host) -> Finding:
    """Free descriptors of the main process, against those that the workers need."""
    (used, limit), workers, method = host.open_files, host.num_workers, host.default_start_method
    held, needed = descriptors_held(workers, method), descriptors_needed(workers, method)
    values: dict[str, Value] = {"held": held, "needed": needed, "used": used, "limit": limit}
    if used is None or limit is None:
        return Finding("ok", "no limit", values=values)
    found = (
        f"{limit:,} (ulimit -n), {used} open; {workers} worker(s) take {held} in the main process, and "
        f"{needed} while the last one starts"
    )
    left = max(0, limit - used)
    enough_for = most_workers(left, method)
    if enough_for is not None and enough_for < workers:
        change = f"{_raise_files(used + needed)}: {left} free ones are enough for {enough_for} workers"
        return Finding("fail", found, change, values)
    if left - held < _MANY_FILES:
        change = f"{_raise_files(used + held + _MANY_FILES)}: little is left for files that the program opens"
        return Finding("warning", found, change, values)
    return Finding("ok", found, values=values)


def _raise_files(needed: int) -> str:
    total = max(_GOOD_FILES, needed)
    return f"ulimit -n {total} (beyond the hard limit: docker run --ulimit nofile={total}, LimitNOFILE=)"


def check_cuda(host: Host) -> Finding:
    """CUDA: whether it works, and whether shared memory can be registered with it."""
    trial = host.cuda
    values: dict[str, Value] = {"available": False, "registered": False}
    if trial is None or (trial.works and not trial.answer["available"]):
        built = "torch is built without it" if trial is None else "no device can be used"
        return Finding("ok", f"no CUDA ({built}): there is nothing to page-lock slots for", values=values)
    values |= trial.answer
    if not trial.works:
        change = "pin_memory=False until CUDA itself works"
        return Finding("warning", f"trying it failed: {trial.error}", change, values)
    device = trial.answer["device"]
    soft, hard = locked_memory_limits()
    if not (trial.answer["registered"] and trial.answer["is_pinned"]):
        reason = trial.answer.get("error", "they are not seen as pinned")
        change = f"{reason}; pin_memory=True copies instead"
        if trial.answer.get("refused"):
            change += (
                f". The limit of locked memory (ulimit -l) is {soft}, hard {hard}: docker run --ulimit "
                "memlock=-1, LimitMEMLOCK=infinity"
            )
        found = f"{device}: slots cannot be page-locked"
        return Finding("warning", found, change, values)
    version, tried_nbytes = trial.answer["driver"], trial.answer["tried_nbytes"]
    batch_nbytes = host.advice.batch_nbytes or tried_nbytes
    per_byte_s = trial.answer["copy_s"] / tried_nbytes
    found = (
        f"{device}, driver for CUDA {version // 1000}.{version % 1000 // 10}: slots are page-locked at "
        f"{tried_nbytes / trial.answer['register_s'] / 1e9:.1f} GB/s, once, and copied at "
        f"{1e-9 / per_byte_s:.1f} GB/s; a batch of {format_nbytes(batch_nbytes)} takes "
        f"{1e3 * batch_nbytes * per_byte_s:.1f} ms; locked memory (ulimit -l): {soft}"
    )
    return Finding("ok", found, values=values)


def check_loading(host: Host, start_method: str) -> Finding:
    """Loading itself, with one start method."""
    trial, needed = host.loading[start_method], start_method == host.default_start_method
    values: dict[str, Value] = {"works": trial.works, "out_of_memory": trial.out_of_memory, **trial.answer}
    if why_unavailable() is not None:
        found = f"{why_unavailable()}: the loader loads as torch does, with the same batches"
        return Finding("warning", found, "to use shared-memory slots, run it on Linux", values)
    if trial.works:
        found = (
            f"works: {trial.answer['batches']} batches of {format_nbytes(trial.answer['batch_nbytes'])} from "
            f"one worker, checked; the first after {trial.answer['first_batch_s']:.2f} s"
        )
        return Finding("ok", found, values=values)
    change = "the message says what failed; everything above that is not ok may be why"
    if trial.out_of_memory:
        own = psutil.Process().memory_info()
        change = (
            "the kernel killed it for lack of memory: raise the memory limit of the cgroup (the doctor "
            f"itself takes about {format_nbytes(own.rss - getattr(own, 'shared', 0))} of it)"
        )
    elif not needed:
        change = f"do not use multiprocessing_context={start_method!r} here"
    return Finding("fail" if needed else "warning", f"does not work: {trial.error}", change, values)


class Check(NamedTuple):
    """One check: its key in the JSON report, which never changes, its name for people, and its function."""

    name: str
    title: str
    run: Callable[[Host], Finding]


CHECKS = (
    Check("versions", "versions", check_versions),
    Check("cores", "cores", check_cores),
    Check("memory", "memory", check_memory),
    Check("open_files", "open files", check_open_files),
    Check("cuda", "CUDA", check_cuda),
)
"""The checks in the order of the report. The checks of loading come after them, one per start method."""
