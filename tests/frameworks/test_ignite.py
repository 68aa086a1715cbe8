"""ignite: auto_dataloader and the deterministic engine, which builds loaders anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

import shmloader
from frameworks.pages import assert_page_loads_from_slots, needs
from frameworks.rows import ARGUMENTS, OPTIONS, Rows, forbid_torchs_workers, options_of

needs("ignite")
from ignite.engine import Events  # noqa: E402
from ignite.engine.deterministic import DeterministicEngine, update_dataloader  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")


def test_the_pages_program() -> None:
    assert_page_loads_from_slots("ignite.md")


def test_options_survive_the_rebuild() -> None:
    loader = shmloader.DataLoader(Rows(), batch_size=4, **ARGUMENTS | OPTIONS)
    rebuilt = update_dataloader(loader, BatchSampler(SequentialSampler(range(24)), 6, False))
    assert options_of(rebuilt) == OPTIONS
    with rebuilt:
        assert [len(batch) for batch in rebuilt] == [6] * 4


@pytest.mark.parametrize("ours", [False, True])
def test_the_deterministic_engine_resumes_from_slots(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that begins in the middle of an epoch sees what the whole run sees from there on."""

    kind = shmloader.DataLoader if ours else torch.utils.data.DataLoader
    states: list[dict[str, Any]] = []

    def run(state: dict[str, Any] | None = None) -> list[Any]:
        seen: list[Any] = []
        engine = DeterministicEngine(lambda _, batch: seen.append(batch.flatten().tolist()))
        engine.add_event_handler(
            Events.ITERATION_COMPLETED(once=8), lambda: states.append(engine.state_dict())
        )
        if state is not None:
            engine.load_state_dict(state)
        torch.manual_seed(5)
        engine.run(kind(Rows(), batch_size=4, shuffle=True, num_workers=2), max_epochs=2)
        return seen

    forbid_torchs_workers(monkeypatch)
    with shmloader.install():
        whole = run()
        assert len(whole) == 12
        assert run(states[0]) == whole[8:]
