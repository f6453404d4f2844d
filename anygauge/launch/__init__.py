"""The way from a run file and options to ranks that train, in the order in which a run takes it.

- `request`: run file and options become one checked object, with a backend and a job.
- `prepare`, `prepare_request`, `prepare_call`, `prepare_endings`: one process fetches, checks and
  plans, and what it died of is said. `prepare_process`, `prepare_stages`, `memory`: that process.
- `prepare_here`: the same where ranks run and the command does not.
- `decision`: what is decided there for all ranks.
- `submit`, `run_directory`: claim the folder, write the run, start the job, record it.
- `local_run`: the ranks of this machine, supervised by a thread of the command.
- `agent`, `startup`: on other machines, a process of its own does the same.
- `environment`: what the machine shows, and the variables and cores of each rank.
- `hello`, `channel`, `listener`, `meeting`: how the agents of a job meet.
- `nodes`, `other_nodes`, `outbox`: what they tell each other, and who follows the job.
- `supervisor`, `attempt`, `rank_process`, `rank_start`, `watchdog`: the ranks of a machine.
- `outcome`, `rank_failure`: why a rank failed, and why a job ended.
- `rank`: what every rank runs.
- `foreign`, `join`, `foreign_meeting`, `foreign_prepare`, `foreign_rank`: ranks that others
  started.
- `follow`, `view`: what the one who waits sees.

Outside of that order: `doctor`, and short jobs on this machine (`local_job`): `round_trip`,
`calibration`.
"""
