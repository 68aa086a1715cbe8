"""The benchmarks for a GPU and for many cores, as far as they can be tried without either."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shmloader import DataLoader

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are a package of the checkout, not of the library

from benchmarks import device, device_copies, scaling  # noqa: E402
from benchmarks.idle_driver import idle_device  # noqa: E402
from benchmarks.options import NOT_MEASURED  # noqa: E402
from benchmarks.resnet import resnet18  # noqa: E402


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, so it would be measured")
def test_without_a_device_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.device"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == NOT_MEASURED
    assert "nothing was measured" in done.stderr


def test_batches_are_stamped_with_their_number() -> None:
    with device.make(DataLoader, 300, device.Stamped(3 * device.PAGE), 1) as loader:
        for number, batch in enumerate(loader):
            assert batch.nbytes == 3 * device.PAGE
            assert batch[:: device.PAGE].tolist() == [number % device.STAMPS] * 3
    leaves = next(iter(device.make(torch.utils.data.DataLoader, 5, device.Small(7), 0)))
    assert len(leaves) == 7
    images, labels = next(iter(device.make(DataLoader, 2, device.Images(), 0, batch_size=3)))
    assert (images.shape, images.dtype, labels.tolist()) == ((3, 3, 224, 224), torch.uint8, [0, 1, 2])


def test_torchs_batches_are_made_in_memory_that_it_sends_without_a_copy() -> None:
    for collate in (device.Stamped(3 * device.PAGE, in_slot=False), device.Images(in_slot=False)):
        batch = collate([7])
        images = batch[0] if isinstance(batch, tuple) else batch
        assert images.is_shared()
        assert images.view(-1)[device.PAGE] == 7
    loader = device.make(torch.utils.data.DataLoader, 3, device.Stamped(device.PAGE, in_slot=False), 1)
    assert [int(batch[0]) for batch in loader] == [0, 1, 2]


def test_the_guard_is_really_off() -> None:
    guard = SimpleNamespace()
    device.leave_unguarded(SimpleNamespace(guard=guard))
    assert guard.pass_on(["a", "b"], at_once=False) == ["a", "b"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("way", device_copies.WAYS)
def test_batches_are_told_second_by_second(way: str) -> None:
    waited: list[bool] = []
    with idle_device():
        loader = device.make(DataLoader, 1 << 30, device.Stamped(100_000), 1, **device_copies.WAYS[way])
        found = device_copies.second_by_second(loader, 3, id, lambda: waited.append(True))
    assert len(found) == len(waited) == 3
    assert all(second.batches > 0 and second.took_s >= 1 for second in found)
    assert found[0].faults > 0
    assert found[0].calls["register"] > 0
    figures = list(device_copies.lines(found, plain=1e-9))
    assert [unit for _, _, unit, _ in figures] == ["% of plain"] * 2 + ["per batch"] * 4
    assert [good for *_, good in figures[:2]] == [True, True]
    assert [good for *_, good in device_copies.lines(found, plain=1e9)][:2] == [False, False]


def test_the_network_is_resnet_18() -> None:
    network = resnet18()
    assert (
        sum(parameter.numel() for parameter in network.parameters()) == 11_689_512
    )  # torchvision's has as many
    training = device.Training("cpu")
    before = [parameter.clone() for parameter in training.network.parameters()]
    training.step((torch.zeros(2, 3, 64, 64, dtype=torch.uint8), torch.tensor([1, 2])))
    assert any(
        not torch.equal(old, new) for old, new in zip(before, training.network.parameters(), strict=True)
    )


def test_the_median_of_turns() -> None:
    values = iter(range(100))
    found = device.in_turns(3, {"one": lambda: (next(values), 1.0), "two": lambda: (next(values), 2.0)})
    assert found == {"one": (3, 1.0), "two": (2, 2.0)}  # 0 3 4 and 1 2 5: each goes first in every other turn


def test_a_loader_that_fails_does_not_end_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> tuple[float, float]:
        raise OSError("Too many open files")

    found = device.in_turns(3, {"torch": fail, "two": lambda: (2.0, 1.0)})
    assert (str(found["torch"]), found["two"]) == ("(nan, nan)", (2.0, 1.0))
    assert capsys.readouterr().err.count("OSError: Too many open files\ntorch has failed") == 1


def test_a_missed_figure_is_marked() -> None:
    text = device.report(
        [device.Figure("leak", "bytes", 5, "", False), device.Figure("copy", "x", 1.5, "GB/s")]
    )
    assert "NO" in text.splitlines()[2]
    assert "1.5 GB/s" in text.splitlines()[3]


def test_a_part_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = device.Figure("leak", "bytes", 0, "", True)

    def fails(_: object):
        yield device.Figure("copy", "x", 1.5, "GB/s")
        raise RuntimeError("a worker was killed")

    monkeypatch.setattr(device, "PARTS", {"copy": fails, "leak": lambda _: iter([good])})
    first, failed, last = device.figures_of(device.PARTS, argparse.Namespace())
    assert (first.value, failed.part, failed.good, last) == (1.5, "copy", False, good)
    assert "it raised RuntimeError" in failed.what
    assert "a worker was killed" in capsys.readouterr().err


def test_rates_of_comparisons_are_put_side_by_side() -> None:
    """The comparisons are in the form that `bench --json` writes."""
    row = {"samples_per_s": 1000.0}
    first = {"workloads": {"tiny": {"contestants": {"shmloader": row, "limit": {"samples_per_s": 5000.0}}}}}
    rates = scaling.rates_of({1: first, 2: {"workloads": {"tiny": {"contestants": {"shmloader": row}}}}})
    assert rates == {"tiny": {"shmloader": {1: 1000.0, 2: 1000.0}, "limit": {1: 5000.0}}}
    text = scaling.table(rates, [1, 2], 2)
    assert "2 *" in text
    assert "more processes than the 2 usable cores" in text


def test_the_time_of_workers_and_of_the_main_process_is_told_apart() -> None:
    """Four workers had 40 s together in these 10 s."""
    found = {
        "iterating_s": 10.0,
        "num_workers": 4,
        "workers_made_s": 20.0,
        "workers_wait_for_slots_s": 4.0,
        "wait_for_workers_s": 3.0,
    }
    assert scaling.shares_of(found) == pytest.approx([50, 10, 40, 30, 70])
    row = {"runs": [{"statistics": found}]}
    text = scaling.shares_table({4: {"workloads": {"rows": {"contestants": {"shmloader": row}}}}})
    assert re.search(r"rows +\| 4 +\| +50 \| +10 \| +40 \| +30 \| +70", text)
    assert scaling.shares_table({4: {"workloads": {"rows": {"contestants": {}}}}}) == ""


def test_peers_that_are_missing_are_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = next(one for one in scaling.LOADERS.values() if one.name == "seqtools")
    monkeypatch.setitem(scaling.LOADERS, "seqtools", replace(peer, packages=("not_here",)))
    (line,) = scaling.missing(["seqtools"])
    assert line.startswith("seqtools is left out: not_here not installed: pip install")
    assert scaling.missing(["shmloader"]) == []


@pytest.mark.long
def test_the_comparison_with_more_workers_in_a_program(tmp_path: Path) -> None:
    words = "--quick --seconds 0.1 --repeats 1 --workload tiny --loader shmloader --workers 1"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scaling", *words.split(), "--plot", str(tmp_path / "rates.png")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rates.png").stat().st_size > 1000
    assert re.search(r"\| tiny +\| shmloader +\|", done.stdout)


def test_a_comparison_that_fails_ends_it() -> None:
    given = argparse.Namespace(workload=["nothing"], loader=["shmloader"], seconds=0.1, repeats=1, quick=True)
    assert scaling.measure(1, given) == 2
