"""Exceptions arrive as they were raised: of the same class, with all their contents."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from exception_kinds import (
    Coded,
    FourNeeded,
    Many,
    NoReduce,
    OtherArgs,
    Plain,
    four_needed,
    imports,
    itself,
    lambda_argument,
    many,
    of_file,
    own_reduce,
    read_only,
    slotted,
    syntax,
    tensor,
)
from loading import make_error
from torch.utils.data import Dataset, IterableDataset
from warm_python import warm_python

from shmloader import DataLoader
from shmloader.failures.exceptions import capture, restore

# --- contents


class RaisesGiven(Dataset):
    def __init__(self, make: Callable[[], BaseException]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise self.make()


def travel(error: BaseException) -> Any:
    """Send an exception to the main process as a worker does."""
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


class Handle:
    """It cannot be pickled, nor shown once it is closed."""

    def __reduce__(self) -> Any:
        raise TypeError("no pickle")

    def __repr__(self) -> str:
        raise RuntimeError("closed")


def test_what_cannot_be_shown_either_is_named_and_the_rest_arrives_as_it_is() -> None:
    error: Any = ValueError("bad file", 7)
    cause: Any = KeyError("name")
    error.__cause__, error.path, error.handle, cause.handle = cause, "a.jpg", Handle(), Handle()
    arrived = travel(error)
    assert (type(arrived), arrived.args, arrived.path) == (ValueError, ("bad file", 7), "a.jpg")
    assert (type(arrived.__cause__), arrived.__cause__.args) == (KeyError, ("name",))
    for one in (arrived, arrived.__cause__):
        assert one.handle == "<Handle, whose repr() raises RuntimeError>"


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
    assert travel(error).__notes__ == "text"
    error.__notes__ = ["one", 2]
    one, two, where = travel(error).__notes__
    assert (one, two, where.split("\n")[0]) == ("one", 2, "here")


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


class RaisesAtOnce(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        raise ValueError("at once")


def test_a_stream_that_raises_at_once_raises_its_own_error_in_every_epoch() -> None:
    """Torch's persistent worker exits in the second one."""
    loader = DataLoader(RaisesAtOnce(), num_workers=1, persistent_workers=True)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"^at once"):
            next(iter(loader))
    loader.close()


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


class Changing(KeyError):
    """Its text does not follow from its attributes."""

    texts: ClassVar[dict[int, str]] = {}

    def __str__(self) -> str:
        return self.texts.get(id(self), "lost")


def test_an_exception_whose_text_would_change_has_a_stand_in_with_the_text() -> None:
    error = Changing("key")
    Changing.texts[id(error)] = "found"
    arrived = travel(error)
    assert isinstance(arrived, Changing)
    assert str(arrived) == "found"
    assert "Changing could not be sent to this process" in arrived.__notes__[0]


class ChangingGroup(BaseExceptionGroup):
    """Its text is known to one process only, and no group can be made of a text alone."""

    def __str__(self) -> str:
        return Changing.texts.get(id(self), "lost")


def test_the_stand_in_of_a_group_is_of_a_base_that_the_group_has() -> None:
    error = ChangingGroup("two", [KeyboardInterrupt(), SystemExit(3)])
    Changing.texts[id(error)] = "found"
    arrived = travel(error)
    assert (type(arrived).__name__, str(arrived)) == ("ChangingGroup", "found")
    assert not isinstance(arrived, Exception)
    assert arrived.__notes__[0].endswith("this is a stand-in, derived from BaseException.")


def test_memory_addresses_in_a_text_do_not_count() -> None:
    assert type(travel(ValueError(Plain(), "x"))) is ValueError


def test_sets_keep_their_class_and_arguments_though_they_come_in_another_order() -> None:
    for size in range(2, 60):
        columns = {f"column {number * size}" for number in range(size)}
        for made in (KeyError("missing columns", columns), Coded(columns), ValueError({size: [columns]})):
            arrived = travel(made)
            assert (type(arrived), arrived.args) == (type(made), made.args)


class Mixes(Exception):
    """Its own pickling mixes up its arguments: the text is of the same letters."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(second, first)
        self.first = first

    def __reduce__(self) -> Any:
        return type(self), self.args


def test_a_copy_with_the_letters_of_a_text_in_another_order_is_none() -> None:
    arrived = travel(Mixes("x", "y"))
    assert (type(arrived), arrived.args, arrived.first) == (Mixes, ("y", "x"), "x")


class Told(ValueError):
    """Its text is another one each time."""

    told = 0

    def __str__(self) -> str:
        self.told += 1
        return f"told {self.told} times"


def test_an_exception_whose_text_is_never_the_same_arrives_as_itself() -> None:
    arrived = travel(Told("a", 7))
    assert (type(arrived), arrived.args) == (Told, ("a", 7))


class OfTwoBuiltins(KeyError, AttributeError):
    """Instances have the layout of the second one."""

    def __init__(self, *, name: str) -> None:
        super().__init__(f"no {name}")


def test_a_class_with_two_built_in_bases_arrives_as_itself() -> None:
    arrived = travel(OfTwoBuiltins(name="x"))
    assert type(arrived) is OfTwoBuiltins
    assert arrived.args == ("no x",)


def test_a_chain_too_long_to_be_sent_is_cut_and_its_first_exception_is_itself() -> None:
    error: BaseException = Coded(0)
    for n in range(1, 3000):
        last, error = error, Coded(n)
        error.__context__ = last
    arrived = travel(error)
    assert (type(arrived), arrived.code) == (Coded, 2999)


def test_a_group_without_its_own_arguments_arrives() -> None:
    group = ExceptionGroup("two", [ValueError(1), KeyError(2)])
    group.args = ()
    assert [one.args for one in travel(group).exceptions] == [(1,), (2,)]


def only_in_the_worker() -> BaseException:
    """An exception of a class whose module the main process lacks."""
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
    assert str(caught.value) == "code 5"
    (note,) = [note for note in caught.value.__notes__ if "stand-in" in note]
    assert note.startswith("only_in_the_worker.Strange could not be sent to this process")
    assert note.endswith("derived from Coded.")


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
        [*warm_python(), script], capture_output=True, text=True, timeout=100, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "True (0,)\n", "")
