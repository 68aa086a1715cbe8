"""Errors in worker threads arrive as raised, with their place; options that threads lack are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import loading
import pytest
from parity.run import Build
from thread_datasets import Facts, Gated
from thread_loaders import assert_same, threads
from torch.utils.data import IterableDataset

from shmloader import BadSampleWarning, DataLoader, WorkerTimeout

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


# --- errors


@pytest.mark.parametrize(
    "name",
    [
        "KeyError",
        "UnicodeDecodeError",
        "FourArguments",
        "Unpicklable",
        "ExceptionGroup",
        "SystemExit",
        "OSError",
    ],
)
def test_exceptions_arrive_as_they_are(name: str) -> None:
    """They have their arguments, the sample's index, the worker and its traceback; the loader goes on."""
    expected = loading.make_error(name)
    with threads(loading.Raises(12, 5, name), batch_size=2, num_workers=2) as loader:
        iterator = iter(loader)
        assert next(iterator)[:, 0].tolist() == [0, 1]
        assert next(iterator)[:, 0].tolist() == [2, 3]
        with pytest.raises(type(expected)) as caught:
            next(iterator)
        assert repr(caught.value) == repr(expected)
        notes = "\n".join(caught.value.__notes__)
        for part in ("thread 'shmloader-worker-0'", "dataset[5]", "__getitem__"):
            assert part in notes
        assert next(iterator)[:, 0].tolist() == [6, 7]
        assert loader.statistics().failures == 1


def test_an_interrupt_that_a_sample_raises_arrives_as_such() -> None:
    """The program itself is not interrupted: the next batch follows."""
    with threads(loading.Raises(3, 1, "KeyboardInterrupt"), batch_size=None, num_workers=2) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(KeyboardInterrupt, match="in a worker"):
            next(iterator)
        assert next(iterator)[0].item() == 2


def test_errors_at_the_start_come_with_the_first_batch() -> None:
    """worker_init_fn and iter(dataset) may raise them."""

    class Refuses(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            raise LookupError("not today")

    def refuse(worker_id: int) -> None:
        raise ValueError(f"worker {worker_id} will not")

    with pytest.raises(ValueError, match="worker 0 will not"):
        next(iter(threads(Facts(), num_workers=2, worker_init_fn=refuse)))
    with pytest.raises(LookupError, match="not today"):
        next(iter(threads(Refuses(), num_workers=1)))


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_bad_samples_are_left_out_or_replaced(on_error: str) -> None:
    """Threads count them and warn once, as worker processes do."""

    def play(build: Build) -> Any:
        loader = build(loading.Raises(11, 4, "KeyError"), batch_size=3, num_workers=2, on_error=on_error)
        with pytest.warns(BadSampleWarning, match=r"dataset\[4\]"):
            return list(loader), loader.statistics().bad_sample_list

    assert_same(play, DataLoader)


def test_a_timeout_shows_where_the_thread_is() -> None:
    """The message has the Python stack, down to the slow line; then the batch still comes."""
    dataset = Gated(4, at=2)
    with threads(dataset, batch_size=2, num_workers=1, timeout=0.2) as loader:
        iterator = iter(loader)

        def take() -> list[int]:
            while True:
                with contextlib.suppress(WorkerTimeout):  # a busy machine may let others come late, too
                    return next(iterator)[:, 0].tolist()

        assert take() == [0, 1]
        assert dataset.inside.wait(60)
        with pytest.raises(WorkerTimeout, match=r"thread 'shmloader-worker-0'[\s\S]*self\.gate\.wait\(60\)"):
            next(iterator)
        dataset.gate.set()
        assert take() == [2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"worker_type": "fibre"}, "must be one of 'process', 'thread', not 'fibre'"),
        ({"worker_type": "thread", "multiprocessing_context": "fork"}, "starts no processes"),
        ({"worker_type": "thread", "worker_restarts": 1}, "cannot be ended"),
    ],
)
def test_what_threads_cannot_do_is_refused(arguments: dict[str, Any], message: str) -> None:
    """The refusal comes at once, with the reason."""
    with pytest.raises(ValueError, match=message):
        DataLoader(loading.Numbered(3), num_workers=1, **arguments)
