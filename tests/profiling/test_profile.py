"""``loader.profile()`` measures the epochs that begin in its block, under every way to load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import subprocess
import time
import urllib.request
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from loading import Numbered
from torch.utils.data import Dataset, IterableDataset
from warm_python import warm_python

from shmloader import DataLoader
from shmloader.errors import LoaderError
from shmloader.profiling import ProfileReport

SLOW_S = 0.5


class OneSlow(Numbered):
    """One sample takes half a second."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SLOW_S if index == 37 else 0.0008)
        return torch.full((8,), index) + torch.randint(0, 100, ())


class Numbers(IterableDataset[int]):
    """A stream of numbers."""

    def __iter__(self) -> Iterator[int]:
        for number in range(32):
            time.sleep(0.0008)
            yield number


class AtOnce(Dataset[torch.Tensor]):
    """Samples that one call fetches."""

    def __len__(self) -> int:
        return 32

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(0.005)
        return [torch.tensor(index) for index in indices]


def with_profile(loader: Any, epochs: int = 1) -> tuple[ProfileReport, list[Any]]:
    with loader.profile() as profile:
        batches = [batch for _ in range(epochs) for batch in loader]
    return profile.report(), batches


WAYS: dict[str, dict[str, Any]] = {
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "forkserver": {"num_workers": 1, "multiprocessing_context": "forkserver"},
    "threads": {"num_workers": 2, "worker_type": "thread"},
    "dynamic": {"num_workers": 2, "dispatch": "dynamic"},
    "in_process": {"num_workers": 0},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_batch_is_measured_and_the_slow_sample_named(way: str) -> None:
    with DataLoader(OneSlow(80), 8, **WAYS[way]) as loader:
        report, _ = with_profile(loader, 2)
    assert report.batches == len(report.made) == 20
    assert sum(count for count, _ in report.by_worker.values()) == 20
    name, slow_s = next(iter(report.slowest.items()))
    assert "37" in name
    assert slow_s >= SLOW_S
    assert report.workers["fetch"].most_s >= SLOW_S
    assert sum(spread.share for spread in report.main.values()) == pytest.approx(1)


def test_a_slow_sample_of_a_large_batch_in_order_is_named_without_workers() -> None:
    """Its index batch is a run of numbers."""
    report, _ = with_profile(DataLoader(OneSlow(80), 40))
    name, slow_s = next(iter(report.slowest.items()))
    assert "37" in name
    assert slow_s >= SLOW_S


@pytest.mark.parametrize("way", ["fork", "in_process"])
def test_batches_are_the_same(way: str) -> None:
    found = []
    for profiled in (False, True):
        torch.manual_seed(1)
        loader = DataLoader(OneSlow(80), 8, shuffle=True, **WAYS[way])
        found.append(with_profile(loader)[1] if profiled else list(loader))
    assert all(map(torch.equal, *found))


def test_persistent_workers_are_measured_from_the_next_epoch_on_and_no_longer() -> None:
    with DataLoader(Numbered(80, delay_s=0.0008), 8, num_workers=2, persistent_workers=True) as loader:
        list(loader)
        report, _ = with_profile(loader)
        list(loader)
        assert (report.batches, len(report.made)) == (10, 10)
        assert with_profile(loader)[0].batches == 10


def test_epochs_that_are_begun_early_are_measured_from_the_block_on() -> None:
    with DataLoader(Numbered(80, delay_s=0.0008), 8, **BEGUN_EARLY, generator=torch.Generator()) as loader:
        list(loader)
        report, batches = with_profile(loader, 2)
    assert len(batches) == report.batches == 20
    # The first epoch's first batches were asked for before the block. Workers may have made some of the third
    # epoch's before the second one ended.
    assert 20 - 2 * 2 <= len(report.made) <= 20


BEGUN_EARLY: dict[str, Any] = {
    "num_workers": 2, "persistent_workers": True, "prefetch_epochs": True, "shuffle": True
}  # fmt: skip


def test_a_profile_leaves_the_random_numbers_of_epochs_that_are_begun_early() -> None:
    found = []
    for profiled in (-1, 1):
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(1)
        with DataLoader(OneSlow(80), 8, **BEGUN_EARLY, generator=generator) as loader:
            epochs = [with_profile(loader)[1] if n == profiled else list(loader) for n in range(3)]
            statistics = loader.statistics()
        assert (statistics.epochs_prefetched, statistics.epochs_in_vain) == (2, 0)
        found.append(torch.cat([batch for epoch in epochs for batch in epoch]))
    assert torch.equal(*found)


@pytest.mark.parametrize("dataset", [Numbers(), AtOnce()])
def test_samples_that_come_together_are_measured_by_the_batch(dataset: Any) -> None:
    with DataLoader(dataset, 8, num_workers=1) as loader:
        report, _ = with_profile(loader)
    assert report.batches == len(report.made) == 4
    assert all(made.excess_s == 0 for made in report.made)


def test_a_sample_that_raises_leaves_the_rest_measured() -> None:
    class Bad(Numbered):
        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.0008)
            if index == 9:
                raise ValueError(index)
            return super().__getitem__(index)

    with DataLoader(Bad(32), 8, num_workers=1, on_error="skip") as loader, pytest.warns(match="bad sample"):
        report, batches = with_profile(loader)
    assert [len(batch) for batch in batches] == [8, 7, 8, 8]
    assert len(report.made) == 4
    with DataLoader(Bad(32), 8, num_workers=1) as loader, loader.profile() as profile:
        with pytest.raises(ValueError, match="9"):
            list(loader)
        assert len(profile.report().made) >= 1


