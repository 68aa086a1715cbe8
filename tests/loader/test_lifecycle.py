"""Beginning and end: errors, deaths, early leaving. Nothing hangs and nothing stays behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import torch
from loading import DiesWithHeir, Ends, Growing, Numbered, Raises, Sleeps, make_error
from robustness.processes import wait_gone
from warm_python import STRICT, warm_python

import shmloader
from shmloader import DataLoader


def _python(code: str, *, timeout_s: float = 200.0) -> subprocess.CompletedProcess:
    """Run a program in a new process, with this folder importable."""
    return subprocess.run(
        [*warm_python(), *STRICT, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
    )


def _workers() -> list[psutil.Process]:
    """Live children, except the interpreter's own resource tracker and fork server, and tests' template."""
    commands = [(child, " ".join(child.cmdline()[1:])) for child in psutil.Process().children()]
    return [child for child, command in commands if not re.search("multiprocessing|warm_python", command)]


@pytest.mark.parametrize("how", [-signal.SIGKILL, -signal.SIGTERM, 3, 0])
def test_a_dead_worker_raises_at_once_and_is_named(how: int) -> None:
    loader = DataLoader(Ends(1000, at=21, how=how), batch_size=4, num_workers=2)
    began = time.monotonic()
    with pytest.raises(shmloader.WorkerDied) as caught:
        for _ in loader:
            pass
    assert time.monotonic() - began < 10  # 2 s, and time that a loaded machine adds
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert error.worker_id == 1
    assert error.exit_code == how
    assert [20, 21, 22, 23] in error.indices
    assert f"pid {error.pid}" in str(error)
    assert "[20, 21, 22, 23]" in str(error)
    assert (signal.Signals(-how).name if how < 0 else f"code {how}") in str(error)


def test_a_dead_worker_is_noticed_while_another_process_holds_its_pipes() -> None:
    dataset = DiesWithHeir(100)
    with pytest.raises(shmloader.WorkerDied, match="SIGKILL"):
        list(DataLoader(dataset, batch_size=4, num_workers=2))
    heir = psutil.Process(int(dataset.heir))
    assert heir.is_running()
    heir.kill()


def test_a_dead_worker_ends_its_siblings_and_the_loader_can_be_used_again() -> None:
    loader = DataLoader(Ends(60, at=21, how=1), batch_size=4, num_workers=2, persistent_workers=True)
    with pytest.raises(shmloader.WorkerDied):
        list(loader)
    assert not _workers()
    with pytest.raises(shmloader.WorkerDied):
        list(loader)


def test_what_comes_after_a_death_says_so() -> None:
    iterator = iter(DataLoader(Ends(60, at=0, how=1), batch_size=4, num_workers=1))
    with pytest.raises(shmloader.WorkerDied):
        next(iterator)
    with pytest.raises(shmloader.LoaderClosed, match="worker 0 died"):
        next(iterator)


@pytest.mark.parametrize(
    "name",
    "KeyError UnicodeDecodeError CalledProcessError FourArguments Unpicklable ExceptionGroup SystemExit "
    "KeyboardInterrupt OSError".split(),
)
def test_exceptions_arrive_as_they_were_raised(name: str) -> None:
    expected = make_error(name)
    iterator = iter(DataLoader(Raises(40, at=9, name=name), batch_size=4, num_workers=2))
    next(iterator), next(iterator)
    with pytest.raises(type(expected)) as caught:
        next(iterator)
    assert repr(caught.value.args) == repr(expected.args)
    notes = "\n".join(caught.value.__notes__)
    assert "worker 0" in notes
    assert "[8, 9, 10, 11]" in notes
    assert "raise make_error(self.name)" in notes
    if isinstance(expected, Exception):
        assert "dataset[9]" in notes
    assert [batch[0, 0].item() for batch in iterator] == [12, 16, 20, 24, 28, 32, 36]
    if name == "FourArguments":
        assert caught.value.four == 4


def test_a_timeout_is_an_error_that_torch_users_catch() -> None:
    loader = DataLoader(Sleeps(8, 30.0, at=0), batch_size=4, num_workers=1, timeout=np.float32(0.25))
    began = time.monotonic()
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match=r"timed out after 0.25 seconds.*\[0, 1, 2, 3\]") as caught:
        next(iterator)
    assert isinstance(caught.value, TimeoutError)
    assert time.monotonic() - began < 20
    iterator._workers[0].kill()  # instead of waiting for its sleep
    loader.close()


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_a_timeout_may_be_longer_than_poll_waits(kind: str) -> None:
    loader = DataLoader(Sleeps(4, 0.5, at=0), batch_size=4, num_workers=1, worker_type=kind, timeout=1e9)
    assert len(list(loader)) == 1


@pytest.mark.parametrize("persistent", [False, True])
def test_leaving_early_leaves_nothing(persistent: bool) -> None:
    loader = DataLoader(Numbered(1000), batch_size=4, num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    held = [next(iterator) for _ in range(4)][3]
    del loader, iterator
    assert held[0, 0] == 12  # a batch that is held stays readable


def test_close_ends_everything_but_what_is_held() -> None:
    loader = DataLoader(Numbered(1000), batch_size=4, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    batch = next(iterator)
    loader.close()
    loader.close()
    assert not _workers()
    assert (batch[:, 0] == torch.arange(4)).all()
    with pytest.raises(shmloader.LoaderClosed, match=r"loader.close\(\)"):
        next(iterator)
    assert next(iter(loader))[0, 0] == 0
    loader.close()


def test_memory_of_batches_that_nobody_took_is_returned_by_close() -> None:
    """Another process (one that the program forked, say) may still have the slots open."""
    loader = DataLoader(Numbered(64, items=1 << 18), num_workers=2)
    iterator = iter(loader)
    (slots,) = [fd for fd in os.listdir("/proc/self/fd") if "shmloader-slots" in _target(fd)]
    elsewhere = os.dup(int(slots))
    try:
        deadline = time.monotonic() + 60
        while os.fstat(elsewhere).st_blocks * 512 < 4 << 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        taken_nbytes = os.fstat(elsewhere).st_blocks * 512
        assert taken_nbytes >= 4 << 20, "four batches of a MiB or two"
        assert loader.statistics().reserved_nbytes < taken_nbytes, "the program has not heard of them"
        loader.close()
        assert os.fstat(elsewhere).st_blocks == 0
    finally:
        os.close(elsewhere)
        del iterator


def _target(fd: str) -> str:
    with contextlib.suppress(OSError):  # that of the listing itself
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def test_a_with_block_closes_also_when_it_raises() -> None:
    with pytest.raises(ZeroDivisionError), DataLoader(Numbered(100), num_workers=2) as loader:
        iterator = iter(loader)
        next(iterator)
        raise ZeroDivisionError
    assert not _workers()


def test_workers_are_ended_quickly_while_they_are_busy() -> None:
    loader = DataLoader(Sleeps(64, 60.0, at=2), batch_size=1, num_workers=2, prefetch_factor=8)
    iterator = iter(loader)
    next(iterator)
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 40


def test_an_exception_in_the_sampler_at_the_start_leaves_nothing() -> None:
    def sampler():
        yield [0]
        raise LookupError("sampler")

    with pytest.raises(LookupError, match="sampler"):
        iter(DataLoader(Numbered(10), batch_sampler=sampler(), num_workers=2))


def test_no_thread_is_started_in_the_main_process() -> None:
    before = threading.active_count()
    for _ in DataLoader(Numbered(100), batch_size=4, num_workers=2):
        assert threading.active_count() == before


@pytest.mark.long
def test_a_hundred_first_batches_grow_nothing() -> None:
    loader = DataLoader(Numbered(100), batch_size=4, num_workers=1)
    next(iter(loader))
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        assert next(iter(loader))[0, 0] == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_importing_has_no_side_effect() -> None:
    result = _python(
        """
        import os, sys, threading, torch, psutil
        def held():
            with open("/proc/self/maps") as maps:
                shared = [line for line in maps if "memfd:" in line or "/dev/shm" in line]
            return shared, threading.active_count(), len(os.listdir("/proc/self/fd"))
        before = held()
        import shmloader
        assert held() == before, (held(), before)
        assert not psutil.Process().children()
        from torch.utils.data._utils import collate
        assert collate.default_collate_fn_map[torch.Tensor] is collate.collate_tensor_fn
        import shmloader.worker.loop
        assert "pyarrow" not in sys.modules  # which would cost each spawned worker 0.15 s
        """
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_a_dataset_of_an_interactive_session_gets_advice(method: str) -> None:
    result = _python(
        f"""
        import sys
        sys.modules["cloudpickle"] = None  # which could send it
        from torch.utils.data import Subset
        from shmloader import DataLoader, WorkerStartError
        class Mine:
            def __len__(self): return 4
            def __getitem__(self, i): return i
        try:
            iter(DataLoader(Subset(Mine(), [0, 1]), num_workers=1, multiprocessing_context="{method}"))
        except WorkerStartError as error:
            print(error)
        assert list(DataLoader(Mine(), num_workers=1, multiprocessing_context="fork"))
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "'Mine'" in result.stdout
    assert "module file" in result.stdout
    assert "fork" in result.stdout


