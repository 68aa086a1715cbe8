"""What the doctor looks at on this host, one function for each thing. Main process only; keeps nothing."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
import torch

from shmloader.cli.doctor_advice import Advice, describe_lack, describe_remedy
from shmloader.cli.doctor_descriptors import Descriptors
from shmloader.cli.doctor_sizes import format_nbytes
from shmloader.cli.doctor_trial import Trial
from shmloader.host.limits import (
    Bound,
    Cores,
    Headroom,
    address_space,
    locked_memory,
    mappings,
    oom_kills,
    open_files,
)
from shmloader.shared_memory import HUGE_NBYTES, MemfdSegment
from shmloader.slots import RETAINED_SLOTS

Status = Literal["ok", "warning", "fail"]
Value = str | int | float | bool | None

_TRIED_NBYTES = 1 << 20
_SHM = "/dev/shm"
_MANY_FILES = 64  # descriptors that a program should have left for files of its own
_GOOD_FILES = 4096
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: Its key in the JSON report; never changes.
        title: Its name for people.
        status: ``ok``, ``warning`` (loading works, but something will hurt) or ``fail`` (it does not work).
        found: What was found, a sentence or two.
        change: What to change; empty when all is well.
        values: The figures in ``found``, for programs.
    """

    name: str
    title: str
    status: Status
    found: str
    change: str = ""
    values: Mapping[str, Value] = field(default_factory=dict)


def default_start_method() -> str:
    """How workers start here when nobody says otherwise."""
    return multiprocessing.get_all_start_methods()[0]  # documented: the first is the default


def check_versions() -> Check:
    """Python, and the libraries that shmloader's metadata asks for, against its lower bounds."""
    versions: dict[str, Value] = {"python": platform.python_version()}
    trouble = []
    for name, least in sorted(_requirements().items()):
        try:
            importlib.import_module(name)
            versions[name] = metadata.version(name)
        except (ImportError, OSError) as error:  # OSError: a shared library that does not load
            versions[name] = None
            trouble.append(f"{name} cannot be imported: {error}")
            continue
        if _numbers(metadata.version(name)) < _numbers(least):
            trouble.append(f"{name} {metadata.version(name)} is older than {least}")
    found = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    if not trouble:
        return Check("versions", "versions", "ok", found, values=versions)
    change = f"{'; '.join(trouble)}: reinstall shmloader and what it depends on"
    return Check("versions", "versions", "warning", found, change, versions)


def _requirements() -> dict[str, str]:
    """The libraries that shmloader needs, with the oldest version of each."""
    try:
        required = metadata.requires("shmloader") or []
    except metadata.PackageNotFoundError:  # run from a source tree
        required = ["torch>=0", "numpy>=0", "pyarrow>=0", "psutil>=0"]
    found = (re.fullmatch(r"([\w-]+)>=([\d.]+)", text) for text in required)  # extras carry a marker
    return {match[1]: match[2] for match in found if match}


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()


_START_METHODS = {
    "fork": "workers begin as copies of the program; a lock that another of its threads holds at that moment "
    "stays locked in them. shmloader itself starts no thread. If workers hang at their start, use "
    "multiprocessing_context='forkserver'",
    "forkserver": "workers are forked from a small server without threads; the dataset is pickled once",
    "spawn": "workers are new interpreters; the dataset is pickled once, and each imports the program",
}


def check_start_method() -> Check:
    """The platform's default start method, and what it means for threads."""
    method = default_start_method()
    found = f"{method}, the default of Python {platform.python_version()} here: {_START_METHODS[method]}"
    methods = " ".join(multiprocessing.get_all_start_methods())
    return Check(
        "start_method", "start method", "ok", found, values={"default": method, "available": methods}
    )


def check_cores(cores: Cores, num_workers: int) -> Check:
    """Cores, affinity and quota, against the workers and torch's own threads."""
    found = f"{cores.affinity} of {cores.machine} cores"
    if cores.quota is not None:
        found += f", and a cgroup quota of {cores.quota:.2g} cores"
    threads = torch.get_num_threads()
    values: dict[str, Value] = {**cores._asdict(), "usable": cores.usable, "torch_threads": threads}
    change = []
    if num_workers > cores.usable:
        change.append(
            f"{num_workers} workers share {cores.usable}: fewer are as fast, unless they wait for a disk"
        )
    if threads > cores.usable:
        change.append(
            f"torch computes with {threads} threads, which the quota throttles: torch.set_num_threads"
            f"({cores.usable}) or OMP_NUM_THREADS={cores.usable}"
        )
    return Check("cores", "cores", "warning" if change else "ok", found, "; ".join(change), values)


