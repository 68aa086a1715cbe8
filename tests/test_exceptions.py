"""Exceptions arrive as what was raised, and say where: worker, sample, and which samples do not match."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import pytest
import torch
from loading import make_error
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

import shmloader
from shmloader import DataLoader
from shmloader.failures import capture, restore

# --- kinds of exceptions; importable, so that workers under every start method have them


class Coded(Exception):
    """Its constructor makes something else of its argument, and must not be called again."""

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
    """Keeps state where only its own __reduce__ finds it."""

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
    """An attribute of its own that cannot be set."""

    @property
    def twice(self) -> int:
        return 2 * self.args[0]


class OtherArgs(LookupError):
    """Uses the name of what all exceptions have."""

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
NAMES = (
    "KeyError UnicodeDecodeError CalledProcessError FourArguments Unpicklable ExceptionGroup SystemExit "
    "KeyboardInterrupt OSError"
).split()


def make(index: int) -> BaseException:
    return MAKERS[index]() if index < len(MAKERS) else make_error(NAMES[index - len(MAKERS)])


class RaisesAll(Dataset):
    """Sample i raises the i-th of all kinds, from another and while yet another is handled."""

    def __len__(self) -> int:
        return len(MAKERS) + len(NAMES) + 1

    def __getitem__(self, index: int) -> int:
        if index == len(self) - 1:
            return index
        try:
            raise ConnectionError("context")
        except ConnectionError:
            error = make(index)
            error.add_note("a note of its own")
            raise error from Coded(9)


def shown(value: Any) -> Any:
    """What can be compared of an argument: objects without equality by type, functions by their repr."""
    if isinstance(value, BaseException):
        return type(value), [shown(arg) for arg in value.args]
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if callable(value) or (isinstance(value, str) and value.startswith("<function ")):
        return "a function"
    return type(value) if isinstance(value, Plain) else value


def assert_arrived(error: BaseException, expected: BaseException, index: int) -> None:
    assert type(error) is type(expected)
    if expected.args[1:] != [[expected]] and not hasattr(expected, "me"):
        assert shown(error.args) == shown(expected.args)
    assert type(error.__cause__) is Coded
    assert error.__cause__.code == 9
    assert type(error.__context__) is ConnectionError
    assert error.__suppress_context__
    own, sample, where = error.__notes__
    assert own == "a note of its own"
    assert sample == f"raised by dataset[{index}]"
    assert where.startswith("Raised in shmloader worker ")
    assert f"while it made the batch of indices [{index}]" in where
    assert "test_exceptions.Coded: code 9" in where
    assert "raise error from Coded(9)" in where
    assert own not in where


def epoch(loader: Any) -> list[BaseException]:
    """The exceptions of one epoch, in its order; the loader goes on after each."""
    iterator, errors = iter(loader), []
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return errors
        except BaseException as error:
            errors.append(error)
        else:
            assert batch.tolist() == [len(RaisesAll()) - 1]


@pytest.mark.parametrize("persistent", [True, False])
def test_every_kind_arrives_in_every_epoch(persistent: bool) -> None:
    loader = DataLoader(RaisesAll(), batch_size=1, num_workers=2, persistent_workers=persistent)
    with loader:
        for _ in range(2):
            errors = epoch(loader)
            assert len(errors) == len(RaisesAll()) - 1
            for index, error in enumerate(errors):
                assert_arrived(error, make(index), index)
        assert loader.statistics().failures == 2 * len(errors)
        assert loader.statistics().detached == 0


def test_every_kind_arrives_under_every_start_method(start_method: str) -> None:
    loader = DataLoader(RaisesAll(), batch_size=1, num_workers=1, multiprocessing_context=start_method)
    errors = epoch(loader)
    assert len(errors) == len(RaisesAll()) - 1
    for index, error in enumerate(errors):
        assert_arrived(error, make(index), index)


# --- what is in them


class RaisesGiven(Dataset):
    def __init__(self, make: Callable[[], BaseException]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise self.make()


def travel(error: BaseException) -> Any:
    """As an exception that a worker caught arrives in the main process."""
    try:
        raise error
    except BaseException as caught:
        return restore(pickle.loads(pickle.dumps(capture(caught, "here"))))


def test_constructors_are_not_called_again() -> None:
    error, made = Coded(3), Coded.made
    arrived = travel(error)
    assert (arrived.args, arrived.code, Coded.made) == (("code 3",), 3, made)


def test_attributes_arrive() -> None:
    assert travel(four_needed()).sum == 10
    assert travel(slotted()).where == "here"
    assert travel(read_only()).twice == 8
    assert travel(many()).count == 2
    called = travel(make_error("CalledProcessError"))
    assert (called.returncode, called.cmd, called.stdout, called.stderr) == (3, ["ls"], b"out", b"err")
    assert travel(make_error("FourArguments")).four == 4


def test_what_built_in_classes_keep_outside_of_args_arrives() -> None:
    assert travel(of_file()).filename == "a.png"
    assert travel(make_error("OSError")).filename == "gone.png"
    assert travel(imports()).name == "module"
    assert travel(make_error("UnicodeDecodeError")).reason == "invalid start byte"
    assert travel(syntax()).lineno == 3
    assert travel(SystemExit(7)).code == 7
    assert travel(StopIteration(8)).value == 8


def test_a_class_that_uses_the_names_of_all_exceptions_for_something_else_arrives() -> None:
    arrived = travel(OtherArgs("text", 2))
    assert type(arrived) is OtherArgs
    assert str(arrived) == "('text', 2)"


def test_a_class_that_pickles_itself_does_so() -> None:
    assert str(travel(own_reduce())) == "hidden"


def test_what_cannot_be_pickled_arrives_as_its_repr_and_the_rest_as_it_is() -> None:
    arrived = travel(lambda_argument())
    assert arrived.args[0] == "a"
    assert "<lambda>" in arrived.args[1]
    assert "<lambda>" in arrived.callback
    assert arrived.fine == 7


def test_tensors_arrive_as_they_were() -> None:
    arrived = travel(tensor())
    assert arrived.args[1].tolist() == [0, 1, 2]
    assert arrived.batch["x"].tolist() == [2, 2]


def test_groups_arrive_whole_and_nested() -> None:
    arrived = travel(many())
    assert type(arrived) is Many
    first, inner = arrived.exceptions
    assert (type(first), first.code) == (Coded, 1)
    assert [type(error) for error in inner.exceptions] == [FourNeeded, NoReduce]
    assert inner.exceptions[1].args == (5,)
    with pytest.raises(ExceptionGroup) as caught:
        try:
            raise arrived
        except* NoReduce:
            pass
    assert [type(error) for error in caught.value.exceptions] == [Coded, ExceptionGroup]


def test_an_exception_that_contains_itself_arrives() -> None:
    arrived = travel(itself())
    assert arrived.args[0] == "round"
    circle = ValueError("circle")
    circle.__context__ = KeyError("other")
    circle.__context__.__context__ = circle
    assert type(travel(circle).__context__) is KeyError


def test_a_long_chain_of_causes_arrives() -> None:
    error = ValueError(0)
    for n in range(1, 200):
        last, error = error, ValueError(n)
        error.__cause__ = last
    arrived = travel(error)
    assert [arrived.args, arrived.__cause__.args, arrived.__cause__.__cause__.args] == [
        (199,),
        (198,),
        (197,),
    ]


def test_notes_arrive_also_where_they_are_no_list() -> None:
    error = ValueError(1)
    error.__notes__ = "text"
    assert [note.split("\n")[0] for note in travel(error).__notes__] == ["here"]
    error.__notes__ = ["one", 2]
    assert travel(error).__notes__[:2] == ["one", "2"]


def noted() -> BaseException:
    error = ValueError("noted")
    error.__notes__ = ("a tuple",)
    return error


class NotedStream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        raise noted()
        yield


@pytest.mark.parametrize("dataset", [RaisesGiven(noted), NotedStream()], ids=["map", "stream"])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_that_takes_no_note_is_raised_all_the_same(workers: int, dataset: Any) -> None:
    with pytest.raises(ValueError, match="noted") as caught:
        next(iter(DataLoader(dataset, num_workers=workers)))
    assert caught.value.__notes__[0] == "a tuple"


def test_contexts_arrive_and_are_suppressed_or_not_as_they_were() -> None:
    error = ValueError(1)
    error.__context__ = KeyError(2)
    arrived = travel(error)
    assert (type(arrived.__context__), arrived.__suppress_context__) == (KeyError, False)
    error.__suppress_context__ = True  # "from None"
    arrived = travel(error)
    assert (type(arrived.__context__), arrived.__cause__, arrived.__suppress_context__) == (
        KeyError,
        None,
        True,
    )


# --- classes that cannot be imported


def local_error() -> BaseException:
    class Local(KeyError):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(a)
            self.b = b

    return Local(1, 2)


def test_a_class_that_no_import_leads_to_has_a_stand_in() -> None:
    pickled = pickle.dumps(capture(local_error(), "here"))
    gc.collect()  # its class is gone now
    arrived = restore(pickle.loads(pickled))
    assert isinstance(arrived, KeyError)
    assert type(arrived).__name__ == "Local"
    assert type(arrived).__qualname__ == "local_error.<locals>.Local"
    assert (arrived.args, arrived.b, str(arrived)) == ((1,), 2, "1")
    assert "this is a stand-in, derived from KeyError" in arrived.__notes__[0]


def test_a_local_class_from_before_the_fork_is_itself() -> None:
    class Local(KeyError):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(a)

    loader = DataLoader(RaisesGiven(lambda: Local(1, 2)), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(Local) as caught:
        next(iter(loader))
    assert type(caught.value) is Local
    assert caught.value.args == (1,)


class OfAnImportableBase(Coded):
    pass


def only_in_the_worker() -> BaseException:
    """Of a class whose module the main process has not got."""
    module = types.ModuleType("only_in_the_worker")
    module.Strange = type("Strange", (Coded,), {"__module__": "only_in_the_worker"})
    module.Argument = type("Argument", (), {"__module__": "only_in_the_worker"})
    sys.modules["only_in_the_worker"] = module
    error = module.Strange(5)
    error.extra = module.Argument()
    return error


def test_a_class_that_only_the_worker_can_import_is_derived_from_its_nearest_base() -> None:
    loader = DataLoader(RaisesGiven(only_in_the_worker), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(Coded) as caught:
        next(iter(loader))
    assert type(caught.value).__name__ == "Strange"
    assert (caught.value.args, caught.value.code) == (("code 5",), 5)
    assert "could not be rebuilt in the main process: ModuleNotFoundError" in caught.value.extra


def test_a_class_of_a_script_run_as_main_arrives_under_spawn(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
from shmloader import DataLoader

class Mine(Exception):
    def __init__(self, a, b):
        super().__init__(a)

class Data:
    def __len__(self): return 2
    def __getitem__(self, index): raise Mine(index, 0)

if __name__ == "__main__":
    try:
        next(iter(DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")))
    except Mine as error:
        print(type(error) is Mine, error.args)
"""
    )
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "True (0,)\n", "")


