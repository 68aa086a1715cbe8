"""`skip_batches`: a state from which some batches of its epoch are left out. Main process only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shmloader.errors import ResumeError
from shmloader.resume.compatibility import behind, check_whole, is_between_epochs, listed, signed

_MOST = 10_000_000  # batches of a range: each takes about 100 bytes while an epoch goes on


def skip_batches(state: Mapping[str, Any], batches: range) -> dict[str, Any]:
    """The same state, with some batches of its epoch counted as if the program had had them.

    For a checkpoint from before a spike of the loss, and the steps around the spike. A loader that continues
    from the result draws their indices, and fetches nothing. Batches keep their numbers and random numbers,
    and those of the range that are before the state's place change nothing: a program may make this call
    whenever it starts. On several ranks let each do so.

    Args:
        state: Of a loader with a map-style dataset, as its ``state_dict()`` has returned it in mid-epoch.
        batches: Numbers of this rank's batches in the epoch, from 0 on, in steps of 1: with another number of
            ranks or another batch size, as the loader that continues counts them.

    Returns:
        A new state. It lists these batches until they are passed.

    Raises:
        ResumeError: If the state is damaged, that of a stream, or lies between two epochs.
        TypeError: If ``batches`` is no range. Make a call for each, if there are several.
        ValueError: For a range with negative numbers, with other steps, or of more than 10 million batches.
    """
    if not isinstance(batches, range):
        raise TypeError(f"batches must be a range, such as range(80, 100), and not {batches!r:.100}")
    if batches.step != 1 or batches.start < 0:
        raise ValueError(f"batches must be a range of numbers from 0 on, in steps of 1, and not {batches!r}")
    if (most := batches.stop - batches.start) > _MOST:
        raise ValueError(
            f"{batches!r} has {most:,} batches, and {_MOST:,} can be left out: end it with the epoch"
        )
    check_whole(state)
    if state["kind"] != "map-style":
        raise ResumeError(
            "the state is that of an iterable-style dataset, whose batches have no indices that could be "
            "left out: leave the samples out in the dataset"
        )
    if is_between_epochs(state):
        raise ResumeError(
            "the state lies between two epochs, and does not know the next one's batches: take a state after "
            "a batch of the epoch in which batches are to be left out"
        )
    further = range(max(batches.start, state["batches"]), batches.stop)
    return signed(dict(state) | {"batches_behind": listed({*behind(state), *further})})
