"""Points that a run can be resumed from: written, verified, kept by count and by loss, found."""

from anygauge.training.checkpoints.files import Checkpoint, complaint_about, write_checkpoint
from anygauge.training.checkpoints.identity import identity_of, settings_of
from anygauge.training.checkpoints.keeper import CheckpointKeeper, checkpoint_folder
from anygauge.training.checkpoints.resume import (
    Resumed,
    changed_settings,
    check_same_run,
    find_checkpoint,
)
from anygauge.training.checkpoints.stop import StopRequest

__all__ = [
    "Checkpoint",
    "CheckpointKeeper",
    "Resumed",
    "StopRequest",
    "changed_settings",
    "check_same_run",
    "checkpoint_folder",
    "complaint_about",
    "find_checkpoint",
    "identity_of",
    "settings_of",
    "write_checkpoint",
]
