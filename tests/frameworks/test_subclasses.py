"""``class X(LibraryLoader, shmloader.DataLoader)``, in the styles of several libraries."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import psutil
import pytest
import torch
from stream_datasets import Numbers
from torch.utils.data import DataLoader, DistributedSampler

import shmloader
from frameworks.pages import assert_page_loads_from_slots
from frameworks.rows import OPTIONS, Rows, forbid_torchs_workers, options_of


class Repeat:
    """An endless batch sampler, as in timm and Ultralytics."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.sampler


class Endless(DataLoader):
    """Takes its epochs from one iterator over an endless batch sampler, `self.iterator`."""

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield next(self.iterator)


class Timm(Endless):
    """Unlocks the attributes by torch's private flag, and iterates in its constructor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        self.batch_sampler = Repeat(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super(Endless, self).__iter__()


class Ultralytics(Endless):
    """Bypasses __setattr__, ends the workers itself, and makes its iterator anew."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeat(self.batch_sampler))
        self.iterator = super(Endless, self).__iter__()

    def reset(self) -> None:
        for worker in self.iterator._workers:
            if worker.is_alive():
                worker.terminate()
        self.iterator._shutdown_workers()
        self.iterator = self._get_iterator()


class Graphs(DataLoader):
    """DGL: methods as collate_fn and worker_init_fn, a sampler of its own, an iterator around torch's."""

    def __init__(
        self, dataset: Any, collate_fn: Any = None, use_ddp: bool = False, ddp_seed: int = 0, **kwargs: Any
    ) -> None:
        self.user_collate = collate_fn or torch.stack
        if use_ddp:
            self.dist_sampler = DistributedSampler(dataset, 1, 0, kwargs.pop("shuffle", False), seed=ddp_seed)
            kwargs["sampler"] = self.dist_sampler
        super().__init__(dataset, collate_fn=self.collate, worker_init_fn=self.begin_worker, **kwargs)

    def collate(self, samples: list[Any]) -> Any:
        return self.user_collate(samples)

    def begin_worker(self, worker_id: int) -> None:
        assert worker_id < self.num_workers

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        self.dist_sampler.set_epoch(epoch)


class OurTimm(Timm, shmloader.DataLoader):
    pass


class OurUltralytics(Ultralytics, shmloader.DataLoader):
    pass


class OurGraphs(Graphs, shmloader.DataLoader):
    pass


STYLES = [(Timm, OurTimm, {}), (Ultralytics, OurUltralytics, {}), (Graphs, OurGraphs, {"use_ddp": True})]


def two_epochs(loader: Any) -> list[Any]:
    return [batch.flatten().tolist() for _ in range(2) for batch in loader]


def make(kind: Any, **more: Any) -> Any:
    torch.manual_seed(4)
    return kind(Rows(), batch_size=4, shuffle=True, **{"num_workers": 2, **more})


