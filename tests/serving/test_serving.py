"""`serve` and `attach`: the same batches in each reader, held as long as wanted, written to by one alone."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from serving_programs import (
    WAIT_S,
    Numbers,
    Raising,
    new_name,
    numbers,
    plain,
    served,
    served_by_thread,
    wait_until,
)
from warm_python import warm_python

import shmloader
from shmloader.memory.private_pages import PrivatePages
from shmloader.serving import meeting, server


def epochs_of(loader: Any, epochs: int = 2) -> list[list[Any]]:
    return [[plain(batch) for batch in loader] for _ in range(epochs)]


def read_into(name: str, results: Any, epochs: int = 2) -> None:
    with shmloader.attach(name) as loader:
        results.put(epochs_of(loader, epochs))


@pytest.mark.filterwarnings("ignore::shmloader.SpillWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"workers": 0},
        {"workers": 2},
        {"workers": 2, "persistent_workers": True},
        {"workers": 2, "worker_type": "thread", "dataset": Numbers(draws=False)},
        {"workers": 2, "memory_budget_nbytes": 1},
        {"workers": 1, "dataset": Numbers(24, 100_000)},
    ],
    ids=lambda options: " ".join(f"{key}={type(value).__name__}" for key, value in options.items()),
)
def test_each_reader_gets_each_batch_as_a_program_of_its_own(options: dict[str, Any]) -> None:
    make = functools.partial(numbers, **options)
    expected = epochs_of(make())
    with served(make, readers=2) as (name, _):
        results = multiprocessing.SimpleQueue()
        other = multiprocessing.Process(target=read_into, args=(name, results))
        other.start()
        with shmloader.attach(name) as loader:
            assert len(loader) == len(expected[0])
            assert epochs_of(loader) == expected
        assert results.get() == expected
        other.join()
        other.close()


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.long), "forkserver"])
def test_it_works_under_every_start_method(method: str) -> None:
    make = functools.partial(numbers, multiprocessing_context=method)
    expected = epochs_of(make(), 1)
    with served(make, method=method, readers=1) as (name, _), shmloader.attach(name) as loader:
        assert epochs_of(loader, 1) == expected


def of_torch() -> Any:
    torch.manual_seed(0)
    return torch.utils.data.DataLoader(Numbers(), 4, shuffle=True, num_workers=2)


def test_torchs_own_loader_is_served_as_well() -> None:
    expected = epochs_of(of_torch(), 1)
    with served(of_torch, readers=1) as (name, _), shmloader.attach(name) as loader:
        assert epochs_of(loader, 1) == expected
        with pytest.raises(shmloader.ResumeError, match="DataLoader, has no states"):
            loader.state_dict()


def objects(samples: list[Any]) -> Any:
    return [sample["name"] for sample in samples], b"x" * 100_000, samples[0]["x"][None, :1].bfloat16()


def test_batches_of_strings_bytes_and_other_dtypes_are_served() -> None:
    make = functools.partial(numbers, collate_fn=objects)
    expected = epochs_of(make(), 1)
    with served(make, readers=1) as (name, _), shmloader.attach(name) as loader:
        assert epochs_of(loader, 1) == expected


@pytest.mark.parametrize("scans", [True, False])
def test_what_a_reader_writes_no_other_sees_and_no_later_batch_has(
    scans: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not scans:  # as before Linux 6.7
        monkeypatch.setattr(PrivatePages, "_may_have", lambda *_: True)
    make = functools.partial(numbers, dataset=Numbers(256, 5000))
    expected = epochs_of(make(), 1)[0]
    with (
        served_by_thread(make(), readers=2) as name,
        shmloader.attach(name) as one,
        shmloader.attach(name) as other,
    ):
        for first, second, right in zip(one, other, expected, strict=True):
            assert plain(first) == right
            first["x"].mul_(-7)
            first["noise"].zero_()
            assert plain(second) == right


def test_batches_that_are_held_never_change_and_beyond_some_are_copied() -> None:
    make = functools.partial(numbers, dataset=Numbers(800))
    expected = epochs_of(make())
    with served(make, readers=2) as (name, _):
        results = multiprocessing.SimpleQueue()
        other = multiprocessing.Process(target=read_into, args=(name, results))
        other.start()
        loader = shmloader.attach(name)
        held = [list(loader), list(loader)]
        assert plain(held) == expected
        figures = loader.statistics()
        assert figures.batches == 400
        assert figures.copies > 0
        assert 0 < figures.held < 100
        assert figures.held + figures.copies >= 400
        assert figures.wait_s > 0
        loader.close()
        assert results.get() == expected
        assert plain(held) == expected  # the server has ended
        other.join()
        other.close()


def test_views_and_arrays_keep_a_batch() -> None:
    loader = numbers(dataset=Numbers(400), persistent_workers=True)
    with served_by_thread(loader, readers=1) as name, shmloader.attach(name) as reader:
        kept = []
        for number, batch in enumerate(reader):
            if number in (3, 20):
                kept.append((batch["x"].detach()[1].numpy(), batch["x"][1, 0].item()))
            del batch
        for array, value in kept:
            assert (array == value).all()
        del kept, array
        next(iter(reader))
        wait_until(lambda: loader.statistics().slots_leased <= 6)


def test_batches_outlive_reader_and_server() -> None:
    with served(numbers, readers=1) as (name, process):
        reader = shmloader.attach(name)
        batches = iter(reader)
        kept = [next(batches) for _ in range(6)]
        right = plain(kept)
        kept[0]["x"][0, 0] = right[0]["x"][1][0][0] = 99.0
        del batches, reader  # the server ends, for its only reader is gone
        process.join(WAIT_S)
        assert plain(kept) == right


def test_a_reader_that_leaves_early_begins_the_next_epoch_with_all() -> None:
    expected = epochs_of(numbers(), 1)[0]
    with (
        served_by_thread(numbers(), readers=2) as name,
        shmloader.attach(name) as one,
        shmloader.attach(name) as other,
    ):
        first, second = iter(one), iter(other)
        assert [plain(next(first)) for _ in range(3)] == expected[:3]
        del first
        assert [plain(batch) for batch in second] == expected
        first, second = iter(one), iter(other)
        left = [plain(next(first)), plain(next(second))]
        assert left[0] == left[1]
        assert left[0] not in (expected[0], None)
        old, first = first, iter(one)
        with pytest.raises(shmloader.LoaderClosed, match=r"iter\(\) was called again"):
            next(old)
        second = iter(other)
        assert plain(next(first)) == plain(next(second))
        assert len(list(zip(first, second, strict=True))) == len(expected) - 1


def test_iter_twice_at_once_gives_whole_epochs() -> None:
    with served_by_thread(numbers(), readers=1) as name, shmloader.attach(name) as reader:
        for _ in range(20):
            iter(reader)
            batches = iter(reader)
            next(batches)
        assert len(list(batches)) == len(reader) - 1
        assert len(list(reader)) == len(reader)


def test_exceptions_come_in_the_place_of_their_batch_to_each_reader() -> None:
    loader = numbers(dataset=Raising(32), shuffle=False)
    with (
        served_by_thread(loader, readers=2) as name,
        shmloader.attach(name) as one,
        shmloader.attach(name) as other,
    ):
        readers = [iter(one), iter(other)]
        for reader in readers:
            assert next(reader)["index"].tolist() == [0, 1, 2, 3]
        for reader in readers:
            with pytest.raises(ValueError, match="sample 5 is bad") as caught:
                next(reader)
            assert any("which serves" in note for note in caught.value.__notes__)
        rest = [[batch["index"][0].item() for batch in both] for both in zip(*readers, strict=True)]
        assert rest == [[first] * 2 for first in (8, 12, 16, 20, 24, 28)]


def test_bad_samples_are_left_out_as_the_loader_says() -> None:
    loader = numbers(dataset=Raising(32), shuffle=False, on_error="skip")
    with (
        pytest.warns(shmloader.BadSampleWarning),
        served_by_thread(loader, readers=1) as name,
        shmloader.attach(name) as reader,
    ):
        assert [batch["index"].tolist() for batch in reader][:2] == [[0, 1, 2, 3], [4, 6, 7]]


def test_one_that_comes_late_enters_now_or_with_the_next_epoch() -> None:
    with served_by_thread(numbers(dataset=Numbers(80), shuffle=False), epochs=2, window=1) as name:
        one = shmloader.attach(name)
        batches = iter(one)
        for _ in range(5):
            next(batches)
        now, later = shmloader.attach(name, join="now"), shmloader.attach(name)
        of_now, of_later = iter(now), iter(later)
        next(batches)  # the server goes on
        first = next(of_now)["index"][0].item()
        assert 20 <= first <= 40
        rest = [both[1]["index"][0].item() for both in zip(batches, of_now, strict=False)]
        assert rest == list(range(first + 4, first + 4 * len(rest) + 4, 4))
        assert [len(list(batches)), len(list(of_now))] == [0, 0]
        batches, of_now = iter(one), iter(now)
        firsts = [next(each)["index"].tolist() for each in (batches, of_now, of_later)]
        assert firsts == [[0, 1, 2, 3]] * 3
        for each in (one, now, later):
            each.close()


def test_a_slow_reader_holds_the_others_back_or_is_let_go() -> None:
    for policy in ("wait", "drop"):
        with served_by_thread(numbers(dataset=Numbers(400)), epochs=1, window=3, policy=policy) as name:
            slow, fast = shmloader.attach(name), shmloader.attach(name, join="now")
            slow_batches, fast_batches = iter(slow), iter(fast)
            first = plain(next(slow_batches))
            kept = next(slow_batches)
            right = plain(kept)
            next(fast_batches)
            if policy == "wait":
                left = sum(1 for _, _ in zip(fast_batches, slow_batches, strict=False))
                assert left > 90
            else:
                assert sum(1 for _ in fast_batches) > 90
                with pytest.raises(shmloader.LoaderClosed, match="behind the fastest reader"):
                    list(slow_batches)
                assert plain(kept) == right != first
            slow.close()
            fast.close()


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_an_epoch_begins_with_a_reader_that_has_batches_of_the_last_one_left(policy: str) -> None:
    with (
        served_by_thread(numbers(), readers=2, policy=policy, window=32) as name,
        shmloader.attach(name) as one,
        shmloader.attach(name) as other,
    ):
        ahead, behind = iter(one), iter(other)
        for _ in range(15):
            next(ahead), next(behind)
        assert len(list(ahead)) == 1
        ahead = iter(one)
        other.state_dict()  # the server has heard that the first one asks
        assert len(list(behind)) == 1
        behind = iter(other)
        assert [plain(batch) for batch in behind] == [plain(batch) for batch in ahead]


@pytest.mark.parametrize("ends_first", [True, False])
def test_one_that_stops_at_an_epochs_end_is_let_go_in_the_end(
    ends_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not so far behind that it would be let go before, and does not ask for the next epoch."""
    monkeypatch.setattr(server, "PATIENCE_S", 0.5)
    with served_by_thread(numbers(), readers=2, epochs=2, window=3, policy="drop") as name:
        one, other = shmloader.attach(name), shmloader.attach(name)
        slow, fast = iter(one), iter(other)
        for _ in range(4):
            next(slow), next(fast)
        for _ in range(10):
            next(slow), next(fast)
        if ends_first:
            list(fast)
        del fast  # else it breaks off
        assert len(list(other)) == 16
        assert len(list(slow)) == 2 if ends_first else 0 < len(list(slow)) <= 3
        with pytest.raises(
            shmloader.LoaderClosed, match=f"processes {os.getpid()} have waited 0.5 s for this"
        ):
            next(iter(one))
        one.close()
        other.close()


