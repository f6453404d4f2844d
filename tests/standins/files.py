"""A server over HTTP on a port of this machine, and one of plain files, as stores and web servers
answer: ranges, ETags, failures."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(kw_only=True)
class File:
    """One file and how the server treats it.

    Attributes:
        status: what it answers in place of the file; 200 for the file; with 302 the body is where
            the file lies.
        ranges: whether parts are sent; if not, every answer is the whole file.
        version: whether an ETag tells one content from another.
        cut: bytes after which the connection breaks, one for each request from now on.
        busy: requests from now on that are answered with 503.
    """

    body: bytes
    kind: str = "application/octet-stream"
    status: int = 200
    ranges: bool = True
    version: bool = True
    cut: list[int] = field(default_factory=list)
    busy: int = 0


class LocalServer:
    """Answers requests until it is left.

    Args:
        methods: those that it knows.
    """

    def __init__(self, *methods: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing is printed."""

        for method in methods:
            setattr(Handler, f"do_{method}", lambda handler: self.answer(handler))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def root(self) -> str:
        """Its address, without a path."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class FileServer(LocalServer):
    """Serves files.

    Attributes:
        requests: path and range of each, in order.
        sent: bytes of bodies that went out.
    """

    def __init__(self, files: Mapping[str, File]) -> None:
        super().__init__("GET", "HEAD")
        self.files = dict(files)
        self.requests: list[tuple[str, int, int]] = []
        self.sent = 0

    def address(self, name: str) -> str:
        """Of a file."""
        return f"{self.root}/{name}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        file = self.files.get(handler.path.partition("?")[0].lstrip("/"))
        if file is None or file.status != 200:
            where = {"Location": file.body.decode()} if file and file.status == 302 else {}
            return send(handler, 404 if file is None else file.status, where)
        if file.busy:
            file.busy -= 1
            return send(handler, 503, {})
        body = file.body
        headers = {"Content-Type": file.kind}
        if file.version:
            headers["ETag"] = f'"{hashlib.md5(body).hexdigest()}"'
            if handler.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
                return send(handler, 412, {})
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range") or "")
        if file.ranges:
            headers["Accept-Ranges"] = "bytes"
        start, end, status = 0, len(body), 200
        if asked and file.ranges:
            start, end, status = int(asked[1]), int(asked[2] or end) + 1, 206
            if start >= len(body):
                return send(handler, 416, {"Content-Range": f"bytes */{len(body)}"})
            end = min(end, len(body))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(body)}"
        reads = handler.command == "GET"
        cut = file.cut.pop(0) if reads and file.cut else None
        if reads:
            self.requests.append((handler.path, start, end))
            self.sent += end - start
        send(handler, status, headers, body[start:end], cut)


def send(
    handler: BaseHTTPRequestHandler,
    status: int,
    headers: Mapping[str, str],
    body: bytes = b"",
    cut: int | None = None,
) -> None:
    """Answer with a body, of which nothing comes behind the byte `cut`."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command == "HEAD":
        return
    try:
        handler.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            handler.close_connection = True
            handler.wfile.flush()
            handler.connection.shutdown(socket.SHUT_RDWR)
    except (BrokenPipeError, ConnectionResetError):  # a client that reads heads alone
        handler.close_connection = True