def check_memory(room: Headroom, advice: Advice) -> Check:
    """Memory of the machine and its cgroups, against what the slots need."""
    kills = oom_kills()
    found = (
        f"{format_nbytes(room.available_nbytes)} of {format_nbytes(room.limit_nbytes)} available, bounded by "
        f"{room.source}"
    )
    if kills:
        found += f"; {kills} process(es) here were killed for want of memory before"
    values: dict[str, Value] = {
        **room._asdict(),
        "oom_kills": kills,
        "slots_nbytes": advice.slots_nbytes,
    }
    status: Status = "ok"
    change = ""
    if not advice.fits:
        status = "fail"
        change = describe_lack(advice)
    elif advice.slots_nbytes is not None and advice.slots_nbytes > room.available_nbytes // 2:
        status = "warning"
        change = f"the slots take {format_nbytes(advice.slots_nbytes)} of it. {describe_remedy(advice)}"
    elif kills:
        status = "warning"
        change = "see what was killed (dmesg, memory.events); use fewer workers or raise the memory limit"
    return Check("memory", "memory", status, found, change, values)


def check_shm_mount() -> Check:
    """The tmpfs that named shared memory lives in; shmloader's memory does not."""
    usage = shutil.disk_usage(_SHM) if os.path.ismount(_SHM) else None
    found = f"nothing is mounted at {_SHM}"
    if usage is not None:
        found = f"{format_nbytes(usage.total)}, {format_nbytes(usage.free)} free"
    values: dict[str, Value] = {
        "mounted": usage is not None,
        "total_nbytes": usage and usage.total,
        "free_nbytes": usage and usage.free,
    }
    status: Status = "ok"
    change = ""
    if usage is None and sys.platform == "linux":
        status = "warning"
        change = "multiprocessing's locks and torch's share_memory_() need it: mount a tmpfs there"
    found += "; shmloader's memory does not depend on it"
    return Check("shm_mount", _SHM, status, found, change, values)


