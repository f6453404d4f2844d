"""``python -m anygauge_launchers.tied PROGRAM ...``: become a program that ends with its parent.

For programs that know nothing of it, such as mpirun: they receive SIGUSR1 when the process that
started them is gone, which Open MPI passes on to agents, and these end their ranks in order.
"""

from __future__ import annotations

import os
import signal
import sys

from anygauge.util.processes import die_with_parent


def main() -> None:
    """Tie this process to its parent, and become the program."""
    # A signal that arrives in between must end this process, as it would the program.
    die_with_parent(signal.SIGUSR1)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main()
