"""Lightning: how it builds loaders anew, combined loaders, ranks, checkpoints, teardown."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.datapipes.map import SequenceWrapper

import shmloader
from frameworks.pages import assert_page_loads_from_slots, needs
from frameworks.rows import ARGUMENTS, OPTIONS, Rows, forbid_torchs_workers, options_of
from shmloader import errors
from shmloader.iterator import SlotIterator

lightning = needs("lightning")
from lightning.fabric.utilities.data import _replace_dunder_methods, _update_dataloader  # noqa: E402
from lightning.pytorch.utilities.combined_loader import CombinedLoader  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")


class Variadic(shmloader.DataLoader):
    def __init__(self, *args: Any, tag: str = "", **kwargs: Any) -> None:
        self.tag = tag
        super().__init__(*args, **kwargs)


class Library(DataLoader):
    """A library's loader, written for torch's class."""

    def __init__(self, dataset: Any, batch_size: int = 1, **kwargs: Any) -> None:
        super().__init__(dataset, batch_size, **kwargs)


class Mixed(Library, shmloader.DataLoader):
    pass


class Stream(IterableDataset):
    def __init__(self, count: int = 6) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([float(number)]) for number in range(self.count))


class Large(Rows):
    """A dataset that is worth sharing."""

    def __init__(self) -> None:
        super().__init__()
        self.data = np.zeros((24, 1 << 16))


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.seen.append(batch)
        first = batch[0] if isinstance(batch, list | tuple) else batch
        return self.layer(first).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(model: Any, loader: Any = None, **arguments: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, **{"max_epochs": 1} | quiet | arguments)
    trainer.fit(model, loader)
    return trainer


def test_the_pages_program() -> None:
    assert_page_loads_from_slots("lightning.md")


@pytest.mark.parametrize("in_hook", [False, True])
@pytest.mark.parametrize("kind", [shmloader.DataLoader, Variadic, Mixed])
def test_options_survive_the_rebuild(kind: Any, in_hook: bool) -> None:
    """Classes with `**kwargs` keep them too, from attributes or, in hooks, from the original arguments."""
    if in_hook:
        with _replace_dunder_methods(DataLoader, "dataset"):
            loader = kind(Rows(), 4, **ARGUMENTS | OPTIONS)
    else:
        loader = kind(Rows(), 4, **ARGUMENTS | OPTIONS)
    rebuilt = _update_dataloader(loader, SequentialSampler(range(24)))
    assert type(rebuilt) is kind
    assert options_of(rebuilt) == OPTIONS
    with rebuilt:
        assert torch.cat(list(rebuilt)).flatten().tolist() == list(range(24))


@pytest.mark.parametrize("positional", [False, True])
def test_a_dataset_is_shared_once(positional: bool) -> None:
    """A hook, in which Lightning notes the arguments, shares it once too; the private original is freed."""
    dataset = Large()
    private = weakref.ref(dataset.data)
    with _replace_dunder_methods(DataLoader, "dataset"):
        if positional:
            loader = shmloader.DataLoader(dataset, share_dataset=True)
        else:
            loader = shmloader.DataLoader(dataset=dataset, share_dataset=True)
    del dataset
    gc.collect()
    assert private() is None
    rebuilt = _update_dataloader(loader, SequentialSampler(range(24)))
    assert rebuilt.dataset is loader.dataset


def test_all_loaders_of_a_combined_one_load_from_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_torchs_workers(monkeypatch)
    loaders = [shmloader.DataLoader(Rows(count), batch_size=4, num_workers=1) for count in (24, 8)]
    model = Model()
    fit(model, CombinedLoader(loaders, "max_size_cycle"))
    assert [batch[0].flatten().tolist()[0] for batch in model.seen] == [0, 4, 8, 12, 16, 20]
    assert [batch[1].flatten().tolist()[0] for batch in model.seen] == [0, 4, 0, 4, 0, 4]
    assert [loader.statistics().batches for loader in loaders] == [6, 6]


def test_a_loader_without_length() -> None:
    model = Model()
    fit(model, shmloader.DataLoader(Stream(), batch_size=2, num_workers=1))
    assert torch.cat(model.seen).flatten().tolist() == list(range(6))


def test_workers_end_with_an_early_teardown() -> None:
    """max_steps in the middle of an epoch, with persistent workers."""
    loader = shmloader.DataLoader(Rows(), batch_size=2, num_workers=2, persistent_workers=True)
    pids: list[int] = []

    class Stops(Model):
        def on_train_batch_start(self, *_: Any) -> None:
            pids.extend(process.pid for process in loader._iterator._workers)

    fit(Stops(), loader, max_steps=2, max_epochs=-1)
    assert len(pids) == 4
    gc.collect()
    assert loader._iterator is None or loader._iterator.closed
    assert not any(map(psutil.pid_exists, pids))


def test_stock_loaders_load_from_slots_under_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders that a hook returns do too, with the options of install()."""
    forbid_torchs_workers(monkeypatch)

    class Hooked(Model):
        def train_dataloader(self) -> Any:
            return DataLoader(Rows(), batch_size=4, num_workers=2)

    with shmloader.install(worker_restarts=2):
        model = Hooked()
        trainer = fit(model)
        assert trainer.train_dataloader.statistics().batches == 6
        assert trainer.train_dataloader.worker_restarts == 2
        fabric_loader = lightning.Fabric(accelerator="cpu", devices=1).setup_dataloaders(
            DataLoader(Rows(), batch_size=4, num_workers=2)
        )
        assert torch.cat(list(fabric_loader)).flatten().tolist() == list(range(24))
        rebuilt = _update_dataloader(
            DataLoader(Rows(), batch_size=4, num_workers=2), SequentialSampler(range(8))
        )
        assert rebuilt.worker_restarts == 2
        assert isinstance(iter(rebuilt), SlotIterator)
    assert torch.cat(model.seen).flatten().tolist() == list(range(24))


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_two_ranks_share_the_samples(strategy: str, tmp_path: Path) -> None:
    """Every sample comes on one rank, from slots, with the options, in processes of both strategies."""
    program = [sys.executable, str(Path(__file__).with_name("lightning_ddp.py")), strategy, str(tmp_path)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [list(map(float, (tmp_path / f"rank{rank}").read_text().split())) for rank in (0, 1)]
    assert [len(rank) for rank in ranks] == [32, 32]
    assert sorted(ranks[0] + ranks[1]) == list(range(64))


def _trainer(folder: Path, max_steps: int) -> Any:
    """A trainer that saves a checkpoint after six steps."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=6, filename="six", save_top_k=-1)],
    )


@pytest.mark.parametrize("stock", [False, True])
def test_a_run_goes_on_in_the_middle_of_an_epoch(
    stock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Lightning's checkpoint each sample comes once; torch's loader alone loses 24 of 64."""

    def run(max_steps: int, checkpoint: str | None = None) -> list[float]:
        model = Model()
        kind = DataLoader if stock else shmloader.DataLoader
        trainer = _trainer(tmp_path, max_steps)
        trainer.fit(model, kind(Rows(64), batch_size=4, shuffle=True, num_workers=2), ckpt_path=checkpoint)
        return torch.cat(model.seen).flatten().tolist()

    forbid_torchs_workers(monkeypatch)
    with shmloader.install(stateful=True):
        begun = run(6)
        rest = run(16, str(tmp_path / "six.ckpt"))
    assert (len(begun), len(rest)) == (24, 40)
    assert sorted(begun + rest) == list(range(64))


@pytest.mark.filterwarnings("ignore:.* is not available for DataPipes:RuntimeWarning")
@pytest.mark.parametrize("installed", [False, True])
def test_checkpoints_of_a_data_pipe_have_no_state_of_it(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads torch's way, which knows no place. Training goes on from them, and one warning says it."""
    monkeypatch.setattr(errors, "_said", set())
    pipe = SequenceWrapper([torch.tensor([float(number)]) for number in range(32)])
    model = Model()
    with shmloader.install(stateful=True) if installed else contextlib.nullcontext():
        with pytest.warns(RuntimeWarning, match="a loader of a DataPipe is empty, and cannot be") as told:
            _trainer(tmp_path, 7).fit(model, shmloader.DataLoader(pipe, batch_size=4))
        _trainer(tmp_path, 8).fit(
            model, shmloader.DataLoader(pipe, batch_size=4), ckpt_path=str(tmp_path / "six.ckpt")
        )
    assert len([one for one in told if "a DataPipe is empty" in str(one.message)]) == 1
    assert len(model.seen) == 9


def run(folder: Path, kind: Any, checkpoint: str | None = None, **arguments: Any) -> list[float]:
    """Three epochs of four batches, with a checkpoint after each; the loader has a generator of its own."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    generator = torch.Generator().manual_seed(3)
    loader = kind(Rows(16), batch_size=4, shuffle=True, num_workers=1, generator=generator)
    each = ModelCheckpoint(folder, every_n_train_steps=1, filename="{step}", save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        callbacks=[each],
        **arguments,
    )
    model = Model()
    trainer.fit(model, loader, ckpt_path=checkpoint and str(folder / checkpoint))
    return [int(number) for batch in model.seen for number in batch.flatten()]


@pytest.mark.parametrize(("step", "cut"), [(4, {}), (8, {}), (3, {"limit_train_batches": 3})])
@pytest.mark.parametrize("kind", [shmloader.DataLoader, DataLoader])
def test_a_checkpoint_of_the_last_batch_begins_the_next_epoch(
    kind: Any, step: int, cut: dict[str, Any], tmp_path: Path
) -> None:
    with shmloader.install(stateful=True):
        whole = run(tmp_path, kind, **cut)
        assert run(tmp_path, kind, f"step={step}.ckpt", **cut) == whole[4 * step :]


def test_checkpoints_are_not_bound_to_install(tmp_path: Path) -> None:
    """They have states only if the program asks for them."""
    with shmloader.install():
        run(tmp_path, DataLoader)
    assert len(run(tmp_path, DataLoader, "step=2.ckpt")) == 40
    with shmloader.install(stateful=True):
        run(tmp_path / "asked", DataLoader)
    with shmloader.install(), pytest.raises(RuntimeError, match="CombinedLoader has 0 stateful loaders"):
        run(tmp_path / "asked", DataLoader, "step=2.ckpt")
    assert len(run(tmp_path / "afterwards", DataLoader)) == 48  # Lightning asks for no state any more


def test_a_last_batch_that_was_saved_without_install_is_refused(tmp_path: Path) -> None:
    """The next epoch would have no batches."""
    run(tmp_path, shmloader.DataLoader)
    with (
        shmloader.install(),
        pytest.raises(
            shmloader.ResumeError, match="is of an epoch's last batch, and was written without install"
        ),
    ):
        run(tmp_path, shmloader.DataLoader, "step=4.ckpt")
    with shmloader.install():
        assert len(run(tmp_path, shmloader.DataLoader, "step=6.ckpt")) == 24


def test_a_lightning_that_has_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_said", set())
    monkeypatch.delattr("lightning.pytorch.loops.fit_loop._FitLoop._load_combined_loader_states")
    with pytest.warns(RuntimeWarning, match="cannot patch this version of Lightning"):
        shmloader.install()
    shmloader.uninstall()


class FromGlobal(torch.utils.data.Sampler[int]):
    """Draws one index after the other from torch's global generator."""

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(64, ())) for _ in range(64))


