"""A stand-in for Gaudi's software, not that software: its names, signatures and rules, no card.

Made from the published signatures of habana-torch-plugin 1.19.0 (gaudi-pytorch-bridge). What is
absent there is absent here; wrong arguments raise; what a mode forbids is refused. Tensors live on
the simulated cards of `anygauge_sim`, under the name "hpu", never on the host. Every call is
written to the file that `HABANA_STANDIN_RECORD` names, one JSON list a line, in the order of calls.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

RECORD = "HABANA_STANDIN_RECORD"
FORK = "git0standin"
"""Local part of the version that torch gets: lazy mode needs Intel's build."""

_census: Any = None
_file: Any = None
_loaded = False


def record(name: str, *values: Any) -> None:
    """Write a call down."""
    global _file
    path = os.environ.get(RECORD)
    if not path:
        return
    if _file is None:
        _file = Path(f"{path}.{os.environ.get('RANK', '0')}").open("a", buffering=1)  # noqa: SIM115
    _file.write(json.dumps([name, *values]) + "\n")


def record_patches_at_exit(torch: Any) -> None:
    """Write down which functions of torch the model library has replaced by then.

    Its predicate for this device does that, once it finds one.
    """
    names = {
        "gather": torch,
        "take_along_dim": torch,
        "scatter": torch,
        "cholesky": torch.linalg,
        "compile": torch,
    }

    def write() -> None:
        owners = {n: getattr(getattr(place, n), "__module__", None) for n, place in names.items()}
        record("patched", [n for n, owner in owners.items() if str(owner).startswith("transf")])

    atexit.register(write)
    if "RANK" not in os.environ:
        return
    rank, usual = os.getpid(), os._exit

    def end(status: int) -> None:
        if os.getpid() == rank:
            write()
        usual(status)

    os._exit = end  # a rank ends by it, and then no handler of exit runs


def pretend_fork(torch: Any) -> None:
    """Let torch bear the version of Intel's build, unless a test wants the stock one."""
    if os.environ.get("HABANA_STANDIN_STOCK_TORCH") != "1":
        torch.__version__ = type(torch.__version__)(
            str(torch.__version__).partition("+")[0] + "+" + FORK
        )


def of_the_bridge(name: str) -> Any:
    """A module of the original by its own file, from the checkout of gaudi-pytorch-bridge that
    `ANYGAUGE_GAUDI_SOURCE` names; None without one."""
    checkout = os.environ.get("ANYGAUGE_GAUDI_SOURCE")
    if not checkout:
        return None
    file = Path(checkout, "python_packages", *name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"{name}_of_the_bridge", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cards() -> Any:
    """The simulated cards, known to torch as "hpu"; the module of `anygauge_sim`'s C++.

    A process sees the card of its module number alone, as index 0.
    """
    global _loaded
    if not _loaded:
        os.environ["ANYGAUGE_SIM_VISIBLE_CARDS"] = os.environ.get("HLS_MODULE_ID") or "0"
        import torch
        from anygauge_sim import device

        # Its own device module is registered under the name and then replaced by the stand-in's.
        device.load("hpu")
        del torch.hpu
        _list_as_the_card()
        _loaded = True
    from anygauge_sim import _C

    return _C


def _list_as_the_card() -> None:
    """Let torch list the card where it lists Gaudi's: "hpu" is among the devices with fused
    optimizers by its name, since torch 2.8, and not among those with multi-tensor functions, where
    torch puts the key that the simulated cards have."""
    from torch.utils import _foreach_utils

    name = "_get_foreach_kernels_supported_devices"
    devices = [each for each in getattr(_foreach_utils, name)() if each != "hpu"]
    # Those that use it have a name of their own for it.
    for module in ("torch.utils._foreach_utils", "torch.optim.optimizer", "torch.optim.swa_utils"):
        setattr(importlib.import_module(module), name, lambda: list(devices))


def census() -> Any:
    """What is counted of this process's card: see `habana_census`."""
    global _census
    if _census is None:
        from habana_census import Census
        from habana_frameworks.torch.utils.internal import is_lazy

        _census = Census(is_lazy())
    return _census


def cards_of_the_machine() -> int:
    """How many the machine has, whichever of them this process sees."""
    return int(os.environ.get("ANYGAUGE_SIM_CARDS", "8"))


def card_functions() -> dict[str, Any]:
    """What `anygauge_sim` would put on torch.hpu: streams, events, card by card."""
    from anygauge_sim import streams

    return dict(streams.functions("hpu"))
