"""A plan in a process of its own: what is imported for it is gone with it, it is bounded in time
and memory, and the checks of a run need not wait for it.

``python -m anygauge.planning.process`` is that process. Question and answer are pickled: both ends
are this program.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from anygauge.util.errors import AnygaugeError
from anygauge.util.processes import describe_exit, die_with_parent, parent_environment

if TYPE_CHECKING:
    from anygauge.config.schema import RunFile
    from anygauge.planning.trials import Target, Trial

LIMIT = 8 * 2**30
"""Memory of the process, in bytes: a plan that needs more has met something that it should not."""
LEAST_S = 1.0
"""Seconds in which an answer that is there can be read."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "OMP_NUM_THREADS": "1",
}


class TooLongError(AnygaugeError):
    """A plan was not made within its time."""


class Planner:
    """Begins at once to plan the first of several forms of a run that fits.

    Args:
        forms, target: see `Trials.first_that_fits`.
        environment: variables that the process has in addition to this one's; these win.
    """

    def __init__(
        self, forms: Sequence[RunFile], target: Target, environment: Mapping[str, str]
    ) -> None:
        with tempfile.TemporaryFile() as question:
            pickle.dump((forms, target), question)
            question.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "anygauge.planning.process"],
                stdin=question,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**environment, **os.environ, **ENVIRONMENT, **parent_environment()},
            )

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def trial(self, limit_s: float) -> Trial:
        """The plan.

        Raises:
            TooLongError: it is not made within so many seconds.
            AnygaugeError: what the run's ranks would refuse, or what cannot be planned; or the
                process has ended.
        """
        try:
            answer, printed = self._process.communicate(timeout=max(LEAST_S, limit_s))
        except subprocess.TimeoutExpired:
            raise TooLongError(f"no plan of this run was made within {limit_s:.0f} s") from None
        if answer:
            found: Trial | AnygaugeError = pickle.loads(answer)
            if isinstance(found, AnygaugeError):
                raise found
            return found
        lines = printed.decode(errors="replace").strip().splitlines()
        last = f": {lines[-1].strip()}" if lines else ""
        raise AnygaugeError(
            f"the process that plans ended with {describe_exit(self._process.returncode)}{last}. "
            "There may be too little memory; a smaller data.max_length or train.micro_batch_size "
            "needs less"
        )


def main() -> int:
    """Answer the question; returns the exit status."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends this process itself
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not stand in the answer
    from anygauge.planning.trials import Trials
    from anygauge.registry import Registry
    from anygauge.training.preflight import bound_memory

    bound_memory(LIMIT)
    forms, target = pickle.load(sys.stdin.buffer)
    found: Trial | AnygaugeError
    try:
        found = Trials(Registry.load()).first_that_fits(forms, target)
    except AnygaugeError as error:
        found = error
    with os.fdopen(answers, "wb") as file:
        pickle.dump(found, file)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # what libraries do at exit has no use here