def test_the_times_of_parts_are_found_where_they_are_spent() -> None:
    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(0.05)
        return torch.stack(samples)

    with DataLoader(Numbered(80, delay_s=0.001), 8, num_workers=1, collate_fn=collate) as loader:
        with loader.profile() as profile:
            for _ in loader:
                time.sleep(0.01)
        report = profile.report()
    assert report.workers["collate"].p50_s >= 0.05
    assert report.workers["fetch"].p50_s >= 0.008
    assert report.main["step"].p50_s >= 0.01
    assert report.main["wait"].p50_s >= 0.01
    assert report.bound_batches_per_s <= 9 / 0.09 * 10 / 9 + 1
    assert "collate" in str(profile)


def test_a_callback_gets_scalars_and_its_time_counts_nowhere() -> None:
    told: list[dict[str, float]] = []

    def track(report: ProfileReport) -> None:
        told.append(report.scalars())
        time.sleep(2 if len(told) == 1 else 0)

    with DataLoader(Numbered(40, delay_s=0.001), 8, num_workers=1) as loader:
        with loader.profile(every_s=0.001, callback=track) as profile:
            list(loader)
        report = profile.report()
    assert told
    assert told[-1]["batches_per_s"] > 0
    assert {"main/wait/share", "workers/fetch/p99_s"} <= told[-1].keys()
    assert report.main["step"].most_s < 2


def test_a_trace_shows_every_process(tmp_path: Path) -> None:
    with DataLoader(Numbered(80, delay_s=0.0008), 8, num_workers=2) as loader:
        report, _ = with_profile(loader)
    report.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {
        "main",
        "worker 0",
        "worker 1",
    }
    assert sum(event["name"] == "fetch" for event in events) == 10
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


