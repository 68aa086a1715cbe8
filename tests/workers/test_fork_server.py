"""The fork server imports torch, this package and the program's choice; the dataset's code is never old."""

import multiprocessing
import os
import subprocess
import textwrap
from multiprocessing import forkserver
from pathlib import Path

import pytest
from robustness.test_interrupt import press_ctrl_c
from warm_python import STRICT, warm_python

from shmloader.workers.launch import begin_fork_server

# Programs of their own, each with a server of its own.

MAIN = """
    import multiprocessing, os, signal, sys, time
    import torch
    import shmloader

    def look_at_signals(queue):
        blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        queue.put((blocked, signal.getsignal(signal.SIGINT) is signal.default_int_handler))

    def load(dataset, **options):
        options = {"num_workers": 2, "multiprocessing_context": "forkserver", **options}
        with shmloader.DataLoader(dataset, **options) as loader:
            return [batch.tolist() for batch in loader]
    """


def _run(folder: Path, main: str, **modules: str) -> list[str]:
    """Run a program with modules beside it from another folder; returns the lines that it prints."""
    for name, source in {"main": MAIN + main, **modules}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    result = subprocess.run(
        [*warm_python(), *STRICT, str(folder / "main.py")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=250,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


# A module's pid shows the process that imported it: the server, or the worker itself.
PLACES = """
    import os
    import torch
    PID = os.getpid()
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 2
        def __getitem__(self, index):
            import chosen
            with open(f"/proc/{os.getppid()}/maps") as maps:
                has_torch = "libtorch" in maps.read()
            return torch.tensor([PID == os.getpid(), chosen.PID == os.getppid(), has_torch])
    """
CHOSEN = "import os\nPID = os.getpid()"
LOOKS_AT_PLACES = """
    if __name__ == "__main__":
        sys.path.append({folder!r})
        os.environ["PYTHONPATH"] += os.pathsep + {folder!r}  # the server does not look beside main.py
        from places import Data
        multiprocessing.set_forkserver_preload({chosen})
        for own, in_server, has_torch in sum(load(Data()), []):
            print("own" if own else "inherited", "server" if in_server else "worker", has_torch)
        context = multiprocessing.get_context("forkserver")
        queue = context.SimpleQueue()
        process = context.Process(target=look_at_signals, args=(queue,))
        process.start()
        print(*queue.get())
        process.join()
    """


@pytest.mark.parametrize(
    ("chosen", "places"),
    [
        (["__main__", "chosen", "not_there"], "own server True"),
        pytest.param([], "own worker False", marks=pytest.mark.long),
    ],
)
def test_the_server_imports_what_the_program_chose_and_no_module_of_the_dataset(
    chosen: list[str], places: str, tmp_path: Path
) -> None:
    """The program's own processes have the same signal handlers as without this library."""
    main = LOOKS_AT_PLACES.format(chosen=chosen, folder=str(tmp_path))
    lines = _run(tmp_path, main, places=PLACES, chosen=CHOSEN)
    assert lines == [places, places, "False True"]


HAS_PYARROW = """
    import sys
    import torch
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 2
        def __getitem__(self, index): return int("pyarrow" in sys.modules)
    """
WITH_A_STORE = """
    from looks import Data
    if __name__ == "__main__":
        store = shmloader.share([{"number": 1}]) if STORE else None
        print(load(Data()))
    """


@pytest.mark.in_ci
@pytest.mark.parametrize("has_store", [True, False])
def test_the_server_imports_what_reads_stores_if_the_program_has_one(has_store: bool, tmp_path: Path) -> None:
    lines = _run(tmp_path, WITH_A_STORE.replace("STORE", str(has_store)), looks=HAS_PYARROW)
    assert lines == [f"[[{int(has_store)}], [{int(has_store)}]]"]


EDITED = """
    import torch
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 2
        def __getitem__(self, index): return index + OFFSET
    OFFSET = {offset}
    """
EDITS_AND_RELOADS = """
    import edited
    if __name__ == "__main__":
        import importlib, pathlib
        print(load(edited.Data()))
        path = pathlib.Path(edited.__file__)
        path.write_text(path.read_text().replace("OFFSET = 100", "OFFSET = 20000"))
        importlib.reload(edited)
        print(load(edited.Data()))
    """


@pytest.mark.in_ci
def test_a_module_that_was_edited_and_reloaded_runs_new_in_the_workers(tmp_path: Path) -> None:
    lines = _run(tmp_path, EDITS_AND_RELOADS, edited=EDITED.format(offset=100))
    assert lines == ["[[100], [101]]", "[[20000], [20001]]"]


def test_the_programs_choice_is_left_as_it_is(warm_helpers: None) -> None:
    server = forkserver.set_forkserver_preload.__self__  # type: ignore[attr-defined]
    before = server._preload_modules
    try:
        for chosen in (["__main__", "json"], ["__main__"], []):
            multiprocessing.set_forkserver_preload(chosen)
            begin_fork_server()
            assert server._preload_modules == chosen
    finally:
        multiprocessing.set_forkserver_preload(before)


@pytest.mark.parametrize("after_s", [0.6, pytest.param(1.2, marks=pytest.mark.long)])
def test_ctrl_c_while_the_server_imports_leaves_nothing(after_s: float) -> None:
    outcome = press_ctrl_c("forkserver", "starting", after_s)
    assert outcome.text.strip().endswith("KeyboardInterrupt"), outcome.text
    assert not outcome.left


WORKS = """
    import time
    import torch
    WORK_S = 0.3
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 4
        def __getitem__(self, index):
            end_s = time.process_time() + WORK_S
            while time.process_time() < end_s:
                pass
            return index
    """
ADDS_UP = """
    from works import Data
    if __name__ == "__main__":
        from shmloader.memory.limits import processor_use
        before_s = processor_use().own_s
        load(Data())
        load(Data())
        print(processor_use().own_s - before_s >= 2.0)
    """


def test_the_processor_time_of_workers_that_have_ended_is_the_programs_own(tmp_path: Path) -> None:
    """They are no children of the program, but of the server."""
    assert _run(tmp_path, ADDS_UP, works=WORKS) == ["True"]
