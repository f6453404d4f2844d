"""Files of other machines, read by fsspec: over HTTP, from the hub (`hf://`), from object stores.

Rows are read as bytes arrive, from any place where the server sends ranges. A connection that
breaks, or a server that is busy, is tried again for about half a minute; what can never work is
refused at once. Each error is a `DataError` that names the address.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

from anygauge.data.cache import Cache, key_of
from anygauge.interface import DataAccessError, DataError
from anygauge.util.files import write_text
from anygauge.util.hiding import without_users

Result = TypeVar("Result")

WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Before each further try."""
SILENCE_S = 30.0
"""Without a byte of an answer."""
BLOCK = 2**23
"""Bytes that are asked for at once while rows are read in order."""
SMALL_BLOCK = 2**16
"""The same, where a little of a file is looked at."""

_HTTP = ("http", "https")
_VERSIONS = ("ETag", "etag", "blob_id", "md5Hash", "Last-Modified", "mtime", "LastModified")
"""What file systems call that which changes with a file's content."""
_HOPELESS = {
    "TooManyRedirects": "the server redirects again and again",
    "NonHttpUrlRedirectClientError": "the server redirects to another protocol",
    "InvalidUrlRedirectClientError": "the server redirects to what is not an address",
    "InvalidUrlClientError": "it is not a valid address",
    "InvalidURL": "it is not a valid address",
}
"""Of aiohttp's errors, those that come again however often one tries."""
_RETRY = (408, 425, 429)
"""Of answers that refuse, those that may be others later."""
_LOGIN = "private or gated repository of the hub needs a login (hf auth login)"


def describe_address(address: str) -> str:
    """An address as messages and records have it: without query and user, which may be secrets."""
    return without_users(urlsplit(address)._replace(query="", fragment="").geturl())


class _RemoteFile(io.RawIOBase):
    """One file, read from any place; what the server calls its content (`version`: an ETag, a
    digest) and its `size` in bytes, where it says so."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._name = describe_address(address)
        self._at = 0
        self._file: Any = None
        self._options: dict[str, Any] = {"cache_type": "none"}
        self._files, self._path = with_retry(self._name, lambda: _file_system(address))
        details = with_retry(self._name, lambda: self._files.info(self._path))
        self.size: int | None = details.get("size")
        self.version = str(next(filter(None, map(details.get, _VERSIONS)), ""))
        if self.version and self._path.startswith(_HTTP):
            self._options["headers"] = {"If-Match": self.version}
        if details.get("mimetype") == "text/html":
            raise DataError(
                f"{self._name}: the server sends a web page (text/html) in place of data; give the "
                "address of the file itself (on the hub with /resolve/ in place of /blob/, on "
                "GitHub its raw address)"
            )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self.size is not None

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size or 0}
        at = starts[whence] + offset
        if at != self._at:
            self._at, self._file = at, None
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = len(buffer) if self.size is None else min(len(buffer), self.size - self._at)
        if wanted <= 0:
            return 0
        place = f"{self._name} (byte {self._at:,})"
        count = with_retry(place, lambda: self._read(buffer, wanted))
        self._at += count
        return count

    def _read(self, buffer: Any, wanted: int) -> int:
        """Read; a connection that breaks leaves nothing."""
        file, self._file = self._file or self._open_at_position(), None
        count = 0
        try:
            while count < wanted and (part := file.read(wanted - count)):
                buffer[count : count + len(part)] = part
                count += len(part)
        except ValueError:  # fsspec's of a server that sends whole files alone: the next try does
            self._options["block_size"] = 0
            raise
        if self.size is not None and count < wanted:
            raise ConnectionError(f"{count:,} of {wanted:,} bytes arrived")
        self._file = file
        return count

    def _open_at_position(self) -> Any:
        """The file at the place that is read next."""
        file = self._files.open(self._path, "rb", **self._options)
        try:
            file.seek(self._at)
        except ValueError:  # a whole file
            left = self._at
            while left and (part := file.read(min(left, BLOCK))):
                left -= len(part)
        return file


def open_remote(address: str, block: int = BLOCK) -> BinaryIO:
    """Open a remote file. `block`: bytes to request at once; 0: what each read wants."""
    file = _RemoteFile(address)
    return cast("BinaryIO", io.BufferedReader(file, block) if block else file)


def remote_identity(address: str) -> str:
    """Hexadecimal digest of a remote file's address, size and version; reads none of it."""
    file = _RemoteFile(address)
    return key_of("remote", describe_address(address), file.size, file.version)


