"""Open MPI: one agent on each host, started by mpirun, which passes signals and output on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from anygauge.interface import Job, LaunchProfile, Plan, PlannedProcess, variables_file
from anygauge_launchers.hosts import HostsOptions
from anygauge_launchers.remote_job import ForegroundLauncher, job_file, keep_alive


def _whole(path: str) -> str:
    if len(path.split()) != 1:
        raise ValueError(
            "mpirun splits this path at its spaces; make a link to it whose path has none"
        )
    return path


class MpiOptions(HostsOptions):
    """Options of the mpi launcher.

    Attributes:
        config: ssh's configuration file for mpirun's own daemons.
        interface: network that mpirun's daemons meet on, such as ``eth0``; Open MPI's choice
            without it.
        extra: further arguments for mpirun, each as one text.
        python: the interpreter on the machines; this one's path by default.
    """

    config: Annotated[str, AfterValidator(_whole)] | None = None
    interface: str | None = None
    extra: list[str] = Field(default_factory=list)
    python: str = sys.executable


class Mpi(ForegroundLauncher):
    """Starts an agent on each host by mpirun."""

    def render(self, job: Job, options: MpiOptions, profile: LaunchProfile) -> Plan:
        """One job file in the shared run directory, and one mpirun.

        Raises:
            RunFileError: an option is wrong, or the hosts are not as many as the nodes.
        """
        hosts, coordinator = options.resolve(job)
        file = job_file(job)
        variables = variables_file(Path(file.path).parent)
        ssh = [*keep_alive(job)]  # of the ssh that leads to a daemon
        if options.config is not None:
            ssh += ["-F", options.config]
        settings = {"plm_rsh_args": " ".join(ssh)}
        if options.interface is not None:
            settings["btl_tcp_if_include"] = settings["oob_tcp_if_include"] = options.interface
        argv = (
            *(sys.executable, "-m", "anygauge.util.processes", "mpirun"),
            # Without it, mpirun refuses to run as root; the user has decided to.
            "--allow-run-as-root",
            *("-np", str(job.launch.nodes), "--host", ",".join(f"{host}:1" for host in hosts)),
            # An agent starts and places its ranks itself.
            *("--map-by", "ppr:1:node", "--bind-to", "none"),
            *(word for name, value in settings.items() for word in ("--mca", name, value)),
            *options.extra,
            *(options.python, "-m", "anygauge.launch.agent"),
            *("--job", file.path, "--node-rank", "$OMPI_COMM_WORLD_RANK"),
            *("--coordinator", coordinator, "--grace", f"{options.grace_s:g}"),
            *("--variables", variables.path, "--tied"),
            # mpirun's daemons behind a cut cable would wait for each other.
            "--parent-too",
        )
        return Plan(
            files=(file, variables),
            processes=(PlannedProcess(node_rank=0, host=hosts[0], argv=argv),),
            pass_environment=tuple(job.launch.pass_environment),
        )
