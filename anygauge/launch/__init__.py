"""The agent: one process on each node that starts the node's ranks and watches them.

In the order in which a run passes through them:

- `agent`: the command line, from the arguments to the exit status.
- `startup`: what happens before ranks start.
- `environment`: what the machine shows, and the variables and cores of each rank.
- `nodes`, `coordinator`: the job's other nodes, as a worker and the coordinator see them.
- `listener`: where the coordinator admits the others.
- `link`: the connection between two agents.
- `supervisor`, `rank_process`: the ranks of this node.
- `outcome`: which failure is the cause, and how the job ended.

Outside of that order: `foreign` (ranks that another launcher started), `local_job` (a short job on
this machine), `doctor` (checks of this machine).
"""
