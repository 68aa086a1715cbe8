"""Batches without waiting: ``try_next()``, ``fileno()`` and ``async for`` give what ``for`` gives."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing.util
import os
import random
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import Ends, Held, Numbered
from robustness.processes import LONG
from robustness.test_interrupt import interrupt_at
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from warm_python import warm_python

import shmloader
from shmloader import DataLoader, NotReady

PAGE = Path(__file__).parents[2] / "docs" / "waiting.md"
DEADLINE_S = 60.0


def drawn(number: int) -> torch.Tensor:
    """A number and a random one, in a thread of the worker's own generator."""
    info = get_worker_info()
    own = None if info is None or info.worker_method != "thread" else info.rng.torch_generator
    return torch.tensor([number, torch.rand(1, generator=own).item()])


class Drawing(Dataset[torch.Tensor]):
    """Sample ``i`` is ``i`` and a random number, after a moment that differs; the ninth raises."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002 * (index % 3))
        if index == 9:
            raise LookupError("the ninth")
        return drawn(index)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        for number in range(0 if info is None else 7 * info.id, 12):
            yield drawn(number)


Outcome = list[Any]
WaitsFor = Callable[[Any], Outcome]


def plain(loader: Any) -> Outcome:
    return outcome_of(iter(loader).__next__)


def outcome_of(take: Callable[[], Any]) -> Outcome:
    """The batches as lists, and the exceptions in place of others."""
    found: Outcome = []
    while True:
        try:
            found.append(take().tolist())
        except StopIteration:
            return found
        except LookupError as error:
            found.append(str(error).splitlines()[0])


def polled(loader: Any) -> Outcome:
    """By the contract for selectors; a descriptor that is not readable in time is a failure."""
    iterator = iter(loader)
    poller = select.poll()
    poller.register(iterator.fileno(), select.POLLIN)

    def take() -> Any:
        while True:
            try:
                return iterator.try_next()
            except NotReady:
                assert poller.poll(DEADLINE_S * 1000), "nothing to wait for"

    return outcome_of(take)


def in_asyncio(loader: Any) -> Outcome:
    async def run() -> Outcome:
        batches, found = aiter(loader), []
        while True:
            try:
                found.append((await anext(batches)).tolist())
            except StopAsyncIteration:
                return found
            except LookupError as error:
                found.append(str(error).splitlines()[0])

    return asyncio.run(run())


def loader_of(dataset: Any, seed: int = 3, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(dataset, **{"batch_size": 3, "num_workers": 2, "generator": generator} | options)


@pytest.mark.each_value
@pytest.mark.parametrize("waits_for", [polled, in_asyncio])
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"shuffle": True, "worker_type": "thread"},
        {"shuffle": True, "dispatch": "dynamic"},
        {"shuffle": True, "persistent_workers": True, "prefetch_epochs": True},
        {"dataset": Stream(), "persistent_workers": True},
        {"dataset": Stream(), "worker_type": "thread"},
        {"dataset": Stream(), "num_workers": 0},
        {"shuffle": True, "timeout": 60},
    ],
)
def test_all_is_as_with_next(waits_for: WaitsFor, options: dict[str, Any]) -> None:
    """In two epochs."""
    outcomes, states = [], []
    for how in (plain, waits_for):
        options = {"dataset": Drawing()} | options
        with loader_of(**options) as loader:
            if options.get("num_workers") == 0:
                torch.manual_seed(1)
            outcomes.append([how(loader), how(loader)])
            states.append(loader.state_dict())
    assert outcomes[0] == outcomes[1]
    assert states[0] == states[1]
    if type(options["dataset"]) is Drawing:
        assert "the ninth" in outcomes[0][0]


def test_all_start_methods(start_method: str) -> None:
    with loader_of(Numbered(30, delay_s=0.001), multiprocessing_context=start_method) as loader:
        assert polled(loader) == plain(loader)


def test_not_in_order_all_come_once() -> None:
    with loader_of(Numbered(60, items=1, delay_s=0.001), in_order=False) as loader:
        assert sorted(itertools.chain(*polled(loader))) == [[index] for index in range(60)]


def test_a_batch_that_is_not_here_is_not_waited_for_and_not_taken() -> None:
    dataset = Held(12)
    with loader_of(dataset) as loader:
        iterator = iter(loader)
        with pytest.raises(NotReady, match="fileno"):
            iterator.try_next()
        dataset.released.set()
        assert loader.state_dict()["batches"] == 0
        assert isinstance(NotReady(), BlockingIOError)
        assert [batch[0, 0].item() for batch in iterator] == [0, 3, 6, 9]


def test_try_next_and_next_may_be_mixed_and_the_state_follows() -> None:
    chance = random.Random(1)
    with loader_of(Numbered(90, delay_s=0.0005)) as loader:
        iterator, found = iter(loader), []
        while len(found) < 30:
            try:
                take = iterator.try_next if chance.random() < 0.7 else iterator.__next__
                found.append(take()[0, 0].item())
            except NotReady:
                time.sleep(0.0003)
            assert loader.state_dict()["batches"] == len(found)
        assert found == list(range(0, 90, 3))


def test_an_interrupt_at_any_line_of_try_next_loses_nothing() -> None:
    """As of ``next()``: the epoch continues exactly, or says that it cannot, and the next one is exact."""
    whole = list(range(0, 48, 3))
    for line in range(1, 1000, 2 if LONG else 17):
        with loader_of(Numbered(48), persistent_workers=True, timeout=20) as loader:
            iterator = iter(loader)
            found = [next(iterator)[0, 0].item()]
            select.select([iterator], [], [], DEADLINE_S)

            def call(iterator: Any = iterator, found: list[float] = found) -> None:
                with contextlib.suppress(NotReady):
                    found.append(iterator.try_next()[0, 0].item())

            interrupted = interrupt_at(line, call)
            before = loader.state_dict()["batches"]
            assert before == len(found), f"after an interrupt at {interrupted.place}"
            with contextlib.suppress(shmloader.LoaderClosed):
                found += [batch[0, 0].item() for batch in iterator]
                assert found == whole, f"after an interrupt at {interrupted.place}"
            assert [batch[0, 0].item() for batch in loader] == whole
        if not interrupted.hit:
            return
    pytest.fail("no call ended before that line")


def test_no_thread_stands_behind_it() -> None:
    before = threading.active_count()
    with loader_of(Numbered(30, delay_s=0.01)) as loader:
        iterator = iter(loader)
        iterator.fileno()

        async def run() -> int:
            await anext(aiter(iterator))
            return threading.active_count()

        assert asyncio.run(run()) == before


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_the_descriptor_rests_while_nothing_comes(worker_type: Any) -> None:
    """Else a program would spin."""
    dataset = Held(24)
    with loader_of(dataset, worker_type=worker_type) as loader:
        iterator = iter(loader)
        iterator.fileno()
        for _ in range(3):
            with pytest.raises(NotReady):
                iterator.try_next()
        assert select.select([iterator], [], [], 0.2)[0] == []
        dataset.released.set()
        assert select.select([iterator], [], [], DEADLINE_S)[0] == [iterator]


def test_many_quick_batches_of_threads_are_never_waited_for_in_vain() -> None:
    with loader_of(Numbered(20_000), worker_type="thread") as loader:
        assert [batch[0][0] for batch in polled(loader)] == list(range(0, 20_000, 3))


def test_a_request_that_its_full_pipe_has_no_room_for_is_sent() -> None:
    """The worker answers none of those before it, and nothing else would make the descriptor readable."""
    with loader_of(Numbered(3), num_workers=1, persistent_workers=True) as loader:
        iterator = iter(loader)
        polled(loader)
        worker = iterator._all_workers.workers[0]
        os.kill(worker.pid, 19)  # SIGSTOP
        for number in range(100):  # records that are not answered: the beginning of settings
            worker.send(shmloader.wire.records.pack_begin_epoch(9, 10**6, 0, b"%d" % number))
        assert not worker.flush()
        iterator._all_workers.ready()
        assert not select.select([iterator], [], [], 0.05)[0]
        os.kill(worker.pid, 18)  # SIGCONT
        deadline_s = time.monotonic() + DEADLINE_S
        while not worker.flush() and time.monotonic() < deadline_s:
            assert select.select([iterator], [], [], DEADLINE_S)[0], "nothing to wait for"
            iterator._all_workers.ready()
        assert worker.flush()


# --- workers that die or hang, loaders that are closed


@pytest.mark.parametrize("waits_for", [polled, in_asyncio])
def test_the_death_of_a_worker_is_an_error(waits_for: WaitsFor) -> None:
    with loader_of(Ends(30, 10, -9)) as loader, pytest.raises(shmloader.WorkerDied, match="SIGKILL"):
        waits_for(loader)


class EndsOnce(Numbered):
    """The worker that is asked for sample 10 ends, the first time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(30, items=1, delay_s=0.001)
        self.mark = folder / "ended"

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 10 and not self.mark.exists():
            self.mark.touch()
            os._exit(3)
        return super().__getitem__(index)