@pytest.mark.in_ci
def test_a_picture_is_drawn(tmp_path: Path) -> None:
    program = """
import sys
from loading import Numbered
from shmloader import DataLoader

with DataLoader(Numbered(80), 8, num_workers=2) as loader, loader.profile() as profile:
    list(loader)
profile.save_picture(sys.argv[1])
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([*warm_python(), "-c", program, tmp_path / "it.png"], check=True, env=environment)
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_the_documented_callback_gives_a_tracker_its_scalars() -> None:
    class Writer:
        def __init__(self) -> None:
            self.found: dict[str, float] = {}
            self.steps: list[int] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.found[name] = value
            self.steps.append(step)

    page = (Path(__file__).parents[2] / "docs" / "profile.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"(def track.*?)for images, labels", page, re.DOTALL)
    writer = Writer()
    with DataLoader(Numbered(160), 8, num_workers=1) as loader:
        step = "for _ in loader:\n        step()\n        trained += 1\n"
        given = {"loader": loader, "writer": writer, "step": lambda: time.sleep(0.01)}
        exec(recipe.replace("every_s=10", "every_s=0.05") + step, given)
    assert 0 < writer.steps[0] <= writer.steps[-1] <= 20
    assert writer.found["loader/batches_per_s"] > 0
    assert 0 <= writer.found["loader/main/wait/share"] <= 1
    assert "loader/workers/fetch/p99_s" in writer.found


def test_the_documented_callback_gives_prometheus_its_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "profile.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"```python\n(from prometheus_client.*?)```", page, re.DOTALL)
    given: dict[str, Any] = {}
    exec(recipe.replace("9100", "0"), given)
    loader = DataLoader(Numbered(160), 8, num_workers=1)
    told: list[float] = []

    def export(report: ProfileReport) -> None:
        given["export"](report)
        told.append(report.scalars()["batches_per_s"])

    with loader, loader.profile(every_s=0.05, callback=export):
        for _ in loader:
            time.sleep(0.01)
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with directly.open(f"http://127.0.0.1:{given['server'].server_port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    given["server"].shutdown()
    given["server"].server_close()
    given["thread"].join()
    rate = next(line.split()[-1] for line in lines if line.startswith('shmloader{name="batches_per_s"}'))
    assert float(rate) == told[-1] > 0


def test_one_of_many_quick_batches_stands_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("profiling.recorder._JOINED_NS", "worker.probe._EVERY_NS"):
        monkeypatch.setattr(f"shmloader.{name}", 32_000_000)  # also on a machine where they are not so quick
    with DataLoader(Numbered(8000), 1, num_workers=1) as loader:
        report, _ = with_profile(loader)
        assert report.batches == 8000
        assert max(len(report.made), len(report.returned)) < 4000
        ((measured, each_s),) = report.by_worker.values()
        assert 6000 < measured <= 8000
        stood_for = measured / len(report.made)  # batches by each entry, some 200
        assert each_s * 8000 < loader.statistics().iterating_s * stood_for / 4, "the time of one, not of all"
        assert report.total_s == pytest.approx(loader.statistics().iterating_s, rel=0.2)


def test_figures_are_asked_for_inside_the_block_or_after_it() -> None:
    with DataLoader(Numbered(80), 8, num_workers=1) as loader:
        profile = loader.profile()
        with pytest.raises(LoaderError, match=r"with loader\.profile\(\) as profile"):
            profile.report()
        with profile:
            assert str(profile) == "No batch has been returned yet."
            list(loader)
            assert profile.report().batches == 10
        list(loader)
        assert profile.report().batches == 10


def test_the_answers_of_a_profile_that_has_ended_are_ignored() -> None:
    with DataLoader(Numbered(800), 8, num_workers=1) as loader:
        with loader.profile() as profile:
            iterator = iter(loader)
            next(iterator)
        assert len(list(iterator)) == 99
        assert profile.report().batches == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_callback_that_raises_loses_no_batch(num_workers: int) -> None:
    calls: list[int] = []
    errors: list[str] = []
    seen: list[int] = []

    def track(report: ProfileReport) -> None:
        calls.append(report.batches)
        if len(calls) == 1:
            raise ConnectionError("the tracker is away")

    loader = DataLoader(Numbered(80, delay_s=0.001), 8, num_workers=num_workers)
    with loader, loader.profile(every_s=0.001, callback=track):
        batches = iter(loader)
        while len(errors) < 3:
            try:
                seen += next(batches)[:, 0].int().tolist()
            except StopIteration:
                break
            except ConnectionError as error:
                errors.append(str(error))
    assert (seen, errors) == (list(range(80)), ["the tracker is away"])


def test_a_callback_is_not_called_after_the_block() -> None:
    calls: list[int] = []
    with DataLoader(Numbered(80), 8) as loader:
        with loader.profile(every_s=0.3, callback=lambda report: calls.append(report.batches)):
            batches = iter(loader)
            next(batches)
        inside = len(calls)
        for _ in batches:
            time.sleep(0.1)  # so that calls would be due
    assert len(calls) == inside


@pytest.mark.parametrize("num_workers", [0, 1])
def test_profiles_in_each_other_both_measure(num_workers: int) -> None:
    with DataLoader(Numbered(80), 8, num_workers=num_workers) as loader:
        with loader.profile() as outer:
            list(loader)
            with loader.profile() as inner:
                list(loader)
            list(loader)
        list(loader)
    assert (inner.report().batches, outer.report().batches) == (10, 30)
    assert sum(made.times.batches for made in inner.report().made) <= 10


def test_profiles_may_end_in_another_order() -> None:
    with DataLoader(Numbered(80), 8, num_workers=1) as loader, contextlib.ExitStack() as last:
        with loader.profile() as first:
            middle = last.enter_context(loader.profile())
            end = last.enter_context(loader.profile())
            list(loader)
        list(loader)
        last.close()
        list(loader)
        reports = [profile.report() for profile in (first, middle, end)]
        counters = loader._shmloader_loading.counters
    assert [report.batches for report in reports] == [10, 20, 20]
    assert counters.recorder is None, "workers measure no longer"


def test_a_profile_is_entered_once() -> None:
    loader = DataLoader(Numbered(80), 8)
    with loader.profile() as profile:
        list(loader)
        with pytest.raises(LoaderError, match=r"call loader\.profile\(\) for each"):
            profile.begin()
    with pytest.raises(LoaderError, match=r"call loader\.profile\(\) for each"), profile:
        pass
    assert profile.report().batches == 10
    assert loader._shmloader_loading.counters.recorder is None


class Endless(Numbers):
    """A stream without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(1_000_000))


