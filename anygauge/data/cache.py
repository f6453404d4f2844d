"""Keeps what is computed once from a file: tokenized rows, copies, numbers of packs.

An entry is a folder named by a digest of all that decides it. It is built beside its place under a
lock, flushed and renamed, and its manifest tells the size of every file: whoever opens an entry
has a whole one. Several ranks and runs share it; one builds, the others wait for the lock, which
the kernel frees when its holder dies. All of them then map the same files.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.interface import DataAccessError, DataError
from anygauge.util.files import flush, write_text
from anygauge.util.text import near_file

MANIFEST = "manifest.json"

_DIGEST = 1
"""Of keys and fingerprints: a run is resumed on data with the same ones."""
_FRESH_S = 2.0


def cache_folder(setting: str | None, environ: Mapping[str, str]) -> Path | None:
    """The folder that `data.cache` means; None where nothing is to be kept."""
    if setting == "off":
        return None
    home = environ.get("HOME") or "~"
    folder = setting or environ.get("ANYGAUGE_CACHE") or f"{home}/.cache/anygauge"
    return Path(folder).expanduser().absolute()


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A whole entry.

    Attributes:
        facts: what the builder said about it.
        built: when another run built it, in local time: ``2026-11-20 13:05:11``; None where this
            one did.
    """

    folder: Path
    facts: Mapping[str, Any]
    built: str | None


class Cache:
    """A folder of entries.

    Args:
        folder: None keeps nothing: entries live in a temporary folder until `with` ends, and files
            that were mapped stay valid.
        run: what tells the start of a run from others: what one of its processes builds is new to
            all of them. Empty: only this object's own entries are new.
    """

    def __init__(
        self, folder: Path | None, log: Callable[[str], None] = lambda text: None, run: str = ""
    ) -> None:
        self._kept, self._log, self.run = folder, log, run or secrets.token_hex(8)
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder = folder or Path(tempfile.mkdtemp(prefix="anygauge-rows-"))
        except OSError as error:
            raise _cache_error(folder, error) from None

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove what is not to be kept."""
        if self._kept is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def entry(self, kind: str, key: str, build: Callable[[Path], Mapping[str, Any]]) -> Entry:
        """The entry of a key, built if there is none.

        Args:
            kind: folder of entries of one sort.
            key: hexadecimal digest of all that decides the entry.
            build: writes files into an empty folder and returns facts for the manifest (JSON);
                what it raises is raised.
        """
        home = self.folder / kind
        place = home / key
        try:
            if found := self._read(place):
                return found
            home.mkdir(parents=True, exist_ok=True)
            with (home / f"{key}.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if found := self._read(place):
                    return found
                if place.exists():
                    self._log(f"cache: {place} is damaged and is built again")
                return self._build(place, build)
        except OSError as error:
            raise _cache_error(self._kept, error) from None

    def _read(self, place: Path) -> Entry | None:
        """The entry in a folder, if it is whole."""
        manifest = _read_manifest(place / MANIFEST)
        if not manifest:
            return None
        files = manifest["files"].items()
        with contextlib.suppress(FileNotFoundError):
            if all((place / name).stat().st_size == size for name, size in files):
                built = None if manifest["run"] == self.run else manifest["built"]
                return Entry(folder=place, facts=manifest["facts"], built=built)
        return None

    def _build(self, place: Path, build: Callable[[Path], Mapping[str, Any]]) -> Entry:
        """Build an entry whose lock this process holds."""
        folder = place.with_name(f".{place.name}")
        shutil.rmtree(folder, ignore_errors=True)  # left by a builder that was killed
        folder.mkdir()
        try:
            facts = dict(build(folder))
            manifest = {
                "built": time.strftime("%Y-%m-%d %H:%M:%S"),
                "run": self.run,
                "files": {each.name: each.stat().st_size for each in folder.iterdir()},
                "facts": facts,
            }
            write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
            for each in (*folder.iterdir(), folder):
                flush(each)
            shutil.rmtree(place, ignore_errors=True)
            folder.rename(place)
            flush(place.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return Entry(folder=place, facts=facts, built=None)

    def digest(self, path: str) -> str:
        """SHA-256 of a file's bytes, in hexadecimal; remembered while the file is not touched.

        Touched means another size, inode, or time of change as the file system keeps it (ctime),
        which no program can set back. A file changed a moment ago is never remembered as it is:
        two changes could fall in one tick of that clock.
        """
        file = Path(path).expanduser().absolute()
        name = hashlib.sha256(os.fsencode(file)).hexdigest()
        note = self.folder / "digests" / f"{name}.json"
        try:
            before = _file_identity(file)
            known = _read_manifest(note)
            if known.get("identity") == before:
                return str(known["digest"])
            age = time.time() - file.stat().st_ctime
            with file.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            if _file_identity(file) != before:
                raise DataError(f"{path} changed while it was read; try again once it is complete")
        except OSError as error:
            raise read_error(path, error) from None
        if age >= _FRESH_S:
            text = json.dumps({"path": str(file), "identity": before, "digest": digest})
            with contextlib.suppress(OSError):  # whoever needs the cache will say so
                write_text(note, text + "\n")
        return digest


def key_of(*parts: Any) -> str:
    """Hexadecimal digest of values that JSON can write."""
    return hashlib.sha256(json.dumps([_DIGEST, *parts], sort_keys=True).encode()).hexdigest()


def read_error(path: str, error: OSError) -> DataError:
    """Return the error of a data file that cannot be opened or read."""
    if isinstance(error, FileNotFoundError):
        file = Path(path).expanduser().absolute()
        return DataError(f"{path}: no such file (looked at {file}){near_file(file)}")
    return DataError(f"{path} cannot be read: {error.strerror or error}")


def _file_identity(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]


def _read_manifest(path: Path) -> dict[str, Any]:
    """What a file holds; nothing where it is not there or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        value = None
    return value if isinstance(value, dict) else {}


def _cache_error(folder: Path | None, error: OSError) -> DataAccessError:
    where = f"the temporary folder {tempfile.gettempdir()}"
    remedy = "make room there, or name another folder in TMPDIR"
    if folder is not None:
        where, other = f"the cache {folder}", "name another folder in data.cache or ANYGAUGE_CACHE"
        remedy = f"{other}, or switch it off (data.cache: off)"
    return DataAccessError(f"{where} cannot be used: {error.strerror or error}; {remedy}")
