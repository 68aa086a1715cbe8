"""The benchmarks for a GPU and for many cores, as far as they can be tried without either."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shmloader import DataLoader

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are a package of the checkout, not of the library

from benchmarks import device, scaling  # noqa: E402
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


def test_the_guard_is_really_off() -> None:
    guard = SimpleNamespace()
    device.leave_unguarded(SimpleNamespace(guard=guard))
    guard.end(["a", "b"])
    assert (guard.done(), guard.done()) == (["a", "b"], [])


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
    assert found == {"one": (3, 1.0), "two": (2, 2.0)}  # 0 3 4 and 1 2 5: they go first in turns


def test_a_missed_figure_is_marked() -> None:
    text = device.report(
        [device.Figure("leak", "bytes", 5, "", False), device.Figure("copy", "x", 1.5, "GB/s")]
    )
    assert "NO" in text.splitlines()[2]
    assert "1.5 GB/s" in text.splitlines()[3]


@pytest.mark.long
def test_the_comparison_with_more_workers(tmp_path: Path) -> None:
    given = argparse.Namespace(workload=["tiny"], loader=["shmloader"], seconds=0.1, repeats=1, quick=True)
    results = {workers: scaling.measure(workers, given) for workers in (1, 2)}
    rates = scaling.rates_of(results)
    assert set(rates["tiny"]) == {"shmloader", "limit"}
    assert set(rates["tiny"]["shmloader"]) == {1, 2}
    text = scaling.table(rates, [1, 2], 2)
    assert "2 *" in text
    assert "more processes than the 2 usable cores" in text
    scaling.draw(tmp_path / "rates.png", rates)
    assert (tmp_path / "rates.png").stat().st_size > 1000


def test_a_comparison_that_fails_ends_it() -> None:
    given = argparse.Namespace(workload=["nothing"], loader=["shmloader"], seconds=0.1, repeats=1, quick=True)
    assert scaling.measure(1, given) == 2
