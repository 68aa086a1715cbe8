"""The constructor: signature, attributes, and the errors and warnings for bad arguments."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from caught_warnings import caught_warnings
from torch.utils.data import BatchSampler, SequentialSampler
from torch.utils.data import DataLoader as TorchLoader

from parity.compare import assert_same
from parity.datasets import CountedStream, EndlessSampler, Rows, SizedStream, Stream, identity
from parity.run import Build, assert_parity, assert_plays, outcome
from shmloader import DataLoader


def _parameters(loader: type) -> list[inspect.Parameter]:
    return list(inspect.signature(loader.__init__).parameters.values())


def _public(loader: Any) -> set[str]:
    return {name for name in vars(loader) if not name.startswith("_")}


def test_every_parameter_of_torch_has_its_name_order_kind_and_default() -> None:
    """The signature begins with torch's parameters; all others are keyword-only and optional."""
    theirs, ours = _parameters(TorchLoader), _parameters(DataLoader)
    facts = [
        [(p.name, p.kind, p.default) for p in parameters[: len(theirs)]] for parameters in (theirs, ours)
    ]
    assert facts[0] == facts[1]
    extra = ours[len(theirs) :]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in extra)


def test_the_class_signature_is_that_of_its_constructor() -> None:
    """inspect.signature of the class, which IDEs and frameworks read, shows the same names."""
    names = list(inspect.signature(DataLoader).parameters)
    assert names == [p.name for p in _parameters(DataLoader)][1:]
    assert names[: len(inspect.signature(TorchLoader).parameters)] == list(
        inspect.signature(TorchLoader).parameters
    )


def test_it_is_a_generic_subclass_of_torchs_loader() -> None:
    """Frameworks check isinstance; users write DataLoader[T]."""
    assert issubclass(DataLoader, TorchLoader)
    assert DataLoader.__name__ == "DataLoader"
    assert isinstance(DataLoader[int](Rows(3)), TorchLoader)


EVERY_KIND: dict[str, Callable[[Build], Any]] = {
    "plain": lambda build: build(Rows(10)),
    "workers": lambda build: build(Rows(10), 4, True, num_workers=1, persistent_workers=True),
    "batch sampler": lambda build: build(Rows(10), batch_sampler=[[1, 2], [3]], collate_fn=identity),
    "no batches": lambda build: build(Rows(10), batch_size=None, sampler=range(3)),
    "stream": lambda build: build(Stream((4,)), 2, drop_last=True),
}


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_public_attributes_are_torchs_and_all_are_constructor_arguments(kind: str) -> None:
    """ignite passes every public attribute back to the constructor."""
    ours, theirs = EVERY_KIND[kind](DataLoader), EVERY_KIND[kind](TorchLoader)
    names = {p.name for p in _parameters(DataLoader)}
    assert _public(theirs) <= _public(ours) <= names
    assert "multiprocessing_context" not in _public(ours)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_attributes_have_torchs_values(kind: str) -> None:
    """Each argument becomes the attribute that torch makes of it."""
    ours, theirs = EVERY_KIND[kind](DataLoader), EVERY_KIND[kind](TorchLoader)
    made = {"dataset", "sampler", "batch_sampler", "multiprocessing_context"}
    for name in _public(theirs) - made:
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in made:
        assert type(getattr(ours, name)) is type(getattr(theirs, name)), name
    for name in ("_dataset_kind", "_auto_collation", "_iterator", "_IterableDataset_len_called"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert type(ours._index_sampler) is type(theirs._index_sampler)
    assert ours.sampler is not None


def test_positional_arguments_mean_what_they_mean_to_torch() -> None:
    """All positional parameters, given by position."""
    sampler, generator = SequentialSampler(range(9)), torch.Generator()
    context = multiprocessing.get_context("fork")
    given = (Rows(9), 2, None, sampler, None, 1, identity, False, True, 3.0, print, context)
    ours, theirs = (loader(*given, generator) for loader in (DataLoader, TorchLoader))
    for name in _public(theirs) - {"batch_sampler"}:
        assert getattr(ours, name) is getattr(theirs, name), name
    assert ours.multiprocessing_context is context


BAD: dict[str, dict[str, Any]] = {
    "negative workers": {"num_workers": -1},
    "negative timeout": {"timeout": -1},
    "prefetch without workers": {"prefetch_factor": 2},
    "negative prefetch": {"prefetch_factor": -1, "num_workers": 1},
    "persistent without workers": {"persistent_workers": True},
    "sampler and shuffle": {"sampler": [1], "shuffle": True},
    "batch sampler and size": {"batch_sampler": [[1]], "batch_size": 2},
    "batch sampler and shuffle": {"batch_sampler": [[1]], "shuffle": True},
    "batch sampler and sampler": {"batch_sampler": [[1]], "sampler": [1]},
    "batch sampler and drop_last": {"batch_sampler": [[1]], "drop_last": True},
    "drop_last without batches": {"batch_size": None, "drop_last": True},
    "zero batch": {"batch_size": 0},
    "fractional batch": {"batch_size": 1.5},
    "a list for workers": {"num_workers": [2]},
    "text for a truth": {"drop_last": "no"},
    "start method unknown": {"num_workers": 1, "multiprocessing_context": "thread"},
    "context of a wrong type": {"num_workers": 1, "multiprocessing_context": 3},
    "context without workers": {"multiprocessing_context": "spawn"},
    "unknown argument": {"workers": 2},
    "too many positional": {"_positional": 13},
}
STREAM: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle": True},
    "with a sampler": {"sampler": [1]},
    "with a batch sampler": {"batch_sampler": [[1]]},
}