@pytest.mark.parametrize("way", ["fork", "in_process"])
def test_a_replay_gives_the_first_batch_as_often_as_there_are_batches(way: str) -> None:
    with DataLoader(Numbered(80, delay_s=0.001), 8, **WAYS[way]) as loader:
        expected = [batch.clone() for batch in loader]
        with loader.profile(replay=True) as profile:
            for _ in range(2):
                batches = iter(loader)
                first = next(batches)
                assert not loader.statistics().slots_granted, "the workers have ended"
                for batch in batches:
                    assert torch.equal(batch, first)
                    time.sleep(0.02)
        report = profile.report()
        assert all(map(torch.equal, expected, loader))
    assert torch.equal(first, expected[0])
    assert report.batches == 20
    assert report.main["wait"].most_s == 0
    assert report.main["step"].p50_s >= 0.02
    assert "no loader makes this program faster than" in report.verdict.text
    assert "worker" not in str(report)


def test_a_replay_of_a_stream_without_a_length_ends() -> None:
    with DataLoader(Endless(), 8) as loader, loader.profile(replay=True) as profile:
        with pytest.raises(TypeError, match="has no length"):
            len(iter(loader))  # type: ignore[arg-type]
        assert sum(1 for _ in loader) == 1_000
    assert profile.report().batches == 1_000


def test_replays_may_end_in_another_order() -> None:
    with DataLoader(Numbered(32), 8) as loader:
        profiles = [loader.profile(replay=True) for _ in range(2)]
        for profile in profiles:
            profile.begin()
        profiles[0].__exit__()
        assert len({int(batch[0, 0]) for batch in loader}) == 1
        profiles[1].__exit__()
        assert loader._shmloader_loading.counters.replay is None
        assert len({int(batch[0, 0]) for batch in loader}) == 4
    assert [profile.report().batches for profile in profiles] == [0, 4]


