"""Taking one Gaudi card for this process, and what the card is asked for."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.interface import (
    MemoryStats,
    NotAvailableError,
    Placement,
    file_texts,
    profile_with_torch,
)
from anygauge_hpu.environment import LAZY_VARIABLE, MODULE_VARIABLE, MODULES_VARIABLE, Mode
from anygauge_hpu.probe import PACKAGE, PATTERNS, is_fork, modules_here, why_missing

if TYPE_CHECKING:
    import torch


class HpuPlacement(Placement):
    """One card. A process drives one: its device is always the only one, of index 0."""

    # Of Gaudi's library; accelerate looks for it, too.
    out_of_memory_texts = ("MODULE:PT_DEVMEM Allocation failed",)

    # Token ids are a few kilobytes: what pinning could gain is nothing to a step. Torch's call
    # takes the device as an argument in some of the releases and refuses it in others.
    pinned_memory = False

    mode = Mode.COMPILE
    """Set by the backend, which knows the options."""

    # -- opening ---------------------------------------------------------------------------

    def open(self, local_rank: int) -> torch.device:
        """Load Gaudi's software in the run's mode, and take this rank's card."""
        missing = why_missing()
        if missing:
            raise NotAvailableError(f"Gaudi's software cannot be loaded: {missing}")
        named = self._set_variables(local_rank)
        import torch

        if self.mode is Mode.LAZY and not is_fork(torch.__version__):
            raise NotAvailableError(
                f"lazy mode needs Intel's build of torch (+git...), but torch {torch.__version__} "
                "is installed: use Intel's container image, or backend_options.mode: compile"
            )
        try:
            # Registers torch.hpu and the collectives.
            importlib.import_module(f"{PACKAGE}.torch")
            internal = importlib.import_module(f"{PACKAGE}.torch.utils.internal")
        except (ImportError, AssertionError, OSError) as error:
            raise NotAvailableError(
                f"Gaudi's software cannot be loaded: {error}. Its releases go with one torch each: "
                "see `anygauge doctor --backend hpu`"
            ) from error
        if bool(internal.is_lazy()) is not (self.mode is Mode.LAZY):
            raise NotAvailableError(
                f"Gaudi's software was loaded in {'lazy' if internal.is_lazy() else 'eager'} mode "
                f"before anygauge, but this run is in {self.mode} mode: import Gaudi's software "
                f"after anygauge, or set {LAZY_VARIABLE}={self.mode.variable} before anything "
                "imports it"
            )
        module = self._module()
        if not module.is_available() or module.device_count() < 1:
            raise NotAvailableError(
                "Gaudi's software is loaded, but sees no card: `anygauge doctor --backend hpu` "
                "shows what was looked at"
            )
        cards = self.device_count()
        if local_rank >= cards:
            if named:  # processes that start later must not look for it
                del os.environ[MODULE_VARIABLE]
            raise NotAvailableError(
                f"local rank {local_rank} has no Gaudi card: this process may use {cards}; ask for "
                f"at most --devices {cards}"
            )
        try:
            index = module.current_device()  # acquires the card
        except RuntimeError as error:
            raise NotAvailableError(
                f"no Gaudi card could be taken: {str(error).splitlines()[0]}. Another process may "
                f"hold it (hl-smi shows which), or {MODULE_VARIABLE} names a card that is not "
                "visible here"
            ) from error
        self._device = torch.device(self.device_type, index)
        return self._device

    def device_count(self) -> int:
        """Cards of this machine, or those among them that are made visible."""
        visible = [part for part in os.environ.get(MODULES_VARIABLE, "").split(",") if part.strip()]
        count = super().device_count()
        return min(count, len(visible)) if visible else count

    def _set_variables(self, local_rank: int) -> bool:
        """Variables that are read once, at import: an agent has set them; else it is done here.

        Returns: whether the card was named here.
        """
        if PACKAGE not in sys.modules:
            os.environ.setdefault(LAZY_VARIABLE, self.mode.variable)
        named = (
            local_rank > 0
            and MODULES_VARIABLE not in os.environ
            and MODULE_VARIABLE not in os.environ
        )
        if named:
            here = modules_here(file_texts(PATTERNS)) or ()
            inside = local_rank < len(here)
            os.environ[MODULE_VARIABLE] = here[local_rank] if inside else str(local_rank)
        return named

    # -- memory ----------------------------------------------------------------------------

    def memory(self) -> MemoryStats:
        """Bytes by the allocator's own names. It reserves the whole card at once, so that
        "reserved" would always be the limit."""
        stats: dict[str, Any] = self._module().memory_stats()
        return MemoryStats(
            in_use=int(stats["InUse"]), peak=int(stats["MaxInUse"]), limit=int(stats["Limit"])
        )

    # -- looking inside --------------------------------------------------------------------

    @contextlib.contextmanager
    def profile(self, folder: Path) -> Iterator[None]:
        """Record by Gaudi's own profiler, which its software registers with torch's and which is
        named to it, and write the allocator's own table, ``memory.txt``, beside the timeline.

        The software switches it on as it is imported (``HABANA_PROFILE=profile_api_light``), unless
        that variable is set; with ``0`` only the host is recorded. Sources: gaudi-pytorch-bridge
        1.19, habana_frameworks/torch/core/__init__.py, hpu/memory.py; optimum-habana, utils.py
        (HabanaProfile), which names both activities, too.
        """
        from torch.profiler import ProfilerActivity

        activities = (ProfilerActivity.CPU, ProfilerActivity.HPU)
        # Nothing shows that the allocator reports to torch's profiler.
        with profile_with_torch(self, folder, activities=activities, allocations=False):
            yield
        text = str(self._module().memory_summary())
        (folder / "memory.txt").write_text(text, encoding="utf-8")
