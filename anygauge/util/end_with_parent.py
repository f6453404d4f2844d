"""``python -m anygauge.util.end_with_parent PROGRAM ...``: run a program that ends with its parent.

For programs that do not do so by themselves, such as mpirun or kubectl: they receive SIGUSR1 when
the process that started them is gone. Open MPI passes that signal on to the agents, which end their
ranks in order.
"""

from __future__ import annotations

import os
import signal
import sys

from anygauge.util.processes import die_with_parent


def main() -> None:
    """Have this process end with its parent, then become the program."""
    # A signal that arrives in between must end this process, as it would the program.
    die_with_parent(signal.SIGUSR1)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        sys.exit(f"{sys.argv[1]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main()
