"""Exceptions of many kinds, importable, so that workers under every start method have them."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch


class Coded(Exception):
    """Its constructor changes its argument, so it must not be called again."""

    made = 0

    def __init__(self, code: int) -> None:
        type(self).made += 1
        super().__init__(f"code {code}")
        self.code = code


class FourNeeded(LookupError):
    """Takes four arguments by keyword only, and passes none on."""

    def __init__(self, *, one: int, two: int, three: int, four: int) -> None:
        self.sum = one + two + three + four


class NoReduce(ValueError):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


class OwnReduce(ValueError):
    """Keeps state that only its own __reduce__ finds."""

    secrets: ClassVar[dict[int, str]] = {}

    def __reduce__(self) -> Any:
        return _with_secret, (self.args, self.secrets[id(self)])

    def __str__(self) -> str:
        return self.secrets[id(self)]


def _with_secret(args: tuple[Any, ...], secret: str) -> OwnReduce:
    error = OwnReduce(*args)
    OwnReduce.secrets[id(error)] = secret
    return error


class BadStr(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("str")


class Slotted(Exception):
    __slots__ = ("where",)


class OfFile(OSError):
    def __init__(self, name: str) -> None:
        super().__init__(2, "gone", name)


class Many(ExceptionGroup):
    """A group with a constructor of its own."""

    def __new__(cls, *errors: Exception) -> Self:
        return super().__new__(cls, "many", errors)

    def __init__(self, *errors: Exception) -> None:
        self.count = len(errors)


class ReadOnly(Exception):
    """Has an attribute that cannot be set."""

    @property
    def twice(self) -> int:
        return 2 * self.args[0]


class OtherArgs(LookupError):
    """Has an attribute with a name that all exceptions use."""

    @property
    def args(self) -> Any:
        raise RuntimeError("not here")


class Plain:
    """Picklable, and equal to nothing but itself."""


def coded() -> BaseException:
    return Coded(3)


def four_needed() -> BaseException:
    return FourNeeded(one=1, two=2, three=3, four=4)


def no_reduce() -> BaseException:
    return NoReduce("a", 2)


def own_reduce() -> BaseException:
    return _with_secret(("a",), "hidden")


def bad_str() -> BaseException:
    return BadStr(1)


def slotted() -> BaseException:
    error = Slotted(1)
    error.where = "here"
    return error


def of_file() -> BaseException:
    return OfFile("a.png")


def many() -> BaseException:
    return Many(Coded(1), ExceptionGroup("inner", [FourNeeded(one=1, two=1, three=1, four=1), NoReduce(5)]))


def read_only() -> BaseException:
    return ReadOnly(4)


def plain_argument() -> BaseException:
    return ValueError(Plain(), [1, 2])


def tensor() -> BaseException:
    error = ValueError("shape", torch.arange(3))
    error.batch = {"x": torch.ones(2, requires_grad=True) * 2}
    return error


def lambda_argument() -> BaseException:
    error = KeyError("a", lambda: None)
    error.callback, error.fine = (lambda: None), 7
    return error


def stop() -> BaseException:
    return StopAsyncIteration(8)


def syntax() -> BaseException:
    return SyntaxError("bad", ("file.py", 3, 4, "text"))


def imports() -> BaseException:
    return ImportError("no", name="module", path="path")


def exits() -> BaseException:
    return BaseExceptionGroup("exits", [SystemExit(3), KeyboardInterrupt()])


def itself() -> BaseException:
    error = ValueError("round")
    error.me = error
    error.args = ("round", [error])
    return error


MAKERS = [
    coded,
    four_needed,
    no_reduce,
    own_reduce,
    bad_str,
    slotted,
    of_file,
    many,
    read_only,
    plain_argument,
    tensor,
    lambda_argument,
    stop,
    syntax,
    imports,
    exits,
    itself,
]
