"""Limits the prepare process's silence, and explains how one was ended."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from anygauge.interface import AnygaugeError, DataError
from anygauge.models.hub import HubUnreachableError
from anygauge.util.processes import describe_exit
from anygauge.util.text import format_bytes

if TYPE_CHECKING:
    from anygauge.launch.prepare_request import PrepareRequest

LIMITS_S = {"fetch": 300.0, "model": 120.0, "data": 1800.0, "plan": 30.0}
"""Silence after which a stage counts as hung. The hub's library itself tries again for a minute.
Tokenizing reports from time to time; a digest of a large file, or the wait for another run that
tokenizes the same rows, does not. Without a plan the run starts all the same."""
RENDERING_LIMIT_S = 60.0
"""For one rendering of a chat template, which takes milliseconds; a second for a thousand turns."""

_TAIL = 2000


class PrepareWork:
    """What the process is at, and the errors of one that was ended there.

    Attributes:
        stage: see `anygauge.launch.prepare_process.Stages`.
    """

    def __init__(self, request: PrepareRequest) -> None:
        self.stage = "fetch" if request.needs_fetch else "model"
        self._request = request
        self._template = self._row = ""  # what is being rendered

    @property
    def limit_s(self) -> float:
        """How long the process may be silent."""
        if self._row:
            return RENDERING_LIMIT_S
        return LIMITS_S[self.stage]

    def track(self, event: Mapping[str, Any]) -> None:
        """Follow the process by its events."""
        if event["event"] == "stage":
            self.stage = event["name"]
        elif event["event"] == "rendering":
            self._template, self._row = event["template"], event["row"]

    def hang_error(self) -> AnygaugeError:
        """Return the error of a process that was silent for longer than it may."""
        limit = f"{self.limit_s:.0f} s"
        if self._row:
            return self._ended_rendering(
                f"has not rendered {self._row} within {limit}, and may loop for ever"
            )
        if self.stage == "fetch":
            return HubUnreachableError(
                f"nothing arrived from the hub for {limit}: check the network and the disk of "
                "HF_HOME; complete files are kept"
            )
        if self.stage == "plan":
            return AnygaugeError(
                f"a plan takes longer than {limit}; `anygauge plan RUN.yaml` waits for it"
            )
        if "render" in self._request.stages:
            return AnygaugeError(
                f"the tokenizer has not been loaded within {limit}. Look at the disk that holds it"
            )
        return AnygaugeError(
            f"the checks before the run have hung: no progress for {limit} on the run file's "
            f"'{self.stage}' section. Look at that section, at regular expressions for names of "
            "layers or weights, and at the disks that hold the paths in it"
        )

    def out_of_memory(self, limit: int) -> AnygaugeError:
        """Return the error of a process that needed more than so many bytes."""
        size = format_bytes(limit)
        if self._row:
            return self._ended_rendering(f"took more than {size} to render {self._row}")
        return AnygaugeError(f"out of memory: the process may have {size}")

    def crash_error(self, code: int, output: IO[bytes]) -> AnygaugeError:
        """Return the error of a process without an answer; `output` is what it printed."""
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - _TAIL))
        lines = output.read().decode(errors="replace").strip().splitlines()
        how = f"ended with {describe_exit(code)}" + (f": {lines[-1].strip()}" if lines else "")
        if self._row:
            return self._ended_rendering(
                f"was to render {self._row}, and its process {how}. There may be too little memory"
            )
        if self.stage == "fetch":
            return HubUnreachableError(f"fetching the model {how}")
        what = f"checks the run file's '{self.stage}' section before the run"
        advice = "; the run would fail in the same way"
        if self.stage == "plan":
            what = "plans"
            advice = "; a smaller data.max_length or train.micro_batch_size needs less"
        elif "render" in self._request.stages:
            what, advice = "loads the tokenizer", ""
        return AnygaugeError(
            f"the process that {what} {how}. There may be too little memory{advice}"
        )

    def _ended_rendering(self, what: str) -> DataError:
        way_out = "or the row, or give another data.chat_template"
        if "render" in self._request.stages:
            way_out = "or give another --tokenizer (`generate --raw` asks without a template)"
        return DataError(f"{self._template} {what}. Correct the template {way_out}")
