"""The agent: one process on each node that starts the node's ranks and watches them.

In the order in which a run passes through them:

- `agent`: the command line, from the arguments to the exit status.
- `startup`: what happens before ranks start.
- `environment`: what the machine shows, and the variables and cores of each rank.
- `meeting`: how it meets the agents of the other nodes.
- `channel`: the connection between two agents, and where node 0 admits the others.
- `nodes`: the job's nodes, as node 0 and the others see them.
- `supervisor`, `rank_process`: the ranks of this node.
- `outcome`: which failure is the cause, and how the job ended.

Outside of that order: `foreign` (ranks that another launcher started), `local_job` (a short job on
this machine), `doctor` (checks of this machine).
"""
