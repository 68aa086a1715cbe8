"""Several threads of the program share one iterator."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from loading import HeldAt, Numbered
from torch.utils.data import Sampler
from when_waiting import when_waiting

from shmloader import DataLoader, LoaderClosed, LoaderError
from shmloader.resume.compatibility import behind


@pytest.mark.parametrize("threads", [2, 4])
def test_each_batch_comes_to_one_of_them(threads: int) -> None:
    loader = DataLoader(Numbered(400, delay_s=0.0005), batch_size=2, num_workers=2)
    iterator = iter(loader)
    found: list[int] = []
    errors: list[BaseException] = []

    def take() -> None:
        try:
            found.extend(int(batch[0, 0]) for batch in iterator)
        except BaseException as error:
            errors.append(error)

    takers = [threading.Thread(target=take) for _ in range(threads)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join(60)
    # The thread that reaches the end shuts the workers down; the others then find the iterator closed.
    assert all(isinstance(error, LoaderClosed) for error in errors), errors
    assert sorted(found) == list(range(0, 400, 2))


def test_a_thread_that_waits_for_another_one_is_let_go_when_the_loader_is_closed() -> None:
    loader = DataLoader(Numbered(4, delay_s=3), num_workers=1)
    iterator = iter(loader)
    errors: list[BaseException] = []

    def take() -> None:
        try:
            next(iterator)
        except BaseException as error:
            errors.append(error)

    takers = [threading.Thread(target=take, daemon=True) for _ in range(2)]
    for taker in takers:
        taker.start()
    while iterator._lifecycle.phase.name != "WAITING":
        signal.sigtimedwait([], 0.01)
    loader.close()
    for taker in takers:
        taker.join(60)
        assert not taker.is_alive()
    assert [type(error) for error in errors] == [LoaderClosed] * 2


def test_a_signal_handler_that_takes_a_batch_meanwhile_is_refused_and_nothing_is_lost() -> None:
    dataset = HeldAt(40, at=0)
    loader = DataLoader(dataset, batch_size=4, num_workers=1)
    iterator = iter(loader)
    refused: list[str] = []

    def handler(*_: Any) -> None:
        try:
            next(iterator)
        except LoaderError as error:
            refused.append(str(error))
        dataset.released.set()

    before = signal.signal(signal.SIGALRM, handler)
    main = threading.get_ident()
    try:
        sending = when_waiting(iterator, lambda: signal.pthread_kill(main, signal.SIGALRM))
        assert [int(batch[0, 0]) for batch in iterator] == list(range(0, 40, 4))
        sending.join()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert refused == ["next() was called by this thread while it was inside next()"]


def test_an_iterator_of_which_a_call_was_cut_short_begins_no_further_epoch() -> None:
    """It may have lost answers, for which it would wait for ever."""
    with DataLoader(Numbered(40), batch_size=4, num_workers=1, persistent_workers=True) as loader:
        iterator: Any = iter(loader)
        next(iterator)
        iterator._lifecycle.enter()  # a second Ctrl-C came before the first was noted
        with pytest.raises(LoaderClosed, match=r"\(Ctrl-C\?\) interrupted it in the .* Call iter"):
            iter(loader)
        assert [int(batch[0, 0]) for batch in loader] == list(range(0, 40, 4))


def test_what_has_interrupted_an_iterator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with DataLoader(Numbered(40), batch_size=4, num_workers=1) as loader:
        iterator: Any = iter(loader)

        def fail(*_: object, **__: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(iterator._exchange, "receive", fail)
        monkeypatch.setattr(iterator._exchange, "receive_from", lambda _: False)
        with pytest.raises(ZeroDivisionError):
            next(iterator)
        with pytest.raises(LoaderClosed, match=r"an exception \(ZeroDivisionError\) interrupted it"):
            next(iterator)


def test_batches_of_another_thread_count_although_this_one_is_interrupted_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with DataLoader(Numbered(40), batch_size=4, num_workers=2, in_order=False) as loader:
        iterator = iter(loader)
        next(iterator)
        enter = iterator._lifecycle.enter

        def wait_for_another_thread(waits: bool) -> bool:
            if threading.current_thread() is threading.main_thread():
                other = threading.Thread(target=lambda: [next(iterator) for _ in range(3)])
                other.start()
                other.join(60)
                raise KeyboardInterrupt
            return enter()

        monkeypatch.setattr(iterator._lifecycle, "enter", wait_for_another_thread)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        state = loader.state_dict()
        assert state["batches"] + len(behind(state)) == 4


class Closes(Sampler[int]):
    """A sampler during whose second epoch the loader is closed, as by another thread or a handler."""

    loader: DataLoader[Any]

    def __init__(self, at: int) -> None:
        self.at = at  # the draw that closes, -1 for the beginning
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        draws = self._draw()
        if self.at < 0:
            self.close()
        return draws

    def _draw(self) -> Iterator[int]:
        for number in range(8):
            if number == self.at:
                self.close()
            yield number

    def close(self) -> None:
        if self.epochs == 2:
            self.loader.close()


@pytest.mark.parametrize("worker_type", ["process", "thread"])
@pytest.mark.parametrize("at", [-1, 0, 1])
def test_iter_of_a_loader_that_is_closed_meanwhile_says_so(at: int, worker_type: str) -> None:
    sampler = Closes(at)
    with DataLoader(
        Numbered(8), sampler=sampler, num_workers=1, persistent_workers=True, worker_type=worker_type
    ) as loader:
        sampler.loader = loader
        assert len(list(loader)) == 8
        with pytest.raises(LoaderClosed):
            iter(loader)
        assert len(list(loader)) == 8


class Mistaken(Sampler[int]):
    """Closes the loader in its second epoch, and has a mistake of its own there."""

    loader: Any = None
    epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        if self.epochs == 2:
            self.loader.close()
            np.arange(2).misspelt  # type: ignore[attr-defined]  # noqa: B018 - which no `==` may be asked of
        return iter(range(8))

    def __len__(self) -> int:
        return 8


def test_a_samplers_own_error_is_told_though_the_loader_is_closed_meanwhile() -> None:
    sampler = Mistaken()
    with DataLoader(Numbered(8), sampler=sampler, batch_size=None) as loader:
        sampler.loader = loader
        assert len(list(loader)) == 8
        with pytest.raises(AttributeError, match="misspelt"):
            iter(loader)


def test_a_subclass_that_makes_no_iterator_is_told_what_torch_says() -> None:
    class Without(DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return None

    with pytest.raises(TypeError, match="iter"):
        iter(Without(Numbered(8)))
