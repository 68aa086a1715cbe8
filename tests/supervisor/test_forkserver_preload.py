"""The fork server imports what workers need, if that may be inherited, and never dies or hangs of it."""

import importlib
import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType

import pytest
import startup_datasets
from loading import Numbered, into_empty
from robustness.test_interrupt import press_ctrl_c
from torch.utils.data import Subset

from shmloader.supervisor.fork_server import begin, modules_of
from shmloader.supervisor.preload import VARIABLE, SharedByFork, Wish

# What may be inherited, and what may not.

INHERITABLE = {
    "plain": "import numpy as np; ARRAY = np.ones(3)",
    "opens_and_closes": "import pathlib; TEXT = pathlib.Path(__file__).read_text()",
    "opens_devnull": "FILE = open('/dev/null'); RANDOM = open('/dev/urandom', 'rb')",
    "systems_generator": "import random; RNG = random.SystemRandom()",
    "global_generators": """
        import random
        from numpy.random import mtrand
        RNG, STATE = random._inst, mtrand._rand
        """,
    "odd_object": """
        class Lazy:
            def __getattribute__(self, name): raise RuntimeError("looked at")
            __class__ = property(lambda self: 1 / 0)
        LAZY = Lazy()
        """,
}
NOT_INHERITABLE = {
    "thread": "import threading; END = threading.Event(); threading.Thread(target=END.wait).start()",
    "file": "FILE = open(__file__)",
    "socket": "import socket; FILE = socket.socket()",
    "device": "FILE = open('/dev/zero')",
    "numpy_generator": "import numpy as np; RNG = np.random.default_rng()",
    "numpy_random_state": "import numpy as np; RNG = np.random.RandomState()",
    "torch_generator": "import torch; RNG = torch.Generator()",
    "python_generator": "import random; RNG = random.Random()",
    "lock": "import multiprocessing; LOCK = multiprocessing.Lock()",
    "memory": "import mmap; MEMORY = mmap.mmap(-1, 4096)",
    "in_a_class": "import random\nclass Augment:\n    rng = random.Random()",
    "in_an_object": """
        import random
        class Augment:
            def __init__(self): self.rng = random.Random()
        AUGMENT = Augment()
        """,
}


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Write modules of sources, and import them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    planted: list[ModuleType] = []

    def plant(**sources: str) -> ModuleType:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        planted.append(importlib.import_module(next(iter(sources))))
        return planted[-1]

    yield plant
    for module in planted:
        for name in ("FILE", "RANDOM"):
            if hasattr(module, name):
                getattr(module, name).close()
        if hasattr(module, "END"):
            module.END.set()
        del sys.modules[module.__name__]


@pytest.mark.parametrize("name", INHERITABLE)
def test_what_workers_may_inherit(name: str, plant: Callable[..., ModuleType]) -> None:
    shared = SharedByFork()
    plant(**{f"planted_{name}": INHERITABLE[name]})
    assert not shared.has_more()


@pytest.mark.parametrize("name", NOT_INHERITABLE)
def test_what_workers_must_not_inherit(name: str, plant: Callable[..., ModuleType]) -> None:
    shared = SharedByFork()
    plant(**{f"planted_{name}": NOT_INHERITABLE[name]})
    assert shared.has_more()


def test_which_modules_a_loader_needs() -> None:
    dataset = Subset(startup_datasets.HasTensor(), [0])
    found = modules_of([dataset, partial(into_empty), startup_datasets.CountsPickles(3).__getitem__, 3, None])
    assert {"torch.utils.data.dataset", "startup_datasets", "loading"} <= set(found)
    assert not {"__main__", "builtins"} & set(found) - {"builtins"}


def test_modules_that_cannot_be_imported_by_name_are_left_out() -> None:
    made = ModuleType("made_here")
    exec("class Made: pass", made.__dict__)
    sys.modules["made_here"] = made
    try:
        assert "made_here" not in modules_of([made.Made()])
    finally:
        del sys.modules["made_here"]
    main_class = type("Main", (), {"__module__": "__main__"})
    assert modules_of([main_class()]) == []


