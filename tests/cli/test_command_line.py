"""The command line: its commands, and the version, which is written in one place."""

import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from warm_python import warm_python

import shmloader
from shmloader.cli import COMMANDS, main

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_without_a_command_all_are_listed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(words)
    except SystemExit as end:  # argparse's own --help
        status = end.code
    output = capsys.readouterr().out
    assert status == 0
    for name, summary in COMMANDS.items():
        assert f"  {name:<8} {summary}" in output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "bench" and not (Path(shmloader.__file__).parents[1] / "benchmarks").is_dir():
        assert main([name, "--help"]) == 2  # an installed package has no benchmarks
        assert "the benchmarks are not here" in capsys.readouterr().err
        return
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert f"usage: python -m shmloader {name}" in capsys.readouterr().out


def test_an_installed_package_says_where_the_benchmarks_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks").mkdir()  # another project's package
    (tmp_path / "benchmarks" / "comparison.py").touch()
    monkeypatch.setattr(shmloader, "__file__", str(tmp_path / "shmloader" / "__init__.py"))
    assert main([]) == 0
    assert f"{COMMANDS['bench']} (not in an installed package: in a checkout)" in capsys.readouterr().out
    assert main(["bench"]) == 2
    assert "is an installed package" in capsys.readouterr().err


def test_the_script_is_the_command_line() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    script = metadata.EntryPoint("shmloader", project["project"]["scripts"]["shmloader"], "console_scripts")
    assert script.load() is main


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["docter"])
    assert end.value.code == 2
    assert "'docter'" in capsys.readouterr().err


def test_the_version_is_told() -> None:
    command = [*warm_python(), "-m", "shmloader", "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.stdout == f"shmloader {shmloader.__version__}\n"


def test_the_version_is_written_in_one_place() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "shmloader.__version__"}
    assert metadata.version("shmloader") == shmloader.__version__
