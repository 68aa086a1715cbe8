"""A reader's state is the serving loader's after what that reader has had; one can go on from it."""

from __future__ import annotations

import functools
import itertools
import json
import os
from typing import Any, ClassVar

import pytest
import torch
from serving_programs import Numbers, Raising, numbers, plain, served, served_by_thread, wait_until

import shmloader
from shmloader.serving import records, server


def batches_of(loader: Any) -> list[Any]:
    return [plain(batch) for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_states_are_those_of_a_program_that_loads_by_itself(workers: int) -> None:
    make = functools.partial(numbers, workers, seed_per_sample=True)
    own = make()
    with served(make, readers=1) as (name, _), shmloader.attach(name) as reader:
        assert reader.state_dict() == own.state_dict()
        for _ in range(2):
            for mine, batch in zip(own, reader, strict=True):
                assert plain(mine) == plain(batch)
                assert reader.state_dict() == own.state_dict()
            assert reader.state_dict() == own.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
def test_exceptions_are_no_batches_that_a_state_counts(workers: int) -> None:
    make = functools.partial(numbers, workers, Raising(), shuffle=False)
    own = make()
    with served(make, readers=1) as (name, _), shmloader.attach(name) as reader:
        mine, batches, states = iter(own), iter(reader), list[Any]()
        for number in range(6):
            if number == 1:
                with pytest.raises(ValueError, match="sample 5"):
                    next(mine)
                with pytest.raises(ValueError, match="sample 5"):
                    next(batches)
                assert reader.state_dict()["batches"] == 1  # it is tried again
            else:
                assert plain(next(mine)) == plain(next(batches))
                states.append(reader.state_dict())
                assert states[-1] == own.state_dict()
        assert [reader.state_dict(taken=taken)["batches"] for taken in range(1, 6)] == [1, 3, 4, 5, 6]


class Moved:
    """A batch that cannot be moved at the first attempt, as where the device has no memory."""

    attempts: ClassVar = itertools.count()

    def __init__(self, samples: list[Any]) -> None:
        self.rows = torch.stack([sample["x"] for sample in samples])

    def to(self, device: Any) -> Moved:
        if not next(self.attempts) % 2:
            raise torch.OutOfMemoryError("no memory on the device")
        return self


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_could_not_be_moved_is_tried_again(workers: int) -> None:
    make = functools.partial(numbers, workers, Numbers(200, 1), collate_fn=Moved, shuffle=False)
    with served(make, readers=1) as (name, _), shmloader.attach(name, device="cpu") as reader:
        batches, got = iter(reader), list[Any]()
        for number in range(50):
            with pytest.raises(torch.OutOfMemoryError):
                next(batches)
            assert reader.state_dict()["batches"] == number
            got.append(next(batches).rows)
            assert reader.state_dict()["batches"] == number + 1
        with pytest.raises(StopIteration):
            next(batches)
        assert torch.cat(got)[:, 0].tolist() == list(range(200))
        assert reader.statistics().copies > 0


class Unmovable(Moved):
    """A batch that can never be moved, if it begins with sample 4 or 5."""

    def to(self, device: Any) -> Unmovable:
        if self.rows[0, 0] in (4, 5):
            raise TypeError("cannot be moved")
        return self


def test_a_batch_that_can_never_be_moved_is_passed_over() -> None:
    make = functools.partial(numbers, 0, Numbers(8, 1), collate_fn=Unmovable, batch_size=1, shuffle=False)
    with served(make, readers=1) as (name, _), shmloader.attach(name, device="cpu") as reader:
        batches, got = iter(reader), list[Any]()
        for number in range(8):
            if number in (4, 5):
                with pytest.raises(TypeError, match="cannot be moved"):
                    next(batches)
                assert reader.state_dict()["batches"] == number
            else:
                got.append(next(batches).rows.item())
                assert reader.state_dict()["batches"] == number + 1
        with pytest.raises(StopIteration):
            next(batches)
        assert got == [0, 1, 2, 3, 6, 7]


def refuse() -> None:
    raise ValueError("cannot be read here")


class Unreadable:
    """An object that can be sent, and not be read."""

    def __reduce__(self) -> Any:
        return refuse, ()


def test_a_batch_that_cannot_be_read_is_where_a_state_begins_until_the_next_one() -> None:
    make = functools.partial(numbers, 0, [1, Unreadable(), 3], collate_fn=list, batch_size=1, shuffle=False)
    with served(make, readers=1) as (name, _), shmloader.attach(name) as reader:
        batches = iter(reader)
        next(batches)
        with pytest.raises(ValueError, match="cannot be read here"):
            next(batches)
        assert reader.state_dict()["batches"] == 1
        assert next(batches) == [3]
        assert reader.state_dict()["batches"] == 3


def test_a_run_goes_on_from_a_readers_state() -> None:
    make = functools.partial(numbers, seed_per_sample=True)
    whole = make()
    expected = [batches_of(whole), batches_of(whole)]
    with (
        served_by_thread(make(), readers=2) as name,
        shmloader.attach(name) as one,
        shmloader.attach(name) as other,
    ):
        readers = [iter(one), iter(other)]
        got = [plain(next(readers[0])) for _ in range(3)]
        got_other = [plain(next(readers[1])) for _ in range(5)]
        state, later = one.state_dict(), other.state_dict()
        with pytest.raises(shmloader.ResumeError, match="between epochs"):
            one.load_state_dict(state)
    assert (got, got_other) == (expected[0][:3], expected[0][:5])
    assert (state["batches"], later["batches"]) == (3, 5)
    alone = make()
    alone.load_state_dict(state)
    assert [batches_of(alone), batches_of(alone)] == [expected[0][3:], expected[1]]
    with served(make, readers=1) as (name, _), shmloader.attach(name) as reader:
        reader.load_state_dict(later)
        assert reader.state_dict() == later
        assert batches_of(reader) == expected[0][5:]
        assert batches_of(reader) == expected[1]


def test_readers_load_the_same_state() -> None:
    state = numbers().state_dict()
    other_state = state | {"batches": 3}
    with (
        served_by_thread(numbers(), readers=2) as name,
        shmloader.attach(name) as one,
        shmloader.attach(name) as other,
    ):
        one.load_state_dict(state)
        other.load_state_dict(state)
        with pytest.raises(shmloader.ResumeError, match="another reader has loaded another state"):
            other.load_state_dict(other_state)
        both = list(zip(one, other, strict=True))
        assert len(both) == 16


def test_a_state_is_loaded_once_all_readers_have_left_the_epoch() -> None:
    """Ranks in step that go back do not break off at the same moment."""
    expected = batches_of(numbers(seed_per_sample=True))
    with (
        served_by_thread(numbers(seed_per_sample=True), readers=2) as name,
        shmloader.attach(name) as one,
        shmloader.attach(name) as other,
    ):
        batches, others = iter(one), iter(other)
        for _ in range(2):
            next(batches), next(others)
        state = one.state_dict()
        next(batches), next(others)
        del batches
        request = one._link._request(records.LOAD, 0, json.dumps(state).encode())
        other.state_dict()  # the server has heard it
        del others
        one._link._answer_to(request)
        other.load_state_dict(state)
        both = [[plain(batch) for batch in pair] for pair in zip(one, other, strict=True)]
        assert both == [[batch] * 2 for batch in expected[2:]]


def test_a_state_that_waits_too_long_for_other_readers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PATIENCE_S", 0.2)
    with (
        served_by_thread(numbers(), readers=2) as name,
        shmloader.attach(name) as one,
        shmloader.attach(name) as other,
    ):
        batches, others = iter(one), iter(other)
        next(batches), next(others)
        state = one.state_dict()
        del batches
        stay = f"other readers have been in one for 0.2 s since: have processes {os.getpid()} end"
        with pytest.raises(shmloader.ResumeError, match=stay):
            one.load_state_dict(state)
        del others
        one.load_state_dict(state)
        other.load_state_dict(state)
        assert len(list(zip(one, other, strict=True))) == 15


def test_a_state_that_does_not_fit_is_refused() -> None:
    with served_by_thread(numbers(), readers=1) as name, shmloader.attach(name) as reader:
        with pytest.raises(shmloader.ResumeError):
            reader.load_state_dict({"x" * 9000: 1})
        with pytest.raises(shmloader.ResumeError, match=r"a state of 70,\d\d\d bytes cannot be sent"):
            reader.load_state_dict({"x" * 70_000: 1})
        assert len(list(reader)) == 16


def test_one_that_came_late_has_the_state_of_its_place_and_others_have_none_of_it() -> None:
    loader = numbers(dataset=Numbers(400))
    with served_by_thread(loader, epochs=1) as name:
        one, now, later = (shmloader.attach(name, join=join) for join in ("next", "now", "next"))
        batches = iter(one)
        for _ in range(7):
            next(batches)
        late = iter(now)
        next(batches)
        first = next(late)
        place = now.state_dict()["batches"]
        assert place > 7
        again = numbers(dataset=Numbers(400))
        expected = batches_of(again)
        assert expected[place - 1]["index"] == plain(first)["index"]
        with pytest.raises(shmloader.ResumeError, match="no place in the epoch"):
            later.state_dict()
        for each in (one, now, later):
            each.close()


def test_a_reader_that_breaks_off_has_the_state_of_its_place() -> None:
    make = functools.partial(numbers, seed_per_sample=True)
    expected = batches_of(make())
    loader = make()
    with served_by_thread(loader, readers=1) as name, shmloader.attach(name) as reader:
        for number, _ in enumerate(reader, 1):
            if number == 2:
                wait_until(lambda: loader.statistics().batches > 2)
                break
        state = reader.state_dict()
        assert state["batches"] == 2
        batches = iter(reader)
        for _ in range(3):
            next(batches)
        assert reader.state_dict(taken=1)["batches"] == 1
        del batches
    again = make()
    again.load_state_dict(state)
    assert batches_of(again) == expected[2:]


def test_a_state_for_which_a_reader_lacks_memory_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    with served_by_thread(numbers(), epochs=1) as name, shmloader.attach(name) as reader:
        slots = reader._link.slots
        with monkeypatch.context() as patch:
            patch.setattr(type(slots), "lease", fails)
            with pytest.raises(MemoryError):
                reader.state_dict()
        assert len(slots.released()) == 1
        assert len(list(reader)) == 16
