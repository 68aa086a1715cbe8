"""MONAI: its loader as a second base class, and its loaders with threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shmloader
from frameworks.pages import assert_page_loads_from_slots, needs
from frameworks.rows import ARGUMENTS, OPTIONS, forbid_torchs_workers, options_of

needs("monai")
from monai.data import CacheDataset, DataLoader, Dataset, ThreadDataLoader  # noqa: E402
from monai.transforms import RandGaussianNoised  # noqa: E402
from monai.utils import set_determinism  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
SAMPLES = [{"image": torch.full((1, 4, 4), float(n))} for n in range(12)]


class VolumeLoader(DataLoader, shmloader.DataLoader):
    pass


class ThreadedLoader(ThreadDataLoader, shmloader.DataLoader):
    pass


def images(kind: Any, dataset: Any = Dataset, **more: Any) -> list[Any]:
    set_determinism(3)
    loader = kind(
        dataset(SAMPLES, RandGaussianNoised("image", prob=0.5)), batch_size=4, num_workers=2, **more
    )
    found = [batch["image"].tolist() for batch in loader]
    set_determinism(None)
    return found


def test_the_pages_program() -> None:
    assert_page_loads_from_slots("monai.md")


def test_a_second_base_class_gives_options_and_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = images(DataLoader)
    forbid_torchs_workers(monkeypatch)
    assert images(VolumeLoader) == images(ThreadedLoader) == wanted
    loader = VolumeLoader(Dataset(SAMPLES), batch_size=4, **ARGUMENTS | OPTIONS)
    assert options_of(loader) == OPTIONS


def test_its_loaders_load_from_slots_under_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """ThreadDataLoader, which iterates in a thread, does too."""
    wanted = images(DataLoader), images(ThreadDataLoader), images(DataLoader, CacheDataset)
    forbid_torchs_workers(monkeypatch)
    with shmloader.install():
        assert (images(DataLoader), images(ThreadDataLoader), images(DataLoader, CacheDataset)) == wanted


def test_threads_that_pose_as_processes_go_torchs_way_and_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"_ProcessThreadContext: .*_ProcessThread\), which cannot write to slots"
    ):
        ThreadedLoader(Dataset(SAMPLES), num_workers=2, use_thread_workers=True)
    loader = ThreadDataLoader(Dataset(SAMPLES), batch_size=4, num_workers=1, use_thread_workers=True)
    with shmloader.install(), pytest.warns(RuntimeWarning, match="leaves ThreadDataLoader to torch"):
        assert [batch["image"][:, 0, 0, 0].tolist() for batch in loader] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9, 10, 11],
        ]
