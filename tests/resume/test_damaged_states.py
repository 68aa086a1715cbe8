"""Damaged, hand-edited and old states: each is resumed from, or refused with the key's name."""

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
"""Keys whose text is JSON itself. A sampler checks the contents of its own state."""


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
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_state_is_refused_by_name_or_gone_on_from(kind: str, data: st.DataObject) -> None:
    """The only error is a `ResumeError`, which names the key or the fact about the loader."""
    state = json.loads(data.draw(st.sampled_from(states_of(kind)), "state"))
    key = data.draw(st.sampled_from(sorted(state)), "key")
    before = state[key]
    inside = key in INNER - {"sampler_state"} or (key, kind) == ("sampler_state", "sharded")
    if inside and before and data.draw(st.booleans(), "inside"):
        state[key] = json.dumps(changed(data, json.loads(before)))
    else:
        state[key] = changed(data, before)
    loader = LOADERS[kind]()
    message = ""
    try:
        loader.load_state_dict(state)
        assert len(list(loader)) <= 10
    except ResumeError as error:
        message = str(error)
    if message and type(state[key]) is not type(before):
        assert key in message or key.replace("sampler_", "sampler's ") in message


@pytest.mark.parametrize("kind", LOADERS)
def test_a_state_that_lacks_a_key_is_refused_by_name(kind: str) -> None:
    for text in states_of(kind):
        for key in (state := json.loads(text)):
            if key == "version":  # of a state of torchdata's, say
                continue
            with pytest.raises(ResumeError, match=rf"it lacks \['{key}'\], and has \[\]"):
                LOADERS[kind]().load_state_dict({name: state[name] for name in state if name != key})


def test_a_state_of_an_older_format_is_refused() -> None:
    """The error names both versions, whatever the keys are."""
    with pytest.raises(ResumeError, match="of version 1, and this shmloader reads 6 only"):
        LOADERS["sharded"]().load_state_dict({"version": 1, "batches": 3})


def test_a_samplers_state_from_behind_the_loaders_place_is_refused() -> None:
    state = json.loads(states_of("own state")[3]) | {"sampler_batches": 4}
    with pytest.raises(ResumeError, match=r"'sampler_batches' is 4 .* more than the 3 batches of the state"):
        LOADERS["own state"]().load_state_dict(state)


WHOLE = (
    "its numbers have to be whole and at least 0, and the draws of a part up to its own state cannot be "
    "more than all its draws"
)
NOT_LISTED = (
    "it lists batch 2 as returned out of order, but batch 3 is the first that was not returned, so only "
    "later ones can be listed"
)
NO_SEED = (
    "the state is of an epoch that has begun (3 batches were returned, finished is False), and such an epoch "
    "has a base seed"
)
NO_PART = "it says that the last batch was of part 7, and it has 1 part(s), which are numbered from 0"
DAMAGES: dict[str, tuple[State, str]] = {
    "batches behind": ({"batches_behind": "5,2"}, NOT_LISTED),
    "range": ({"batches": -1}, "it has to be from 0 to 9,223,372,036,854,775,807"),
    "base seed": ({"base_seed": None}, NO_SEED),
}
DAMAGES_OF_STREAMS: dict[str, tuple[State, str]] = {
    "numbers": ({"rank": -1}, WHOLE),
    "drawn at a state": ({"parts": [[4, "", 8, False, 0, 0]]}, WHOLE),
    "last": ({"last": 7}, NO_PART),
    "layout": ({"layout": "x"}, "its layout is 'x', and can be 'own', 'shard' or 'stride'"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_the_error_says_what_is_wrong_and_what_to_pass(what: str) -> None:
    changes, reason = DAMAGES[what]
    refused("own generator", json.loads(states_of("own generator")[3]) | changes, reason)


@pytest.mark.parametrize("what", DAMAGES_OF_STREAMS)
def test_the_error_says_what_is_wrong_with_a_stream(what: str) -> None:
    changes, reason = DAMAGES_OF_STREAMS[what]
    state = json.loads(states_of("counted stream")[3])
    refused("counted stream", state | {"stream": json.dumps(json.loads(state["stream"]) | changes)}, reason)


def refused(kind: str, state: State, reason: str) -> None:
    loader = LOADERS[kind]()
    with pytest.raises(ResumeError) as error:
        loader.load_state_dict(state)
        iter(loader)
    assert str(error.value).endswith(f"Error: {reason}). Pass what state_dict() returned.")


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


def test_a_state_before_the_first_epoch_that_tells_of_one_is_refused_by_name() -> None:
    """A `ShardedSampler` has a state in an epoch, and none before it."""
    state = json.loads(states_of("sharded")[0]) | {"base_seed": 0}
    with pytest.raises(ResumeError, match=r"sampler_state is None .* has a state if base_seed is 0 and"):
        LOADERS["sharded"]().load_state_dict(state)
