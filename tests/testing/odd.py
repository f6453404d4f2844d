"""A backend with oddities that the kit must not overlook, beside a plugin that it must.

Installed by the tests as distributions of their own; `ANYGAUGE_ODD` names the oddity. The backend
without one is the host's processors under another name.
"""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge.interface import (
    API_VERSION,
    Backend,
    BackendSpec,
    Finding,
    Job,
    Level,
    Node,
    Probe,
    RunFileError,
    Setting,
    Support,
    hookimpl,
)

ODD = os.environ.get("ANYGAUGE_ODD", "none")
MISSING = Support(Level.NOT_WRITTEN_YET, "so it says")


def odd_site(folder: Path) -> Path:
    """A folder with two installed distributions: the backend `odd`, and one that is heavy."""
    site = folder / "site"
    for distribution, module in (("anygauge-odd", "anygauge_odd"), ("odd", "a_heavy_one")):
        info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        # The other's distribution is named like this one's plugin.
        name = "odd" if module == "anygauge_odd" else "heavy"
        (info / "entry_points.txt").write_text(f"[anygauge]\n{name} = {module}\n")
    shutil.copy(__file__, site / "anygauge_odd.py")
    (site / "a_heavy_one.py").write_text("import jax\n")
    (site / "jax.py").touch()  # heavy by its name
    return site


def probe() -> Probe:
    found = Finding.not_needed("the host")
    here = Finding.no("no card") if ODD == "no device" else found
    count = 0 if ODD == "no device" else 2
    return Probe(devices=here, driver=found, software=found, device_count=count)


@hookimpl
def anygauge_provide_backends() -> Iterable[BackendSpec]:
    spec = BackendSpec(
        name="odd",
        factory="anygauge_odd:make",
        options="anygauge_cpu.options:CpuOptions",
        probe=probe,
        api_version=API_VERSION,
        priority=-1000,
    )
    return [spec]


def make(options: Any) -> Backend:
    from anygauge_cpu.backend import CpuBackend, CpuCollectives

    if ODD == "aborts at exit":
        atexit.register(os.abort)

    class OddCollectives(CpuCollectives):
        def open(self, **arguments: Any) -> None:
            if ODD == "no collectives":
                raise RuntimeError("no library")
            super().open(**arguments)

    class Odd(CpuBackend):
        name = "odd"
        collectives_class = OddCollectives
        if ODD in ("no collectives", "collectives declared missing"):
            capabilities = {**CpuBackend.capabilities, "collectives": MISSING}

        def diagnostics(self) -> Any:
            return ()  # the processors' own import torch, which takes seconds

        def environment(
            self, job: Job, node: Node, local_rank: int | None = None
        ) -> Sequence[Setting]:
            if ODD == "sets a variable":
                os.environ["ODD_WAS_HERE"] = "1"
            told = Setting(
                name="ODD_RANKS", value=str(job.launch.devices), reason="told", source="here"
            )
            return [*super().environment(job, node, local_rank), told]

        def check_environment(self, environ: Mapping[str, str]) -> None:
            if ODD == "refuses the environment":
                raise RunFileError("two variables contradict each other")
            if ODD == "ends while it is asked":
                os._exit(9)

        def close(self) -> None:
            super().close()
            if ODD == "close raises":
                raise RuntimeError("the driver is gone")

    return Odd(options)