@pytest.mark.parametrize("waits_for", [polled, in_asyncio])
def test_the_descriptor_stays_the_same_when_workers_are_replaced(waits_for: WaitsFor, tmp_path: Path) -> None:
    with loader_of(EndsOnce(tmp_path), worker_restarts=1) as loader:
        assert list(itertools.chain(*waits_for(loader))) == [[index] for index in range(30)]
        assert loader.statistics().worker_restarts == 1


class Hangs(Numbered):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 6:
            time.sleep(60)
        return super().__getitem__(index)


@pytest.mark.parametrize("waits_for", [polled, in_asyncio])
def test_a_hang_ends_with_the_timeout(waits_for: WaitsFor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmloader.workers.processes._STOP_S", 0.1)

    def poll_until_the_end(iterator: Any) -> None:
        while True:
            try:
                iterator.try_next()
            except NotReady:
                select.select([iterator], [], [], 0.05)

    with loader_of(Hangs(30), timeout=0.5) as loader:
        iterator, said = iter(loader), [""]
        while "__getitem__" not in said[-1] and len(said) < 50:  # a busy machine takes long to start workers
            with pytest.raises(shmloader.WorkerTimeout) as raised:
                in_asyncio(iterator) if waits_for is in_asyncio else poll_until_the_end(iterator)
            said.append(str(raised.value))
        assert "__getitem__" in said[-1]


class Later(Held):
    """The first batch comes after a moment, the others once they are released."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 3:
            return super().__getitem__(index)
        time.sleep(1.0)
        return Numbered.__getitem__(self, index)


def test_the_timeout_does_not_count_from_before_a_batch_that_next_has_taken() -> None:
    dataset = Later(6)
    with loader_of(dataset, num_workers=1, timeout=5) as loader:
        iterator = iter(loader)
        with pytest.raises(NotReady):
            iterator.try_next()
        time.sleep(5.1)  # in which the program did something else
        assert next(iterator)[0, 0] == 0
        with pytest.raises(NotReady):
            iterator.try_next()
        dataset.released.set()


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_close_in_another_thread_wakes_whoever_waits(worker_type: Any) -> None:
    with loader_of(Numbered(30, delay_s=1.0), worker_type=worker_type) as loader:

        async def run() -> None:
            batches = aiter(loader)
            closing = threading.Timer(0.1, loader.close)
            closing.start()
            try:
                await anext(batches)
            finally:
                closing.join()

        with pytest.raises(shmloader.LoaderClosed):
            asyncio.run(run())


def test_a_thread_inside_next_is_not_waited_for() -> None:
    dataset = Held(6)
    with loader_of(dataset) as loader:
        iterator = iter(loader)
        found: list[torch.Tensor] = []
        inside = threading.Thread(target=lambda: found.append(next(iterator)))
        inside.start()
        told = ""
        while "another thread" not in told:  # it may not be inside yet
            time.sleep(0.05)
            with pytest.raises(NotReady) as raised:
                iterator.try_next()
            told = str(raised.value)
        dataset.released.set()
        inside.join()
        assert found[0][0, 0] == 0
        assert next(iterator)[0, 0] == 3


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_whoever_waits_is_told_of_what_another_call_has_received(worker_type: Any) -> None:
    """By another thread, say: one batch is returned, the next one comes with it, then the epoch ends."""
    dataset = Held(6)
    with loader_of(dataset, num_workers=1, worker_type=worker_type, persistent_workers=True) as loader:
        iterator, poller = iter(loader), select.poll()
        poller.register(iterator.fileno(), select.POLLIN)
        with pytest.raises(NotReady):
            iterator.try_next()
        assert poller.poll(0) == []
        dataset.released.set()
        time.sleep(0.5)  # until both batches are sent
        assert next(iterator)[0, 0] == 0
        assert poller.poll(DEADLINE_S * 1000)
        assert iterator.try_next()[0, 0] == 3
        assert next(iterator, None) is None
        assert poller.poll(DEADLINE_S * 1000)


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_threads_that_all_wait_for_the_descriptor_end(worker_type: Any) -> None:
    with loader_of(Numbered(120, delay_s=0.001), worker_type=worker_type, persistent_workers=True) as loader:
        iterator, found = iter(loader), list[Outcome]()
        threads = [threading.Thread(target=lambda: found.append(polled(iterator))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(batch[0][0] for one in found for batch in one) == list(range(0, 120, 3))


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_a_thread_that_waits_for_the_descriptor_sleeps_while_another_is_inside_next(worker_type: Any) -> None:
    with loader_of(Numbered(24, delay_s=0.1), num_workers=1, worker_type=worker_type) as loader:
        iterator, poller, wakeups, found = iter(loader), select.poll(), 0, list[Any]()
        poller.register(iterator.fileno(), select.POLLIN)
        with pytest.raises(NotReady):
            iterator.try_next()
        thread = threading.Thread(target=lambda: found.extend(itertools.islice(iterator, 6)))
        thread.start()
        while thread.is_alive():
            wakeups += bool(poller.poll(100))
            with contextlib.suppress(NotReady, StopIteration):
                found.append(iterator.try_next())
            time.sleep(0.001)  # not to keep the interpreter from the other thread
        thread.join()
        assert len(found) >= 6
        assert wakeups < 400  # some for each batch; always awake there would be some 1,600


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_threads_that_ask_at_once_get_the_same_descriptor(worker_type: Any) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            with loader_of(Numbered(3), num_workers=1, worker_type=worker_type) as loader:
                iterator, found, together = iter(loader), set[int](), threading.Barrier(3)

                def ask(iterator: Any = iterator, found: set[int] = found, together: Any = together) -> None:
                    together.wait()
                    found.add(iterator.fileno())

                threads = [threading.Thread(target=ask) for _ in range(3)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert found == {iterator.fileno()}
    finally:
        sys.setswitchinterval(before)


def end_slowly(worker_id: int) -> None:
    multiprocessing.util.Finalize(None, time.sleep, (2.0,), exitpriority=1)


def test_while_another_thread_ends_the_epoch_it_is_not_ready() -> None:
    """The workers are being stopped then, as by ``close()``."""
    with loader_of(Numbered(6), worker_init_fn=end_slowly) as loader:
        iterator, told = iter(loader), 0
        assert [next(iterator)[0, 0].item() for _ in range(2)] == [0, 3]
        ending = threading.Thread(target=next, args=(iterator, None))
        ending.start()
        while iterator._lifecycle.phase.name == "IDLE" and ending.is_alive():
            time.sleep(0.001)
        while ending.is_alive():
            with contextlib.suppress(StopIteration):
                with pytest.raises(NotReady, match="another thread"):
                    iterator.try_next()
                told += 1
                time.sleep(0.01)
        assert told
        with pytest.raises(StopIteration):
            iterator.try_next()


# --- tasks


def test_a_cancelled_task_loses_no_batch() -> None:
    """Cancelled at random moments, some of them when the batch has just come."""
    chance = random.Random(5)

    async def run(loader: Any) -> tuple[list[float], int]:
        batches, found, cancelled = aiter(loader), [], 0
        while True:
            task = asyncio.ensure_future(anext(batches))
            await asyncio.sleep(chance.choice([0, 0.0005, 0.002]))
            task.cancel()
            try:
                found.append((await task)[0, 0].item())
            except asyncio.CancelledError:
                cancelled += 1
            except StopAsyncIteration:
                return found, cancelled

    with loader_of(Numbered(300, delay_s=0.0003)) as loader:
        found, cancelled = asyncio.run(run(loader))
    assert found == list(range(0, 300, 3))
    assert cancelled > 20


def test_ctrl_c_in_asyncio_loses_no_batch() -> None:
    """``asyncio.run`` cancels the task; the same pass goes on in the next one."""
    dataset = Held(90)
    dataset.released.set()
    with loader_of(dataset) as loader:
        iterator, found = iter(loader), []

        async def take(interrupt_after: int) -> None:
            left = interrupt_after
            async for batch in aiter(iterator):
                found.append(batch[0, 0].item())
                left -= 1
                if left == 0:
                    dataset.released.clear()  # so that it waits when Ctrl-C comes
                    threading.Timer(0.015, lambda: os.kill(os.getpid(), 2)).start()

        for number in range(1, 5):
            with pytest.raises(KeyboardInterrupt):
                asyncio.run(take(number))
            dataset.released.set()
        asyncio.run(take(-1))
        assert found == list(range(0, 90, 3))


def test_tasks_that_share_an_iterator_get_each_batch_once_and_other_tasks_run() -> None:
    """The first sample waits for another task."""

    async def run(loader: Any) -> list[int]:
        batches, found = aiter(loader), []

        async def take() -> None:
            async for batch in batches:
                found.append(batch[0, 0].item())

        async def count() -> None:
            for _ in range(10):
                await asyncio.sleep(0.001)
            dataset.released.set()

        counting = asyncio.create_task(count())
        await asyncio.gather(take(), take(), take())
        counting.cancel()
        return found

    dataset = Held(90)
    with loader_of(dataset) as loader:
        assert asyncio.run(run(loader)) == list(range(0, 90, 3))


def test_other_tasks_run_between_batches_that_are_here() -> None:
    async def run(batches: AsyncIterator[Any]) -> list[str]:
        order: list[str] = []

        async def other() -> None:
            while True:
                order.append("other")
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        async for _ in batches:
            order.append("batch")
        task.cancel()
        return order

    with loader_of(Numbered(30), num_workers=0) as loader:
        order = asyncio.run(run(aiter(loader)))
    assert "batch" in order
    assert all(before == "other" for before, now in itertools.pairwise(order) if now == "batch")


def test_two_waits_for_one_iterator_are_refused() -> None:
    async def run(iterator: Any) -> list[Any]:
        waits = [anext(aiter(iterator)), anext(aiter(iterator))]
        return await asyncio.gather(*waits, return_exceptions=True)

    with loader_of(Numbered(30, delay_s=0.1)) as loader:
        first, second = asyncio.run(run(iter(loader)))
    assert first[0, 0] == 0
    with pytest.raises(shmloader.LoaderError, match="share one"):
        raise second


def test_the_time_until_a_batch_came_is_counted() -> None:
    with loader_of(Numbered(9, delay_s=0.3)) as loader, loader.profile() as profile:
        began_s = time.monotonic()
        in_asyncio(loader)
        assert 1.2 < loader.statistics().wait_for_workers_s < time.monotonic() - began_s
        report = profile.report()
        assert report.main["wait"].share > 0.8, report.main


# --- torch's own way


def test_after_install_loaders_of_torchs_class_have_it() -> None:
    shmloader.install()
    try:
        loader = torch.utils.data.DataLoader(Numbered(30), batch_size=3, num_workers=2)
        assert polled(loader) == in_asyncio(iter(loader)) == plain(loader)
        with pytest.raises(TypeError, match="DataLoader"):
            aiter(loader)
    finally:
        shmloader.uninstall()


def test_where_torchs_iterator_loads_async_for_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "shmloader: slots are not available on this platform: no memfd."
    monkeypatch.setattr("shmloader.loading.why_unavailable", lambda: "no memfd")
    loader = loader_of(Numbered(30))
    with (
        pytest.warns(RuntimeWarning, match="no memfd"),
        pytest.raises(NotImplementedError, match=r"_MultiProcessingDataLoaderIter.*no memfd") as raised,
    ):
        aiter(loader)
    assert why.split(":", maxsplit=1)[0] in str(raised.value)
    assert not hasattr(iter(loader), "try_next")


def test_a_subclass_that_iterates_in_its_own_way_is_refused_by_name() -> None:
    class Doubling(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:
            return (2 * batch for batch in super().__iter__())

    with pytest.raises(NotImplementedError, match=r"generator.*Doubling"):
        aiter(Doubling(Numbered(30), num_workers=1))


# --- the page


@pytest.mark.parametrize("heading", ["asyncio", "Selectors"])
def test_the_programs_of_the_page(heading: str, tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1]
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert program
    (tmp_path / "program.py").write_text(program[1])
    command = [*warm_python(), "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line != "alive"] == ["28.0", "92.0", "156.0", "220.0"]
    assert lines.count("alive") >= (5 if heading == "asyncio" else 0)


# --- exceptions of the program's code that mean something to whoever waits


class Nested(Dataset[int]):
    """Sample 7 raises what a loader of its own does, or another exception."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 7 and self.error is not NotReady:
            raise self.error("of sample 7")
        if index == 7:
            held = Held(12)
            with loader_of(held, num_workers=1, worker_type="thread") as inner:
                try:
                    iter(inner).try_next()
                finally:
                    held.released.set()
        return index


class Asking(Nested):
    """A sampler that does so."""

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(12))


WORKERS = [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}]


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("error", [NotReady, StopAsyncIteration])
def test_a_samples_exception_is_not_taken_for_the_iterators_own(
    error: type[Exception], options: dict[str, Any]
) -> None:
    async def run() -> list[Any]:
        batches, found = aiter(loader_of(Nested(error), batch_size=1, **options)), list[Any]()
        while True:
            try:
                found.append((await anext(batches)).item())
            except StopAsyncIteration:
                return found
            except shmloader.LoaderError as raised:
                found.append(raised if type(raised) is error else raised.__cause__)

    found = asyncio.run(run())
    assert type(found.pop(7)) is error
    assert found == [*range(7), *range(8, 12)]


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize(
    "code", [{"dataset": Nested(NotReady)}, {"dataset": range(12), "sampler": Asking(NotReady)}]
)
def test_try_next_raises_a_not_ready_of_the_programs_code_as_another_error(
    code: dict[str, Any], options: dict[str, Any]
) -> None:
    iterator = iter(loader_of(batch_size=1, **code, **options))
    with pytest.raises(shmloader.LoaderError, match="wait there with next") as raised:
        while True:
            with contextlib.suppress(NotReady):
                iterator.try_next()
    assert type(raised.value.__cause__) is NotReady