def test_the_programs_choice_and_environment_are_left_as_they_are(warm_helpers: None) -> None:
    server = forkserver.set_forkserver_preload.__self__  # type: ignore[attr-defined]
    before = server._preload_modules
    environment = dict(os.environ)
    try:
        for chosen in (["__main__", "json"], []):
            multiprocessing.set_forkserver_preload(chosen)
            begin([Numbered(3)])
            assert server._preload_modules == chosen
            assert dict(os.environ) == environment
    finally:
        multiprocessing.set_forkserver_preload(before)


# Programs of their own, each with a server of its own.

MAIN = """
    import multiprocessing, os, signal, sys, time
    import torch
    os.environ.setdefault("MAIN_PID", str(os.getpid()))  # also for the server
    import shmloader

    def look_at_signals(queue):
        blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        queue.put((blocked, signal.getsignal(signal.SIGINT) is signal.default_int_handler))
    """

# A module's pid tells where it was imported: in the server, or in the worker itself.
DATA = """
    import os, sys
    import torch
    PID = os.getpid()
    IN_MAIN = os.environ["MAIN_PID"] == str(PID)
    if not IN_MAIN:
        sys.stdin.read()  # the program's does not end
        print("imported", flush=False)
    if sys.argv[1:] != ["--flag"]:
        raise RuntimeError(f"wrong arguments: {sys.argv}")
    class Data(torch.utils.data.Dataset):
        def __len__(self): return 4
        def __getitem__(self, index):
            from collation import PID as COLLATION_PID
            from initial import PID as INITIAL_PID
            chosen = os.getppid() if "colorsys" in sys.modules else -1
            return torch.tensor([os.getpid(), os.getppid(), PID, COLLATION_PID, INITIAL_PID, chosen])
    """
COLLATION = """
    import multiprocessing, os
    from torch.utils.data import default_collate
    PID = os.getpid()
    if multiprocessing.current_process().name == "shmloader-fork-server":
        raise RuntimeError("in the server")
    def collate(samples): return default_collate(samples)
    """
INITIAL = """
    import os, threading
    PID = os.getpid()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    def begin(worker_id): pass
    """


