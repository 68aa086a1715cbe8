"""Sharing leaves no reference cycle that contains views of memory: Python's collector would crash on it."""

from __future__ import annotations

import gc
from collections import OrderedDict

import numpy as np
import torch

from shmloader import share


def test_objects_with_arrays_in_them_are_free_once_they_are_shared() -> None:
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        share([OrderedDict(z=torch.full((300,), i), y=np.ones(3)) for i in range(40)])
        gc.collect()
        left = [
            type(one).__name__
            for one in gc.garbage
            if isinstance(one, memoryview | OrderedDict | torch.Tensor)
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left