def test_a_checkpoint_does_not_stop_a_run_whose_sampler_cannot_be_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With torch's loader the run would continue. Here a warning is logged; only resuming is an error."""

    def run(max_steps: int, checkpoint: str | None = None) -> int:
        model = Model()
        trainer = _trainer(tmp_path, max_steps)
        loader = shmloader.DataLoader(Rows(64), 4, sampler=FromGlobal(), num_workers=1)
        trainer.fit(model, loader, ckpt_path=checkpoint)
        return len(torch.cat(model.seen))

    assert run(8) == 32
    assert "the sampler (FromGlobal) draws from a global generator" in caplog.text
    with pytest.raises(RuntimeError) as caught:  # Lightning's own, raised while it handles ours
        run(16, str(tmp_path / "six.ckpt"))
    error: BaseException | None = caught.value
    while not isinstance(error, shmloader.ResumeError):
        assert error is not None
        error = error.__context__
    assert "FromGlobal" in str(error)


def test_a_checkpoint_has_the_state_before_the_batch_that_was_read_ahead(tmp_path: Path) -> None:
    """Lightning reads loaders without a length one batch ahead, and the last batch begins the next epoch."""
    path, places = tmp_path / "checkpoint.ckpt", []

    class Saves(Model):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.save_checkpoint(path)
            loops = torch.load(path, weights_only=False)["loops"]
            state = loops["fit_loop"]["state_dict"]["combined_loader"][0]
            places.append((state["batches"], state["finished"]))

    for loader in (shmloader.DataLoader(Stream(), num_workers=1), DataLoader(Stream(), num_workers=1)):
        with shmloader.install(stateful=True):
            places.clear()
            fit(Saves(), loader)
            assert places == [(1, False), (2, False), (3, False), (4, False), (5, False), (6, True)]


@pytest.mark.parametrize("sized", [False, True])
def test_a_loader_that_is_through_before_the_others_stays_so_when_a_run_goes_on(
    sized: bool, tmp_path: Path
) -> None:
    """The checkpoint after six of ten batches comes when the short one of two loaders had its three."""

    class Pairs(Model):
        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            self.seen.append([part if part is None else part.flatten().tolist() for part in batch])
            return self.layer(batch[1]).mean()

    def run(folder: Path, max_steps: int, checkpoint: Path | None = None) -> list[Any]:
        long = DataLoader(Rows(20) if sized else Stream(20), batch_size=2, num_workers=1)
        generator = torch.Generator().manual_seed(2)
        short = DataLoader(Rows(6), batch_size=2, num_workers=1, shuffle=True, generator=generator)
        model = Pairs()
        pairs = CombinedLoader([short, long], "max_size")
        _trainer(folder, max_steps).fit(model, pairs, ckpt_path=checkpoint)
        return model.seen

    with shmloader.install(stateful=True):
        whole, begun = run(tmp_path / "whole", 20), run(tmp_path, 6)
        assert (whole[5][0], begun) == (None, whole[:6])
        assert run(tmp_path, 20, tmp_path / "six.ckpt") == whole[6:]
