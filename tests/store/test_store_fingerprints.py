"""The fingerprint of a function that builds: other arguments make another one, other ranks do not."""

from __future__ import annotations

import datetime as dt
import enum
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shmloader.store.job import fingerprint_of


class Trainer:
    """An object that each rank has of its own, with a method that builds."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def build(self) -> Any:
        return self.rank

    __call__ = build


def make(*arguments: Any, **named: Any) -> Any:
    return arguments, named


class Split(enum.Enum):
    TRAIN, VALID = object(), object()


@dataclass(frozen=True)
class Configuration:
    rank: int


def with_default(split: Any) -> Callable[[], Any]:
    def build(split: Any = split) -> Any:
        return split

    return build


def with_variables(paths: Any, split: Any) -> Callable[[], Any]:
    return lambda: make(paths, split)


PATHS = [f"/data/{number:06}.jpg" for number in range(20_000)]
WAYS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "list": lambda split: functools.partial(make, [[split], 1]),
    "by name": lambda split: functools.partial(make, files=[{}, (split,)]),
    "set": lambda split: functools.partial(make, {split, "a", "b"}),
    "behind a long argument": lambda split: functools.partial(make, PATHS, split),
    "within partial": lambda split: functools.partial(functools.partial(make, PATHS, split), PATHS),
    "behind a long variable": lambda split: with_variables(PATHS, split),
    "end of a long argument": lambda split: functools.partial(make, [*PATHS, split]),
    "ninth depth": lambda split: functools.partial(make, [[[[[[[[[split]]]]]]]]]),
    "enclosing variable": lambda split: lambda: make([split], ""),
    "default": lambda split: with_default((split,)),
}


@pytest.mark.parametrize("way", WAYS)
def test_arguments_are_compared_at_any_depth(way: str) -> None:
    splits = (
        "train",
        "valid",
        Split.TRAIN,
        Split.VALID,
        Path("train"),
        1,
        int,
        float,
        dt.date(2024, 1, 1),
    )
    found = [fingerprint_of(WAYS[way](split)) for split in splits]
    assert len(set(found)) == len(splits)
    assert found == [fingerprint_of(WAYS[way](split)) for split in splits]


def test_classes_that_build_are_compared() -> None:
    assert fingerprint_of(dict) != fingerprint_of(Trainer) != fingerprint_of(list)


def test_what_may_differ_between_ranks_is_no_other_way() -> None:
    def of_rank(rank: int) -> list[str]:
        configuration, device = {"rank": rank}, torch.device("cpu", rank)
        trainer = Trainer(rank)
        ways: list[Callable[[], Any]] = [
            trainer.build,
            trainer,
            lambda: (configuration, device, trainer),
            functools.partial(make, trainer, ""),
            functools.partial(
                make, configuration, [Configuration(rank)], device=device, options=configuration
            ),
        ]
        return list(map(fingerprint_of, ways))

    assert of_rank(0) == of_rank(1)


def test_the_order_of_a_configuration_does_not_count() -> None:
    one, other = ({"path": "x", "size": 1}, {"size": 1, "path": "x"})
    assert fingerprint_of(functools.partial(make, one)) == fingerprint_of(functools.partial(make, other))


def test_a_list_that_holds_itself_has_a_fingerprint() -> None:
    rows: list[Any] = [*range(50)]
    rows += [rows] * 50
    assert fingerprint_of(lambda: rows)


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    """The order of a set of texts, as the compiler makes for ``in {...}``, differs between processes."""
    found = {
        subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            check=False,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
        ).stdout
        for seed in "1234"
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == 32


FINGERPRINT = """
from functools import partial
from shmloader.store.job import fingerprint_of
def build(split="train"):
    return split in {"train", "valid", "test", "all"}
print(fingerprint_of(partial(build, {"some", "more", "texts"})))
"""