def _run(folder: Path, main: str, **modules: str) -> str:
    """Run a program whose modules lie beside it, from another folder, with an input that does not end."""
    for name, source in {"main": MAIN + main, **modules}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(source))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    environment.pop("PYTHONUNBUFFERED", None)  # what is printed at import is to be buffered
    program = subprocess.Popen(
        [sys.executable, "-W", "error", str(folder / "main.py"), "--flag"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env=environment,
    )
    assert program.stdout is not None
    assert program.stderr is not None
    assert program.stdin is not None
    try:
        output, errors = program.stdout.read(), program.stderr.read()
        assert program.wait(10) == 0, errors
    finally:
        program.kill()
        program.wait()
        for stream in (program.stdin, program.stdout, program.stderr):
            stream.close()
    assert errors == ""
    return output


LOADS = """
    if __name__ == "__main__":
        from data import Data
        from collation import collate
        from initial import begin
        multiprocessing.set_forkserver_preload({chosen})
        functions = {{"collate_fn": collate, "worker_init_fn": begin}}
        with shmloader.DataLoader(
            Data(), num_workers=2, multiprocessing_context="forkserver", **functions
        ) as loader:
            for batch in loader:
                own, parent, *imported = batch[0].tolist()
                print(*("server" if pid == parent else "worker" if pid == own else pid for pid in imported))
    """


def test_the_server_imports_what_may_be_inherited(tmp_path: Path) -> None:
    """Not what raises there or starts a thread; the program's choice and its signals stay as they were."""
    more = """
        context = multiprocessing.get_context("forkserver")
        queue = context.SimpleQueue()
        process = context.Process(target=look_at_signals, args=(queue,))
        process.start()
        print(queue.get())
        process.join()
    """
    output = _run(
        tmp_path,
        LOADS.format(chosen=["__main__", "colorsys", "not_there"]) + more,
        data=DATA,
        collation=COLLATION,
        initial=INITIAL,
    )
    lines = output.splitlines()
    assert lines.count("imported") == 1
    assert [line for line in lines if line != "imported"] == ["server worker worker server"] * 4 + [
        "(False, True)"
    ]


def test_an_empty_choice_means_nothing(tmp_path: Path) -> None:
    output = _run(tmp_path, LOADS.format(chosen=[]), data=DATA, collation=COLLATE, initial=INITIAL)
    assert [line for line in output.splitlines() if line != "imported"] == ["worker worker worker -1"] * 4


COLLATE = "import os\nfrom torch.utils.data import default_collate as collate\nPID = os.getpid()"


def test_a_server_that_dies_of_an_import_is_replaced(tmp_path: Path) -> None:
    deadly = COLLATION.replace('raise RuntimeError("in the server")', "os._exit(3)")
    output = _run(tmp_path, LOADS.format(chosen=["__main__"]), data=DATA, collation=deadly, initial=INITIAL)
    assert [line for line in output.splitlines() if line != "imported"] == ["worker worker worker -1"] * 4


COMPUTES = """
    import torch
    TABLE = torch.rand(4_000_000).sort()  # with all threads, unless told otherwise
    SUM = torch.rand(8_000_000).sum()
    class Data(torch.utils.data.Dataset):
        def __init__(self): self.length = 4  # without a state there is none to set
        def __len__(self): return self.length
        def __getitem__(self, index): return index
        def __setstate__(self, state):
            self.__dict__.update(state)
            self.sum = torch.rand(8_000_000).sum()
    """
LOADS_WHAT_COMPUTES = """
    if __name__ == "__main__":
        from data import Data
        with shmloader.DataLoader(Data(), num_workers=1, multiprocessing_context="forkserver") as loader:
            print([int(batch) for batch in loader])
    """


def test_modules_may_compute_with_torch_when_they_are_imported(tmp_path: Path) -> None:
    """OpenMP's threads are not there after a fork: whoever then computes with them waits for ever."""
    assert _run(tmp_path, LOADS_WHAT_COMPUTES, data=COMPUTES) == "[0, 1, 2, 3]\n"


FULFILS = """
    import os, sys
    from shmloader.supervisor import preload
    preload._MOST_S = {most_s}
    preload.fulfil(preload.Wish.from_text(os.environ.pop(preload.VARIABLE)))
    planted = {{"quick", "pkg", "later", "second", "slow", "last"}}
    print(sorted(planted & set(sys.modules)), os.environ["PYTHONPATH"])
    """


@pytest.mark.parametrize(
    ("modules", "most_s", "left", "rounds"),
    [
        (["quick", "slow", "last"], 0.3, ["quick"], 2),
        (["quick", "pkg.one", "pkg.two", "later", "second", "last"], 30, ["later", "quick"], 3),
    ],
)
def test_the_server_begins_again_at_most_twice(
    modules: list[str], most_s: float, left: list[str], rounds: int, tmp_path: Path
) -> None:
    (tmp_path / "pkg").mkdir()
    for name, source in {
        "quick": f"print('once more', file=open({str(tmp_path / 'rounds')!r}, 'a'))",
        "pkg/__init__": "FILE = open(__file__)",
        "pkg/one": "",
        "pkg/two": "raise SystemExit",
        "later": "",
        "second": "FILE = open(__file__)",
        "slow": "import time\ntime.sleep(100)",
        "last": "",
    }.items():
        (tmp_path / f"{name}.py").write_text(source)
    here = str(Path(__file__).parents[2])
    wish = Wish(modules, [str(tmp_path), *sys.path], ["-c"], "here", here, holds_interrupts=False)
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FULFILS.format(most_s=most_s))],
        env={**os.environ, VARIABLE: wish.to_text(), "PYTHONPATH": here},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.stdout, result.stderr) == (f"{left} here\n", "")
    assert (tmp_path / "rounds").read_text().count("once more") == rounds


@pytest.mark.parametrize("after_s", [0.6])
def test_ctrl_c_while_the_server_imports_gives_one_traceback_and_no_noise(after_s: float) -> None:
    outcome = press_ctrl_c("forkserver", "starting", after_s)
    assert outcome.text.count("Traceback (most recent call last)") == 1, outcome.text
    assert outcome.text.strip().endswith("KeyboardInterrupt"), outcome.text
    assert not outcome.left
