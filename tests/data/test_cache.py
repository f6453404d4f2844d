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
from anygauge.data.cache import Cache, cache_folder
from anygauge.interface import DataError


def numbers(folder):
    (folder / "numbers").write_bytes(np.arange(1000).tobytes())
    (folder / "none").write_bytes(b"")
    return {"count": 1000}


def never(folder):
    raise AssertionError("it is there already")


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_an_entry_is_built_once(tmp_path):
    folder = tmp_path / "deep" / "cache"
    built = Cache(folder).entry("numbers", "k", numbers)
    found = Cache(folder).entry("numbers", "k", never)
    assert built.built is None
    assert abs(time.mktime(time.strptime(found.built, "%Y-%m-%d %H:%M:%S")) - time.time()) < 600
    assert built.facts == found.facts == {"count": 1000}
    assert names(found.folder) == ["manifest.json", "none", "numbers"]
    assert Cache(folder).entry("numbers", "other", numbers).built is None


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: os.truncate(folder / "numbers", 7000),
        lambda folder: (folder / "none").unlink(),
        lambda folder: os.truncate(folder / "manifest.json", 20),
    ],
)
def test_a_damaged_entry_is_built_anew_and_said(tmp_path, harm):
    said = []
    folder = Cache(tmp_path).entry("numbers", "k", numbers).folder
    harm(folder)
    again = Cache(tmp_path, said.append).entry("numbers", "k", numbers)
    assert again.built is None
    assert (again.folder / "numbers").stat().st_size == 8000
    assert said == [f"cache: {folder} is damaged and is built again"]
    assert names(folder.parent) == ["k", "k.lock"]
    assert Cache(tmp_path).entry("numbers", "k", never).built


def test_a_builder_that_fails_leaves_nothing(tmp_path):
    def fails(folder):
        numbers(folder)
        raise DataError("row 7 is wrong")

    with pytest.raises(DataError, match="row 7"):
        Cache(tmp_path).entry("numbers", "k", fails)
    assert names(tmp_path / "numbers") == ["k.lock"]


def test_without_a_folder_nothing_is_kept_but_what_is_mapped_stays():
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
    (folder / "file").write_bytes(b"x" * 10)
    print("building", flush=True)
    time.sleep(float(sys.argv[2]))
    return {}

entry = Cache(Path(sys.argv[1])).entry("slow", "k", slow)
print("found" if entry.built else "built", (entry.folder / "file").stat().st_size)
"""


def builder(folder, seconds):
    command = [sys.executable, "-c", BUILD, str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_when_the_builder_dies_another_one_builds_and_the_rest_wait(tmp_path):
    first = builder(tmp_path, 600)
    assert first.stdout.readline() == "building\n"
    others = [builder(tmp_path, 3) for _ in range(2)]
    assert (tmp_path / "slow" / ".k" / "file").exists(), "what it leaves behind"
    first.kill()
    first.communicate()
    said = sorted(other.communicate(timeout=120)[0] for other in others)
    assert said == ["building\nbuilt 10\n", "found 10\n"]
    assert names(tmp_path / "slow") == ["k", "k.lock"]


def test_a_digest_is_remembered_until_the_file_is_touched(tmp_path, monkeypatch):
    cache, file = Cache(tmp_path / "cache"), tmp_path / "file"
    file.write_bytes(b"first")
    before = cache.digest(str(file))
    assert before == "a7937b64b8caa58f03721bb6bacf5c78cb235febe0e70b1b84cd99541461a08e"
    assert not (tmp_path / "cache" / "digests").exists(), "it may change within the clock's tick"
    monkeypatch.setattr(cache_module, "_FRESH_S", 0.0)
    assert cache.digest(str(file)) == before
    with monkeypatch.context() as unread:
        unread.setattr(cache_module.hashlib, "file_digest", None)
        assert cache.digest(str(file)) == before
    stat = file.stat()
    time.sleep(0.05)
    file.write_bytes(b"other")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert cache.digest(str(file)) != before
    with pytest.raises(DataError, match="no such file"):
        cache.digest(str(tmp_path / "nowhere"))


def test_where_the_cache_is(tmp_path):
    assert cache_folder("off", {"ANYGAUGE_CACHE": "/a"}) is None
    assert cache_folder("/b", {"ANYGAUGE_CACHE": "/a"}) == Path("/b")
    assert cache_folder(None, {"ANYGAUGE_CACHE": "/a", "HOME": "/h"}) == Path("/a")
    assert cache_folder(None, {"HOME": "/h"}) == Path("/h/.cache/anygauge")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be used: .*; name another folder in data\.cache"):
        Cache(tmp_path / "file" / "cache")
