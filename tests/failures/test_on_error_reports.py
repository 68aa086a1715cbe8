"""on_error: the statistics list the samples that raised, and their errors; one warning per loader sums up."""

from __future__ import annotations

import warnings

import pytest
from caught_warnings import caught_warnings
from flawed_datasets import MODES, Flawed, Raising, quiet, rows

import shmloader
from shmloader import BadSampleWarning, DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

# --- statistics


@quiet
@pytest.mark.parametrize("workers", [0, 1])
def test_the_statistics_say_what_was_wrong(workers: int) -> None:
    loader = DataLoader(Flawed(9, {4, 5}), batch_size=3, num_workers=workers, on_error="skip")
    list(loader)
    first, second = loader.statistics().bad_sample_list
    assert first == shmloader.BadSample(index=4, error="ValueError", message="no 4")
    assert str(first) == "dataset[4]: ValueError: no 4"
    assert (second.index, second.error, second.message) == (5, "KeyError", "'no 5'")


@quiet
def test_a_thousand_bad_samples_are_listed_and_all_are_counted() -> None:
    loader = DataLoader(Flawed(3000, set(range(0, 3000, 2))), batch_size=16, num_workers=2, on_error="skip")
    list(loader)
    figures = loader.statistics()
    assert figures.bad_samples == 1500
    assert [sample.index for sample in figures.bad_sample_list] == list(range(0, 2000, 2))


class Unspeakable(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("str")


def unspeakable() -> BaseException:
    return Unspeakable()


def long_winded() -> BaseException:
    return ValueError("x" * 10_000)


@quiet
def test_messages_are_bounded_and_may_be_missing() -> None:
    for make, message in (
        (unspeakable, "<str() of this Unspeakable raises"),
        (long_winded, "x" * 497 + "..."),
    ):
        loader = DataLoader(Raising(make), batch_size=4, num_workers=1, on_error="skip")
        list(loader)
        sample = loader.statistics().bad_sample_list[2]
        assert sample.message.startswith(message)
        assert len(sample.message) <= 500


# --- the warning


def summaries(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if one.category is BadSampleWarning]


@pytest.mark.parametrize("workers", [0, 2])
def test_one_warning_sums_up_at_the_end_of_the_epoch(workers: int) -> None:
    loader = DataLoader(Flawed(20, {1, 4, 5, 6, 7}), batch_size=4, num_workers=workers, on_error="skip")
    with caught_warnings() as caught:
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        assert not caught
        assert next(iterator, None) is None
        next(iterator, None)
        list(loader)
        loader.close()
    (text,) = summaries(caught)
    assert text.startswith("5 bad sample(s) raised and were left out of their batches (on_error='skip'): ")
    assert "dataset[1]: KeyError: 'no 1'; dataset[4]: ValueError: no 4; dataset[5]" in text
    assert "and 2 more. 1 batch(es) had no good sample" in text
    assert caught[0].filename == __file__


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("how", ["close", "with", "iter"])
def test_an_epoch_that_is_not_finished_is_summed_up_by_what_comes_next(how: str, workers: int) -> None:
    loader = DataLoader(Flawed(20, {1}), batch_size=4, num_workers=workers, on_error="replace")
    next(iter(loader))
    with caught_warnings() as caught:
        if how == "close":
            loader.close()
        elif how == "iter":
            iter(loader)
        else:
            with loader:
                pass
    assert [one.filename for one in caught] == [__file__]
    (text,) = summaries(caught)
    assert text.startswith("1 bad sample(s) raised and were replaced")
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_warning_that_is_an_error_breaks_nothing(persistent: bool, workers: int) -> None:
    loader = DataLoader(
        Flawed(20, {1}),
        batch_size=4,
        num_workers=workers,
        on_error="skip",
        persistent_workers=persistent and workers > 0,
    )
    iterator = iter(loader)
    got = [next(iterator)[0, 0].item() for _ in range(5)]
    with pytest.raises(BadSampleWarning):
        next(iterator)
    assert got == [0, 4, 8, 12, 16]
    assert next(iterator, None) is None
    assert len(rows(loader)) == 5
    assert loader.statistics().bad_samples == 2
    loader.close()


def test_a_with_block_that_raises_raises_what_it_raised() -> None:
    with (
        pytest.raises(ZeroDivisionError),
        DataLoader(Flawed(8, {1}), batch_size=4, num_workers=1, on_error="skip") as loader,
    ):
        next(iter(loader))
        raise ZeroDivisionError


def test_without_bad_samples_there_is_no_warning() -> None:
    for mode in MODES:
        with DataLoader(Flawed(8, set()), batch_size=4, num_workers=1, on_error=mode) as loader:
            assert len(rows(loader)) == 2
