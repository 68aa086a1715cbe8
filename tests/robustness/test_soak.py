"""The soak's short form; ``make soak`` is the long one."""

import pytest

from robustness.soak import Mixed, copy_of, ignore_expected, same, soak


@pytest.mark.filterwarnings("ignore")
def test_twenty_seconds_of_kills_breaks_and_holds_are_exact_and_leave_nothing(warm_helpers: None) -> None:
    ignore_expected()
    tally, last = soak(20, seed=11, methods=("fork",))
    assert tally.rounds >= 12
    assert min(tally.batches, tally.kills, tally.breaks, tally.held) > 0
    assert last.processes == 0


@pytest.mark.parametrize("kind", Mixed.KINDS)
def test_the_oracle_tells_batches_apart(kind: str) -> None:
    one, other = Mixed(kind, 10, seed=1), Mixed(kind, 10, seed=2)
    assert same(one[3], copy_of(one[3]))
    assert not same(one[3], one[4])
    assert not same(one[3], other[3])
