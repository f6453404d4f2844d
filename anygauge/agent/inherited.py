"""What a rank must not inherit: variables by which another launcher told *its* processes who they
are. Left in place, libraries inside a rank believe them over what the agent says.
"""

from __future__ import annotations

from collections.abc import Mapping

from anygauge.util.events import EVENTS_FD
from anygauge.util.processes import PARENT_PID
from anygauge.util.rendezvous import STORE_FD

NAMES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "CROSS_RANK"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("LOCAL_SIZE", "CROSS_SIZE", "ROLE_NAME"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS"),
        *("SLURM_GTIDS", "SLURM_TASK_PID"),
        *(EVENTS_FD, PARENT_PID, STORE_FD),
    }
)
PREFIXES = ("MASTER_", "TORCHELASTIC_", "PET_", "OMPI_COMM_", "PMI_", "PMIX_")


def scrub(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy without the identity that another launcher gave to this process."""
    return {
        name: value
        for name, value in environ.items()
        if name not in NAMES and not name.startswith(PREFIXES)
    }
