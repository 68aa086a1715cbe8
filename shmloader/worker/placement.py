"""Placement: results of torch's and NumPy's calls that reach the batch are made in the batch's slot.

The first large batches of a program's own ``collate_fn`` (or of a data set that gives whole batches) show
which of its calls make what is in the batch. From then on these calls get their memory in the slot, and the
batch is there without a copy. While the program's function runs, and only in the thread of the worker
process that runs it, their names stand for these calls. See docs/decisions/0043.
"""

from __future__ import annotations

import bisect
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from sys import _getframe as frame_of_caller
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch

from shmloader import torch_private
from shmloader.codec.slot_allocator import SlotAllocator
from shmloader.failures.bad_samples import Report
from shmloader.failures.exceptions import add_note
from shmloader.statistics import PlacedSite
from shmloader.worker.placed_calls import CALLS, COMPILERS, LEAST_NBYTES, RESIZES, PlacedCall
from shmloader.worker.stand_ins import Before, Replacement, StandIn

_LEAST_BATCH_NBYTES = 256 << 10
_WATCHED_BATCHES = 4
_CHANCES = 2  # batches that show that a call's results arrive; results that may be missing
_MOST_KEPT, _MOST_REFUSED = 3, 32

_WATCHED, _PLACED, _LEFT = "watched", "placed", "left"
_MISSED = "its results are not in the batch"
_OTHERS = "its arguments are others than those that can be placed"
_NONE = "no call's results were in the batch"
_OFTEN = "the same function is called too often for what is not in the batch"
_NBYTES_OF_A_CALL = 64 << 10  # what is copied in the time that a call takes longer
_NOT_RESIZABLE = ("not resizable", "does not own its data")


@dataclass(eq=False)
class _Site:
    """A place in the program's code that makes a call."""

    call: PlacedCall
    where: str
    state: str = _WATCHED
    arrived: int = 0  # batches in which all results were in the batch
    misses: int = 0  # those in which one was not
    refused: int = 0  # calls in a row that could not be made in the slot
    why: str = "noticed in one batch only"

    def judge(self, *, arrived: bool, why: str = _MISSED) -> bool:
        """Learn whether all results of a batch arrived; whether that decides if its results are placed."""
        if not arrived:
            self.misses += 1
            return (self.state is _WATCHED or self.misses >= _CHANCES) and self.leave(why)
        self.arrived += 1
        if self.state is _WATCHED and self.arrived >= _CHANCES:
            self.state = _PLACED
            return True
        return False

    def leave(self, why: str) -> bool:
        self.state, self.why = _LEFT, why
        return True

    def count_refused(self, refused: bool) -> int:
        """Count a call that could not be made in the slot, or one that could; returns how many could not."""
        self.refused = self.refused + 1 if refused else 0
        return self.refused


@dataclass
class _Result:
    """A result of this batch; `holder` keeps its memory from being used again until the batch is done."""

    site: _Site
    begin: int
    end: int
    holder: Any


