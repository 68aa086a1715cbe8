"""States of the program's own samplers as text: exact, and loaded without running code."""

from typing import Any

import numpy as np
import pytest
import torch

from shmloader import ResumeError
from shmloader.resume.user_states import pack_user_state, unpack_user_state


@pytest.mark.parametrize(
    "state",
    [None, 3, "text", {"epoch": 1, "at": [1, 2.5, None, True]}, {}, [], float("inf")],
)
def test_what_json_gives_back_is_json(state: Any) -> None:
    text = pack_user_state(state, "S")
    assert not text.startswith("torch:")
    assert unpack_user_state(text) == state


@pytest.mark.parametrize("state", [(1, 2), {1: "a"}, {"a": (1,)}, {"n": 1.0, "t": (2,)}, b"bytes"])
def test_what_json_changes_is_kept_as_torch_saves_it(state: Any) -> None:
    found = unpack_user_state(pack_user_state(state, "S"))
    assert (found, type(found)) == (state, type(state))


def test_tensors_are_kept() -> None:
    state = {"generator": torch.Generator().manual_seed(3).get_state()}
    assert torch.equal(unpack_user_state(pack_user_state(state, "S"))["generator"], state["generator"])


class Own:
    """A class that only this program knows."""


@pytest.mark.parametrize("state", [{"place": np.int64(3)}, {"order": np.arange(3)}])
def test_what_is_refused_of_numpys_is_named(state: Any) -> None:
    with pytest.raises(
        ResumeError, match=r"does not load: .*numpy.* by default\. Return .*int\(\.\.\.\) and \.tolist\(\)"
    ):
        pack_user_state(state, "S")


@pytest.mark.parametrize("state", [Own(), {"a": lambda: 0}])
def test_what_needs_code_is_refused(state: Any) -> None:
    with pytest.raises(ResumeError, match=r"state_dict\(\) of S holds what cannot be saved"):
        pack_user_state(state, "S")
