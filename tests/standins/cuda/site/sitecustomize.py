"""Puts the stand-in below torch, in every process that imports torch; then the next such file."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

import cuda_standin

cuda_standin.wait_for_torch()

_here = [Path(path or ".").resolve() for path in sys.path].index(Path(__file__).resolve().parent)
_next = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path[_here + 1 :])
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
