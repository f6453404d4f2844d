"""The environment of one node's ranks: decided by the job's backend, its site and its run file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge.agent.affinity import cores_of_ranks
from anygauge.agent.node import inspect_node
from anygauge.interface import Job, NotAvailableError, Scope, missing_fabric
from anygauge.registry import Registry, ResolvedSetting, applied, resolve_environment
from anygauge.registry.environment import USER
from anygauge.util.files import write_text


class NodeEnvironment:
    """What each rank of this node gets.

    Raises:
        PluginError: the backend cannot be found or made.
        NotAvailableError: this machine lacks the network that the run asks for.
    """

    def __init__(self, job: Job, node_rank: int, inherited: Mapping[str, str]) -> None:
        registry = Registry.load()
        backend = registry.create_backend(job.backend, job.backend_options)
        node = inspect_node(rank=node_rank, backend=backend, environ=inherited)
        missing = missing_fabric(backend.fabrics, job, node)
        if missing is not None:
            raise NotAvailableError(missing)
        self.fabric = backend.fabric(job, node)
        self.cores = cores_of_ranks(job, backend.launch, node)
        self._inherited = inherited
        self._by_rank = {
            rank: resolve_environment(registry, backend, job, node, rank, inherited)
            for rank in range(job.launch.devices)
        }

    def record(self) -> dict[str, Any]:
        """What each local rank's environment is, why, and who won; see `write_provenance`."""
        return provenance(self._by_rank)

    def overruled(self, local_rank: int) -> list[ResolvedSetting]:
        """What was set where this process began, against what somebody else would have set."""
        return [
            one
            for one in self._by_rank[local_rank]
            if one.origin == USER and any(value != one.value for _, value in one.overruled)
        ]

    def of_rank(self, local_rank: int) -> dict[str, str]:
        """All variables of a rank, but for its identity."""
        return applied(self._by_rank[local_rank], self._inherited)

    def digests(self) -> dict[str, str]:
        """Variable -> digest of its value, of those that all nodes must have alike."""
        return {
            one.name: hashlib.sha256(repr(one.value).encode()).hexdigest()
            for one in self._by_rank[0]
            if one.setting.scope is Scope.JOB
        }


def provenance(by_rank: Mapping[int, Sequence[ResolvedSetting]]) -> dict[str, Any]:
    """What each local rank's environment was, why, and who won; secrets, and what the run file
    sets, are hidden.
    """
    return {str(rank): [one.record() for one in found] for rank, found in by_rank.items()}


def write_provenance(path: Path, records: Mapping[str, Any]) -> None:
    """Record it with the run: what `provenance` gave, for its owner alone."""
    write_text(path, json.dumps(records, indent=2) + "\n", 0o600)


def provenance_file(job: Job, node_rank: int) -> Path:
    """Where a node's is written."""
    return job.start_directory / f"environment-node{node_rank}.json"
