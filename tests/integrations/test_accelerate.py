"""accelerate: prepare, its ways to divide batches, skip_first_batches, and torchdata's loader."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shmloader
from integrations.pages import assert_page_loads_from_slots, needs
from integrations.rows import ARGUMENTS, OPTIONS, Rows, forbid_torchs_workers, options_of
from shmloader.rebuilds import PREPARED_FLAG

accelerate = needs("accelerate")
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def accelerate_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = sys.modules["accelerate.data_loader"]
    before, init = dict(vars(module)), module.DataLoaderAdapter.__init__
    monkeypatch.setattr(PREPARED_FLAG, "warned", False)
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
    """It is patched when it looks whether a loader is prepared already."""
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
    monkeypatch.undo()
    forbid_torchs_workers(monkeypatch)
    prepared = accelerator().prepare(make())
    assert (prepared.worker_restarts, prepared.on_error) == (1, "raise")
    assert values(prepared) == list(range(24))