def test_classes_of_an_interactive_session_work_with_cloudpickle() -> None:
    pytest.importorskip("cloudpickle")
    result = _python(
        """
        from torch.utils.data import Subset
        from shmloader import DataLoader
        class Mine:
            def __len__(self): return 4
            def __getitem__(self, i): return i + OFFSET
        OFFSET = 10
        loader = DataLoader(Subset(Mine(), [0, 3]), num_workers=1, multiprocessing_context="spawn")
        print([int(batch) for batch in loader])
        """
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "[10, 13]\n", "")


def test_what_cannot_be_pickled_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # which could send it
    loader = DataLoader(Numbered(4), collate_fn=lambda x: x, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(Exception, match="pickle") as caught:
        iter(loader)
    assert any("multiprocessing_context='fork'" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("keep", ["iterator", pytest.param("loader", marks=pytest.mark.long), "batch"])
def test_interpreter_exit_is_quiet_and_leaves_nothing(keep: str) -> None:
    result = _python(
        f"""
        from loading import Numbered
        from shmloader import DataLoader
        loader = DataLoader(Numbered(1000), batch_size=4, num_workers=2, persistent_workers=True)
        iterator = iter(loader)
        batch = next(iterator)
        print(*[process.pid for process in iterator._workers], flush=True)
        print(getattr(iterator.table.segment, "_prefix", "no names"))
        kept = {keep}
        del loader, iterator, batch
        """
    )
    assert (result.returncode, result.stderr) == (0, "")
    pids, prefix = result.stdout.splitlines()
    assert not [pid for pid in map(int, pids.split()) if psutil.pid_exists(pid)]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


@pytest.mark.parametrize("fork", [False, True])
def test_workers_end_with_a_killed_main_process(fork: bool) -> None:
    """A process that the program forked may still hold the main ends of the pipes."""
    code = f"""
        import os, sys, time
        from loading import Sleeps
        from shmloader import DataLoader
        loader = DataLoader(Sleeps(1000, 60.0, at=40), batch_size=4, num_workers=2)
        iterator = iter(loader)
        batch = next(iterator)
        child = os.fork() if {fork} else -1
        if child == 0:
            time.sleep(60)
            os._exit(0)
        print(child, *[process.pid for process in iterator._workers], flush=True)
        time.sleep(60)
        """
    main = subprocess.Popen(
        [*warm_python(), "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
    )
    child, *workers = map(int, main.stdout.readline().split())
    workers = list(map(psutil.Process, workers))
    main.kill()
    main.wait()
    main.stdout.close()
    assert len(workers) == 2
    _, alive = wait_gone(workers, 10)  # pid 1 may leave them zombies for seconds
    assert not alive
    if fork:
        assert psutil.pid_exists(child)
        os.kill(child, signal.SIGKILL)


def test_a_forked_copy_of_an_iterator_cannot_disturb_the_original() -> None:
    loader = DataLoader(Numbered(400), batch_size=4, num_workers=2)
    iterator = iter(loader)
    held = next(iterator)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            next(iterator)
        except shmloader.LoaderClosed:
            loader.close()
            code = 0 if held[0, 0] == 0 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [batch[0, 0].item() for batch in iterator] == list(range(4, 400, 4))
    assert held[3, 0] == 3


def test_batches_that_grow_a_hundred_thousandfold_are_exact() -> None:
    sizes = [128, 12_000_000, 1, 300, 5_000_000, 128, 0, 20, 7_000_000, 3, 3, 12_000_001]
    loader = DataLoader(Growing(sizes), batch_size=None, num_workers=2)
    for index, (size, sample) in enumerate(zip(sizes, loader, strict=True)):
        assert sample.shape == (size,)
        assert bool((sample == index).all())
    assert loader.statistics().spills == 0


class _Closes:
    """A sampler during whose first index the loader is closed, as another thread might do."""

    loader: DataLoader | None = None

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        if self.loader is not None:
            self.loader.close()
        return iter(range(40))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_that_is_closed_while_it_starts_workers_says_so(persistent: bool) -> None:
    sampler = _Closes()
    loader = DataLoader(
        Numbered(40), batch_size=4, num_workers=2, sampler=sampler, persistent_workers=persistent
    )
    sampler.loader = loader
    with pytest.raises(shmloader.LoaderClosed):
        iter(loader)
    assert loader.statistics().reserved_nbytes == 0
    sampler.loader = None
    with loader:
        assert len(list(loader)) == 10