@pytest.mark.parametrize(("theirs", "ours", "more"), STYLES)
def test_a_second_base_class_gives_slots_and_options(
    theirs: Any, ours: Any, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = two_epochs(make(theirs, **more))
    forbid_torchs_workers(monkeypatch)
    repeats = nullcontext() if more else pytest.warns(UserWarning, match="prefetch_epochs=True has no effect")
    with repeats:  # an endless sampler around one has no next epoch
        loader = make(ours, **more, persistent_workers=True, **OPTIONS, generator=torch.Generator())
    assert options_of(loader) == OPTIONS
    loader.close()
    loader = make(ours, **more)
    assert two_epochs(loader) == wanted
    assert loader.statistics().batches == 12
    loader.close()


@pytest.mark.parametrize(("theirs", "ours", "more"), STYLES)
def test_the_librarys_own_class_loads_from_slots_under_install(
    theirs: Any, ours: Any, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = two_epochs(make(theirs, **more))
    forbid_torchs_workers(monkeypatch)
    with shmloader.install():
        loader = make(theirs, **more)
        assert two_epochs(loader) == wanted
        assert loader.statistics().batches == 12
        loader.close()


@pytest.mark.parametrize("kind", [Ultralytics, OurUltralytics])
def test_a_reset_ends_the_workers_and_starts_others(kind: Any) -> None:
    with shmloader.install():
        loader = make(kind)
        next(iter(loader))
        before = [psutil.Process(worker.pid) for worker in loader.iterator._workers]
        loader.reset()
        assert not psutil.wait_procs(before, timeout=60)[1]
        assert len(list(loader)) == 6
        loader.close()


class Variadic(shmloader.DataLoader):
    def __init__(self, *args: Any, on_error: str = "skip", **kwargs: Any) -> None:
        super().__init__(*args, on_error=on_error, **kwargs)


def test_the_signature_of_a_variadic_subclass_lists_the_options() -> None:
    """Each option is listed once, with the subclass's own default; the library's function is left alone."""
    assert list(inspect.signature(Variadic.__init__).parameters)[:3] == ["self", "args", "on_error"]
    for kind in (Variadic, OurGraphs, OurTimm):
        parameters = inspect.signature(kind.__init__).parameters
        assert parameters.keys() >= OPTIONS.keys()
        assert [each.kind for each in parameters.values()][-1] is inspect.Parameter.VAR_KEYWORD
    assert inspect.signature(Variadic.__init__).parameters["on_error"].default == "skip"
    assert not inspect.signature(Graphs.__init__).parameters.keys() & OPTIONS.keys()
    assert Variadic(Rows()).on_error == "skip"


def of_a_named_loader(loader: Any, rows: int, batch_size: int = 1, **kwargs: Any) -> None:
    shmloader.DataLoader.__init__(loader, Rows(rows), batch_size, **kwargs)


def of_any_arguments(*args: Any, **kwargs: Any) -> None:
    shmloader.DataLoader.__init__(args[0], Rows(args[1]), **kwargs)


@pytest.mark.parametrize("init", [of_a_named_loader, of_any_arguments])
def test_a_constructor_may_call_its_loader_otherwise_than_self(init: Any) -> None:
    kind = type("Kind", (shmloader.DataLoader,), {"__init__": init})
    parameters = inspect.signature(kind.__init__).parameters
    assert parameters.keys() >= OPTIONS.keys()
    assert "self" not in parameters
    loader = kind(3, on_error="skip")
    assert (len(loader), loader.on_error) == (3, "skip")


def test_a_subclass_of_a_subclass_is_not_wrapped_twice() -> None:
    assert type("Again", (Variadic,), {}).__init__ is Variadic.__init__


def test_a_constructor_that_was_inherited_is_looked_up_anew() -> None:
    """A class between may have come by a further base."""

    class Common:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    class Inherits(Common, shmloader.DataLoader):
        pass

    class Between(Common):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.was_here = True
            super().__init__(*args, **kwargs)

    class Joined(Inherits, Between):
        pass

    loader = Joined(Rows(), on_error="skip")
    assert (loader.was_here, loader.on_error) == (True, "skip")
    assert inspect.signature(Inherits.__init__).parameters.keys() >= OPTIONS.keys()


class TakesOver(shmloader.DataLoader):
    def __init__(self, loader: Any) -> None:
        vars(self).update(vars(loader))


def changed_class(loader: Any) -> Any:
    loader.__class__ = shmloader.DataLoader
    return loader


@pytest.mark.parametrize("take_over", [TakesOver, changed_class])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_takes_over_one_of_torchs_has_the_defaults(take_over: Any, workers: int) -> None:
    loader = take_over(make(DataLoader, num_workers=workers))
    assert repr(loader) == f"<{type(loader).__name__} of Rows: batch_size=4, num_workers={workers}>"
    with loader:
        assert two_epochs(loader) == two_epochs(make(DataLoader, num_workers=workers))


@pytest.mark.parametrize("base", [DataLoader, shmloader.DataLoader])
def test_a_loader_may_have_no_hash(base: Any) -> None:
    """As that of a dataclass. Each is itself, whatever equals it."""

    class Equal(base):  # type: ignore[misc]
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Equal)

        __hash__ = None  # type: ignore[assignment]

    with shmloader.install(stateful=True, share_dataset=True):
        for _ in range(2):
            loader = Equal(Rows(), 4, num_workers=1)
            next(iter(loader))
            loader.load_state_dict(loader.state_dict())
            assert next(iter(loader)).flatten().tolist() == [4, 5, 6, 7]
            loader.close()


def test_a_constructor_without_a_signature_stays() -> None:
    """Compiled constructors have no signature."""

    class Compiled:
        __signature__ = property(lambda _: (_ for _ in ()).throw(ValueError("no signature")))

        def __call__(self, *_: Any, **__: Any) -> None: ...

    init = Compiled()
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(init)
    assert type("Kind", (shmloader.DataLoader,), {"__init__": init}).__init__ is init


def test_a_subclass_without_variadic_arguments_keeps_its_constructor() -> None:
    def __init__(self: Any, rows: int) -> None:
        shmloader.DataLoader.__init__(self, Rows(rows))

    kind = type("Plain", (shmloader.DataLoader,), {"__init__": __init__})
    assert kind.__init__ is __init__
    assert len(kind(3)) == 3


def test_the_pages_program() -> None:
    assert_page_loads_from_slots("library-authors.md")


class NamesOptions(DataLoader):
    """A library's class: its attributes have the names of options, but other meanings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = "gpu"
        super().__init__(*args, **kwargs)
        self.shard, self.on_error, self.dispatch, self.worker_type = 3, print, "rows", "ray"


class HasDevice(NamesOptions):
    device = property(lambda self: "tpu", lambda self, name: None)  # type: ignore[assignment]


class ReadsDevice(DataLoader):
    device = property(lambda self: "tpu")


class OurNamesOptions(NamesOptions, shmloader.DataLoader):
    pass


class OurHasDevice(HasDevice, shmloader.DataLoader):
    pass


class OurReadsDevice(ReadsDevice, shmloader.DataLoader):
    pass


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [NamesOptions, OurNamesOptions, OurHasDevice, OurReadsDevice])
def test_attributes_that_are_named_as_options_have_no_effect(
    kind: Any, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")  # of two ranks, but nothing is to be divided between them
    monkeypatch.setenv("WORLD_SIZE", "2")
    with shmloader.install():
        for dataset in (Numbers(6), list(range(6))):
            loader = kind(dataset, 2, num_workers=workers)
            assert loader.device in {"gpu", "tpu"}
            assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
            loader.close()
        loader = kind(Numbers(6, fails_at=3), 2, num_workers=workers)
        with pytest.raises(ValueError, match="no number 3"):
            list(loader)
        loader.close()
