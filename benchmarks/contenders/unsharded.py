"""The upper bound: each process trains the whole model alone on its share, with no communication.

Not a contender that anybody could use for one model: the processes end with different weights.
"""

from __future__ import annotations

import contextlib

from benchmarks.contenders.torch_loop import train

if __name__ == "__main__":
    train(lambda plan, model: (model, lambda last: contextlib.nullcontext()))
