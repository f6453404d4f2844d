"""Files of other machines, read in parts: over HTTP, from the hub (`hf://`), or by fsspec.

Every read asks for a range of bytes, so nothing lies on the disk and a file is read from any place.
`datasets` reads hubs the same way; addresses of HTTP need aiohttp there, which it no longer brings,
so they go through the session that `huggingface_hub` has open anyway. A connection that breaks, or
a server that is busy, is tried again for about half a minute.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from anygauge.data.cache import Cache, key_of
from anygauge.interface import DataAccessError, DataError
from anygauge.util.hiding import without_users

WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Before each further try."""

BLOCK = 2**23
"""Bytes that are asked for at once while rows are read in order."""

FEW = 2**16
"""The same, where a little of a file is looked at."""

_ANSWER_S = 30.0
_BUSY = (408, 425, 429, 500, 502, 503, 504)
_PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}

Fetch = Callable[[int, int], bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """A remote file: its size in bytes, what tells its version, and how bytes of it are got."""

    size: int
    version: str
    fetch: Fetch


class RemoteFile(io.RawIOBase):
    """One file, seekable; see `open_remote`.

    Attributes:
        size: bytes.
        version: what the server calls this content (an ETag, a digest); "" where it does not.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        self._name = shown(address)
        self._address = address
        opened = _retried(self._name, lambda: _opened(address))
        self.size, self.version, self._fetch = opened.size, opened.version, opened.fetch
        self._at = 0

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.RawIOBase`."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`.

        Raises:
            DataError: the connection breaks again and again, or the file is another one by now.
        """
        start, end = self._at, min(self._at + len(buffer), self.size)
        if start >= end:
            return 0
        got = _retried(f"{self._name} (byte {start:,})", lambda: self._exactly(start, end))
        buffer[: len(got)] = got
        self._at += len(got)
        return len(got)

    def _exactly(self, start: int, end: int) -> bytes:
        got = self._fetch(start, end)
        if len(got) != end - start:
            raise ConnectionError(f"{len(got):,} of {end - start:,} bytes arrived")
        return got


def open_remote(address: str, block: int | None = None) -> BinaryIO:
    """A remote file, buffered.

    Args:
        block: bytes that are asked for at once; None: `BLOCK`, 0: what each read wants.

    Raises:
        DataError: nothing is there, nobody answers, it may not be read, or a package is missing.
    """
    file = RemoteFile(address)
    if block == 0:
        return cast("BinaryIO", file)
    return cast("BinaryIO", io.BufferedReader(file, block or BLOCK))


def remote_identity(address: str) -> str:
    """Hexadecimal digest of a remote file's address, size and version; reads none of it.

    Raises:
        DataError: as for `open_remote`.
    """
    file = RemoteFile(address)
    return key_of("remote", shown(address), file.size, file.version)


def copied(address: str, cache: Cache) -> Path:
    """The copy of a remote file in the cache, made if there is none of this version.

    Raises:
        DataError: as for `open_remote`.
    """

    def copy(folder: Path) -> dict[str, Any]:
        with open_remote(address) as source, (folder / name).open("wb") as target:
            while part := source.read(BLOCK):
                target.write(part)
        return {"address": shown(address)}

    name = Path(urlsplit(address).path).name
    return cache.entry("files", remote_identity(address), copy).folder / name


def shown(address: str) -> str:
    """An address as messages and records have it: without query and user, which may be secrets."""
    return without_users(urlsplit(address)._replace(query="", fragment="").geturl())


def _opened(address: str) -> _Opened:
    from huggingface_hub import constants

    endpoint = str(constants.ENDPOINT)
    if address.startswith(f"{endpoint}/") and "/resolve/" in address:
        # The same file by the hub's own means, which know the user's token.
        path = address.removeprefix(f"{endpoint}/").replace("/resolve/", "@", 1)
        address = f"hf://{path}".partition("?")[0]
    scheme = urlsplit(address).scheme
    if scheme in ("http", "https", "hf") and constants.HF_HUB_OFFLINE:
        raise DataError(
            f"{shown(address)}: HF_HUB_OFFLINE is set, and this is read over the network; unset it"
        )
    if scheme in ("http", "https"):
        return _over_http(address)
    return _by_fsspec(address)


def _over_http(address: str) -> _Opened:
    """Ask for the first byte: servers tell the size with it, and whether they send parts."""
    first = _get(address, 0, 1)
    if first.status == 416:  # an empty file has no first byte
        return _Opened(size=0, version="", fetch=lambda start, end: b"")
    if "text/html" in first.headers.get("Content-Type", ""):
        raise DataError(
            f"{shown(address)}: the server sends a web page (text/html) in place of data; give the "
            "address of the file itself (on the hub with /resolve/ in place of /blob/, on GitHub "
            "its raw address)"
        )
    whole = re.fullmatch(r"bytes 0-0/(\d+)", first.headers.get("Content-Range", ""))
    if first.status != 206 or whole is None:
        raise DataError(
            f"{shown(address)}: the server sends whole files only (it does not know the header "
            "Range), so rows cannot be read from it as they are needed; download the file, and "
            "give its path"
        )

    def fetch(start: int, end: int) -> bytes:
        answer = _get(address, start, end)
        if answer.version != first.version:
            raise DataError(f"{shown(address)} changed while it was being read; start again")
        return answer.content

    return _Opened(size=int(whole[1]), version=first.version, fetch=fetch)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def version(self) -> str:
        return self.headers.get("ETag") or self.headers.get("Last-Modified", "")


def _get(address: str, start: int, end: int) -> _Answer:
    from huggingface_hub.utils import get_session

    session: Any = get_session()
    # Compressed on the way, bytes would have other numbers.
    headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    # As streams: of a server that ignores the range, the head alone is read.
    if hasattr(session, "build_request"):  # httpx, since huggingface_hub 1.0
        request = session.build_request("GET", address, headers=headers, timeout=_ANSWER_S)
        answer = session.send(request, stream=True)
    else:  # requests
        answer = session.get(address, headers=headers, timeout=_ANSWER_S, stream=True)
    try:
        status = int(answer.status_code)
        if status in _BUSY:
            raise ConnectionError(f"the server answers {status}")
        if status in (401, 403):
            raise DataError(
                f"{shown(address)}: the server refuses access ({status}). A signed address may "
                "have expired, and a private file needs a signed address"
            )
        if status in (404, 410):
            raise DataError(f"{shown(address)}: no such file on the server ({status})")
        if status >= 400 and status != 416:
            raise DataError(f"{shown(address)}: the server answers {status}")
        content = b""
        if status == 206:
            content = answer.read() if hasattr(session, "build_request") else answer.content
        return _Answer(status=status, headers=answer.headers, content=content)
    finally:
        answer.close()


def _by_fsspec(address: str) -> _Opened:
    import fsspec
    from huggingface_hub import constants

    scheme = urlsplit(address).scheme
    options = {"endpoint": constants.ENDPOINT} if scheme == "hf" else {}
    try:
        files, path = fsspec.core.url_to_fs(address, **options)
    except ImportError:
        package = _PACKAGES.get(scheme, "its package")
        raise DataError(
            f"{shown(address)}: {scheme}:// is read by {package}, which is not installed: "
            f"pip install {package}"
        ) from None
    except ValueError as error:
        raise DataError(f"{shown(address)} is not an address that can be read: {error}") from None
    details = files.info(path)
    known = details.get("ETag") or details.get("etag") or details.get("blob_id")
    known = known or details.get("mtime") or details.get("LastModified") or ""
    file = files.open(path, "rb", cache_type="none")

    def fetch(start: int, end: int) -> bytes:
        file.seek(start)
        return cast("bytes", file.read(end - start))

    return _Opened(size=int(details["size"]), version=str(known), fetch=fetch)


def _retried(what: str, work: Callable[[], Any]) -> Any:
    """What `work` returns; once more where a connection breaks or the server is busy.

    Raises:
        DataError: names what was to be read.
    """
    for wait in (*WAITS_S, None):
        try:
            return work()
        except DataError:
            raise
        except Exception as error:  # which class it is depends on the library below the library
            said = str(error).strip().partition("\n")[0] or type(error).__name__
            status = getattr(getattr(error, "response", None), "status_code", None)
            if isinstance(error, FileNotFoundError) or status in (404, 410):
                raise DataError(
                    f"{what}: no such file there; a private or gated repository of the hub needs a "
                    "login (hf auth login)"
                ) from None
            if isinstance(error, PermissionError) or status in (401, 403):
                raise DataError(f"{what} may not be read: {said}") from None
            if wait is None:
                raise DataAccessError(
                    f"{what} cannot be read, after {len(WAITS_S) + 1} tries: {said}. Check the "
                    "address and the network (HTTPS_PROXY), then resume the run"
                ) from None
            time.sleep(wait)
    raise AssertionError("the last try returns or raises")
