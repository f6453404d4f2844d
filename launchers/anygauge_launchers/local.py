"""The local launcher: ranks of this machine, which the command itself starts and supervises."""

from __future__ import annotations

from anygauge.interface import Job, LauncherOptions, LaunchProfile, Plan, RunFileError
from anygauge_launchers.remote_job import ForegroundLauncher


class Local(ForegroundLauncher):
    """Starts nothing: without `LauncherSpec.remote`, ranks are children of the command."""

    def render(self, job: Job, options: LauncherOptions, profile: LaunchProfile) -> Plan:
        """Nothing to write and nothing to start."""
        if job.launch.nodes != 1:
            raise RunFileError(
                f"launch.launcher: 'local' starts ranks on this machine only, and launch.nodes is "
                f"{job.launch.nodes}. Set launch.nodes to 1, or name a launcher for several "
                "machines, such as ssh."
            )
        return Plan(grace_s=options.grace_s)
