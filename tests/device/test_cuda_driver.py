"""`CudaDriver` against a library of its functions that is compiled with NVIDIA's own header.

The compiler refuses a function whose parameters are not those of ``cuda.h``; the functions note what ctypes
hands them. So a wrong type, order or width of an argument is found without a device.
"""

import contextlib
import ctypes
import gc
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
import torch

from shmloader.device import captures
from shmloader.device import driver as drivers
from shmloader.device.captures import Captures, counted
from shmloader.device.driver import CudaDriver, DriverError, Event, is_capturing, open_driver
from shmloader.device.guard import DeviceGuard

HEADERS = [Path(root) / "include/cuda.h" for root in ("/usr/local/cuda", "/usr")]
HEADER = next((path for path in HEADERS if path.exists()), None)
COMPILER = shutil.which("cc")

SOURCE = r"""
#include <cuda.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
char noted[4096];
int answer;       /* what calls return but for those that cannot fail */
int capturing;    /* the stream that captures */
unsigned long long current; /* the thread's context */
volatile int full; /* the streams take no more work until another thread has set it to 0 */
static CUresult note(const char *name, unsigned long long a, unsigned long long b, unsigned long long c,
                     unsigned long long d) {
    size_t used = strlen(noted);
    snprintf(noted + used, sizeof noted - used, "%s %llx %llx %llx %llx\n", name, a, b, c, d);
    return answer;
}
static CUresult queue(const char *name, unsigned long long a, unsigned long long b, unsigned long long c,
                      unsigned long long d) {
    for (int tries = 0; full && tries < 30000; tries++) usleep(1000);
    note(name, a, b, c, d);
    return full ? CUDA_ERROR_UNKNOWN : answer;
}
#define N(x) ((unsigned long long)(x))
CUresult CUDAAPI cuInit(unsigned int f) { return note("init", f, 0, 0, 0); }
CUresult CUDAAPI cuDriverGetVersion(int *v) { *v = 12080; return 0; }
CUresult CUDAAPI cuGetErrorName(CUresult e, const char **s) { *s = e == 2 ? "NAME_OF_2" : 0; return 0; }
CUresult CUDAAPI cuDeviceGetCount(int *n) { *n = 2; return 0; }
CUresult CUDAAPI cuDeviceGet(CUdevice *d, int n) { *d = n + 50; return 0; }
CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice d, unsigned int *f, int *a)
    { *f = 9; *a = d == 51; return 0; }
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d)
    { *c = (CUcontext)(0x7000000000000ull + d); return 0; }
CUresult CUDAAPI cuCtxGetCurrent(CUcontext *c)
    { *c = (CUcontext)current; note("current", 0, 0, 0, 0); return 0; }
CUresult CUDAAPI cuCtxPushCurrent(CUcontext c) { note("push", N(c), 0, 0, 0); return 0; }
CUresult CUDAAPI cuCtxPopCurrent(CUcontext *c) { *c = 0; note("pop", 0, 0, 0, 0); return 0; }
CUresult CUDAAPI cuCtxSynchronize(void) { return note("sync", 0, 0, 0, 0); }
CUresult CUDAAPI cuCtxRecordEvent(CUcontext c, CUevent e) { return queue("ctxrecord", N(c), N(e), 0, 0); }
CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *m) {
    static CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    CUstreamCaptureMode before = mode;
    mode = *m; *m = before; note("mode", mode, 0, 0, 0); return 0; }
CUresult CUDAAPI cuMemHostRegister(void *p, size_t n, unsigned int f)
    { return note("register", N(p), n, f, 0); }
CUresult CUDAAPI cuMemHostUnregister(void *p) { return note("unregister", N(p), 0, 0, 0); }
CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr d, const void *p, size_t n, CUstream s)
    { return queue("copy", d, N(p), n, N(s)); }
CUresult CUDAAPI cuEventCreate(CUevent *e, unsigned int f) {
    static unsigned long long next = 0x6000000000000ull; *e = (CUevent)next++;
    note("event", f, 0, 0, 0); return 0; }
CUresult CUDAAPI cuEventRecord(CUevent e, CUstream s) { return queue("record", N(e), N(s), 0, 0); }
CUresult CUDAAPI cuEventQuery(CUevent e) { return note("query", N(e), 0, 0, 0); }
CUresult CUDAAPI cuStreamCreate(CUstream *s, unsigned int f)
    { *s = (CUstream)0x5000000000000ull; return queue("stream", f, 0, 0, 0); }
CUresult CUDAAPI cuStreamDestroy(CUstream s) { return queue("destroy", N(s), 0, 0, 0); }
CUresult CUDAAPI cuStreamSynchronize(CUstream s) { return note("drain", N(s), 0, 0, 0); }
CUresult CUDAAPI cuStreamWaitEvent(CUstream s, CUevent e, unsigned int f)
    { return queue("wait", N(s), N(e), f, 0); }
CUresult CUDAAPI cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *c) {
    *c = N(s) == capturing ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE; return 0; }
"""

