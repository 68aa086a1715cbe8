"""States of random generators: kept, compared, and put back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class GeneratorStates:
    """What some generators would draw next, as it is now.

    Args:
        torch_generators: Generators of torch.
        python_generators: Generators of ``random``; the module itself stands for the global one.
        numpy_generators: New style generators of NumPy.
        numpy_global: Whether ``numpy.random``'s own is meant too.
    """

    def __init__(
        self,
        torch_generators: Sequence[torch.Generator],
        python_generators: Sequence[Any] = (),
        numpy_generators: Sequence[np.random.Generator] = (),
        *,
        numpy_global: bool = False,
    ) -> None:
        self._torch = [(generator, generator.get_state()) for generator in torch_generators]
        self._python = [(generator, generator.getstate()) for generator in python_generators]
        self._numpy = [
            (generator.bit_generator, generator.bit_generator.state) for generator in numpy_generators
        ]
        self._numpy_global = np.random.get_state() if numpy_global else None  # noqa: NPY002 - what torch seeds

    def put_back(self) -> None:
        """Let the generators go on from here."""
        for generator, state in self._torch:
            generator.set_state(state)
        for python, state in self._python:
            python.setstate(state)
        for bits, numbers in self._numpy:
            bits.state = numbers
        if self._numpy_global is not None:
            np.random.set_state(self._numpy_global)  # noqa: NPY002 - as above

    def are_those_of_torch_now(self) -> bool:
        """Whether torch's generators among them have drawn nothing since, and were not seeded anew."""
        return all(torch.equal(generator.get_state(), state) for generator, state in self._torch)


def states_of_a_worker(rng: Any, *, in_thread: bool) -> GeneratorStates:
    """The states of the generators that a worker has to itself.

    Args:
        rng: Its ``get_worker_info().rng``.
        in_thread: Whether the global ones belong to the program.
    """
    return GeneratorStates(
        [rng.torch_generator] if in_thread else [rng.torch_generator, torch.default_generator],
        [rng.random_generator] if in_thread else [rng.random_generator, random],
        [rng.numpy_generator],
        numpy_global=not in_thread,
    )