def _build_bad(build: Build, dataset: Any, arguments: dict[str, Any]) -> Any:
    arguments = dict(arguments)
    return build(dataset, *[None] * arguments.pop("_positional", 0), **arguments) and None


@pytest.mark.parametrize("bad", BAD)
def test_bad_arguments_raise_torchs_error_with_its_text(bad: str) -> None:
    """The same exception type and the same words."""
    with pytest.raises((ValueError, TypeError)):
        _build_bad(DataLoader, Rows(4), BAD[bad])
    if bad in {"unknown argument", "too many positional"}:
        return  # Python's own words count our additional parameters
    assert_parity(lambda build: _build_bad(build, Rows(4), BAD[bad]))


@pytest.mark.parametrize("bad", STREAM)
def test_bad_arguments_for_a_stream_raise_torchs_error(bad: str) -> None:
    """An iterable-style dataset takes no sampler and no shuffling."""
    with pytest.raises(ValueError, match="DataLoader with IterableDataset"):
        DataLoader(Stream((4,)), **STREAM[bad])
    assert_parity(lambda build: _build_bad(build, Stream((4,)), STREAM[bad]))


def test_shuffling_nothing_fails_or_not_as_in_torch() -> None:
    """An empty dataset, plain and shuffled."""
    assert_parity(lambda build: list(build(Rows(0), shuffle=True)))
    assert assert_parity(lambda build: list(build(Rows(0), num_workers=1))) == []


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_attributes_that_are_fixed_refuse_assignment_in_torchs_words(name: str) -> None:
    """The message names the loader's class, which is DataLoader too."""
    with pytest.raises(ValueError, match="should not be set after DataLoader is initialized"):
        setattr(DataLoader(Rows(4)), name, None)
    assert_parity(lambda build: setattr(build(Rows(4)), name, None))


def test_arguments_that_torch_refuses_at_iteration_are_refused_there() -> None:
    """Constructing, or setting the attribute, passes; iter() raises torch's AssertionErrors."""
    loader = DataLoader(Rows(4), num_workers=1)
    loader.prefetch_factor = 0
    # torch's is not run: its half-made iterator prints an error when it dies
    with pytest.raises(AssertionError, match=r"^prefetch_factor must be greater than 0 for Multi"):
        iter(loader)
    ours, theirs = (
        outcome(lambda build: list(build(Rows(4), timeout=1)), kind) for kind in (DataLoader, TorchLoader)
    )
    assert ours.error == (AssertionError, "_SingleProcessDataLoaderIter requires timeout == 0")
    theirs.error = theirs.error[0], theirs.error[1] or ours.error[1]  # older releases of torch say nothing
    assert_same(ours, theirs)