def check_segment() -> Check:
    """Make a segment, reserve, map and write it, and read it back through a second mapping."""
    try:
        segment = MemfdSegment()
        try:
            nbytes = segment.reserve(0, 0, _TRIED_NBYTES)
            written = segment.map(0, nbytes)
            written.view[:] = bytes(range(256)) * (nbytes // 256)
            intact = segment.map(0, nbytes).view == written.view
        finally:
            segment.close()
    except (AttributeError, OSError, RuntimeError, ValueError) as error:
        change = "allow memfd_create, fallocate and shared mappings (a seccomp profile may forbid them)"
        return Check("segment", "shared memory", "fail", f"{type(error).__name__}: {error}", change)
    found = f"memfd: {format_nbytes(nbytes)} reserved, mapped twice, written and read back"
    values: dict[str, Value] = {"tried_nbytes": nbytes}
    if not intact:
        change = "report this, with the platform: the two mappings do not show the same memory"
        return Check("segment", "shared memory", "fail", "a memfd does not share", change, values)
    return Check("segment", "shared memory", "ok", found, values=values)


def check_pidfd() -> Check:
    """Whether a process can be watched through a descriptor."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        found = f"not here ({error}); worker deaths are seen through the process's sentinel pipe instead"
        change = "Linux 5.3 or newer, and a seccomp profile that allows pidfd_open" * (
            sys.platform == "linux"
        )
        return Check("pidfd", "pidfd", "warning", found, change, {"works": False})
    return Check("pidfd", "pidfd", "ok", "works: a worker's death is seen at once", values={"works": True})


def check_open_files(descriptors: Descriptors, num_workers: int) -> Check:
    """Descriptors, against what the workers take of the main process's."""
    bound = open_files()
    if bound is None or bound.most is None:
        return Check("open_files", "open files", "ok", "no limit", values=_values(bound))
    held, needed = descriptors.held(num_workers), descriptors.needed(num_workers)
    hard = "no limit" if bound.reachable is None else f"{bound.reachable:,}"
    found = (
        f"{bound.most:,} (ulimit -n; hard limit {hard}), {bound.used} open; {num_workers} worker(s) take "
        f"{held} in the main process, and {needed} while the last one starts; batches take none"
    )
    values = {**_values(bound), "held": held, "needed": needed}
    most_workers, left = descriptors.most_workers, descriptors.left
    if most_workers is not None and most_workers < num_workers:
        change = (
            f"{_raise_files(bound, needed)}: the {left} that are left are enough for {most_workers} workers"
        )
        return Check("open_files", "open files", "fail", found, change, values)
    if left is not None and left - held < _MANY_FILES:
        change = f"{_raise_files(bound, held + _MANY_FILES)}: little is left for files that the program opens"
        return Check("open_files", "open files", "warning", found, change, values)
    return Check("open_files", "open files", "ok", found, values=values)


def _raise_files(bound: Bound, needed: int) -> str:
    """How to have so many descriptors free: the soft limit can be raised by anyone, up to the hard one."""
    total = (bound.used or 0) + needed
    wanted = max(_GOOD_FILES, total)
    if bound.reachable is None or bound.reachable >= total:
        return f"ulimit -n {min(wanted, bound.reachable or wanted)}"
    return f"raise the hard limit (docker run --ulimit nofile={wanted}, LimitNOFILE=, limits.conf)"


def check_address_space(advice: Advice) -> Check:
    """``ulimit -v``, against the mappings of the slots, which may begin and end at whole huge pages."""
    bound, needed = address_space(), advice.slots_nbytes or 0
    if needed >= advice.slots * HUGE_NBYTES:
        needed += advice.slots * 2 * HUGE_NBYTES
    if bound is None or bound.most is None:
        return Check("address_space", "address space", "ok", "no limit (ulimit -v)", values=_values(bound))
    found = f"{format_nbytes(bound.most)} (ulimit -v), {format_nbytes(bound.left)} left"
    if bound.left is not None and bound.left < needed:
        change = f"ulimit -v unlimited: the slots alone need {format_nbytes(needed)}"
        return Check("address_space", "address space", "fail", found, change, _values(bound))
    change = "ulimit -v unlimited: it bounds mappings, and not memory that is used"
    return Check("address_space", "address space", "warning", found, change, _values(bound))


def check_mappings(advice: Advice) -> Check:
    """``vm.max_map_count``, against the mappings of the slots: memory, and space before and behind it."""
    bound, most_mappings = mappings(), 3 * (advice.slots + RETAINED_SLOTS)
    if bound is None or bound.most is None:
        return Check("mappings", "mappings", "ok", "no limit known", values=_values(bound))
    found = (
        f"{bound.most:,} (vm.max_map_count), {bound.used:,} in use; the loader adds one to three per "
        f"slot, at most {most_mappings}"
    )
    if bound.left is not None and bound.left < most_mappings:
        change = "sysctl vm.max_map_count=65530 or more"
        return Check("mappings", "mappings", "fail", found, change, _values(bound))
    return Check("mappings", "mappings", "ok", found, values=_values(bound))


def check_locked_memory() -> Check:
    """``ulimit -l``, which shmloader needs nothing of."""
    bound = locked_memory()
    found = (
        f"{format_nbytes(bound and bound.most)} (ulimit -l); not needed: slots are not locked, and "
        "pin_memory=True copies batches into torch's own pinned memory"
    )
    return Check("locked_memory", "locked memory", "ok", found, values=_values(bound))


def check_huge_pages() -> Check:
    """Whether shared memory gets huge pages."""
    try:
        chosen = re.search(r"\[(\w+)\]", _HUGE_PAGES.read_text())
    except OSError:
        chosen = None
    setting = chosen[1] if chosen else None
    found = f"{setting or 'not known'} for shared memory"
    if setting in ("always", "force"):
        found += ": slots of small batches may take 2 MiB each"
    else:
        found += (
            "; that does not matter: slots and stores of 2 MiB and more ask for them one by one"
            if setting != "deny"
            else "; slots are used again, so their pages are faulted in once"
        )
    return Check("huge_pages", "huge pages", "ok", found, values={"shmem_enabled": setting})


def check_cuda(trial: Trial | None) -> Check:
    """Whether pages can be registered with CUDA.

    Args:
        trial: How it went; None where torch was built without CUDA, and nothing was tried.
    """
    values: dict[str, Value] = {"available": False, "registered": False}
    if trial is None or (trial.works and not trial.answer["available"]):
        built = "torch is built without it" if trial is None else "no device can be used"
        found = f"no CUDA ({built}); pin_memory=True has no effect"
        return Check("cuda", "CUDA", "ok", found, values=values)
    values |= trial.answer
    if not trial.works:
        change = "pin_memory=False until CUDA itself works"
        return Check("cuda", "CUDA", "warning", f"trying it failed: {trial.error}", change, values)
    if not (trial.answer["registered"] and trial.answer["is_pinned"]):
        found = f"{trial.answer['device']}: pages of shared memory cannot be registered"
        change = f"{trial.answer.get('error', 'they are not seen as pinned')}; pin_memory=True copies instead"
        return Check("cuda", "CUDA", "warning", found, change, values)
    found = f"{trial.answer['device']}: pages of shared memory registered, and seen as pinned"
    return Check("cuda", "CUDA", "ok", found, values=values)


def check_loading(start_method: str, trial: Trial, needed: bool) -> Check:
    """Whether loading works with a start method, as a trial showed.

    Args:
        start_method: Which.
        trial: How it went.
        needed: Whether loading without further arguments depends on it.
    """
    name, title = f"loading_{start_method}", f"loading, {start_method}"
    values: dict[str, Value] = {"works": trial.works, "out_of_memory": trial.out_of_memory, **trial.answer}
    if trial.works:
        found = (
            f"works: {trial.answer['batches']} batches of 1 MiB from one worker, checked; the first after "
            f"{trial.answer['first_batch_s']:.2f} s"
        )
        return Check(name, title, "ok", found, values=values)
    change = "the message says what failed; everything above that is not ok may be why"
    if trial.out_of_memory:
        own = psutil.Process().memory_info()
        change = (
            "the kernel killed it for want of memory: raise the memory limit of the cgroup (the doctor "
            f"itself takes about {format_nbytes(own.rss - getattr(own, 'shared', 0))} of it)"
        )
    elif not needed:
        change = f"do not use multiprocessing_context={start_method!r} here"
    return Check(
        name, title, "fail" if needed else "warning", f"does not work: {trial.error}", change, values
    )


def _values(bound: Bound | None) -> dict[str, Value]:
    used, most, reachable = bound or (None, None, None)
    return {"used": used, "limit": most, "hard_limit": reachable}
