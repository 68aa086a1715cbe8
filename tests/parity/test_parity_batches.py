"""Any batch arrives as torch sends it: every kind of leaf and container, collated or not."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import default_collate, default_convert

from parity.batches import CASES, Cases
from parity.collation import SAMPLES, Samples, register_backwards, register_special, register_wrapped
from parity.compare import assert_same, differences
from parity.datasets import EqualKeys, Fails, Rows, Sized, identity, ragged
from parity.run import Build, assert_plays, builder, descriptors_for_torch
from shmloader import DataLoader

# torch says once per process that some kinds of tensor are new
NEW_KINDS = [
    "ignore:ComplexHalf support is experimental:UserWarning",
    "ignore:Sparse .* tensor support is in beta state:UserWarning",
    "ignore:TypedStorage is deprecated:UserWarning",
    "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning",
]
pytestmark = [pytest.mark.filterwarnings(text) for text in NEW_KINDS]


def _collect(build: Build, dataset: Any, names: list[str], **given: Any) -> dict[str, Any]:
    """Each name's last batch, or the type of the error that came in its place."""
    loader = build(dataset, batch_size=None, sampler=names, **given)
    iterator, got = iter(loader), {}
    for name in names:
        try:
            got[name] = next(iterator)
        except Exception as error:
            got[name] = type(error)
    with pytest.raises(StopIteration):
        next(iterator)
    return got


def _assert_each(build: Build, dataset: Any, expected: dict[str, Any], **given: Any) -> None:
    """Send batches in several orders through slots that are used again; each is compared and dropped."""
    names = list(expected)
    several = names + names[::-1] + random.Random(3).sample(names, len(names))
    iterator = iter(build(dataset, batch_size=None, sampler=several, **given))
    found = []
    for name in several:
        try:
            batch = next(iterator)
        except Exception as error:
            batch = type(error)
        found += [f"{name}: {text}" for text in differences(batch, expected[name])]
        del batch
    assert not found, "\n".join(found)


def _one(sample: Any) -> Any:
    return default_collate([sample, sample])


def _quiet(play: Any) -> Any:
    """The play without its warnings, for kinds that torch warns about once per process."""

    def silenced(build: Build) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return play(build)

    return silenced


def _all_cases(build: Build, workers: int) -> dict[str, Any]:
    return _collect(build, Cases(), list(CASES), collate_fn=identity, num_workers=workers)


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"], indirect=True)
def test_every_kind_of_batch_arrives_as_torch_sends_it(start_method: str) -> None:
    """Types, dtypes, shapes, strides, bits, requires_grad and the identity of objects are compared."""
    with descriptors_for_torch(), warnings.catch_warnings():  # which holds some all the time
        warnings.simplefilter("ignore")
        expected = _all_cases(builder(TorchLoader), 1)
        assert not [name for name, batch in expected.items() if isinstance(batch, type)]
        _assert_each(builder(DataLoader, start_method), Cases(), expected, collate_fn=identity, num_workers=2)


def test_every_kind_of_batch_may_be_held() -> None:
    assert_plays(_quiet(lambda build: _all_cases(build, 1)))


def test_every_kind_of_batch_is_left_alone_without_workers() -> None:
    """With num_workers=0 the batch is the collate function's own result."""
    assert_plays(_quiet(lambda build: _all_cases(build, 0)))


@pytest.mark.in_ci(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [default_collate, default_convert])
def test_default_collation_makes_torchs_batch_or_raises_its_error(collate: Any, workers: int) -> None:
    """Every kind of sample is tried, also those that cannot be collated."""
    assert_plays(
        _quiet(
            lambda build: _collect(build, Samples(), list(SAMPLES), collate_fn=collate, num_workers=workers)
        )
    )


@pytest.mark.parametrize("collate", [default_collate, pytest.param(default_convert, marks=pytest.mark.long)])
def test_default_collation_into_slots_that_are_used_again_makes_torchs_batch(collate: Any) -> None:
    """Every kind of sample comes after every other, and each batch is dropped before the next."""
    how = {"collate_fn": collate, "num_workers": 1}
    with descriptors_for_torch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = _collect(builder(TorchLoader), Samples(), list(SAMPLES), **how)
        _assert_each(builder(DataLoader), Samples(), expected, **how)


@pytest.mark.parametrize("init", [register_special, register_backwards, register_wrapped])
def test_what_a_user_registers_with_default_collate_is_used(init: Any) -> None:
    """Entries of torch's default_collate_fn_map are used, new ones and replaced ones."""
    names = ["views of one", "arrays f4", "dict", "special"]

    def play(build: Build) -> list[Any]:
        given = {"collate_fn": default_collate, "worker_init_fn": init, "num_workers": 1}
        # several times: a slot has no memory yet when its first batch is collated
        return [_collect(build, Samples(), names * 6, **given)]

    (got,) = assert_plays(play)
    assert torch.is_tensor(got["views of one"])
    assert (got["special"] is TypeError) == (init is not register_special)


def test_keys_that_are_equal_but_not_the_same_stay_what_they_are() -> None:
    """(1,) and (True,), 0.0 and -0.0, a str and a NumPy str: batch after batch in their turn."""
    loader = DataLoader(EqualKeys(), 2, num_workers=1, multiprocessing_context="fork")
    for index, batch in enumerate(loader):
        key = EqualKeys.KEYS[index % len(EqualKeys.KEYS)]
        assert_same((list(batch), list(batch["inner"])), ([key, "n", "inner"], [key]))
        del batch


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_of_ones_own_gives_what_it_gives_torch(workers: int) -> None:
    """Padding, arrays, lists and a nested default_collate in one batch."""
    assert_plays(lambda build: list(build(Rows(23, 900), 4, collate_fn=ragged, num_workers=workers)))


