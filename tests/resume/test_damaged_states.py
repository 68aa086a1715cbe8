"""Damaged, hand-edited and old states are refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resume_datasets import OwnGenerator, Plain, Stateful
from robustness.processes import LONG
from stream_datasets import ByShard, Numbers, identity
from stream_datasets import Stateful as StatefulStream

from shmloader import DataLoader, ResumeError, ShardedSampler

pytestmark = pytest.mark.filterwarnings("ignore:to resume, .* samples")

State = dict[str, Any]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def streams(dataset: Any, **given: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 4, collate_fn=identity, **given)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "own generator": lambda: DataLoader(Plain(40), 4, True, generator=seeded()),
    "global generator": lambda: DataLoader(Plain(40), 4, True),
    "loader's generator": lambda: DataLoader(Plain(40), 4, generator=seeded()),
    "sharded": lambda: DataLoader(Plain(40), 4, sampler=ShardedSampler(range(40), 2, 1)),
    "own sampler": lambda: DataLoader(Plain(40), 4, sampler=OwnGenerator(40, seeded())),
    "own state": lambda: DataLoader(Plain(40), 4, sampler=Stateful(40)),
    "counted stream": lambda: streams(Numbers(40)),
    "stream with a state": lambda: streams(StatefulStream(40)),
    "dealt-out stream": lambda: streams(Numbers(40), shard="auto"),
    "shards": lambda: streams(ByShard(40), shard="auto"),
}
INNER = {"stream", "sampler_settings", "sampler_state"}
"""Keys whose text is JSON itself."""


@functools.cache
def states_of(kind: str) -> list[str]:
    """States before the first batch, in mid-epoch, before the end and after it, as JSON."""
    loader = LOADERS[kind]()
    states = [loader.state_dict()]
    for _ in loader:
        states.append(loader.state_dict())
    return [json.dumps(state) for state in [*states, loader.state_dict()]]


TEXTS = ["", "1,2", "drawn 1 2", "drawn 1 999999999", "seed 3", "state AAAA", "torch:AAA", "{}", "null"]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 12),
    st.floats(),
    st.text(),
    st.sampled_from(TEXTS),
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
)


def changed(data: st.DataObject, value: Any) -> Any:
    """A value of JSON, with one part changed, missing or repeated."""
    if data.draw(st.booleans(), "whole"):
        return data.draw(VALUES, "value")
    if isinstance(value, str) and value:
        cut = data.draw(st.integers(0, len(value)), "cut")
        return (
            value[:cut]
            + data.draw(st.sampled_from(["", "x", "0", "-", " ", "٣"]), "added")
            + value[cut + 1 :]
        )
    if isinstance(value, dict | list) and value:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = data.draw(st.sampled_from(keys), "key inside")
        copied = value.copy()
        if data.draw(st.integers(0, 3), "remove") == 0:
            del copied[key]
        else:
            copied[key] = changed(data, copied[key])
        return copied
    return data.draw(VALUES, "instead")


@pytest.mark.parametrize("kind", LOADERS)
@settings(max_examples=150 if LONG else 20, deadline=None)
@given(data=st.data())
def test_a_damaged_state_is_refused(kind: str, data: st.DataObject) -> None:
    """The checksum covers each key and each part of its value."""
    state = json.loads(data.draw(st.sampled_from(states_of(kind)), "state"))
    key = data.draw(st.sampled_from(sorted(state)), "key")
    before = state[key]
    if key in INNER and before and data.draw(st.booleans(), "inside"):
        state[key] = json.dumps(changed(data, json.loads(before)))
    else:
        state[key] = changed(data, before)
    loader = LOADERS[kind]()
    if type(before) is type(state[key]) and before == state[key]:
        loader.load_state_dict(state)
    else:
        with pytest.raises(ResumeError, match=r"damaged, or was changed by hand|of version"):
            loader.load_state_dict(state)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_state_that_lacks_a_key_is_refused(kind: str) -> None:
    for text in states_of(kind):
        for key in (state := json.loads(text)):
            with pytest.raises(ResumeError, match=r"damaged|no state of a shmloader.DataLoader \(KeyError"):
                LOADERS[kind]().load_state_dict({name: state[name] for name in state if name != key})


def test_a_state_of_an_older_format_is_refused() -> None:
    """The error names both versions, whatever the keys are."""
    with pytest.raises(ResumeError, match="of version 1, and this shmloader reads 7 only"):
        LOADERS["sharded"]().load_state_dict({"version": 1, "batches": 3})


@pytest.mark.parametrize("written", ["loader's generator", "own state"])
def test_a_loader_that_lacks_what_the_state_has_is_refused(written: str) -> None:
    """The loader lacks a generator, or a sampler with a state of its own; or the state lacks it."""

    class Stateful(OwnGenerator):  # of the same name
        def __init__(self) -> None:
            super().__init__(40, seeded())
            self.seed = 0

    others = {
        "loader's generator": ("loader_generator", DataLoader(Plain(40), 4)),
        "own state": ("sampler_state", DataLoader(Plain(40), 4, sampler=Stateful())),
    }
    key, other = others[written]
    for text in states_of(written)[1:3]:
        with pytest.raises(ResumeError, match=f"{key} is .* in the state, and"):
            other.load_state_dict(json.loads(text))
    if written == "own state":
        next(iter(other))
        with pytest.raises(ResumeError, match="sampler_state is None in the state, and the sampler has a"):
            LOADERS[written]().load_state_dict(other.state_dict())