# --- which sample


class Held(Dataset):
    """Its exceptions refer to frames that hold memory of the slot."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        leaf = shmloader.empty(4)
        if index % 4 == 3:
            try:
                raise ConnectionError(leaf.data_ptr())
            except ConnectionError as error:
                kept = error  # a circle: frame, error, traceback, frame
                raise ExceptionGroup("one", [kept]) from kept
        return leaf.fill_(index)


def test_a_failed_batch_holds_nothing_of_its_slot() -> None:
    loader = DataLoader(Held(), batch_size=4, num_workers=1, prefetch_factor=1)
    iterator = iter(loader)
    for _ in range(10):
        with pytest.raises(ExceptionGroup):
            next(iterator)
    assert loader.statistics().failures == 10
    assert loader.statistics().detached == 0


class FailsAt(Dataset):
    def __init__(self, at: Any) -> None:
        self.at = at

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: Any) -> int:
        if index == self.at:
            raise ValueError("bad")
        return 0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("how", "at", "note"),
    [
        ({"batch_size": 4}, 6, "dataset[6]"),
        ({"batch_size": None}, 6, "dataset[6]"),
        ({"batch_sampler": [["a", "b"], ("c", "d")]}, "d", "dataset['d']"),
        ({"batch_sampler": [range(3), range(3, 9, 2)]}, 5, "dataset[5]"),
        ({"batch_size": None, "sampler": [(1, 2), (3, 4)]}, (3, 4), "dataset[(3, 4)]"),
    ],
)
def test_the_failing_sample_is_named(how: dict[str, Any], at: Any, note: str, workers: int) -> None:
    with pytest.raises(ValueError, match=r"^bad") as caught:
        list(DataLoader(FailsAt(at), num_workers=workers, **how))
    assert caught.value.__notes__[0] == f"raised by {note}"


class FailingStream(IterableDataset):
    def __init__(self, at: int) -> None:
        self.at = at

    def __iter__(self) -> Iterator[int]:
        for step in range(12):
            if step == self.at:
                raise ValueError("bad")
            yield step


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [4, None])
@pytest.mark.parametrize("at", [0, 5])
def test_the_failing_sample_of_a_stream_is_named(at: int, size: int | None, workers: int) -> None:
    with pytest.raises(ValueError, match=r"^bad") as caught:
        list(DataLoader(FailingStream(at), batch_size=size, num_workers=workers))
    assert caught.value.__notes__[0] == f"raised by sample {at} of the stream, counted from 0"


# --- samples that cannot be joined


class Point(NamedTuple):
    x: int
    y: torch.Tensor


EIGHT, NINE = torch.ones(3, 8), torch.ones(3, 9)
# Samples of one batch, and what is said of them; a number in braces stands for the sample's name.
CASES: dict[str, tuple[list[Any], str]] = {
    "tensors": ([EIGHT, EIGHT, NINE], "{0} has shape (3, 8), {2} has shape (3, 9) at batch"),
    "the first is odd": (
        [NINE, EIGHT, EIGHT],
        "{1} has shape (3, 8), {0} has shape (3, 9) at batch",
    ),
    "arrays": (
        [np.ones((2, 2)), np.ones((2, 2)), np.ones(4)],
        "{0} has shape (2, 2), {2} has shape (4,) at batch",
    ),
    "nested": (
        [{"image": (torch.ones(2), {"mask": item})} for item in (EIGHT, NINE)],
        "{0} has shape (3, 8), {1} has shape (3, 9) at batch['image'][1]['mask']",
    ),
    "namedtuples": (
        [Point(1, EIGHT), Point(2, NINE)],
        "{0} has shape (3, 8), {1} has shape (3, 9) at batch.y",
    ),
    "keys": (
        [{"a": 1, "b": 1}, {"a": 1}, {"a": 1, "b": 1}],
        "{0} has a value, {1} has no value at batch['b']",
    ),
    "lengths": ([[1, 2], [1, 2], [1]], "{0} has length 2, {2} has length 1 at batch"),
    "types": (
        [{"x": 1}, {"x": "one"}, {"x": 2}],
        "{0} has a number, {1} has type str at batch['x']",
    ),
    "a tensor and a number": (
        [(0, torch.ones(())), (0, 1.0)],
        "{0} has shape (), {1} has type float at batch[1]",
    ),
    "a mapping and none": ([{"a": 1}, [1]], "{0} has type dict, {1} has type list at batch"),
    "nothing that can be joined": (
        [{"x": None}, {"x": None}],
        "{0} has type NoneType at batch['x'], and so have the others",
    ),
    "some of them None": (
        [{"x": EIGHT}, {"x": None}, {"x": EIGHT}],
        "{0} has shape (3, 8), {1} has type NoneType at batch['x']",
    ),
    "many": (
        [EIGHT, *[torch.ones(n) for n in range(6)], EIGHT],
        (
            "{0} has shape (3, 8), {1} has shape (0,), {2} has shape (1,), "
            "{3} has shape (2,) (and 3 more differ) at batch"
        ),
    ),
}


class Samples(Dataset):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def error_of(act: Callable[[], Any]) -> Exception:
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def collate_twice(samples: list[Any]) -> Any:
    return {"whole": default_collate(samples)}


@pytest.mark.parametrize("collate", [None, collate_twice], ids=["default", "custom"])
@pytest.mark.parametrize("workers", [0, 1])
def test_what_does_not_match_is_named(workers: int, collate: Any) -> None:
    batches, every = [], []
    for samples, _ in CASES.values():
        batches.append(list(range(len(every), len(every) + len(samples))))
        every += samples
    loader = DataLoader(Samples(every), batch_sampler=batches, num_workers=workers, collate_fn=collate)
    iterator = iter(loader)
    for case, indices in zip(CASES, batches, strict=True):
        samples, expected = CASES[case]
        torchs = error_of(lambda samples=samples: default_collate(samples))
        error = error_of(lambda: next(iterator))
        assert (type(error), str(error)) == (type(torchs), str(torchs)), case
        names = [f"dataset[{index}]" for index in indices]
        assert error.__notes__[0] == f"cannot join samples: {expected.format(*names)}", case


@pytest.mark.parametrize("workers", [0, 1])
def test_dtypes_are_named_where_shapes_agree(workers: int) -> None:
    samples = [{"x": torch.ones(2), "y": torch.ones(2)}, {"x": torch.ones(2), "y": torch.ones(2) * 1j}]
    loader = DataLoader(Samples(samples), batch_size=2, num_workers=workers, collate_fn=stack_of_y)
    error = error_of(lambda: next(iter(loader)))
    (note,) = [note for note in error.__notes__ if note.startswith("cannot join samples: ")]
    assert "dataset[0] has dtype torch.float32" in note
    assert "dataset[1] has dtype torch.complex64" in note
    assert note.endswith("at batch['y']")


def stack_of_y(samples: list[Any]) -> torch.Tensor:
    values = [sample["y"] for sample in samples]
    return torch.stack(values, out=torch.empty(2, 2, dtype=torch.float32))


def looks_up(samples: list[Any]) -> Any:
    return {}["text"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_custom_collate_functions_error_names_its_samples_only(workers: int) -> None:
    """Samples of different shapes are what it is for: they are not to blame."""
    samples = [torch.ones(1 + n) for n in range(60)]
    loader = DataLoader(Samples(samples), batch_size=30, collate_fn=looks_up, num_workers=workers)
    with pytest.raises(KeyError) as caught:
        next(iter(loader))
    assert caught.value.__notes__[0].startswith("raised by collate_fn, given dataset[0], dataset[1], ")
    assert caught.value.__notes__[0].endswith("dataset[23] and 6 more")
    assert "cannot join" not in "".join(caught.value.__notes__)


def test_a_streams_samples_are_named_by_their_positions() -> None:
    class Ragged(IterableDataset):
        def __iter__(self) -> Iterator[torch.Tensor]:
            yield from (torch.ones(1 + step // 6) for step in range(12))

    iterator = iter(DataLoader(Ragged(), batch_size=4, num_workers=1))
    next(iterator)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size") as caught:
        next(iterator)
    assert caught.value.__notes__[0] == (
        "cannot join samples: sample 4 of the stream has shape (1,), sample 6 of the stream has shape (2,), "
        "sample 7 of the stream has shape (2,) at batch"
    )


class Odd(Sequence):
    """Raises when it is looked at."""

    def __len__(self) -> int:
        raise RuntimeError("its length")

    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("its items")


def test_samples_that_cannot_be_looked_at_do_not_hide_the_error() -> None:
    loader = DataLoader(Samples([Odd(), Odd()]), batch_size=2, num_workers=1)
    with pytest.raises(RuntimeError, match="its length") as caught:
        next(iter(loader))
    assert caught.value.__notes__[0] == "raised by collate_fn, given dataset[0], dataset[1]"


class OddIndex:
    def __repr__(self) -> str:
        raise RuntimeError("repr")


@pytest.mark.parametrize("workers", [0, 1])
def test_indices_that_cannot_be_shown_do_not_hide_the_error(workers: int) -> None:
    batches = [[OddIndex(), OddIndex()], [0, 1]]
    iterator = iter(DataLoader(Samples([1, 2]), batch_sampler=batches, num_workers=workers))
    with pytest.raises(TypeError, match="list indices must be integers or slices, not OddIndex"):
        next(iterator)
    assert next(iterator).tolist() == [1, 2]


def initialises(worker_id: int) -> None:
    raise FourNeeded(one=worker_id, two=0, three=0, four=0)


def test_an_error_of_worker_init_fn_arrives_from_each_worker() -> None:
    loader = DataLoader(Samples([1, 2, 3, 4]), num_workers=2, worker_init_fn=initialises)
    for _ in range(2):
        iterator = iter(loader)
        for worker in range(2):
            with pytest.raises(FourNeeded) as caught:
                next(iterator)
            assert caught.value.sum == worker


def test_the_note_names_the_worker_that_raised() -> None:
    class Pids(Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            raise ValueError(get_worker_info().id, os.getpid())

    with pytest.raises(ValueError, match="0") as caught:
        list(DataLoader(Pids(), num_workers=1))
    worker, pid = caught.value.args
    assert f"shmloader worker {worker} (pid {pid})" in caught.value.__notes__[-1]
