"""accelerate: prepare, its ways to divide batches, skip_first_batches, and torchdata's loader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from look_ahead import InThread, in_this_thread
from parity.pipes import map_pipe

import shmloader
from frameworks.pages import assert_page_loads_from_slots, needs
from frameworks.rows import ARGUMENTS, OPTIONS, Rows, forbid_torchs_workers, options_of
from shmloader import errors

accelerate = needs("accelerate")
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def accelerate_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = sys.modules["accelerate.data_loader"]
    vars(module).setdefault("__warningregistry__", {})  # Python makes it at the first warning
    before, init = dict(vars(module)), module.DataLoaderAdapter.__init__
    monkeypatch.setattr(errors, "_said", set())
    yield
    shmloader.uninstall()
    accelerate.state.AcceleratorState._reset_state(True)
    assert dict(vars(module)) == before
    assert module.DataLoaderAdapter.__init__ is init


def make(**more: Any) -> Any:
    return shmloader.DataLoader(Rows(), batch_size=4, **ARGUMENTS | OPTIONS | more)


def accelerator(**configuration: Any) -> Any:
    return accelerate.Accelerator(
        cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**configuration)
    )


def values(loader: Any) -> list[float]:
    return torch.cat(list(loader)).flatten().tolist()


def test_the_pages_program() -> None:
    assert_page_loads_from_slots("accelerate.md")


@pytest.mark.parametrize(
    "configuration",
    [{}, {"dispatch_batches": True}, {"split_batches": True}, {"even_batches": False}],
    ids=str,
)
def test_options_survive_prepare_and_skip_first_batches(
    configuration: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_torchs_workers(monkeypatch)
    shmloader.install()
    prepared = accelerator(**configuration).prepare(make())
    assert options_of(prepared) == OPTIONS
    assert values(prepared) == list(range(24))
    rest = accelerate.skip_first_batches(prepared, 2)
    assert options_of(rest) == OPTIONS
    assert values(rest) == list(range(8, 24))
    assert rest.base_dataloader.statistics().batches == 4, "skipped batches were fetched"
    assert prepared.base_dataloader.statistics().batches == 6
    for loader in (prepared, rest):
        loader.base_dataloader.close()


def test_two_ranks_get_what_torchs_loader_gives_them(tmp_path: Path) -> None:
    """All ways to divide batches among ranks are tried, whole and resumed by skip_first_batches."""
    program = Path(__file__).with_name("accelerate_ranks.py")
    found = []
    for mode in ("slots", "torch"):
        folder = tmp_path / mode
        folder.mkdir()
        launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*launched, str(program), str(folder), mode],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found.append([json.loads((folder / f"rank{rank}").read_text()) for rank in (0, 1)])
    assert found[0] == found[1]
    first, second = found[0]
    assert sorted({n for batch in first[0] + second[0] for n in batch}) == list(range(26))


def test_a_torch_loader_has_the_options_of_install(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_torchs_workers(monkeypatch)
    shmloader.install(worker_restarts=1)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2)
    prepared = accelerator().prepare(loader)
    assert type(prepared.base_dataloader) is torch.utils.data.DataLoader
    assert prepared.worker_restarts == 1
    assert values(prepared) == list(range(24))


def test_auto_stays_auto() -> None:
    shmloader.install()
    prepared = accelerator().prepare(shmloader.DataLoader(Rows(), batch_size=4, num_workers="auto"))
    assert values(prepared) == list(range(24))
    assert prepared.base_dataloader.statistics().autotune is not None


def test_accelerate_may_be_imported_after_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate is patched when it checks whether a loader is prepared already."""
    module = sys.modules["accelerate.data_loader"]
    monkeypatch.delitem(sys.modules, "accelerate.data_loader")
    shmloader.install()
    monkeypatch.setitem(sys.modules, "accelerate.data_loader", module)
    assert options_of(accelerator().prepare(make())) == OPTIONS


def test_without_install_one_warning_says_what_is_lost() -> None:
    with pytest.warns(
        RuntimeWarning, match=r"without its options \(.*worker_restarts=2, on_error='skip'"
    ) as said:
        prepared = accelerator().prepare(make())
    assert "Call shmloader.install() before accelerator.prepare()" in str(said[0].message)
    assert type(prepared.base_dataloader) is torch.utils.data.DataLoader
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator().prepare(make())


def test_a_loader_that_is_marked_as_prepared_stays() -> None:
    loader = make()
    loader._is_accelerate_prepared = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accelerator().prepare(loader) is loader


def test_an_accelerate_that_has_changed_loads_from_slots_without_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forbid_torchs_workers(monkeypatch)
    monkeypatch.delattr(sys.modules["accelerate.data_loader"], "DataLoaderAdapter")
    with pytest.warns(RuntimeWarning, match=r"cannot patch this version of accelerate"):
        shmloader.install(worker_restarts=1)
    prepared = accelerator().prepare(make())
    assert (prepared.worker_restarts, prepared.on_error) == (1, "raise")
    assert values(prepared) == list(range(24))
    monkeypatch.undo()


