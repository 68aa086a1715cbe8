"""Exceptions whose ``args`` or fields were changed after they were made arrive with the change."""

from __future__ import annotations

import builtins
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch.utils.data
from exception_kinds import MAKERS, Coded, itself, tensor
from loading import make_error
from torch.utils.data import Dataset

from shmloader import DataLoader

BUILTIN = {
    kind.__name__: kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
FIELDS = (
    "errno strerror filename filename2 characters_written code value name path msg lineno offset text "
    "end_lineno print_file_and_line encoding object start end reason message"
).split()


def make_builtin(kind: type) -> BaseException:
    if issubclass(kind, UnicodeTranslateError):
        return kind("ab", 0, 1, "bad")
    if issubclass(kind, UnicodeError) and kind is not UnicodeError:
        return kind("utf-8", b"ab" if kind is UnicodeDecodeError else "ab", 0, 1, "bad")
    if issubclass(kind, BaseExceptionGroup):
        return kind("many", [Coded(1), ValueError(2)])
    if issubclass(kind, OSError):
        return kind(2, "gone", "a.png", None, "b.png")
    if issubclass(kind, SyntaxError):
        return kind("no", ("file.py", 3, 4, "text"))
    if issubclass(kind, ImportError):
        return kind("no", name="module", path="path")
    if issubclass(kind, AttributeError | NameError):
        return kind("no", name="place")
    return kind("a")


def with_context(make: Callable[[], BaseException]) -> Callable[[], BaseException]:
    def changed() -> BaseException:
        error = make()
        error.args += ("context",)
        return error

    return changed


def changed_fields(error: Any, **values: Any) -> Callable[[], BaseException]:
    for name, value in values.items():
        setattr(error, name, value)
    return lambda: error


MADE: dict[str, Callable[[], BaseException]] = {
    **{name: with_context(lambda kind=kind: make_builtin(kind)) for name, kind in BUILTIN.items()},
    **{
        make.__name__: with_context(make) for make in MAKERS if make not in (itself, tensor)
    },  # they have reprs of their own
    **{
        name: with_context(lambda name=name: make_error(name))
        for name in ("CalledProcessError", "FourArguments", "Unpicklable")
    },
    "an OSError without a file": with_context(lambda: FileNotFoundError(2, "gone")),
    "an OSError of a text": with_context(lambda: OSError("gone")),
    "an OSError without a number": lambda: OSError(None, "gone"),
    "another file": changed_fields(FileNotFoundError(2, "gone", "a.png"), filename="b.png"),
    "another number": changed_fields(OSError(5, "gone"), errno=6, strerror="lost"),
    "another count": changed_fields(BlockingIOError(11, "wait", 3), characters_written=4),
    "another code": changed_fields(SystemExit(3), code=4),
    "another value": changed_fields(StopIteration(3), value=4),
    "another name": changed_fields(ImportError("no", name="module"), name="other"),
    "another position": changed_fields(
        UnicodeDecodeError("utf-8", b"ab", 0, 1, "bad"), end=2, reason="worse"
    ),
    "no arguments": changed_fields(Coded(1), args=()),
    "no arguments of a group": changed_fields(ExceptionGroup("many", [Coded(1)]), args=()),
}


class RaisesMade(Dataset):
    def __len__(self) -> int:
        return len(MADE)

    def __getitem__(self, index: int) -> int:
        make = list(MADE.values())[index]
        raise make()


def arrivals(loader: Any) -> list[BaseException]:
    iterator, errors = iter(loader), []
    for _ in range(len(loader)):
        try:
            next(iterator)
        except BaseException as error:
            errors.append(error)
    return errors


@pytest.fixture(scope="module")
def arrived() -> dict[str, BaseException]:
    return dict(zip(MADE, arrivals(DataLoader(RaisesMade(), batch_size=1, num_workers=1)), strict=True))


def text_of(error: BaseException) -> str:
    """Its last line in a traceback, without notes and addresses."""
    formatted = traceback.TracebackException.from_exception(error)
    formatted.__notes__ = None
    return re.sub("0x[0-9a-f]+", "0x", list(formatted.format_exception_only())[-1])


def shown(error: BaseException) -> Any:
    """What an exception has, in a form that can be compared; the repr of a function stands for it."""
    contents = {name: getattr(error, name, "none") for name in FIELDS} | error.__dict__
    contents.pop("__notes__", None)
    contents["args"] = vars(BaseException)["args"].__get__(error)
    return type(error), re.sub("0x[0-9a-f]+", "0x", repr(contents)), text_of(error)


@pytest.mark.parametrize("name", MADE)
def test_a_changed_exception_arrives_as_it_was_raised(name: str, arrived: dict[str, BaseException]) -> None:
    assert shown(arrived[name]) == shown(MADE[name]())
    assert not [note for note in arrived[name].__notes__ if "stand-in" in note]


def test_the_change_is_in_what_torch_raises_too(arrived: dict[str, BaseException]) -> None:
    # Torch's worker ends at others than an Exception, no group can be made of a text, and three show none.
    names = [
        name
        for name, error in arrived.items()
        if isinstance(error, Exception)
        and not isinstance(error, ExceptionGroup)
        and name not in ("own_reduce", "bad_str", "of_file")
    ]
    places = [list(MADE).index(name) for name in names]
    loader = torch.utils.data.DataLoader(RaisesMade(), sampler=places, num_workers=1)
    for name, of_torch in zip(names, arrivals(loader), strict=True):
        assert text_of(arrived[name]) in re.sub("0x[0-9a-f]+", "0x", str(of_torch)), name