CONTEXT = 0x7000000000000 + 51  # of device 1
BIG = 0x7F12_3456_7000  # wider than 32 bits
LONG = (5 << 32) + 4096


class Library:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.inside = ctypes.CDLL(str(path))

    def take(self) -> list[str]:
        noted = (ctypes.c_char * 4096).in_dll(self.inside, "noted")
        lines = noted.value.decode().splitlines()
        noted.value = b""
        return [line for line in lines if line.split()[0] not in {"current", "push", "pop", "mode"}]

    def answer(self, code: int) -> None:
        ctypes.c_int.in_dll(self.inside, "answer").value = code

    def names(self) -> list[str]:
        """All calls since the last look, by their first word."""
        noted = (ctypes.c_char * 4096).in_dll(self.inside, "noted")
        names = [line.split()[0] for line in noted.value.decode().splitlines()]
        noted.value = b""
        return names

    def make_current(self, context: int) -> None:
        ctypes.c_ulonglong.in_dll(self.inside, "current").value = context

    def capture(self, stream: int) -> None:
        ctypes.c_int.in_dll(self.inside, "capturing").value = stream


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if HEADER is None or COMPILER is None:
        pytest.skip("needs cuda.h and a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(SOURCE)
    command = [COMPILER, "-shared", "-fPIC", "-Werror", "-I", HEADER.parent, "-o", folder / "libcuda.so"]
    subprocess.run([*command, folder / "driver.c"], check=True)
    return folder / "libcuda.so"


@pytest.fixture
def library(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: SimpleNamespace(cuda_stream=31))
    counts = Captures()
    monkeypatch.setattr(drivers, "counted", lambda: counts)
    library = Library(compiled)
    library.capture(-1)
    yield library
    library.answer(0)
    library.capture(-1)
    library.make_current(0)
    library.take()


@pytest.fixture
def driver(library: Library) -> CudaDriver:
    driver = CudaDriver(str(library.path))
    assert library.take() == ["init 0 0 0 0"]
    return driver


def test_every_function_is_declared_and_called_as_in_the_header(library: Library, driver: CudaDriver) -> None:
    assert driver.version() == 12080
    assert driver.active_devices() == [1]
    driver.register(BIG, LONG)
    driver.unregister(BIG)
    with driver.captures.lock, driver.on(1):
        driver.copy(BIG + 1, BIG + 2, LONG, BIG + 3)
        event = driver.record(BIG + 4, 1)
        driver.wait(BIG + 5, event)
        assert driver.is_done(event)
    stream = driver.create_stream(1)
    driver.destroy_stream(stream, 1)
    driver.synchronize()
    driver.recycle(event)
    with driver.captures.lock, driver.on(1):
        assert driver.record_all(1) is event
    handle = 0x6000000000000
    assert library.take() == [
        f"register {BIG:x} {LONG:x} 1 0",
        f"unregister {BIG:x} 0 0 0",
        f"copy {BIG + 1:x} {BIG + 2:x} {LONG:x} {BIG + 3:x}",
        "event 2 0 0 0",
        f"record {handle:x} {BIG + 4:x} 0 0",
        f"wait {BIG + 5:x} {handle:x} 0 0",
        f"query {handle:x} 0 0 0",
        "stream 1 0 0 0",
        "drain 5000000000000 0 0 0",
        "destroy 5000000000000 0 0 0",
        "sync 0 0 0 0",
        f"ctxrecord {CONTEXT:x} {handle:x} 0 0",
    ]
    with open(HEADER) as header:
        text = header.read()
    assert all(name.removesuffix("_v2") + "(" in text for name in drivers.SIGNATURES)


def test_calls_are_made_in_the_devices_context_and_leave_the_threads_state(
    library: Library, driver: CudaDriver
) -> None:
    driver.register(BIG, LONG)
    noted = (ctypes.c_char * 4096).in_dll(library.inside, "noted").value.decode().split("\n")
    assert [line.split()[:2] for line in noted[:-1]] == [
        ["push", f"{CONTEXT:x}"],  # from the device that is in use, not the current one
        ["mode", "2"],
        ["register", f"{BIG:x}"],
        ["mode", "0"],
        ["pop", "0"],
    ]


def test_a_context_that_is_current_is_not_made_so_again(library: Library, driver: CudaDriver) -> None:
    around = [["current", "push", "mode", "record", "mode", "pop"], ["current", "record"]]
    event = driver._new_event(1)
    driver.recycle(event)
    library.take()
    for context, names in zip((CONTEXT - 1, CONTEXT), around, strict=True):
        library.make_current(context)
        with driver.captures.lock, driver.on(1):
            driver.recycle(driver.record(BIG, 1))
        assert library.names() == names
    driver.captures.note_other()
    with driver.captures.lock, driver.on(1):
        driver.recycle(driver.record(BIG, 1))
    assert library.names() == around[0]  # a capture elsewhere may forbid calls to this thread


def test_home_is_a_device_in_use(
    library: Library, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context on another one would take memory there."""
    assert driver.home() == 1
    fresh = CudaDriver(str(library.path))
    monkeypatch.setattr(fresh, "active_devices", list)
    assert fresh.home() == torch.cuda.current_device() == 0


def test_errors_have_the_drivers_name(library: Library, driver: CudaDriver) -> None:
    library.answer(2)
    with pytest.raises(DriverError, match=r"cuMemHostRegister_v2 failed: NAME_OF_2 \(2\)") as caught:
        driver.register(BIG, LONG)
    assert not caught.value.is_of_capture
    event = Event(ctypes.c_void_p(1), 1)
    library.answer(600)
    assert not driver.is_done(event)
    library.answer(700)
    with pytest.raises(DriverError, match="cuEventQuery"):
        driver.is_done(event)
    library.answer(900)
    with pytest.raises(DriverError) as caught:
        driver.synchronize()
    assert caught.value.is_of_capture
    library.answer(700)
    with pytest.raises(DriverError, match="cuCtxRecordEvent"):
        driver.record_all(1)


def test_captures_are_found_on_streams_of_torch_and_on_the_default_stream(
    library: Library, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are asked once, and from then on if others than torch may capture: a package, or one was met."""
    made = []

    class Stream:
        def __init__(self, device: int, priority: int) -> None:
            made.append(priority)
            self.cuda_stream = 1000 + len(made) % 32 + 100 * priority

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    assert not driver.captures_open()
    assert len(made) == 64
    library.capture(1000)
    assert not driver.captures_open()  # torch would have counted it
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "cupy", sys)
        assert driver.captures_open()
        library.capture(5)
        assert not driver.captures_open()
    library.capture(0)
    assert driver.captures_open()
    for stream in (1000, 931):
        library.capture(stream)
        assert driver.captures_open()
    library.capture(5)
    assert not driver.captures_open()
    assert len(made) == 64
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert driver.captures_open()


def test_a_capture_from_before_they_were_counted_is_found(library: Library, driver: CudaDriver) -> None:
    library.capture(31)
    assert driver.captures_open()
    assert driver.captures_open()
    library.capture(-1)
    assert not driver.captures_open()


def test_an_event_that_meets_a_capture_is_tried_again_after_it(library: Library, driver: CudaDriver) -> None:
    """Of a package that nobody knew of: its capture has ended, and from now on all streams are asked."""
    assert not driver.captures_open()
    with driver.captures.lock, driver.on(1):
        library.answer(900)
        assert driver.record_all(1) is None
        library.answer(0)
        library.capture(31)
        assert driver.record_all(1) is None
        library.capture(-1)
        assert driver.record_all(1) is not None


def test_a_question_that_a_capture_forbids_is_asked_again(library: Library, driver: CudaDriver) -> None:
    """Of a package that nobody knew of, in another thread: the device's work has not failed."""
    assert not driver.captures_open()
    guard = DeviceGuard(driver)
    held = guard.hold(None)
    with driver.captures.lock, driver.on(1):
        guard.record_end(held, BIG, 1)
    library.make_current(CONTEXT)
    library.answer(900)
    guard.drop_copied(at_once=True)
    assert guard.is_busy()
    library.answer(0)
    library.names()
    guard.drop_copied(at_once=True)
    assert not guard.is_busy()
    assert library.names() == ["current", "push", "mode", "query", "mode", "pop"]  # it forbids that no more


def test_a_capture_of_others_on_the_current_stream_is_seen(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of a batch would become a part of its graph."""
    assert not driver.captures_open()
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert driver.is_capturing()
    assert not driver.is_capturing()
    assert driver.captures.may_be_others()


class Graph:
    """As torch's: captures from one method to the other."""

    def capture_begin(self, pool: object = None, *, fails: bool = False) -> str:
        if fails:
            raise RuntimeError("no capture")
        return "begun"

    def capture_end(self) -> None:
        """End it."""


def test_captures_of_torchs_graphs_are_counted(library: Library, driver: CudaDriver) -> None:
    kind = type("Graph", (Graph,), {})
    driver.captures.count(kind)
    assert kind.capture_begin.__doc__ == Graph.capture_begin.__doc__
    graphs = [kind(), kind()]
    assert not driver.captures_open()
    with pytest.raises(RuntimeError, match="no capture"):
        graphs[0].capture_begin(fails=True)
    assert not driver.captures_open()
    assert [graph.capture_begin() for graph in graphs] == ["begun"] * 2
    library.take()
    for graph in graphs:
        assert driver.captures_open()
        with driver.captures.lock, driver.on(1):
            assert driver.record_all(1) is None
        graph.capture_end()
    assert not driver.captures_open()
    graphs[0].capture_begin()
    graphs.clear()
    del graph
    assert not driver.captures_open()  # nobody can end it any more


def test_torchs_own_graphs_are_counted_once() -> None:
    assert counted() is counted()
    assert torch.cuda.CUDAGraph.capture_begin.__wrapped__.__qualname__ == "CUDAGraph.capture_begin"
    assert not hasattr(torch.cuda.CUDAGraph.capture_begin.__wrapped__, "__wrapped__")


def test_no_capture_begins_between_two_calls_for_a_batch(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "_MOST_WAIT_S", 60.0)
    kind = type("Graph", (Graph,), {})
    driver.captures.count(kind)
    graph, order = kind(), list[str]()

    def capture() -> None:
        graph.capture_begin()
        order.append("begun")

    with driver.captures.lock, driver.on(1):
        thread = threading.Thread(target=capture)
        thread.start()
        thread.join(0.05)
        with driver.captures.lock, driver.on(1):  # of a finalizer in this thread
            driver.recycle(driver.record(BIG, 1))
            assert driver.record_all(1) is None
        order.append("recorded")
    thread.join()
    assert order == ["recorded", "begun"]


def test_a_kept_traceback_of_ctrl_c_keeps_no_other_thread_from_capturing(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes inside of contextlib, whose frame keeps the generator of `on` as it is."""
    monkeypatch.setattr(captures, "_MOST_WAIT_S", 60.0)
    before = sys.gettrace()

    def interrupt(frame: FrameType, *_: object) -> None:
        if frame.f_code.co_name == "__exit__" and frame.f_code.co_filename == contextlib.__file__:
            raise KeyboardInterrupt

    def make_a_call() -> None:
        with driver.captures.lock, driver.on(1):
            driver.recycle(driver.record(BIG, 1))

    try:
        sys.settrace(interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            make_a_call()
    finally:
        sys.settrace(before)
    kind = type("Graph", (Graph,), {})
    driver.captures.count(kind)
    thread, began_s = threading.Thread(target=kind().capture_begin), time.monotonic()
    thread.start()
    thread.join()
    assert time.monotonic() - began_s < captures._MOST_WAIT_S
    assert caught.tb is not None


def test_a_stream_that_may_not_be_asked_captures(driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """So torch answers for the default stream while a blocking stream captures."""

    def refuse() -> bool:
        raise RuntimeError(
            "CUDA error: operation would make the legacy stream depend on a capturing blocking stream"
        )

    driver.captures.note_other()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", refuse)
    assert driver.is_capturing()
    assert driver.captures_open()

    def fail() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        driver.is_capturing()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def ask(kept: set[int]) -> None:
        with contextlib.suppress(RuntimeError):
            is_capturing()

    kept = {1}
    dies = weakref.ref(kept)
    gc.disable()
    try:
        ask(kept)
        del kept
        assert dies() is None, "a cycle of the exception and a frame keeps it"
    finally:
        gc.enable()


CALLS_ON_STREAMS = {
    "record": lambda driver: driver.record(BIG, 1),
    "record_all": lambda driver: driver.record_all(1),
    "wait": lambda driver: driver.wait(BIG, Event(ctypes.c_void_p(1), 1)),
    "copy": lambda driver: driver.copy(BIG, BIG, 1, BIG),
    "create_stream": lambda driver: driver.create_stream(1),
    "destroy_stream": lambda driver: driver.destroy_stream(BIG, 1),
}


def test_threads_make_calls_while_one_waits_for_the_device(library: Library, driver: CudaDriver) -> None:
    """Perhaps for work that they queue after their own batches, such as their part of a collective."""
    full = ctypes.c_int.in_dll(library.inside, "full")

    def make_a_call() -> None:
        with driver.captures.lock, driver.on(1):
            full.value = 0

    with driver.captures.lock, driver.on(1):
        full.value = 1
        thread = threading.Timer(0.05, make_a_call)
        thread.start()
        driver.recycle(driver.record(BIG, 1))  # fails if the stream stays full
    thread.join()


def test_a_capture_begins_though_a_call_waits_for_ever(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "_MOST_WAIT_S", 0.01)
    kind = type("Graph", (Graph,), {})
    driver.captures.count(kind)
    with driver.captures.lock:
        thread = threading.Thread(target=kind().capture_begin)
        thread.start()
        thread.join()


@pytest.mark.parametrize("call", CALLS_ON_STREAMS)
def test_other_threads_run_while_a_call_waits_for_the_device(
    library: Library, driver: CudaDriver, call: str
) -> None:
    """A full stream may wait for work that only another thread can release."""
    full = ctypes.c_int.in_dll(library.inside, "full")
    full.value = 1

    def release() -> None:
        full.value = 0

    thread = threading.Timer(0.05, release)
    thread.start()
    CALLS_ON_STREAMS[call](driver)
    thread.join()


def test_memory_that_is_allocated_ahead_in_inference_mode_can_be_trained_on(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: empty(shape, dtype=dtype))
    with torch.inference_mode():
        assert torch.empty(4, torch.uint8, None).is_inference()
        assert not driver.allocate((4,), torch.uint8, 1).is_inference()


def test_an_older_driver_and_no_driver_are_told_apart(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setitem(drivers.SIGNATURES, "cuOfTomorrow", ())
    original = CudaDriver.__init__
    monkeypatch.setattr(CudaDriver, "__init__", lambda self: original(self, str(compiled)))
    open_driver.cache_clear()
    assert "older than CUDA 12.5" in open_driver()
    monkeypatch.setattr(CudaDriver, "__init__", lambda self: original(self, "libcuda.so.nowhere"))
    open_driver.cache_clear()
    assert "cannot be loaded" in open_driver()
    open_driver.cache_clear()
