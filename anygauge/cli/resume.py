"""What can be said, before a rank is started, of a run that is to be gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.cli.run_folder import RUN_FILE, goes_on
from anygauge.interface import AnygaugeError

if TYPE_CHECKING:
    from anygauge.cli.intent import Intent
    from anygauge.training.checkpoints.identity import Finished

_DECIDE = ("model", "adapter", "data", "train")
"""Sections that decide what is trained, and for how long."""


def gone_on_with(intent: Intent) -> tuple[bool, Finished | None]:
    """Whether a start resumes the run of its folder, and that run if it is done already.

    For a run and its dry run alike; only where the files are on this machine.

    Raises:
        AnygaugeError: what is to be gone on from is not a checkpoint, or belongs to another run.
    """
    run, folder = intent.run, Path(intent.job.run_directory)
    resume = run.checkpoint.resume
    launcher = intent.registry.find_launcher(run.launch.launcher).spec
    if not launcher.shared_filesystem or resume == "never":
        return False, None
    if resume != "auto":
        _check_named(run, Path(resume))
        return False, None
    if not goes_on(folder):
        return False, None
    return True, finished_before(run, folder)


def _check_named(run: Any, checkpoint: Path) -> None:
    """What ranks would refuse of ``--resume FOLDER``, but for the contents of its large files."""
    from anygauge.training.checkpoints.identity import check_same_run, identity_of_file
    from anygauge.training.checkpoints.sound import read_record, refusal_of

    refusal = refusal_of(checkpoint, contents=False)
    if refusal is not None:
        raise AnygaugeError(refusal)
    check_same_run(checkpoint, read_record(checkpoint)["identity"], identity_of_file(run))


def finished_before(run: Any, folder: Path) -> Finished | None:
    """The run of a folder, if it is done and just this was asked for; reads records, no tensors.

    Where sections differ, the ranks decide: they know the data and the number of steps.

    Raises:
        RunFileError: what the folder holds belongs to another run.
    """
    from anygauge.training.checkpoints.identity import (
        check_same_run,
        finished_run,
        identity_of_file,
    )
    from anygauge.training.checkpoints.sound import checkpoints_in, complaint_about, read_record

    finished = finished_run(folder)
    kept, where = (finished.identity if finished else {}), folder
    if not kept:
        sound = (p for p in checkpoints_in(folder) if complaint_about(p, contents=False) is None)
        newest = next(sound, None)
        if newest is not None:
            kept, where = read_record(newest)["identity"], newest
    if kept:
        check_same_run(where, kept, identity_of_file(run))
    return finished if finished and _asks_the_same(run, folder) else None


def _asks_the_same(run: Any, folder: Path) -> bool:
    from anygauge.config import load_run_file

    try:
        before = load_run_file(folder / RUN_FILE).run
    except AnygaugeError:
        return False
    return all(getattr(before, name) == getattr(run, name) for name in _DECIDE)
