"""An object store that speaks as much of S3 as reading takes, and takes its time for each request."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class ObjectStore(ThreadingHTTPServer):
    """The files of a folder as the objects of the bucket ``data``.

    Attributes:
        delay_s: How long each request takes at least.
        requests: How many there were.
        most_at_once: The most that were answered at the same time.
        denies: Whether all are refused.
    """

    daemon_threads = True

    def __init__(self, folder: Path, delay_s: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.delay_s = folder, delay_s
        self.requests = self.most_at_once = self.now = 0
        self.denies = False
        self.lock = threading.Lock()

    def client(self) -> Any:
        """Arrow's client of it."""
        from pyarrow import fs

        return fs.S3FileSystem(
            access_key="a",
            secret_key="b",
            region="us-east-1",
            scheme="http",
            endpoint_override=f"127.0.0.1:{self.server_port}",
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ObjectStore

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        store = self.server
        with store.lock:
            store.requests += 1
            store.now += 1
            store.most_at_once = max(store.most_at_once, store.now)
        time.sleep(store.delay_s)
        try:
            self._answer()
        finally:
            with store.lock:
                store.now -= 1

    def _answer(self) -> None:
        url = urlsplit(self.path)
        _, bucket, *rest = unquote(url.path).split("/", 2)
        name, query = "".join(rest), parse_qs(url.query)
        path = self.server.folder / name
        if bucket != "data" or self.server.denies:
            self._send(403, b"")
        elif not name and self.command == "GET":
            self._send(200, self._listed(query.get("prefix", [""])[0]))
        elif not name:
            self._send(200, b"")
        elif not path.is_file():
            self._send(404, b"")
        else:
            self._send_file(path.read_bytes())

    def _send_file(self, data: bytes) -> None:
        asked = self.headers.get("Range")
        if asked is None:
            self._send(200, data)
            return
        begin, end = (int(one) for one in asked.removeprefix("bytes=").split("-"))
        part = data[begin : end + 1]
        self._send(206, part, {"Content-Range": f"bytes {begin}-{begin + len(part) - 1}/{len(data)}"})

    def _listed(self, prefix: str) -> bytes:
        folder = self.server.folder / prefix
        found = [one for one in sorted(folder.iterdir()) if one.is_file()] if folder.is_dir() else []
        listed = "".join(
            f"<Contents><Key>{prefix}{one.name}</Key><Size>{one.stat().st_size}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for one in found
        )
        head = '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        count = f"<KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>"
        return f"{head}{count}{listed}</ListBucketResult>".encode()

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def object_store(folder: Path, delay_s: float = 0.0) -> Iterator[ObjectStore]:
    """A store that answers meanwhile, in threads of this process."""
    store = ObjectStore(folder, delay_s)
    thread = threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.shutdown()
        store.server_close()
        thread.join()
