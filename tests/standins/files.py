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
        cut: bytes after which the connection breaks, one for each request from now on.
        busy: requests from now on that are answered with 503.
    """

    body: bytes
    kind: str = "application/octet-stream"
    status: int = 200
    ranges: bool = True
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
        super().__init__("GET")
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
        digest = hashlib.md5(file.body[: 2**16]).hexdigest()
        headers = {"ETag": f'"{digest}-{len(file.body)}"', "Content-Type": file.kind}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range") or "")
        assert asked, "every request is for a part"
        start, end = int(asked[1]), int(asked[2]) + 1
        self.requests.append((handler.path, start, end))
        if not file.ranges:
            return send(handler, 200, headers, file.body)
        if start >= len(file.body):
            return send(handler, 416, {"Content-Range": f"bytes */{len(file.body)}"})
        part = file.body[start:end]
        headers["Content-Range"] = f"bytes {start}-{start + len(part) - 1}/{len(file.body)}"
        cut = file.cut.pop(0) if file.cut and len(part) > 1 else None
        self.sent += len(part)
        send(handler, 206, headers, part, cut)


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