def test_more_workers_than_cores_warn_at_construction_and_at_iteration() -> None:
    """torch warns twice, with the host's number of cores."""
    many = len(os.sched_getaffinity(0)) + 1

    def play(build: Build) -> str:
        loader = build(Rows(4), num_workers=many)
        loader.num_workers = 1  # the second check comes at iter(), without starting so many
        list(loader)
        loader.num_workers = many
        loader.check_worker_number_rationality()
        return "done"

    assert_plays(play)
    with pytest.warns(UserWarning, match=f"This DataLoader will create {many} worker processes"):
        DataLoader(Rows(4), num_workers=many)


def pinned_batches(build: Build, workers: int, **pinning: Any) -> list[Any]:
    """The batches of a loader that pins, which does not warn before iter()."""
    with warnings.catch_warnings(record=True) as at_construction:
        warnings.simplefilter("always")
        loader = build(Rows(4), num_workers=workers, pin_memory=True, **pinning)
    assert not at_construction
    return list(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_pinning_without_an_accelerator_warns_as_torch_does(workers: int) -> None:
    """Nothing is pinned, and the batches come."""
    assert_plays(lambda build: pinned_batches(build, workers))
    with caught_warnings() as caught:
        iter(TorchLoader(Rows(4), pin_memory=True))
    if caught:  # torch 2.6 says nothing
        with pytest.warns(UserWarning, match="no accelerator is found"):
            iter(DataLoader(Rows(4), num_workers=workers, pin_memory=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_named_device_to_pin_for_is_warned_of_as_torch_does(workers: int) -> None:
    """The argument is deprecated: it changes nothing but the warnings."""
    try:
        with caught_warnings():
            list(TorchLoader(Rows(4), pin_memory=True, pin_memory_device="cuda"))
    except RuntimeError as error:
        pytest.skip(f"this torch pins for the device that is named: {error}")
    assert_plays(lambda build: pinned_batches(build, workers, pin_memory_device="cuda"))


def test_lengths_are_torchs() -> None:
    """Samplers, batch samplers and streams are tried, with and without the last batch."""
    plays: list[dict[str, Any]] = [
        {"batch_size": 3},
        {"batch_size": 3, "drop_last": True},
        {"batch_size": None},
        {"batch_sampler": [[1], [2, 3], []]},
        {"sampler": [5, 1, 1]},
        {"batch_sampler": BatchSampler(SequentialSampler(range(7)), 2, True)},
    ]
    for given in plays:
        assert_plays(lambda build, given=given: (len(build(Rows(10), **given)),))
    for given in plays[:3]:
        dataset = SizedStream((4,), 10)
        assert_plays(lambda build, given=given, dataset=dataset: (len(build(dataset, **given)),))


def test_a_length_that_is_unknown_is_a_type_error() -> None:
    """Lightning expects that of an endless sampler and of a stream without a length."""
    for given in ({"sampler": EndlessSampler()}, {"batch_sampler": iter([[1]])}):
        with pytest.raises(TypeError):
            len(DataLoader(Rows(10), **given))
        assert_parity(lambda build, given=given: len(build(Rows(10), **given)))
    with pytest.raises(TypeError):
        len(DataLoader(CountedStream()))
    assert_parity(lambda build: len(build(CountedStream())))


def test_a_context_may_be_a_name_or_an_object(start_method: str) -> None:
    """The attribute is a context object either way, and None stays None."""
    context = multiprocessing.get_context(start_method)
    given = DataLoader(Rows(4), num_workers=1, multiprocessing_context=context)
    named = DataLoader(Rows(4), num_workers=1, multiprocessing_context=start_method)
    assert given.multiprocessing_context is context
    assert named.multiprocessing_context.get_start_method() == start_method
    assert DataLoader(Rows(4), num_workers=1).multiprocessing_context is None