class Placement:
    """The sites of one worker process, and the calls that are replaced while the program's code runs."""

    def __init__(self, allocator: SlotAllocator, *, is_on: bool) -> None:
        self._allocator = allocator
        self.is_on = is_on
        self._sites: dict[tuple[Any, int], _Site] = {}
        self._results: list[_Result] = []
        self._to_watch = _WATCHED_BATCHES
        self._others: dict[PlacedCall, int] = {}  # calls in this batch of which none is placed
        self._small = self._kept = 0
        self.has_news = False  # whether what is placed has changed since the last report
        self._version = 0  # grows when a site is left, and when no more are looked for
        self._running = 0
        self._put: list[StandIn] = []
        self._lacked_room = False  # the slot, for the result that was to be placed last
        self._thread = threading.get_ident()
        self._out_of_reach: list[PlacedSite] = []
        self._resizes = [Before(self._make_resizable, *name) for name in RESIZES if is_on]
        self._moved: list[Any] = []
        if is_on:
            os.register_at_fork(before=self._end_for_fork)

    def around(self, function: Callable[[Any], Any], *, of_batches: bool = False) -> Callable[[Any], Any]:
        """The program's function, with calls of torch's and NumPy's replaced while it runs."""
        if not self.is_on:
            return function
        calls = [call for call in CALLS if call.of_batches <= of_batches and call.can_stand()]
        replacements = [Replacement(call, self._call) for call in calls]
        self._out_of_reach += _captured_names(function, replacements)
        function = next((one for one in replacements if one.is_own(function)), function)
        compilers = [Before(self._end_for_compiler, *name) for name in COMPILERS]
        others = [*self._resizes, *compilers]
        put: list[StandIn] = [*replacements, *others]
        version = 0

        def placed(argument: Any) -> Any:
            nonlocal put, version
            if not self.is_on or self._running:
                return function(argument)
            if version != self._version:  # fewer sites are looked at
                looked_at = {id(site.call) for site in self._sites.values() if site.state is not _LEFT}
                version = self._version
                if not self._to_watch:
                    put = [*(one for one in replacements if id(one.call) in looked_at), *others]
            return self._replaced(put, function, argument)

        return placed

    def _replaced(self, put: list[StandIn], function: Callable[[Any], Any], argument: Any) -> Any:
        """Call the program's function with others in the place of torch's and NumPy's."""
        self._put = put.copy()
        torch_private.before_compiling(self._end_for_compiler)
        self._running += 1
        try:
            for one in put:
                one.replace()
            return function(argument)
        except BaseException as error:
            self.drop()
            is_resize = type(error) in (RuntimeError, ValueError) and self._is_placing()
            if is_resize and any(one in str(error) for one in _NOT_RESIZABLE):
                self._end("a result was resized by a call that cannot be seen")
                add_note(
                    error, "a result that shmloader made in the batch's slot; place_results=False avoids it"
                )
            raise
        finally:
            self._put_back()
            self._running -= 1

    def _put_back(self) -> None:
        while self._put:
            self._put.pop().put_back()

    def _with_own_names(self, own: Callable[..., Any], arguments: tuple[Any, ...], named: Any) -> Any:
        """Make a call that may run ``__torch_function__`` of the program's, with ``func is torch.stack``."""
        put, self._put = self._put, []
        for one in put:
            one.put_back()
        try:
            return own(*arguments, **named)
        finally:
            if self.is_on:
                self._put = put
                for one in put:
                    one.replace()

    def _end_for_compiler(self, *_: Any) -> None:
        """End before torch compiles a function, in which the compiler has to find torch's own calls."""
        if self._running:
            self._end("it calls a function that torch compiles")

    def _end_for_fork(self) -> None:
        """End before the program forks: the child would share the slot, and have names replaced."""
        if self._running and threading.get_ident() == self._thread:
            self._end("it starts a process")
            self._allocator.restart()

    def _call(self, call: PlacedCall, own: Callable[..., Any], arguments: tuple[Any, ...], named: Any) -> Any:
        """Make one call of the program's: in the slot, or by the original function."""
        if not self._running or threading.get_ident() != self._thread:
            return own(*arguments, **named)
        site = None if "out" in named else self._site(call, frame_of_caller(2))
        if site is None or site.state is _LEFT:
            site = None
            self._others[call] = self._others.get(call, 0) + 1
        goes_on = call.is_passed_on(arguments, named)
        if not goes_on and (site is not None or call.owner is not np):
            goes_on = torch_private.is_intercepted((*arguments, *named.values()))
        if goes_on:
            return self._with_own_names(own, arguments, named)
        if site is None:
            return own(*arguments, **named)
        if site.state is _PLACED:
            result = self._in_slot(site, arguments, named)
            return own(*arguments, **named) if result is None else result
        result = own(*arguments, **named)
        self._note(site, result, keep=True)
        return result

    def _site(self, call: PlacedCall, frame: FrameType) -> _Site | None:
        """The site of a call; None if it is a new one and no more are looked for."""
        if frame.f_code.co_filename == torch.nn.utils.rnn.__file__ and frame.f_back is not None:
            frame = frame.f_back
        key = frame.f_code, frame.f_lasti
        site = self._sites.get(key)
        if site is None and self._to_watch:
            file = frame.f_code.co_filename
            where = f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
            where = "collate_fn" if file == __file__ else where  # which is such a function itself
            site = self._sites[key] = _Site(call, where)
        return site if site is not None and site.call is call else None

    def _in_slot(self, site: _Site, arguments: tuple[Any, ...], named: Any) -> Any:
        begin, self._lacked_room = self._allocator.cursor, False
        try:
            result = site.call.second_way(self._place, *arguments, **named)
        except Exception:  # noqa: BLE001 - the original call raises it, or does what was asked for
            result = None
        if result is not None:
            self._note(site, result, keep=False)
            site.count_refused(False)
            return result
        self._allocator.go_back(begin)
        if not self._lacked_room and site.count_refused(True) > _MOST_REFUSED:
            self._leave(site, _OTHERS)
        return None

    def _place(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        if math.prod(shape) * dtype.itemsize < LEAST_NBYTES:
            return None
        tensor = self._allocator.tensor(tuple(shape), dtype)
        self._lacked_room = tensor is None
        return tensor

    def _note(self, site: _Site, result: Any, *, keep: bool) -> None:
        holder = None
        if type(result) is torch.UntypedStorage:
            nbytes = result.nbytes()
        elif type(result) is torch.Tensor and result.is_cpu and result.layout is torch.strided:
            nbytes, holder = result.nbytes, result.untyped_storage() if keep else None
        elif type(result) is np.ndarray:  # not kept: one that is referred to cannot be resized
            nbytes = result.nbytes
        else:
            return
        if nbytes >= LEAST_NBYTES:
            begin = result.ctypes.data if type(result) is np.ndarray else result.data_ptr()
            self._results.append(_Result(site, begin, begin + nbytes, holder))

    # --- after the batch

    def settle(self, leaves: list[tuple[int, int]], batch_nbytes: int) -> None:
        """Learn from a batch: the addresses and sizes of its leaves show which results have reached it."""
        results, self._results = self._results, []
        others, self._others = self._others, {}
        if batch_nbytes < _LEAST_BATCH_NBYTES:
            self._small += 1
            if self._small >= _WATCHED_BATCHES:
                self._end("batches are small")
            return
        self._small = 0
        leaves = sorted(leaves)
        missed = {result.site for result in results if not _arrived(result, leaves)}
        for site in dict.fromkeys(result.site for result in results):
            if site.judge(arrived=site not in missed):
                self._note_change()
        self._weigh(results, others)
        if self._to_watch:
            self._to_watch -= 1
            if not self._to_watch:
                self._end_watch()
        elif not self._is_placing():
            self._end(_NONE)

    def _weigh(self, results: list[_Result], others: dict[PlacedCall, int]) -> None:
        """Leave the sites of a call that saves less than its replacement takes in all other calls."""
        for call, count in others.items():
            placed = [one for one in results if one.site.call is call and one.site.state is _PLACED]
            if count * _NBYTES_OF_A_CALL > sum(one.end - one.begin for one in placed):
                for site in dict.fromkeys(one.site for one in placed):
                    if site.judge(arrived=False, why=_OFTEN):
                        self._note_change()

    def _note_change(self) -> None:
        self.has_news = True
        self._version += 1

    def _end_watch(self) -> None:
        self._note_change()
        for site in self._sites.values():
            if site.state is _WATCHED:
                self._leave(site, site.why)
        if not self._is_placing():
            self._end(_NONE)

    def _is_placing(self) -> bool:
        return any(site.state is _PLACED for site in self._sites.values())

    def _leave(self, site: _Site, why: str) -> None:
        site.leave(why)
        self._note_change()

    def _end(self, why: str) -> None:
        self.is_on = False
        self._put_back()
        self.drop()
        for site in self._sites.values():
            if site.state is not _LEFT:
                self._leave(site, why)

    def drop(self) -> None:
        """Forget the results of a batch that was not published."""
        self._results.clear()
        self._others.clear()

    def note_kept(self) -> None:
        """The program keeps tensors of a batch, which were moved out of the slot: it may resize them."""
        self._kept += 1
        for one in self._resizes:
            one.stay()
        if self._kept == _MOST_KEPT and self.is_on:
            self._end("the program keeps its batches")

    def _make_resizable(self, storage: Any = None, *_: Any) -> None:
        """Move what was placed to memory of torch's own, before torch resizes it.

        Not once that has failed: a tensor then has its new shape without the memory for it.
        """
        if type(storage) is torch.Tensor and storage.is_cpu and storage.layout is torch.strided:
            storage = storage.untyped_storage()
        if type(storage) is not torch.UntypedStorage or storage.device.type != "cpu":
            return
        if self._allocator.holds(storage.data_ptr()) and not storage.resizable():
            # The former memory stays: an ndarray over it may be left.
            self._moved.append(torch_private.move_to_private_memory(storage))

    def with_news(self, batch: Any) -> Any:
        """A batch, with a report of what is placed, which has changed since the last one."""
        self.has_news = False
        sites = [
            PlacedSite(str(site.call), site.where, placed=site.state is _PLACED, why=site.why)
            for site in self._sites.values()
            if site.arrived
        ]
        placed = (*sites, *self._out_of_reach)
        if not placed:
            return batch
        reported = batch if type(batch) is Report else Report(batch)
        return reported._replace(placed=placed)


def _arrived(result: _Result, leaves: list[tuple[int, int]]) -> bool:
    """Whether at least half of a result's bytes are leaves of the batch."""
    nbytes = 0
    for address, leaf_nbytes in leaves[bisect.bisect_left(leaves, (result.begin, 0)) :]:
        if address >= result.end:
            break
        nbytes += leaf_nbytes
    return 2 * nbytes >= result.end - result.begin


def _captured_names(function: Any, replacements: list[Replacement]) -> list[PlacedSite]:
    """Names of calls that a module has imported before (``from torch import stack``)."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType):
        return []
    code, names = function.__code__, function.__globals__
    return [
        PlacedSite(
            str(one.call),
            f"{Path(code.co_filename).name} in {function.__name__}",
            placed=False,
            why=f"{name} was imported by its name; it has to be looked up when it is called",
        )
        for name in code.co_names
        for one in replacements
        if one.is_own(names.get(name))
    ]
