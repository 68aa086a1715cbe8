"""Ends of loaders in programs that reap their children, and in programs that end while a thread loads."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest
from warm_python import warm_python

LOADER = """
    import multiprocessing, os, signal, sys, threading, time
    import torch
    from torch.utils.data import Dataset
    from shmloader import DataLoader

    multiprocessing.set_start_method("fork")  # what "-c" defines cannot be imported

    class Numbers(Dataset):
        def __len__(self):
            return 10_000

        def __getitem__(self, index):
            time.sleep(0.001)
            return torch.tensor(index)
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    source = textwrap.dedent(LOADER) + textwrap.dedent(program)
    command = [*warm_python(), "-c", source, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


REAPS = """
    def reap(*_):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    signal.signal(signal.SIGCHLD, signal.SIG_IGN if sys.argv[1] == "ignores" else reap)
    for _ in range(3):
        loader = DataLoader(Numbers(), batch_size=2, num_workers=2)
        iterator = iter(loader)
        next(iterator)
        began_s = time.monotonic()
        loader.close()
        print(time.monotonic() - began_s)
"""


@pytest.mark.parametrize("how", ["ignores", "reaps"])
def test_closing_waits_for_no_exit_code_that_somebody_else_has_taken(how: str) -> None:
    """Otherwise closing would wait five seconds for processes that ended long before."""
    done = run(REAPS, how)
    assert done.stderr == ""
    assert max(map(float, done.stdout.split())) < 4.0


ENDS = """
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, worker_type=sys.argv[1])
    begun = threading.Event()

    def load():
        kept = [torch.zeros(1) for _ in range(100_000)]  # freeing them takes a while
        for batch in loader:
            kept.append(batch)
            begun.set()

    threading.Thread(target=load, daemon=True).start()
    begun.wait()
"""


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_a_program_that_ends_while_a_daemon_thread_loads_says_nothing(worker_type: str) -> None:
    done = run(ENDS, worker_type)
    assert done.stderr == ""
    assert done.returncode == 0


ASKED = """
    iterator = iter(DataLoader(Numbers(), batch_size=2, num_workers=2, worker_type=sys.argv[1]))
    iterator.fileno()  # an event loop waits for it
    print(len(next(iterator)))
"""


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_a_program_that_has_asked_for_the_descriptor_may_end_in_the_middle_of_an_epoch(
    worker_type: str,
) -> None:
    """Closing the descriptor before the workers were stopped, which write to it, would end in a traceback."""
    done = run(ASKED, worker_type)
    assert (done.stdout, done.stderr, done.returncode) == ("2\n", "", 0)


SERVER = """
import multiprocessing, os, signal, threading
import psutil
from shmloader import DataLoader
from shmloader.workers import processes

processes._EXIT_CODE_S = 30.0  # a busy machine may let the server sleep for longer

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["shmloader"])  # else each worker imports torch

    def load():
        loader = DataLoader(list(range(8)), num_workers=2, multiprocessing_context="forkserver")
        iterator = iter(loader)
        next(iterator)
        return loader, iterator

    load()[0].close()
    before = set(os.listdir("/proc/self/fd"))
    loader, iterator = load()
    server, = (child for child in psutil.Process().children() if "forkserver" in " ".join(child.cmdline()))
    server.send_signal(signal.SIGSTOP)
    threading.Timer(0.3, server.send_signal, [signal.SIGCONT]).start()
    loader.close()
    print(*(os.readlink(f"/proc/self/fd/{fd}") for fd in set(os.listdir("/proc/self/fd")) - before))
"""


def test_no_descriptor_is_left_where_a_fork_server_tells_late_that_its_workers_have_ended(
    tmp_path: Path,
) -> None:
    script = tmp_path / "program.py"
    script.write_text(SERVER)
    command = [*warm_python(), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (done.stdout.strip(), done.stderr) == ("", "")


RAISES_AT_EXIT = """
    class Stop(Exception):
        pass

    def raise_stop(*_):
        raise Stop

    signal.signal(signal.SIGUSR1, raise_stop)
    iterators = [iter(DataLoader(Numbers(), batch_size=2, num_workers=1)) for _ in range(3)]

    def stop_late(stop):
        signal.raise_signal(signal.SIGUSR1)
        stop()
        print("stopped")

    for iterator in iterators:
        next(iterator)
        iterator._stop = functools.partial(stop_late, iterator._stop)
"""


def test_a_handler_that_raises_at_the_programs_end_leaves_no_loader_open() -> None:
    """Else multiprocessing would wait for the workers of the others."""
    done = run("import functools\n" + textwrap.dedent(RAISES_AT_EXIT))
    assert done.stdout.split() == ["stopped"] * 3
    assert done.stderr.count("in raise_stop") == 1
