"""PyTorch Geometric: its loaders under install(), and as a second base class."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shmloader
from frameworks.pages import assert_page_loads_from_slots, needs
from frameworks.rows import ARGUMENTS, OPTIONS, forbid_torchs_workers, options_of

needs("torch_geometric")
from torch_geometric.data import Data  # noqa: E402
from torch_geometric.loader import DataLoader, DenseDataLoader, NodeLoader, RandomNodeLoader  # noqa: E402
from torch_geometric.sampler import BaseSampler, SamplerOutput  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")


def graphs() -> list[Any]:
    edges = torch.tensor([[0, 1], [1, 0]])
    return [Data(x=torch.full((2, 3), float(number)), edge_index=edges) for number in range(12)]


class GraphLoader(DataLoader, shmloader.DataLoader):
    pass


def features(loader: Any) -> list[Any]:
    torch.manual_seed(2)
    return [batch.x.tolist() for batch in loader]


def test_the_pages_program() -> None:
    assert_page_loads_from_slots("pyg.md")


def test_a_second_base_class_gives_options_and_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = features(DataLoader(graphs(), batch_size=4, follow_batch=["x"]))
    forbid_torchs_workers(monkeypatch)
    loader = GraphLoader(graphs(), batch_size=4, follow_batch=["x"], **ARGUMENTS | OPTIONS)
    assert options_of(loader) == OPTIONS
    with loader:
        assert features(loader) == wanted
        assert hasattr(next(iter(loader)), "x_batch")


class AllNodes(BaseSampler):
    """The nodes that were asked for, without neighbours: other samplers need compiled extensions."""

    def sample_from_nodes(self, inputs: Any, **_: Any) -> SamplerOutput:
        edges = torch.arange(len(inputs.node))
        return SamplerOutput(
            node=inputs.node, row=edges, col=edges, edge=None, metadata=(inputs.input_id, inputs.time)
        )

    def sample_from_edges(self, *_: Any, **__: Any) -> SamplerOutput:
        raise NotImplementedError


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_its_loaders_load_from_slots_under_install(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned workers are sent a method of the loader, and so the loader. NodeLoader wraps the iterator."""
    whole = Data(x=torch.randn(20, 3), edge_index=torch.randint(20, (2, 60)))
    kinds = [
        lambda **more: DataLoader(graphs(), batch_size=4, shuffle=True, **more),
        lambda **more: NodeLoader(whole, AllNodes(), batch_size=4, shuffle=True, **more),
    ]
    if context == "fork":
        kinds.append(lambda **more: DenseDataLoader(graphs(), batch_size=4, **more))
        kinds.append(lambda **more: RandomNodeLoader(whole, num_parts=4, **more))
    wanted = [features(kind(num_workers=1)) for kind in kinds]
    forbid_torchs_workers(monkeypatch)
    with shmloader.install(worker_restarts=1):
        for kind, batches in zip(kinds, wanted, strict=True):
            loader = kind(num_workers=1, multiprocessing_context=context)
            assert features(loader) == batches
            assert loader.statistics().batches == len(batches)


class OurNodeLoader(NodeLoader, shmloader.DataLoader):
    pass


@pytest.mark.parametrize("kind", [NodeLoader, OurNodeLoader])
def test_a_loader_that_wraps_its_persistent_iterator_can_be_closed_and_resumed(kind: Any) -> None:
    whole = Data(x=torch.arange(40.0).view(40, 1), edge_index=torch.zeros(2, 0, dtype=torch.long))
    with shmloader.install():
        loader = kind(
            whole,
            AllNodes(),
            batch_size=4,
            num_workers=1,
            persistent_workers=True,
            filter_per_worker=False,
        )
        assert type(iter(loader)).__name__ == "DataLoaderIterator"
        for _ in range(2):
            assert len(features(loader)) == 10
            loader.close()
        if kind is OurNodeLoader:  # others have no states
            next(iter(loader))
            loader.load_state_dict(loader.state_dict())
            assert next(iter(loader)).x.flatten().tolist() == [4.0, 5.0, 6.0, 7.0]
            loader.close()
