"""Subclasses that have attributes with the names of options: of their class, properties, set before or after.

A value that the option can have is the option, as a late ``loader.timeout = 5`` is torch's. Another one is
the own affair of the class and has no effect. An argument takes precedence. It holds for the loaders that
Lightning and accelerate make of such a loader, too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch.utils.data
from stream_datasets import Numbers

import shmloader
from shmloader import DataLoader
from shmloader.settings import OWN_DEFAULTS

VALUES: dict[str, tuple[Any, ...]] = {
    "on_error": ("skip", print),
    "shard": ("auto", 3),
    "dispatch": ("dynamic", "rows"),
    "worker_type": ("thread", "ray"),
    "snapshot_every_n_steps": (5,),
    "seed_per_sample": (True,),
}

WORDS = ("on_error", "shard", "dispatch", "worker_type")


def set_before(name: str, value: Any) -> type:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        setattr(self, name, value)
        DataLoader.__init__(self, *args, **kwargs)

    return type("Before", (DataLoader,), {"__init__": __init__})


def set_after(name: str, value: Any) -> type:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        DataLoader.__init__(self, *args, **kwargs)
        setattr(self, name, value)

    return type("After", (DataLoader,), {"__init__": __init__})


def late_property(name: str, value: Any) -> type:
    """It can be read only when the constructor is through."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        DataLoader.__init__(self, *args, **kwargs)
        self._own = value

    return type("Late", (DataLoader,), {"__init__": __init__, name: property(lambda self: self._own)})


def with_setter(name: str, value: Any) -> type:
    own = property(lambda self: vars(self).get("_own", value), lambda self, to: vars(self).update(_own=to))
    return type("WithSetter", (DataLoader,), {name: own})


def of_a_base(name: str, value: Any) -> type:
    base = type("Library", (torch.utils.data.DataLoader,), {name: value})
    return type("OfABase", (base, DataLoader), {})


WAYS: dict[str, Callable[[str, Any], type]] = {
    "set before": set_before,
    "set after": set_after,
    "of the class": lambda name, value: type("OfTheClass", (DataLoader,), {name: value}),
    "a property": lambda name, value: type("Property", (DataLoader,), {name: property(lambda _: value)}),
    "a property that is late": late_property,
    "a property with a setter": with_setter,
    "of a library's class": of_a_base,
}


def directly(loader: Any) -> Any:
    return loader


def by_lightning(loader: Any) -> Any:
    from lightning.pytorch.utilities import data as utilities

    return utilities._update_dataloader(loader, loader.sampler)


def by_accelerate(loader: Any) -> Any:
    import accelerate

    return accelerate.Accelerator(cpu=True).prepare_data_loader(loader)


def needing(library: str, rebuild: Any) -> Any:
    """A parameter that is skipped where a library is missing, before anything is built."""
    reason = f"{library} is not installed: make test-integrations"
    return pytest.param(
        rebuild, marks=pytest.mark.skipif(importlib.util.find_spec(library) is None, reason=reason)
    )


def dataset_of(name: str, value: Any) -> Any:
    return Numbers(8) if name in ("shard", "snapshot_every_n_steps") else list(range(8))


@pytest.mark.parametrize(
    "rebuild",
    [directly, needing("lightning", by_lightning), needing("accelerate", by_accelerate)],
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in VALUES.items() for value in values]
)
def test_an_attribute_is_the_option_or_has_no_effect(name: str, value: Any, way: str, rebuild: Any) -> None:
    with shmloader.install():
        loader = WAYS[way](name, value)(dataset_of(name, value), 2, num_workers=2)
        assert getattr(loader, name) == value
        if rebuild is by_lightning and way == "set after" and name in WORDS and value != VALUES[name][0]:
            with pytest.raises(ValueError, match=f"{name} must be one of"):  # it comes as an argument
                rebuild(loader)
            loader.close()
            return
        again = rebuild(loader)
        assert getattr(again, name) in (value, OWN_DEFAULTS[name])
        is_option = value == VALUES[name][0]
        assert (getattr(again, name) == value) or not is_option
        batches = sorted(batch.tolist() for batch in again)
        once = [[0, 1], [2, 3], [4, 5], [6, 7]]
        if name == "shard" and is_option:
            assert sorted(number for batch in batches for number in batch) == list(range(8))
        else:
            assert batches == (sorted(once * 2) if name == "shard" or "snapshot" in name else once)
        for each in (loader, again):
            each.close()


@pytest.mark.parametrize("way", ["set before", "of the class", "a property with a setter"])
@pytest.mark.parametrize("name", [name for name in VALUES if name != "seed_per_sample"])
def test_an_argument_takes_precedence(name: str, way: str) -> None:
    valid = VALUES[name][0]
    loader = WAYS[way](name, 7 if name == "snapshot_every_n_steps" else "own")(
        dataset_of(name, valid), 2, **{name: valid}
    )
    assert getattr(loader, name) == valid
    loader.close()


def test_an_argument_that_a_property_cannot_take_is_an_error_as_torchs_is() -> None:
    kind = WAYS["a property"]("on_error", "own")
    with pytest.raises(AttributeError, match="on_error"):
        kind([1], on_error="skip")
    with pytest.raises(AttributeError, match="timeout"):
        type("Torchs", (torch.utils.data.DataLoader,), {"timeout": property(lambda _: 0)})([1])


def test_another_value_of_an_option_that_is_no_word_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="worker_restarts must be a whole number"):
        WAYS["of the class"]("worker_restarts", "never")([1])