SIZES = [2**10, 2**16, 100 * 2**20, 2**10, 8, 9 * 2**20, 2**12, 40 * 2**20, 2**10, 2**20, 0, 2**13]


@pytest.mark.in_ci(1)
@pytest.mark.parametrize("together", [False, True], ids=["dropped", "held"])
def test_batches_may_change_their_size_from_bytes_to_100_mb(together: bool) -> None:
    """Each batch is right when it comes, and if it is held, also after the last has come."""
    dataset, held = Sized(SIZES), []
    loader = DataLoader(dataset, num_workers=2, multiprocessing_context="fork")
    for index, batch in enumerate(loader):
        assert torch.equal(batch[0], dataset[index])
        if together:
            held.append(batch)
        del batch
    assert all(torch.equal(batch[0], dataset[index]) for index, batch in enumerate(held))


class Keys5:
    """An index batch that can only be iterated."""

    def __iter__(self) -> Iterator[int]:
        return iter([5])

    def __len__(self) -> int:
        raise TypeError("no length")

    def __getitem__(self, place: int) -> int:
        raise TypeError("no item")

    def __str__(self) -> str:
        return "Keys5"


class Lazy(Cases):
    """Tensors with a pending conjugation or sign, which torch's workers lose."""

    def __getitem__(self, name: str) -> torch.Tensor:
        whole = torch.complex(torch.arange(4000.0), -torch.arange(4000.0))
        return whole.conj() if name == "conjugate" else whole.conj().imag


@pytest.mark.parametrize("collate", [identity, default_convert, _one])
def test_lazy_conjugates_and_signs_arrive_with_their_values(collate: Any) -> None:
    """The values are right, resolved or not, as without workers."""
    names = ["conjugate", "negative"] * 8
    given = {"batch_size": None, "sampler": names, "collate_fn": collate, "num_workers": 1}
    for name, batch in zip(names, DataLoader(Lazy(), multiprocessing_context="fork", **given), strict=True):
        assert torch.equal(batch, collate(Lazy()[name])), name


class Unsendable(Cases):
    """Batches that torch's loader cannot send, and hangs on."""

    def __getitem__(self, name: str) -> Any:
        made = {
            "lambda": lambda: [lambda: None, torch.zeros(5000)],
            "lock": lambda: [torch.zeros(5000), threading.Lock()],
            "graph": lambda: torch.ones(5000, requires_grad=True) * 2,
            "generator": lambda: (k for k in range(3)),
        }
        return made[name]() if name in made else torch.ones(5000)


def test_a_batch_that_cannot_be_sent_is_an_error_and_the_next_batch_comes() -> None:
    """torch prints an error in the worker and waits for ever."""
    names = ["lambda", "fine", "lock", "graph", "generator", "fine too"]
    got = _collect(
        lambda *a, **k: DataLoader(*a, multiprocessing_context="fork", timeout=30, **k),
        Unsendable(),
        names,
        collate_fn=identity,
        num_workers=1,
    )
    for name in ("lambda", "lock", "graph", "generator"):
        assert isinstance(got[name], type), name
        assert issubclass(got[name], Exception), name
    assert torch.equal(got["fine"], torch.ones(5000))
    assert torch.equal(got["fine too"], torch.ones(5000))


def test_an_error_in_a_sample_leaves_the_other_batches_as_torch_leaves_them() -> None:
    """Iteration continues after an exception, in order, with the same types of exceptions."""

    def play(build: Build) -> list[Any]:
        iterator, got = iter(build(Fails(12, (3, 4, 9), KeyError), 2, num_workers=2)), []
        while True:
            try:
                got.append(next(iterator))
            except StopIteration:
                return got
            except KeyError as error:
                got.append(type(error))

    assert_plays(play)


class Exits(Rows):
    """User code in a worker that calls sys.exit or is interrupted."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__(3)
        self.error = error

    def __getitem__(self, index: int) -> torch.Tensor:
        raise self.error(3)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_worker_whose_sample_exits_goes_on_and_the_exception_arrives(error: Any) -> None:
    """torch's worker ends without a reason; here type and arguments of the exception are kept."""
    loader = DataLoader(Exits(error), num_workers=1, multiprocessing_context="fork")
    iterator = iter(loader)
    for _ in range(2):
        with pytest.raises(error) as caught:
            next(iterator)
        assert caught.value.args == (3,)


@pytest.mark.parametrize("keys", [{5: "a"}, {5}, (5,), torch.tensor([5]), Keys5()], ids=str)
def test_an_error_in_a_sample_keeps_its_type_whatever_the_index_batch_is(keys: Any) -> None:
    """Sets, mappings, tensors and sequences of the user's own are index batches too."""
    loader = DataLoader(
        Fails(9, (5,), ZeroDivisionError), batch_sampler=[keys], num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises(ZeroDivisionError):
        list(loader)


def test_a_stop_iteration_from_a_sample_ends_the_epoch_as_in_torch() -> None:
    """Odd, but what torch does, with workers (whose iterator then lingers) and without."""
    dataset = Fails(12, (3,), StopIteration)
    expected = list(TorchLoader(dataset, 2))
    assert len(expected) == 1
    assert_same(list(DataLoader(dataset, 2)), expected)
    assert_same(list(DataLoader(dataset, 2, num_workers=1, multiprocessing_context="fork")), expected)
