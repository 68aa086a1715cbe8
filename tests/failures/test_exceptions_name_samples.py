"""Exceptions name the sample or worker where they were raised, and samples that do not match."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from exception_kinds import FourNeeded
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from shmloader import DataLoader, SharedMemoryExhausted
from shmloader.memory import Segment

# --- which sample


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


class FailsAlways(Dataset):
    """All samples raise one object, as ``Future.result()`` does."""

    error = ValueError("kept")

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        raise self.error


class StreamsAgain(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        raise FailsAlways.error


def raises_again(samples: Any) -> Any:
    raise FailsAlways.error


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "collate", "notes"),
    [
        (FailsAlways(), None, ["dataset[0]", "dataset[4]", "dataset[8]", "dataset[0]"]),
        (StreamsAgain(), None, [f"sample {n} of the stream, counted from 0" for n in range(3)]),
        (range(12), raises_again, [f"collate_fn, given dataset[{n}], " for n in (0, 4, 8, 0)]),
    ],
)
def test_an_exception_that_is_raised_again_names_the_last_sample_only(
    dataset: Any, collate: Any, notes: list[str], workers: int
) -> None:
    FailsAlways.error.__notes__ = ["the program's"]  # type: ignore[attr-defined]
    loader = DataLoader(dataset, 4, num_workers=workers, collate_fn=collate, persistent_workers=workers > 0)
    iterator = iter(loader)
    for number, note in enumerate(notes):
        if number == 3:
            iterator = iter(loader)
        with pytest.raises(ValueError, match="kept") as caught:
            next(iterator)
        programs, own, *of_worker = caught.value.__notes__
        assert programs == "the program's"
        assert own.startswith(f"raised by {note}")
        assert len(of_worker) == workers
    assert set(map(type, pickle.loads(pickle.dumps(caught.value)).__notes__)) == {str}


class Loads(Dataset):
    """Each sample is loaded, without workers."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return next(iter(DataLoader(FailsAlways(), batch_size=1)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_inside_a_dataset_keeps_its_note(workers: int) -> None:
    FailsAlways.error.__notes__ = []  # type: ignore[attr-defined]
    iterator = iter(DataLoader(Loads(), 4, num_workers=workers))
    for number in range(3):
        with pytest.raises(ValueError, match="kept") as caught:
            next(iterator)
        expected = ["raised by dataset[0]", f"raised by dataset[{4 * number}]"]
        assert caught.value.__notes__[:2] == expected
        assert len(caught.value.__notes__) == 2 + workers


def test_a_batch_that_is_made_again_and_raises_names_the_last_sample_only() -> None:
    FailsAlways.error.__notes__ = []  # type: ignore[attr-defined]
    loader = DataLoader(FailsAlways(), 4)
    for number in range(2):
        with pytest.raises(ValueError, match="kept") as caught:
            loader.batch(0, number)
        assert caught.value.__notes__ == [f"raised by dataset[{4 * number}]"]


# --- samples that cannot be joined


class Point(NamedTuple):
    x: int
    y: torch.Tensor


EIGHT, NINE = torch.ones(3, 8), torch.ones(3, 9)
# Samples of one batch, and the note about them; a number in braces stands for the sample's name.
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
        "{0} has shape (), {1} has a number at batch[1]",
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
    """A custom collate_fn may well join samples of different shapes: the note does not blame shapes."""
    samples = [torch.ones(1 + n) for n in range(60)]
    loader = DataLoader(Samples(samples), batch_size=30, collate_fn=looks_up, num_workers=workers)
    with pytest.raises(KeyError) as caught:
        next(iter(loader))
    assert caught.value.__notes__[0].startswith("raised by collate_fn, given dataset[0], dataset[1], ")
    assert caught.value.__notes__[0].endswith("dataset[23] and 6 more")
    assert "cannot join" not in "".join(caught.value.__notes__)


def padded(samples: list[Any]) -> Any:
    tokens = pad_sequence([sample["tokens"] for sample in samples], batch_first=True)
    return {"tokens": tokens, "label": default_collate([sample["label"] for sample in samples])}


def padded_by_length(samples: list[Any]) -> Any:
    return padded(sorted(samples, key=lambda sample: -len(sample["tokens"])))


def padded_pairs(samples: list[Any]) -> Any:
    return default_collate([{"pair": [0, sample["label"]]} for sample in samples[1:]])


def padded_and_stacked(samples: list[Any]) -> Any:
    return padded([sample | {"label": 0} for sample in samples]), torch.stack(
        [one["image"] for one in samples]
    )


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("collate", "said"),
    [
        (padded, "dataset[0] has a number, dataset[2] has type str at default_collate's batch"),
        (padded_by_length, "item 0 has a number, item 1 has type str at default_collate's batch"),
        (padded_pairs, "item 0 has a number, item 1 has type str at default_collate's batch['pair'][1]"),
        (padded_and_stacked, None),
    ],
)
def test_what_collate_fn_has_padded_is_not_blamed(collate: Any, said: str | None, workers: int) -> None:
    samples = [
        {"tokens": torch.ones(1 + n), "label": "a" if n == 2 else n, "image": torch.ones(1 + n // 2)}
        for n in range(4)
    ]
    loader = DataLoader(Samples(samples), batch_size=4, collate_fn=collate, num_workers=workers)
    error = error_of(lambda: next(iter(loader)))
    given = "raised by collate_fn, given dataset[0], dataset[1], dataset[2], dataset[3]"
    expected = [given] if said is None else [f"cannot join samples: {said}", given]
    assert error.__notes__[: len(error.__notes__) - workers] == expected


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


def test_a_batch_whose_slot_could_not_be_mapped_is_named_by_its_indices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Address space was short for a moment only, or the error could not be reported either."""
    map_slot, main_pid, refused = Segment.map, os.getpid(), list[int]()

    def refuse_once(segment: Segment, slot: int, nbytes: int, **options: Any) -> Any:
        if os.getpid() != main_pid and not refused:
            refused.append(slot)
            raise SharedMemoryExhausted("no address space", needed_nbytes=nbytes)
        return map_slot(segment, slot, nbytes, **options)

    monkeypatch.setattr(Segment, "map", refuse_once)
    with pytest.raises(SharedMemoryExhausted, match="no address space") as raised:
        list(DataLoader(FailsAt(None), batch_size=4, num_workers=1))
    assert "while it made the batch of indices [0, 1, 2, 3]" in raised.value.__notes__[0]
