"""The command lines of the benchmarks: arguments that make no sense are refused before measuring."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from shmloader.cli import INTERRUPTED
from shmloader.cli import bench as bench_command
from shmloader.cli import main as command_line

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are a package of the checkout, not of the library

from benchmarks import (  # noqa: E402
    autotune,
    checkouts,
    collector,
    comparison,
    contest,
    in_memory,
    large_batches,
    memory,
    per_batch,
    processor_time,
    resume,
    samplers,
    stores,
    unasked_states,
)
from benchmarks.loaders import LOADERS  # noqa: E402
from benchmarks.options import NOT_MEASURED, NOT_WRITTEN  # noqa: E402
from benchmarks.workloads import WORKLOADS  # noqa: E402

SOURCES = [*sorted((ROOT / "benchmarks").glob("*.py")), ROOT / "shmloader" / "cli" / "bench.py"]


def refused(script: ModuleType, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls a script's main function as a command line does, and checks that it ends with 2."""
    monkeypatch.setattr(sys, "argv", [script.__name__, *words])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2


def test_an_unknown_name_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["bench", "--workload", "imagse"]) == 2
    error = capsys.readouterr().err
    assert "'imagse'" in error
    assert "images" in error


def test_the_list_has_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line(["bench", "--list"]) == 0
    listed = capsys.readouterr().out
    for name in (*WORKLOADS, *LOADERS):
        assert f"| {name} " in listed


@pytest.mark.parametrize(
    "words",
    [
        ["--repeats", "0"],
        ["--workers", "x"],
        ["--seconds", "nan"],
        ["--seconds", "inf"],
        ["--prefetch-factor", "1.5"],
        ["--workers", "0"],
        ["--prefetch-factor", "0"],
        ["--seconds", "0"],
        ["--max-foreign", "-1"],
    ],
)
def test_numbers_that_are_none_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line(["bench", *words])
    assert ended.value.code == 2
    assert repr(words[1]) in capsys.readouterr().err


NUMBERS = {
    autotune: {"--turns": "0"},
    checkouts: {"--rounds": "0", "--turns": "-1", "--seconds": "0", "--workers": "0"},
    collector: {"--turns": "0", "--lists": "-5"},
    unasked_states: {"--turns": "0", "--batches": "0", "--mb": "-1", "--workers": "-1"},
    large_batches: {"--turns": "0", "--workers": "0", "--prefetch-factor": "0", "--large-mb": "0"},
    memory: {"--rows": "1", "--workers": "0", "--blocks": "0", "--repeats": "0", "--cgroup-limit": "0"},
    per_batch: {"--batches": "1"},
    resume: {"--batches": "10", "--turns": "0"},
    processor_time: {"--seconds": "nan", "--workers": "0"},
    stores: {"--rows": "0"},
    in_memory: {"--turns": "0", "--rows": "1", "--floats": "0"},
    samplers: {"--samples": "7", "--workers": "-1"},
}


@pytest.mark.parametrize(
    ("script", "option", "number"),
    [
        pytest.param(script, option, number, id=f"{script.__name__.rpartition('.')[2]} {option} {number}")
        for script, options in NUMBERS.items()
        for option, number in options.items()
    ],
)
def test_every_script_refuses_numbers_that_make_no_sense(
    script: ModuleType,
    option: str,
    number: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = ["other"] if script is checkouts else []
    refused(script, [*other, option, number], monkeypatch)
    error = capsys.readouterr().err
    assert f"argument {option}: '{number}' is not a " in error
    assert "Traceback" not in error


def test_every_number_on_a_command_line_is_checked() -> None:
    for path in SOURCES:
        assert not re.search(r"type=(int|float)\b", path.read_text(encoding="utf-8")), path


@pytest.mark.long
def test_without_a_checkout_the_command_says_where_to_get_one(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "shmloader", tmp_path / "shmloader", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "shmloader", "bench", "--quick"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2
    assert f"{tmp_path / 'shmloader'} is an installed package" in done.stderr
    assert "clone the repository" in done.stderr


def test_what_is_said_to_be_installed_can_be_in_a_checkout() -> None:
    """The package is on no index: its extras come from the checkout; constraints pin all other packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    known = {f"-e '.[{extra}]'" for extra in project["optional-dependencies"]} | set(pinned)
    told = [
        command.strip()
        for path in SOURCES
        for command in re.findall(r"pip install ([^)\"\n]*)", path.read_text(encoding="utf-8"))
    ]
    assert len(told) >= 5
    for command in told:
        assert command.startswith("-c constraints.txt "), command
        assert command.removeprefix("-c constraints.txt ") in known, command


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path for a plugin; changes made by importing it are undone."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path / f"plugin_of_{tmp_path.name}.py"


def list_with(plugin: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Asks for the list with an unusable plugin, and returns the error."""
    assert command_line(["bench", "--plugin", str(plugin), "--list"]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    return captured.err


def test_a_plugin_that_is_not_there_is_named(plugin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_with(plugin, capsys) == f"error: --plugin: no file {plugin}\n"


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("def", "SyntaxError: invalid syntax"),
    ],
)
def test_a_plugin_that_fails_is_named_with_its_traceback(
    plugin: Path, code: str, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin.write_text(f"# a plugin\n{code}\n", encoding="utf-8")
    first, *rest = list_with(plugin, capsys).splitlines()
    assert first == f"error: --plugin: {plugin} failed while it was loaded:"
    assert rest[-1].endswith(ending)
    assert any(f'File "{plugin}", line 2' in line for line in rest)
    assert not any("importlib" in line for line in rest)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("json.py", "another module is called 'json'"), ("a.b.py", "NAME.py"), ("plugin.txt", "NAME.py")],
)
def test_a_plugin_that_would_not_be_the_one_imported_is_refused(
    plugin: Path, name: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = plugin.with_name(name)
    named.touch()
    error = list_with(named, capsys)
    assert reason in error
    assert str(named) in error


def test_the_documented_window_is_that_of_the_command() -> None:
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").split())
    window = f"{comparison.parse([]).seconds:g} s and {contest.LEAST_BATCHES} batches"
    assert f"The window has at least {window}" in text


def test_the_help_has_every_exit_status() -> None:
    for status in (1, NOT_MEASURED, NOT_WRITTEN, INTERRUPTED):
        assert re.search(rf"^  {status} +\w", comparison.DESCRIPTION, re.MULTILINE)
    assert bench_command.NOT_MEASURED == NOT_MEASURED


def test_the_map_has_every_file() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        assert path.name == "__init__.py" or f"`{path.name}`" in text, path.name


def test_the_benchmarks_know_nothing_of_the_command_line() -> None:
    """The command line starts the benchmarks: an import the other way would be a cycle."""
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        assert "shmloader.cli" not in path.read_text(encoding="utf-8"), path
