"""Entries are whole or not there, shared by processes, and known by the bytes of their source."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from anygauge.data import cache as cache_module
from anygauge.data.cache import Cache, cache_folder, quick_identity
from anygauge.interface import DataError

FILES = ["none", "numbers"]


def numbers(folder: Path) -> dict[str, int]:
    (folder / "numbers").write_bytes(np.arange(1000).tobytes())
    (folder / "none").write_bytes(b"")
    return {"count": 1000}


def never(folder: Path) -> dict[str, int]:
    raise AssertionError("it is there already")


def test_an_entry_is_built_once(tmp_path):
    cache = Cache(tmp_path / "deep" / "cache")
    built = cache.entry("numbers", "k", numbers)
    found = Cache(tmp_path / "deep" / "cache").entry("numbers", "k", never)
    assert (built.found, found.found) == (False, True)
    assert (built.built, built.facts) == (found.built, found.facts)
    assert found.facts == {"count": 1000}
    assert sorted(each.name for each in found.folder.iterdir()) == ["manifest.json", *FILES]
    assert not cache.entry("numbers", "other", numbers).found


@pytest.mark.parametrize("harm", ["shorten", "remove", "manifest", "format"])
def test_a_damaged_entry_is_built_anew_and_said(tmp_path, harm):
    said = []
    cache = Cache(tmp_path, said.append)
    folder = cache.entry("numbers", "k", numbers).folder
    manifest = folder / "manifest.json"
    if harm == "shorten":
        os.truncate(folder / "numbers", 7000)
    elif harm == "remove":
        (folder / "none").unlink()
    elif harm == "manifest":
        os.truncate(manifest, 20)
    else:
        manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 1'))
    again = cache.entry("numbers", "k", numbers)
    assert not again.found
    assert (again.folder / "numbers").stat().st_size == 8000
    why = "of another version of anygauge" if harm == "format" else "damaged"
    assert said == [f"cache: {folder} is {why} and is built again"]
    assert sorted(each.name for each in folder.parent.iterdir()) == ["k", "k.lock"]
    assert cache.entry("numbers", "k", never).found


def test_a_builder_that_fails_leaves_nothing(tmp_path):
    def fails(folder: Path) -> dict[str, int]:
        numbers(folder)
        raise DataError("row 7 is wrong")

    cache = Cache(tmp_path)
    with pytest.raises(DataError, match="row 7"):
        cache.entry("numbers", "k", fails)
    assert [each.name for each in (tmp_path / "numbers").iterdir()] == ["k.lock"]
    assert not cache.entry("numbers", "k", numbers).found


def test_without_a_folder_nothing_is_kept_but_what_is_mapped_stays(tmp_path):
    with Cache(None) as cache:
        folder = cache.entry("numbers", "k", numbers).folder
        array = np.memmap(folder / "numbers", dtype=np.int64, mode="r")
    assert not cache.folder.exists()
    assert array[-1] == 999


BUILD = """
import sys, time
from pathlib import Path
from anygauge.data.cache import Cache

def slow(folder):
    print("building", flush=True)
    (folder / "file").write_bytes(b"x" * 10)
    time.sleep(float(sys.argv[2]))
    return {}

entry = Cache(Path(sys.argv[1])).entry("slow", "k", slow)
print("found" if entry.found else "built", (entry.folder / "file").stat().st_size)
"""


def builder(folder: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD, str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_when_the_builder_dies_another_one_builds_and_the_rest_wait(tmp_path):
    first = builder(tmp_path, 600)
    assert first.stdout is not None
    assert first.stdout.readline() == "building\n"
    others = [builder(tmp_path, 3) for _ in range(2)]
    assert len(list((tmp_path / "slow").glob(".k.*"))) == 1, "what it leaves behind"
    first.kill()
    first.wait()
    first.stdout.close()
    said = sorted(other.communicate(timeout=120)[0] for other in others)
    assert said == ["building\nbuilt 10\n", "found 10\n"]
    assert sorted(each.name for each in (tmp_path / "slow").iterdir()) == ["k", "k.lock"]


def test_a_digest_is_remembered_until_the_file_is_touched(tmp_path, monkeypatch):
    cache, file = Cache(tmp_path / "cache"), tmp_path / "file"
    file.write_bytes(b"first")
    before = cache.digest(str(file))
    assert not (tmp_path / "cache" / "digests").exists(), "it may change within the clock's tick"
    monkeypatch.setattr(cache_module, "_FRESH_S", 0.0)
    assert cache.digest(str(file)) == before
    assert before == "a7937b64b8caa58f03721bb6bacf5c78cb235febe0e70b1b84cd99541461a08e"
    monkeypatch.setattr(cache_module.hashlib, "file_digest", None)
    assert cache.digest(str(file)) == before
    monkeypatch.undo()
    monkeypatch.setattr(cache_module, "_FRESH_S", 0.0)
    stat = file.stat()
    time.sleep(0.05)
    file.write_bytes(b"other")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert cache.digest(str(file)) != before


def test_the_quick_identity_reads_the_ends_alone(tmp_path):
    file, copy = tmp_path / "file", tmp_path / "copy"
    content = bytearray(3 * 2**20)
    file.write_bytes(content)
    copy.write_bytes(content)
    base = quick_identity(str(file))
    assert quick_identity(str(copy)) == base
    for place, told in ((0, True), (len(content) - 1, True), (len(content) // 2, False)):
        changed = bytearray(content)
        changed[place] = 1
        copy.write_bytes(changed)
        assert (quick_identity(str(copy)) != base) is told
    with pytest.raises(DataError, match="no such file"):
        quick_identity(str(tmp_path / "nowhere"))


def test_where_the_cache_is(tmp_path):
    assert cache_folder("off", {"ANYGAUGE_CACHE": "/a"}) is None
    assert cache_folder("/b", {"ANYGAUGE_CACHE": "/a"}) == Path("/b")
    assert cache_folder(None, {"ANYGAUGE_CACHE": "/a", "HOME": "/h"}) == Path("/a")
    assert cache_folder(None, {"HOME": "/h"}) == Path("/h/.cache/anygauge")


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be used: .*; name another folder in data\.cache"):
        Cache(tmp_path / "file" / "cache")
