"""Kills main processes at every stage, and checks that they leave nothing behind.

Run as a program for the full figure: ``python -m robustness.main_kills --kills 20`` (kills per stage).
"""

import argparse
import contextlib
import os
import random
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from robustness.processes import start_python, wait_gone, workers_of

STAGES = ("starting", "mid-epoch", "holding", "persistent", "nested-fork", "stuck-sample")
MOST_GONE_S = 2.0
MOST_IMPORT_S = 10.0  # a worker that is not forked and still imports ends when it has

PROGRAM = """
    import os, sys, time
    from loading import Numbered, Sleeps
    from shmloader import DataLoader

    def main():
        stage, method = sys.argv[1:]
        dataset = Sleeps(100_000, 60.0, at=40) if stage == "stuck-sample" else Numbered(100_000, items=50_000)
        loader = DataLoader(
            dataset, batch_size=4, num_workers=2, multiprocessing_context=method,
            persistent_workers=stage == "persistent",
        )
        if stage == "starting":
            print("ready", flush=True)
        iterator = iter(loader)
        batch = next(iterator)
        if stage == "persistent":
            iterator = iter(loader)
            batch = next(iterator)
        if stage == "nested-fork":
            if os.fork() == 0:
                print(os.getpid(), flush=True)
                if os.fork() == 0:
                    print(os.getpid(), flush=True)
                time.sleep(60)  # child and grandchild hold all that a fork inherits
            time.sleep(0.2)
        if stage != "starting":
            print("ready", flush=True)
        kept = []
        for batch in iterator:
            if stage == "holding":
                kept.append(batch)
                time.sleep(0 if len(kept) < 20 else 60)

    if __name__ == "__main__":
        main()
"""


class Kill(NamedTuple):
    """One kill of a main process.

    Attributes:
        stage: The stage at which it was killed.
        method: Start method of its workers.
        workers: Number of worker processes.
        gone_s: Seconds from the kill until all of them had ended.
        returned_s: Seconds from then until no process mapped its slots and /dev/shm was as before.
    """

    stage: str
    method: str
    workers: int
    gone_s: float
    returned_s: float


def kill_once(stage: str, method: str, rng: random.Random) -> Kill:
    """Run a program to a stage, ``kill -9`` it, and wait for its workers and their memory to be gone.

    Raises:
        AssertionError: If anything of it is left.
    """
    entries = set(os.listdir("/dev/shm"))
    main = start_python(PROGRAM, stage, method)
    strangers: list[psutil.Process] = []
    try:
        while (line := main.stdout.readline().strip()) != "ready":
            assert line.isdecimal(), f"{line}\n{main.stdout.read()}"
            strangers.append(psutil.Process(int(line)))
        time.sleep(rng.uniform(0, 2.5 if stage == "starting" and method != "fork" else 0.3))
        family = [w for w in workers_of(main.pid) if w not in strangers and _is_worker(w)]
        slots = _slots_of(main.pid)
        main.kill()
        gone_s, left = wait_gone(family, 30)
        assert not left, f"{stage}, {method}: left behind: {left}"
        returned_s = 0.0 if strangers else _wait_returned(entries, slots)
    finally:
        main.kill()
        main.wait()
        main.stdout.close()
        for stranger in strangers:
            with contextlib.suppress(psutil.NoSuchProcess):
                stranger.kill()
        wait_gone(strangers, 5)
    if strangers:
        returned_s = _wait_returned(entries, slots)
    return Kill(stage, method, len(family), gone_s, returned_s)


def most_gone_s(stage: str, method: str) -> float:
    """Most seconds that workers may live on."""
    return MOST_GONE_S + (MOST_IMPORT_S if stage == "starting" and method != "fork" else 0.0)


def _is_worker(process: psutil.Process) -> bool:
    try:
        return bool(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _slots_of(pid: int) -> set[str]:
    """The memory files that a process maps as slots, by inode."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "/memfd:shmloader-slots" in line}
    return set()


def _wait_returned(entries: set[str], slots: set[str], timeout_s: float = 5.0) -> float:
    """Wait until /dev/shm is as before and no process maps the slots: then the kernel has freed them."""
    began = time.monotonic()
    while True:
        new = {name for name in set(os.listdir("/dev/shm")) - entries if not _is_held(name)}
        holders = [
            pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if slots & _slots_of(pid)
        ]
        if not new and not holders:
            return time.monotonic() - began
        assert time.monotonic() - began < timeout_s, f"left in /dev/shm: {new}; slots are mapped by {holders}"
        time.sleep(0.02)


def _is_held(name: str) -> bool:
    """Whether a living process maps a /dev/shm entry: then it is another program's."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if f"/dev/shm/{name}" in maps.read_text():
                return True
    return False


def report(kills: list[Kill]) -> None:
    """Print the figures of each stage and start method."""
    for stage in STAGES:
        for method in ("fork", "spawn", "forkserver"):
            row = [k for k in kills if (k.stage, k.method) == (stage, method)]
            if row:
                print(
                    f"{stage:12} {method:10} {len(row):3} kills; workers gone: worst "
                    f"{max(k.gone_s for k in row) * 1e3:6.1f} ms; memory returned after a further "
                    f"{max(k.returned_s for k in row) * 1e3:6.1f} ms"
                )


def main() -> int:
    """Kill as often as asked at each stage; exit status 1 if workers outlived the main process for long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="at each stage")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    kills = []
    for number in range(arguments.kills):
        for stage in STAGES:
            kills.append(kill_once(stage, ("fork", "fork", "spawn", "forkserver")[number % 4], rng))
    report(kills)
    return int(any(k.gone_s > most_gone_s(k.stage, k.method) for k in kills))


if __name__ == "__main__":
    raise SystemExit(main())