def test_a_stateful_loader_is_ours_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchdata's loader is not built; save_state and load_state work in the middle of a shuffled epoch."""
    forbid_torchs_workers(monkeypatch)
    shmloader.install()
    for make_one, plain in ((make, {"prefetch_epochs": False}), (stock, {})):
        torch.manual_seed(7)
        first = accelerator(use_stateful_dataloader=True)
        prepared = first.prepare(make_one(shuffle=True, **plain))
        assert type(prepared.base_dataloader) is shmloader.DataLoader
        assert prepared.use_stateful_dataloader
        iterator = iter(prepared)
        taken = torch.cat([next(iterator) for _ in range(2)]).flatten().tolist()
        first.save_state(str(tmp_path))
        iterator.close()
        prepared.base_dataloader.close()
        accelerate.state.AcceleratorState._reset_state(True)
        torch.manual_seed(8)
        second = accelerator(use_stateful_dataloader=True)
        resumed = second.prepare(make_one(shuffle=True, **plain))
        second.load_state(str(tmp_path))
        rest = values(resumed)
        assert len(rest) == 16
        assert sorted(taken + rest) == list(range(24))
        assert resumed.base_dataloader.statistics().batches == 4
        resumed.base_dataloader.close()
        accelerate.state.AcceleratorState._reset_state(True)


def stock(**more: Any) -> Any:
    return torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2, **more)


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(24.0).reshape(24, 1))


@pytest.mark.parametrize("kind", [shmloader.DataLoader, torch.utils.data.DataLoader])
def test_states_that_nobody_wants_are_neither_errors_nor_warnings(kind: Any) -> None:
    """accelerate asks each loader for its state at each batch; during two passes at once there is none."""
    shmloader.install()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream = accelerator(dispatch_batches=False).prepare(kind(Stream(), batch_size=4, num_workers=1))
        assert values(stream) == list(range(24))
        rows = accelerator().prepare(kind(Rows(), batch_size=4, num_workers=1))
        pairs = [(one.tolist(), other.tolist()) for one, other in zip(rows, rows, strict=True)]
    assert all(one == other for one, other in pairs)
    assert len(pairs) == 6


def test_a_loader_has_no_state_unless_the_program_asks() -> None:
    """Neither torch's nor ours, as with torch's own; `install(stateful=True)` asks for all."""
    with shmloader.install():
        for loader in (stock(), make()):
            prepared = accelerator().prepare(loader)
            next(iter(prepared))
            assert not hasattr(prepared, "dl_state_dict")
            prepared.base_dataloader.close()
    with shmloader.install(stateful=True):
        prepared = accelerator().prepare(stock())
        next(iter(prepared))
        assert prepared.state_dict()["batches"] == 1
        prepared.base_dataloader.close()


def test_loaders_without_workers_are_prepared_where_installed_options_are_of_workers() -> None:
    shmloader.install(worker_restarts=1)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4)
    expected = values(loader)
    assert values(accelerator(use_stateful_dataloader=True).prepare(loader)) == expected


def test_states_that_are_wanted_and_cannot_be_had_are_errors() -> None:
    shmloader.install()
    rows = accelerator(use_stateful_dataloader=True).prepare(
        make(persistent_workers=False, prefetch_epochs=False)
    )
    with pytest.raises(shmloader.ResumeError):
        list(zip(rows, rows, strict=True))
    rows.base_dataloader.close()


@pytest.mark.filterwarnings("ignore:the state of a loader of a DataPipe is empty:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.* is not available for DataPipes:RuntimeWarning")
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("kind", [shmloader.DataLoader, torch.utils.data.DataLoader])
def test_a_data_pipe_has_an_empty_state_which_is_saved_and_loaded(
    kind: Any, stateful: bool, tmp_path: Path
) -> None:
    """It loads torch's way, which knows no place; the epoch begins again."""
    with shmloader.install(stateful=stateful):
        for _ in range(2):
            begun = accelerator(use_stateful_dataloader=not stateful)
            prepared = begun.prepare(kind(map_pipe(8), batch_size=4))
            if (tmp_path / "random_states_0.pkl").exists():
                begun.load_state(str(tmp_path))
            assert [batch.tolist() for batch in prepared] == [[0, 2, 4, 6], [8, 10, 12, 14]]
            begun.save_state(str(tmp_path))
            accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_prefetcher_around_accelerates_own_look_ahead_is_followed(shuffle: bool) -> None:
    """After each batch and each epoch the state continues where the loop was, also in a new loader."""

    def prepared() -> Any:
        generator = torch.Generator().manual_seed(4)
        loader = shmloader.DataLoader(Rows(22), batch_size=4, shuffle=shuffle, generator=generator)
        return accelerator(use_stateful_dataloader=True).prepare(loader)

    with shmloader.install():
        one = prepared()
        whole = [[batch.flatten().tolist() for batch in one] for _ in range(2)]
        for ahead in (in_this_thread, InThread):
            loader, states = prepared(), []
            for epoch in range(2):
                for had, _ in enumerate(loader.follow(ahead(loader)), 1):
                    states.append((epoch, had, loader.state_dict()))
                states.append((epoch + 1, 0, loader.state_dict()))
            for epoch, had, state in states:
                again = prepared()
                again.load_state_dict(state)
                got = [[batch.flatten().tolist() for batch in again] for _ in range(epoch, 2)]
                expected = [whole[epoch][had:], *whole[epoch + 1 :]] if epoch < 2 else []
                assert got == expected, (ahead, epoch, had)