def test_a_program_may_take_entries_out_of_a_batch_that_is_replayed() -> None:
    rows = [{"number": number} for number in range(32)]
    with DataLoader(rows, 8) as loader, loader.profile(replay=True):
        assert [batch.pop("number").tolist() for batch in loader] == [list(range(8))] * 4


class Named(NamedTuple):
    """A batch with names."""

    entries: dict[str, Any]
    count: int


@dataclass
class Labelled:
    """A batch of a class of the program's."""

    labels: torch.Tensor | None


class Whole(Labelled):
    """A batch that cannot be copied."""

    def __copy__(self) -> None:
        raise TypeError


def entries_of(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"labels": torch.stack(samples)}


def take(batch: Any) -> torch.Tensor:
    """The labels, taken out of a batch."""
    if isinstance(batch, Labelled):
        labels = batch.labels
        if type(batch) is Labelled:
            batch.labels = None
    else:
        while isinstance(batch, (tuple, list)):
            batch = batch[0]
        batch = batch.get("of", batch)
        labels = batch.pop("labels")
    assert labels is not None
    return labels


@pytest.mark.parametrize(
    "make",
    [
        lambda samples: UserDict(entries_of(samples)),  # as BatchEncoding of transformers
        lambda samples: OrderedDict(entries_of(samples)),
        lambda samples: (entries_of(samples), len(samples)),
        lambda samples: [entries_of(samples), len(samples)],  # as of detection
        lambda samples: ([entries_of(samples)], len(samples)),
        lambda samples: Named({"of": entries_of(samples)}, len(samples)),
        lambda samples: Labelled(torch.stack(samples)),
        lambda samples: Whole(torch.stack(samples)),
    ],
    ids=["UserDict", "OrderedDict", "tuple", "list", "list_in_tuple", "in_named_tuple", "object", "no_copy"],
)
def test_a_program_may_change_a_batch_of_any_class_that_is_replayed(make: Any) -> None:
    loader = DataLoader(Numbered(32), 8, collate_fn=make)
    with loader.profile(replay=True):
        assert [len(take(batch)) for batch in loader] == [8] * 4


def test_what_a_batch_that_is_replayed_holds_twice_is_copied_once() -> None:
    def ring(samples: list[torch.Tensor]) -> list[Any]:
        batch: list[Any] = [{"labels": samples[0]}]
        batch += [batch[0], batch]
        return batch

    loader = DataLoader(Numbered(32), 8, collate_fn=ring)
    with loader.profile(replay=True):
        for batch in loader:
            assert batch[2] is batch
            assert batch[1] is batch[0]
            assert batch[0].pop("labels") is not None


def test_a_replay_is_asked_in_each_way_in_which_an_iterator_is() -> None:
    async def count() -> int:
        return len([batch async for batch in loader])

    with DataLoader(Numbered(32), 8, num_workers=1) as loader, loader.profile(replay=True):
        assert asyncio.run(count()) == 4
        batches: Any = iter(loader)
        assert len(batches) == 4
        assert select.select([batches], [], [], 0)[0] == [batches]
        assert sum(1 for _ in iter(batches.try_next, None)) == 4


def test_the_last_spans_of_main_process_and_workers_begin_together() -> None:
    """One entry of the main process stands for many quick batches, and one of a worker for few slow ones."""
    with DataLoader(Numbered(2400, delay_s=0.0008), 4, num_workers=2) as loader:
        report, _ = with_profile(loader)
    begins: dict[str, float] = {}
    for who, _, at_s, _ in report.last_spans():
        begins.setdefault(who, at_s)
    first, *_, last = sorted(begins.values())
    whole_s = max(at_s for _, _, at_s, _ in report.last_spans()) - first
    assert len(report.returned) > 300 or len(report.made) > 300
    assert last - first < whole_s / 4
