"""A folder has one run at a time, also while the ranks of a killed command still save."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from anygauge.interface import AnygaugeError
from anygauge.launch.run_directory import lock_folder
from tests.helpers.child_processes import alive, as_in_a_terminal, until
from tests.launch.fakes import FAKE_CLI, read_pid, write_script


def is_claimed(folder: Path) -> bool:
    try:
        with lock_folder(folder):
            return False
    except AnygaugeError as error:
        assert "a run is writing to" in str(error)
        assert "wait until it ends" in str(error)
        return True


def test_a_claim_ends_with_its_block_and_another_changes_nothing(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        marks = [tmp_path / name for name in ("cancelled", "rendezvous")]
        for mark in marks:
            mark.touch()
        assert is_claimed(tmp_path)
        assert all(mark.exists() for mark in marks)
    assert not is_claimed(tmp_path)


def test_the_lock_is_its_owners_alone_and_is_not_truncated(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        lock = tmp_path / ".lock"
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    lock.write_text("kept")
    with lock_folder(tmp_path):
        assert lock.read_text() == "kept"


def test_a_start_removes_what_a_kill_left_of_a_result(tmp_path: Path) -> None:
    left, other = tmp_path / ".model.part", tmp_path / ".merged.part"
    for part in (left, other):
        part.mkdir()
        (part / "model.safetensors").write_bytes(b"half")
    with lock_folder(tmp_path):
        assert not left.exists() and other.exists()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGHUP])
def test_the_folder_is_free_when_the_last_rank_of_a_command_is_gone(
    tmp_path: Path, signum: int
) -> None:
    # A rank that saves for as long as it likes: it is done when it finds the file.
    script = write_script(
        tmp_path, {0: [["ignore", signal.SIGTERM], ["touch", "up"], ["wait", "saved"], ["exit", 0]]}
    )
    folder = tmp_path / "run"
    command = subprocess.Popen(
        [sys.executable, FAKE_CLI, script, folder, "1", "0.5"], preexec_fn=as_in_a_terminal
    )
    try:
        until((tmp_path / "up").exists, "the rank")
        rank = read_pid(tmp_path / "pid0")
        held = [each.readlink() for each in Path(f"/proc/{rank}/fd").iterdir() if each.is_symlink()]
        assert folder / ".lock" in held
        command.send_signal(signum)
        if signum == signal.SIGHUP:  # a terminal that closes lets the ranks save
            with pytest.raises(subprocess.TimeoutExpired):
                command.wait(timeout=1)
            assert is_claimed(folder) and alive(rank)
            (tmp_path / "saved").touch()
        command.wait(timeout=60)
        until(lambda: not alive(rank), "the end of the rank")
    finally:
        command.kill()
    assert not is_claimed(folder)