def test_only_as_many_epochs_are_served_as_were_asked_for() -> None:
    with served_by_thread(numbers(), epochs=1) as name, shmloader.attach(name) as reader:
        assert len(list(reader)) == len(reader)
        for _ in range(2):
            batches = iter(reader)
            for _ in range(2):
                with pytest.raises(shmloader.LoaderError, match="served for 1 epochs"):
                    next(batches)
                assert reader.state_dict()["batches"] == 16


class Timed(Numbers):
    """Says in its samples which epoch it was told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return self.epoch


def test_readers_set_the_epoch_and_have_to_agree() -> None:
    loader = numbers(dataset=Timed(16))
    with (
        served_by_thread(loader, readers=2) as name,
        shmloader.attach(name) as one,
        shmloader.attach(name) as other,
    ):
        for each in (one, other):
            each.set_epoch(7)
        readers = [iter(one), iter(other)]
        assert [next(reader).tolist() for reader in readers] == [[7] * 4] * 2
        one.set_epoch(8)
        readers = [iter(one), iter(other)]
        for reader in readers:
            with pytest.raises(ValueError, match=r"want different epochs: \[7, 8\]"):
                next(reader)
        other.set_epoch(8)
        readers = [iter(one), iter(other)]
        assert [next(reader).tolist() for reader in readers] == [[8] * 4] * 2


def test_batches_come_on_the_device_or_pinned_as_far_as_there_is_one() -> None:
    with (
        served_by_thread(numbers(), readers=1) as name,
        shmloader.attach(name, pin_memory=True, device="cpu") as reader,
    ):
        batch = next(iter(reader))
        assert batch["x"].device.type == "cpu"
        assert batch["x"].is_pinned() == torch.accelerator.is_available()


def test_wrong_arguments_are_refused() -> None:
    loader = numbers(0)
    for wrong in ({"window": 0}, {"window": 33}, {"policy": "skip"}, {"readers": 0}, {"epochs": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            shmloader.serve(loader, "wrong", **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="serve takes a loader, and not a int: pass"):
        shmloader.serve(5, "wrong")
    for name in ("", "x" * 65, "a\0b"):
        with pytest.raises(ValueError, match="1 to 64 bytes"):
            shmloader.serve(loader, name)
    with pytest.raises(ValueError, match="pass them to attach"):
        shmloader.serve(numbers(0, pin_memory=True), "wrong")
    with pytest.raises(ValueError, match="join"):
        shmloader.attach("wrong", join="later")  # type: ignore[arg-type]


def test_a_reader_is_of_its_process() -> None:
    with served_by_thread(numbers(), readers=1) as name, shmloader.attach(name) as reader:
        with pytest.raises(TypeError, match="cannot be sent"):
            pickle.dumps(reader)
        batches = iter(reader)
        next(batches)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                next(batches)
            except shmloader.LoaderError as error:
                code = 42 if "attach here, too" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
        assert len(list(batches)) == len(reader) - 1


def test_plain_loading_imports_nothing_of_it() -> None:
    code = (
        "import sys, shmloader\n"
        "list(shmloader.DataLoader(range(8), num_workers=1, multiprocessing_context='fork'))\n"
        "print([name for name in sys.modules if 'serving' in name])\n"
        "print(shmloader.serve.__module__)"
    )
    out = subprocess.check_output([*warm_python(), "-c", code], text=True)
    assert out.split("\n")[:2] == ["[]", "shmloader.serving.start"]


def test_nothing_is_lost_where_ctrl_c_comes_at_any_moment() -> None:
    make = functools.partial(numbers, dataset=Numbers(4800))
    expected = epochs_of(make(), 1)[0]
    came, got, random = 0, list[Any](), torch.Generator().manual_seed(1)
    over, sources = False, os.path.dirname(meeting.__file__)

    def interrupt(number: int, frame: Any) -> None:
        if over:
            return
        signal.setitimer(signal.ITIMER_REAL, 1e-5 + 2e-3 * torch.rand(1, generator=random).item())
        # Inside of next(). In this loop it would lose what next() has returned, before it has a name.
        if frame is not None and frame.f_code.co_filename.startswith(sources):
            nonlocal came
            came += 1
            raise KeyboardInterrupt

    with served(make, readers=1) as (name, _), shmloader.attach(name) as reader:
        batches = iter(reader)
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 1e-3)
        while True:
            try:
                batch = next(batches)
            except KeyboardInterrupt:
                continue
            except StopIteration:
                break
            got.append(batch)
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        assert [plain(batch) for batch in got] == expected
    assert came > 20


def test_a_batch_is_not_read_before_its_time() -> None:
    """The server makes no more than the window for a reader that has not asked."""
    loader = numbers(dataset=Numbers(400))
    with served_by_thread(loader, readers=1, window=2) as name, shmloader.attach(name) as reader:
        batches = iter(reader)
        next(batches)
        time.sleep(0.3)
        assert loader.statistics().batches <= 4
        assert len(list(itertools.islice(batches, 10))) == 10


def test_batches_lie_in_the_slots_that_workers_wrote() -> None:
    loader = numbers(persistent_workers=True)
    with served_by_thread(loader, readers=1) as name, shmloader.attach(name) as reader:
        held = list(itertools.islice(reader, 5))
        assert loader.statistics().slots_leased >= len(held)


@pytest.mark.parametrize("ends", ["close", "leave"])
def test_what_is_held_stays_where_its_reader_ends_and_another_goes_on(ends: str) -> None:
    loader = numbers(dataset=Numbers(400), persistent_workers=True, shuffle=False)
    with (
        served_by_thread(loader, readers=2) as name,
        shmloader.attach(name) as one,
        shmloader.attach(name) as other,
    ):
        batches, others = iter(one), iter(other)
        held = [batch for _, batch in zip(itertools.islice(others, 3), batches, strict=False)][-1:]
        right = plain(held)
        if ends == "close":
            one.close()
        else:
            del batches
        assert len(list(others)) == 97
        assert plain(held) == right
        del held


def test_one_that_leaves_waits_for_the_next_epoch_also_if_it_joins_now() -> None:
    with served_by_thread(numbers(dataset=Numbers(80), shuffle=False), epochs=2) as name:
        one, now = shmloader.attach(name), shmloader.attach(name, join="now")
        batches = iter(one)
        next(batches)
        entered = iter(now)
        next(batches)
        next(entered)
        entered = iter(now)
        assert len(list(batches)) > 10
        batches = iter(one)
        assert [next(each)["index"].tolist() for each in (batches, entered)] == [[0, 1, 2, 3]] * 2
        one.close()
        now.close()


def test_a_forked_child_does_not_keep_a_name() -> None:
    name = new_name()
    listener = meeting.listen(name)
    child = multiprocessing.Process(target=time.sleep, args=(WAIT_S,))
    child.start()
    listener.close()
    for attempts_left in reversed(range(100)):  # the child may only be about to close its copy
        try:
            meeting.listen(name).close()
        except shmloader.LoaderError:
            if not attempts_left:
                raise
            time.sleep(0.05)
        else:
            break
    child.kill()
    child.join()
    child.close()


class Chained(Numbers):
    """Sample 5 raises an exception that has a context, after a moment."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__(16)
        self._error = error

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            time.sleep(0.3)
            error = self._error("of sample 5")
            error.__context__ = KeyError("its context")
            raise error
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [ValueError, shmloader.NotReady])
def test_an_exception_is_the_samples_alone(error: type[Exception], workers: int) -> None:
    """Also one that the server could take for its own."""
    make = functools.partial(numbers, workers, Chained(error), shuffle=False)
    with served(make, readers=1) as (name, _), shmloader.attach(name) as loader:
        iterator = iter(loader)
        assert next(iterator)["index"].tolist() == [0, 1, 2, 3]
        with pytest.raises(error, match="of sample 5") as raised:
            next(iterator)
        assert type(raised.value.__context__) is KeyError
        assert [batch["index"][0].item() for batch in iterator] == [8, 12]


