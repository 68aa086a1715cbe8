"""Pickling that keeps NumPy's types apart where NumPy's own does not.

C has two types of 64-bit integers, and so has NumPy: ``longlong`` is equal to ``int64`` (on most platforms)
but is another type. A dtype is pickled by its size alone, which makes one into the other.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np


def reduce_dtype(value: Any) -> Any:
    """How a dtype is pickled that would come back as another one.

    Returns:
        What ``reducer_override`` of a pickler is to return; NotImplemented for any other object.
    """
    if type(value) not in _AMBIGUOUS:
        return NotImplemented
    return _dtype_of, (value.char, value.byteorder)


def _dtype_of(character: str, byteorder: Any) -> np.dtype[Any]:
    return np.dtype(character).newbyteorder(byteorder)


_TYPES = [np.dtype(character) for character in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]]
_AMBIGUOUS = {type(dtype) for dtype in _TYPES if np.dtype(dtype.str).char != dtype.char}


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """See ``pickle.Pickler``."""
        return reduce_dtype(value)


def dumps(value: Any) -> bytes:
    """As ``pickle.dumps(value, 5)``, with every dtype as it is."""
    file = io.BytesIO()
    _Pickler(file, 5).dump(value)
    return file.getvalue()
