"""The optimizer of `zero` on a disk: what is refused of it, and a rank's folder there.

DeepSpeed reads and writes through an operator of its own, `async_io`, over the library libaio. It
is built ahead, or compiled by the first run that needs it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge.interface import NotAvailableError, RunFileError, StrategyRun, UnsupportedError
from anygauge.strategies.zero.deepspeed_versions import ENGINE, parsed

_PROGRAM = "#include <libaio.h>\nint main(void) { return io_submit(0, 0, 0); }\n"


def check_nvme(run: StrategyRun, environment: Mapping[str, str]) -> None:
    """Refuse a disk that DeepSpeed cannot use, or not with these options.

    Args:
        environment: of this process; compilers read it.

    Raises:
        RunFileError: the field says nothing that could be done, or the folder is not one.
        UnsupportedError: DeepSpeed has no such combination.
        NotAvailableError: its operator is not built, and cannot be.
    """
    options = run.options
    if options.nvme is None:
        return
    if options.offload in ("parameters", "both"):
        raise UnsupportedError(
            f"strategy.nvme: with strategy.offload: {options.offload}, DeepSpeed would put the "
            "weights on the disk too, and then a rank of DeepSpeed 0.19.8 ended without a "
            "message. Set strategy.offload: optimizer"
        )
    if options.offload != "optimizer":
        raise RunFileError(
            "strategy.nvme: says where an offloaded optimizer goes, but strategy.offload is "
            f"{options.offload}. Set strategy.offload: optimizer, or leave it out"
        )
    if options.stage != 3:
        raise UnsupportedError(
            f"strategy.nvme: DeepSpeed's stage {options.stage} leaves an offloaded optimizer in "
            "the host's memory. Set strategy.stage: 3, or leave it out"
        )
    if run.optimizer == "adamw_8bit":
        raise UnsupportedError(
            "train.optimizer.name: adamw_8bit: DeepSpeed writes only 32-bit state to a disk "
            "(strategy.nvme). Use adamw, lion or sgd"
        )
    if not Path(options.nvme).is_absolute():
        raise RunFileError(
            f"strategy.nvme: {options.nvme!r} is relative; give an absolute path that every "
            "machine has, on its own disk"
        )
    if run.ranks_run_here:
        check_folder(options.nvme)
        missing = operator_lacks(environment)
        if missing:
            raise NotAvailableError(
                f"strategy.nvme: DeepSpeed's operator async_io is not built here, and {missing} "
                "missing to build it. Install libaio-dev (Debian, Ubuntu) or libaio-devel "
                "(Fedora), ninja and a C++ compiler, use an image that has it built (`anygauge "
                "image`), or leave strategy.nvme out to keep the optimizer in the host's memory"
            )


def check_folder(path: str) -> None:
    """Raises: RunFileError: no folder of this machine that can be written to."""
    folder = Path(path)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist on this machine"
        raise RunFileError(f"strategy.nvme: {path} {what}; create it on a local disk")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunFileError(f"strategy.nvme: {path} cannot be written to; change its permissions")


def folder_of_rank(path: str, needed: int) -> tempfile.TemporaryDirectory[str]:
    """A folder below `path` of this rank's own, which is gone when the rank ends.

    Ranks of another run may have the same numbers, by which DeepSpeed names its files.

    Args:
        needed: bytes that this rank writes.

    Raises:
        RunFileError: it cannot be written to, or not even this rank's bytes fit.
    """
    check_folder(path)
    free = shutil.disk_usage(path).free
    if free < needed:
        raise RunFileError(
            f"strategy.nvme: {path} has {free / 2**30:.2f} GiB free, but each rank writes "
            f"{needed / 2**30:.2f} GiB. Free some, name another disk, or use more ranks"
        )
    return tempfile.TemporaryDirectory(prefix="anygauge-", dir=path)


def load_operator() -> None:
    """Load DeepSpeed's operator, which may compile it: minutes.

    Raises:
        NotAvailableError: it cannot be compiled.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        AsyncIOBuilder().load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        raise NotAvailableError(
            f"strategy.nvme: DeepSpeed's operator async_io cannot be loaded: "
            f"{str(error).splitlines()[0]}. Leave strategy.nvme out, or run ds_report"
        ) from error


def operator_lacks(environment: Mapping[str, str]) -> str:
    """What is missing to build the operator, as "x is" or "x and y are"; "" if it is to be had."""
    if installed_operators().get("async_io"):
        return ""
    compiler = shlex.split(environment.get("CC", "")) or ["cc"]
    command = [*compiler, *shlex.split(environment.get("CFLAGS", "")), "-x", "c", "-"]
    command += [*shlex.split(environment.get("LDFLAGS", "")), "-laio", "-o", os.devnull]
    missing = []
    if shutil.which(environment.get("CXX", "c++").split()[0]) is None:
        missing.append("a C++ compiler")
    elif shutil.which(compiler[0]) is None:
        missing.append("a C compiler")
    elif subprocess.run(command, input=_PROGRAM, text=True, capture_output=True).returncode:
        missing.append("libaio with its headers")
    if shutil.which("ninja") is None:
        missing.append("ninja")
    return f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'}" if missing else ""


def installed_operators() -> dict[str, Any]:
    """Operators of DeepSpeed -> whether they were built ahead; read, since importing it is slow."""
    if importlib.util.find_spec(ENGINE) is None:
        return {"async_io": True}  # that DeepSpeed is missing is reported by another check
    tree = parsed("git_version_info_installed.py")
    for line in () if tree is None else tree.body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "installed_ops":
            found: dict[str, Any] = ast.literal_eval(line.value)
            return found
    return {}
