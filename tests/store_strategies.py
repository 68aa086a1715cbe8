"""Values of every type that stores hold, for hypothesis."""

import datetime as dt
import decimal
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from store_samples import Colour, Frozen, Person, Point, Slotted, Text

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text()
    | st.text(st.characters(categories=["Cs", "Lu"]))
    | st.binary()
    | st.complex_numbers()
    | st.sampled_from([Colour.RED, Text("text"), np.int64(3), np.float32("nan"), np.bool_(True), 2**63])
    | st.sampled_from([np.datetime64("2024-01-01"), np.datetime64(5, "ns"), np.str_("x"), decimal.Decimal(1)])
    | st.sampled_from([dt.date(2024, 1, 1), frozenset({1}), ..., b"", "", float("inf"), -0.0])
)
ARRAYS = st.sampled_from(
    [
        np.arange(6),
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(5),
        np.zeros((0, 3)),
        np.arange(10)[::2],
        np.array(["a", "bcd"]),
        np.array([("a", 1)], dtype=[("s", "U3"), ("n", ">i4")]),
        np.array(["2024-01-01"], "datetime64[D]"),
        np.array([1, "x", None], object),
        torch.arange(4),
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor(3),
        torch.zeros(0),
        torch.ones(2, requires_grad=True),
        torch.tensor([1 + 2j]).conj(),
    ]
)
KEYS = (
    st.text(max_size=4) | st.integers(0, 3) | st.booleans() | st.sampled_from(["path", "label", Text("path")])
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.fixed_dictionaries({"path": inner, "label": inner})
        | st.builds(Point, inner, inner)
        | st.builds(Person, inner, inner, inner)
        | st.builds(Frozen, inner, inner)
        | st.builds(Slotted, inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
    )
