"""The start hook of ``python -m shmloader memory`` in real interpreters: what it changes, and what not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shmloader.monitor import start
from shmloader.monitor.inside import REPORTS, Report, read_reports

HOOK = start.__path__[0]


class Program:
    """Runs programs as the command does, and reads what their loaders report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports = folder / "reports"
        self.reports.touch()

    def run(self, code: str, *, hooked: bool = True, paths: str = "") -> subprocess.CompletedProcess[str]:
        path = self.folder / "program.py"
        path.write_text(code, encoding="utf-8")
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        entries = [HOOK] * hooked + [paths] * bool(paths)
        environment |= {"PYTHONPATH": os.pathsep.join(entries), REPORTS: str(self.reports)}
        words = [sys.executable, str(path)]
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)

    def reported(self) -> list[Report]:
        return read_reports(self.reports, 0)[0]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


STATE = """
import json, sys, signal, threading
print(json.dumps({
    "path": sys.path,
    "torch": "torch" in sys.modules,
    "shmloader": "shmloader" in sys.modules,
    "sitecustomize": "sitecustomize" in sys.modules,
    "cached": sorted(key for key in sys.path_importer_cache if key.endswith("/start")),
    "threads": threading.active_count(),
    "handlers": [str(signal.getsignal(number)) for number in range(1, 32)],
}))
"""


def test_an_interpreter_is_as_it_would_be_without_the_hook(program: Program) -> None:
    plain, hooked = (json.loads(program.run(STATE, hooked=hooked).stdout) for hooked in (False, True))
    assert hooked == plain
    assert not hooked["torch"]
    assert not hooked["sitecustomize"]


def test_the_programs_own_sitecustomize_is_imported(program: Program, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("OWN = 1", encoding="utf-8")
    code = "import sitecustomize; print(sitecustomize.OWN, sitecustomize.__file__)"
    done = program.run(code, paths=str(tmp_path / "own"))
    assert done.stdout == f"1 {tmp_path}/own/sitecustomize.py\n", done.stderr


def test_an_error_in_the_programs_own_sitecustomize_is_told_as_always(
    program: Program, tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("1 / 0", encoding="utf-8")
    plain, hooked = (
        program.run("print('runs')", paths=str(tmp_path / "own"), hooked=hooked) for hooked in (False, True)
    )
    assert "ZeroDivisionError" in plain.stderr
    assert (hooked.stdout, hooked.stderr) == (plain.stdout, plain.stderr)


LOADS = """
import sys
import torch.utils.data

class Images(torch.utils.data.Dataset):
    def __init__(self):
        self.samples = [{"label": number + 1000, "path": f"image-{number}"} for number in range(30_000)]
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return self.samples[index]["label"]
    def __getattr__(self, name):
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name != "begin":
            if frame.f_globals["__name__"] == "shmloader.monitor.inside":
                print("the search ran code of the dataset for", name, file=sys.stderr)
            frame = frame.f_back
        raise AttributeError(name)

def main(method):
    train = Images()
    loader = LOADER(train, batch_size=4, num_workers=1, multiprocessing_context=method)
    print([batch.tolist() for batch in loader])

if __name__ == "__main__":
    main(METHOD)
"""


def loads(loader: str, method: str, before: str = "") -> str:
    return before + LOADS.replace("LOADER", loader).replace("METHOD", repr(method))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long), "forkserver"])
def test_a_loader_reports_the_owner_and_its_workers(program: Program, method: str) -> None:
    done = program.run(loads("torch.utils.data.DataLoader", method))
    assert done.stdout == "[[1000, 1001, 1002, 1003], [1004, 1005, 1006, 1007]]\n", done.stderr
    assert done.stderr == ""
    report = program.reported()[-1]
    assert (report.dataset, report.owner, report.start_method) == ("train", "train.samples", method)
    assert report.is_shareable
    assert report.error == ""
    assert len(report.workers) == 1
    assert 30_000 * 200 < report.nbytes < 30_000 * 500


OTHERS = """
import shmloader
class Own(torch.utils.data.DataLoader): pass
for install, LOADER in ((False, shmloader.DataLoader), (False, Own), (True, torch.utils.data.DataLoader)):
    if install:
        shmloader.install()
    main("fork")
    print(LOADER, hasattr(torch.utils.data.DataLoader, "close"))
"""


def test_other_loaders_report_too(program: Program) -> None:
    """This package's, a class of the program's own, and torch's after `install()`."""
    done = program.run(LOADS.replace("main(METHOD)", "pass") + OTHERS)
    assert done.stderr == ""
    assert [line.split()[-1] for line in done.stdout.splitlines()[1::2]] == ["False", "False", "True"]
    reports = program.reported()
    assert [(report.owner, len(report.workers)) for report in reports] == [("train.samples", 1)] * 3


def test_a_loader_inside_a_spawned_process_reports(program: Program) -> None:
    code = LOADS.replace("LOADER", "torch.utils.data.DataLoader").replace(
        "main(METHOD)",
        "import multiprocessing\n"
        "    rank = multiprocessing.get_context('spawn').Process(target=main, args=('fork',))\n"
        "    rank.start(); rank.join(); print(rank.pid)",
    )
    done = program.run(code)
    (report,) = program.reported()
    assert done.stdout.splitlines()[-1] == str(report.pid), done.stderr
    assert report.owner == "train.samples"


def test_without_shmloader_the_program_loads_and_nothing_is_reported(program: Program) -> None:
    code = "import sys; sys.modules['shmloader'] = None\n" + loads("torch.utils.data.DataLoader", "fork")
    done = program.run(code)
    assert done.stdout.startswith("[[1000"), done.stderr
    assert program.reported() == []


def test_an_error_of_iter_reaches_the_program(program: Program) -> None:
    code = loads("torch.utils.data.DataLoader", "fork").replace("batch_size=4", "batch_sampler=Broken()")
    code = "class Broken:\n    def __iter__(self): raise OSError('no order')\n" + code
    done = program.run(code)
    assert done.stderr.splitlines()[-1] == "OSError: no order"


def test_reports_are_read_up_to_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "reports"
    line: dict[str, Any] = {"pid": 1, "loader": 2, "dataset": "train", "workers": [3, 4]}
    path.write_text(json.dumps(line) + "\n" + json.dumps(line)[:9], encoding="utf-8")
    (first,), offset = read_reports(path, 0)
    assert first == Report(1, 2, "train", workers=(3, 4))
    path.write_text((json.dumps(line) + "\n") * 2, encoding="utf-8")
    assert len(read_reports(path, offset)[0]) == 1
