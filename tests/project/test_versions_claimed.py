"""The versions of Python and torch that pyproject.toml claims are those that the matrix tests."""

import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
sys.path.insert(0, str(REPOSITORY / "tests" / "matrix"))

from environments import DEBIAN, environments_of  # noqa: E402 - it is no package


def test_each_python_that_is_claimed_is_tested() -> None:
    claimed = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if ":: Python :: 3." in line]
    tested = {PROJECT["requires-python"].removeprefix(">="), *(python for python, _ in DEBIAN.values())}
    assert claimed
    assert set(claimed) <= tested


def test_the_oldest_versions_that_are_claimed_are_tested() -> None:
    floors = dict(line.split(">=") for line in PROJECT["dependencies"])
    assert floors.pop("torch") == min((torch for _, torch in DEBIAN.values()), key=_numbers)
    oldest, *_ = environments_of(PROJECT)
    assert oldest.versions[1:] == [f"{name} {floor}" for name, floor in floors.items()]


def _numbers(version: str) -> list[int]:
    return list(map(int, version.split(".")))