class NotCounted(torch.utils.data.IterableDataset[int]):
    """As wrappers of loaders are, that have a length once they are iterated over."""

    def __init__(self, error: type[Exception]) -> None:
        self._error = error

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def __len__(self) -> int:
        raise self._error("no length yet")


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_length_that_raises_is_none(error: type[Exception]) -> None:
    loader = shmloader.DataLoader(NotCounted(error), batch_size=4)
    with served_by_thread(loader, readers=1) as name, shmloader.attach(name) as reader:
        with pytest.raises(TypeError, match="has no length"):
            len(reader)
        assert sum(len(batch) for batch in reader) == 8
        assert reader.state_dict() == loader.state_dict()


def test_threads_of_a_reader_get_each_batch_once() -> None:
    make = functools.partial(numbers, 0, Numbers(3000, 1), batch_size=1, shuffle=False)
    with served(make, readers=1, window=32) as (name, _), shmloader.attach(name) as loader:
        iterator, found = iter(loader), list[int]()

        def take() -> None:
            found.extend(batch["index"].item() for batch in iterator)

        threads = [threading.Thread(target=take) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == list(range(3000))


def test_all_is_kept_with_the_largest_window() -> None:
    """The server has a window of batches ready while the reader holds as many as it may."""
    make = functools.partial(numbers, 0, Numbers(200, 1), batch_size=1, shuffle=False)
    with served(make, readers=1, window=32) as (name, _), shmloader.attach(name) as loader:
        kept = []
        for batch in loader:
            kept.append(batch)
            time.sleep(0.005)
        assert [batch["index"].item() for batch in kept] == list(range(200))
