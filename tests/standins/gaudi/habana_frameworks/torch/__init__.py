"""Loads the device, in the order of the original: mode, version, core, collectives, hpu."""

import os

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import habana_frameworks.autoload

habana_frameworks.autoload.is_loaded = True

import habana_standin  # noqa: E402
import torch  # noqa: E402
from packaging.version import Version  # noqa: E402

from habana_frameworks.torch.utils.internal import is_lazy  # noqa: E402

habana_standin.pretend_fork(torch)
run_time_ver = Version(torch.__version__)
is_torch_fork = run_time_ver.local.startswith("git")
if is_lazy():
    assert is_torch_fork, f"Stock PyTorch version {run_time_ver} is not supported in Lazy mode."

habana_standin.record_patches_at_exit(torch)
habana_standin.record("load", "lazy" if is_lazy() else "eager")
habana_standin.record(
    "variables", {n: v for n, v in sorted(os.environ.items()) if n.startswith(("PT_", "HCCL_"))}
)

import habana_frameworks.torch.core  # noqa: E402
import habana_frameworks.torch.distributed.hccl  # noqa: E402
import habana_frameworks.torch.hpu  # noqa: E402
