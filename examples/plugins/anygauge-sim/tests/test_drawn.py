"""Which drawn defects of simulated cards no program can meet (`tests/testing/drawn.py`)."""

from __future__ import annotations

from children import LOAD, run

CALLS = """
import torch.distributed as dist
dist.init_process_group('simccl', store=dist.HashStore(), rank=0, world_size=1)
def tensor(strided):
    return torch.ones(8, device='sim')[::2] if strided else torch.ones(4, device='sim')
calls = {
    'all_reduce': (1, lambda a: dist.all_reduce(a)),
    'broadcast': (1, lambda a: dist.broadcast(a, src=0)),
    'reduce': (1, lambda a: dist.reduce(a, dst=0)),
    'all_gather': (2, lambda a, b: dist.all_gather([a], b)),
    'gather': (2, lambda a, b: dist.gather(a, [b])),
    'scatter': (2, lambda a, b: dist.scatter(a, [b])),
    'all_gather_into_tensor': (2, dist.all_gather_into_tensor),
    'reduce_scatter_tensor': (2, dist.reduce_scatter_tensor),
    'all_to_all_single': (2, dist.all_to_all_single),
}
for name, (count, call) in calls.items():
    call(*(tensor(False) for each in range(count)))
    for strided in range(count):
        try:
            call(*(tensor(each == strided) for each in range(count)))
        except (RuntimeError, ValueError) as error:
            assert 'contiguous' in str(error), error
            print('refused:', name, strided)
"""


def test_no_collective_takes_a_strided_tensor() -> None:
    status, out = run(LOAD + CALLS)
    assert status == 0, out
    of_one = ("all_reduce", "broadcast", "reduce")
    of_two = ("all_gather", "gather", "scatter", "all_gather_into_tensor")
    of_two += ("reduce_scatter_tensor", "all_to_all_single")
    wanted = {f"refused: {name} 0" for name in of_one + of_two}
    wanted |= {f"refused: {name} 1" for name in of_two}
    assert wanted <= set(out.splitlines()), wanted - set(out.splitlines())
