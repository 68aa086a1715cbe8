"""Kills workers at random moments, and measures when and how the main process reports it.

Run as a program for the full figure: ``python -m robustness.worker_kills --kills 200``.
"""

import argparse
import contextlib
import faulthandler
import multiprocessing
import random
import signal
import statistics
import threading
import time
import warnings
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import NamedTuple

import psutil
from loading import Numbered

import shmloader
from robustness.datasets import BATCH, first_indices
from robustness.processes import is_helper, wait_gone
from shmloader import DataLoader

METHODS = ("fork", "spawn", "forkserver")
MOMENTS = ("starting", "working", "waiting", "parts")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGBUS, signal.SIGHUP, signal.SIGUSR1)
MOST_ERROR_S = 2.0
MOST_GONE_S = 5.0
_LENGTH = 20_000


class Kill(NamedTuple):
    """One kill and its outcome.

    Attributes:
        method: Start method.
        moment: The worker's activity, see `make_loader`.
        how: The signal that killed it.
        error_s: Seconds from the kill, or from the call of ``next()`` if that was later, to the error.
        gone_s: Seconds from the kill until no worker was left.
        batches: Batches before the error, all of them exact.
    """

    method: str
    moment: str
    how: signal.Signals
    error_s: float
    gone_s: float
    batches: int


def make_loader(method: str, moment: str, workers: int, persistent: bool) -> DataLoader:
    """A loader whose workers are nearly always in the state ``moment``.

    ``starting``: not yet at their first sample. ``working``: in a sample or collating. ``waiting``: for a
    task, because the program takes no batch. ``parts``: sending a batch that is larger than the budget.
    """
    dataset, budget_nbytes = Numbered(_LENGTH, delay_s=0.0005), None
    if moment == "parts":
        dataset, budget_nbytes = Numbered(_LENGTH, items=50_000), 1 << 20
    return DataLoader(
        dataset,
        batch_size=BATCH,
        num_workers=workers,
        multiprocessing_context=method,
        persistent_workers=persistent,
        memory_budget_nbytes=budget_nbytes,
    )


def kill_once(method: str, moment: str, how: signal.Signals, rng: random.Random) -> Kill:
    """Start a loader, kill one of its workers by ``how``, and check all promises."""
    workers = rng.randint(1, 3)
    loader = make_loader(method, moment, workers, persistent=rng.random() < 0.5)
    iterator = iter(loader)
    family = [psutil.Process(process.pid) for process in iterator._workers]
    victim = rng.randrange(workers)
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        killed_at = time.monotonic()
        family[victim].send_signal(how)

    ahead = 0
    killer = None
    if moment == "starting":
        time.sleep(rng.uniform(0, 0.02 if method == "fork" else 1.0))
        kill()
    else:
        ahead = len(first_indices(next(iterator) for _ in range(rng.randint(1, 6))))
        if moment == "waiting":
            time.sleep(0.05)
            kill()
        else:
            killer = threading.Timer(rng.uniform(0, 0.3), kill)
            killer.start()
    called_at, error = time.monotonic(), None
    got = ahead
    try:
        while True:
            called_at = time.monotonic()
            batch = next(iterator)
            assert first_indices([batch]) == [BATCH * got]
            got += 1
            del batch
    except shmloader.WorkerDied as died:
        error_at, error = time.monotonic(), died
    if killer is not None:
        killer.join()
    check_error(error, victim, family[victim].pid, how, workers, got)
    gone_s, left = wait_gone(family, MOST_GONE_S)
    assert not left, f"workers are left after a kill: {left}"
    loader.close()
    return Kill(method, moment, how, error_at - max(killed_at, called_at), error_at - killed_at + gone_s, got)


def check_error(
    error: shmloader.WorkerDied, victim: int, pid: int, how: signal.Signals, workers: int, got: int
) -> None:
    """Check that the error names the dead worker, the cause, and the index batches that it had."""
    assert isinstance(error, RuntimeError)
    text = str(error)
    assert (error.worker_id, error.pid, error.exit_code) == (victim, pid, -how), text
    assert f"worker {victim} " in text
    assert f"pid {pid}" in text
    assert how.name in text
    # A worker whose answers have all arrived holds nothing, while the main process waits for another's.
    assert error.indices or workers > 1, text
    for indices in error.indices:
        number, rest = divmod(indices[0], BATCH)
        assert (indices, rest) == (list(range(indices[0], indices[0] + BATCH)), 0)
        assert number % workers == victim, "an index batch of another worker"
        assert number >= got, "an index batch that was returned"
        assert str(indices) in text


def kill_while_being_started(method: str, ballast_nbytes: int) -> tuple[BaseException, float]:
    """Kill the first worker as soon as its process exists, while ``iter(loader)`` still starts it.

    Returns:
        The error, and the seconds from the kill until it was raised.
    """
    me = psutil.Process()
    before = set(me.children(recursive=True))
    killed: list[tuple[psutil.Process, float]] = []

    def kill() -> None:
        deadline = time.monotonic() + 90  # the loader has samples for 100 s
        while not killed and time.monotonic() < deadline:
            for process in set(me.children(recursive=True)) - before:
                if not is_helper(process):
                    killed.append((process, time.monotonic()))
                    process.kill()
                    return

    dataset = Numbered(_LENGTH, ballast_nbytes=ballast_nbytes, delay_s=0.01)
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        for _ in DataLoader(dataset, batch_size=BATCH, num_workers=2, multiprocessing_context=method):
            pass
    except Exception as raised:
        error, error_at = raised, time.monotonic()
    else:
        raise AssertionError("nothing was raised")
    finally:
        killer.join()
    return error, error_at - killed[0][1]


@contextlib.contextmanager
def hang_limit(seconds: float) -> Iterator[None]:
    """End this program with all its threads' stacks if the block takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def ready_helpers() -> None:
    """Start the fork server, with torch in it, so that its workers start as quickly as forked ones."""
    multiprocessing.set_forkserver_preload(["torch"])
    forkserver.ensure_running()


def report(kills: list[Kill]) -> None:
    """Print the figures: by start method and moment, and over all."""
    for method in METHODS:
        for moment in MOMENTS:
            _print_row(f"{method:10} {moment:9}", [k for k in kills if k[:2] == (method, moment)])
    _print_row(f"{'all':20}", kills)


def _print_row(name: str, kills: list[Kill]) -> None:
    if kills:
        error_s, gone_s = [k.error_s for k in kills], [k.gone_s for k in kills]
        print(
            f"{name} {len(kills):4} kills; to the error: median {statistics.median(error_s) * 1e3:6.1f} ms, "
            f"worst {max(error_s) * 1e3:7.1f} ms; all workers gone: worst {max(gone_s) * 1e3:7.1f} ms; "
            f"over {MOST_ERROR_S:.0f} s: {sum(s > MOST_ERROR_S for s in error_s)}"
        )


def main() -> int:
    """Kill as often as asked; exit status 1 if any error came later than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", shmloader.SpillWarning)
    for how in SIGNALS[1:]:
        signal.signal(how, signal.SIG_DFL)  # nohup leaves SIGHUP ignored, and workers inherit that
    ready_helpers()
    rng = random.Random(arguments.seed)
    kills = []
    for number in range(arguments.kills):
        method = METHODS[number % len(METHODS)]
        with hang_limit(60):
            kills.append(kill_once(method, rng.choice(MOMENTS), rng.choice(SIGNALS), rng))
    report(kills)
    return int(any(k.error_s > MOST_ERROR_S or k.gone_s > MOST_GONE_S for k in kills))


if __name__ == "__main__":
    raise SystemExit(main())