def local_copy(
    address: str, cache: Cache, show: Callable[[int, int], None] = lambda done, total: None
) -> Path:
    """The copy of a remote file in the cache, made if there is none of this version.

    The version is asked for once in a start (`Cache.run`): its other processes need no network.

    Args:
        show: takes the bytes that are here, and all, where that is known, again and again.
    """

    def copy(folder: Path) -> dict[str, Any]:
        remote, done = _RemoteFile(address), 0
        with io.BufferedReader(remote, BLOCK) as source, (folder / name).open("wb") as target:
            while part := source.read(BLOCK):
                done += target.write(part)
                show(done, remote.size or 0)
        return {"address": describe_address(address)}

    name = Path(urlsplit(address).path).name
    asked = cache.folder / "addresses" / key_of(cache.run, address)
    if asked.exists() and (path := cache.folder / "files" / asked.read_text() / name).exists():
        return path
    identity = remote_identity(address)
    path = cache.entry("files", identity, copy).folder / name
    write_text(asked, identity)
    return path


def _file_system(address: str) -> tuple[Any, str]:
    """fsspec's file system of an address, and the path there."""
    import fsspec
    from huggingface_hub import constants

    endpoint = str(constants.ENDPOINT)
    if address.startswith(f"{endpoint}/") and "/resolve/" in address:
        # The same file by the hub's own means, which know the user's token.
        path = address.removeprefix(f"{endpoint}/").replace("/resolve/", "@", 1)
        address = f"hf://{path}".partition("?")[0]
    scheme, described = urlsplit(address).scheme, describe_address(address)
    if scheme in (*_HTTP, "hf") and constants.HF_HUB_OFFLINE:
        raise DataError(
            f"{described}: HF_HUB_OFFLINE is set, and this is read over the network; unset it"
        )
    options: dict[str, Any] = {"endpoint": endpoint} if scheme == "hf" else {}
    try:
        if scheme in _HTTP:
            from aiohttp import ClientTimeout

            limits = ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
            options["client_kwargs"] = {"timeout": limits, "trust_env": True}
        files, path = fsspec.core.url_to_fs(address, **options)
    except ImportError as error:
        raise DataError(f"{described} needs a package that is not installed: {error}") from None
    except ValueError as error:
        raise DataError(f"{described} is not an address that can be read: {error}") from None
    return files, path


def with_retry(what: str, work: Callable[[], Result]) -> Result:
    """What `work` returns; once more where a connection breaks or the server is busy."""
    waits = iter(WAITS_S)
    while True:
        try:
            return work()
        except DataError:
            raise
        except Exception as raised:  # which class it is depends on the library below the library
            error, cause = raised, raised.__cause__
            if isinstance(raised, FileNotFoundError) and isinstance(cause, Exception):
                # Over HTTP, fsspec calls all not found that it cannot ask about.
                error = raised if hasattr(cause, "response") else cause
            refused = _permanent_error(what, error)
            if refused is not None:
                raise refused from None
            wait = next(waits, None)
            if wait is None:
                raise DataAccessError(
                    f"{what} cannot be read, after {len(WAITS_S) + 1} tries: "
                    f"{_describe_error(error)}. Check the address and the network (HTTPS_PROXY), "
                    "then resume the run"
                ) from None
            time.sleep(wait)


def _permanent_error(what: str, error: Exception) -> DataError | None:
    """Return the error where a new attempt would end alike; None where it may not."""
    answer = getattr(error, "response", error)
    status = getattr(answer, "status_code", getattr(answer, "status", None))
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return DataError(f"{what}: no such file there; a {_LOGIN}")
    if isinstance(error, PermissionError) or status in (401, 403):
        signed = "A signed address may have expired, and a private file needs a signed address"
        remedy = f"A {_LOGIN}" if hasattr(error, "response") else signed
        return DataError(f"{what} may not be read: {_describe_error(error).rstrip('.')}. {remedy}")
    if status == 412:
        return DataError(f"{what} changed while it was being read; start again")
    hopeless = type(error).__name__ in _HOPELESS or isinstance(error, io.UnsupportedOperation)
    if hopeless or (isinstance(status, int) and 400 <= status < 500 and status not in _RETRY):
        return DataError(f"{what} cannot be read: {_describe_error(error)}")
    return None


def _describe_error(error: Exception) -> str:
    """Describe an error, without what addresses hold that may be secrets."""
    name = type(error).__name__
    if name in _HOPELESS:
        return _HOPELESS[name]
    if isinstance(status := getattr(error, "status", None), int):
        return f"the server answers {status} ({getattr(error, 'message', '')})"
    said = str(error).strip().partition("\n")[0] or name
    return re.sub(r"(\w+://[^\s?#'\"]*)[?#][^\s'\"]*", r"\1", said)
