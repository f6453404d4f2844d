"""The collectives facet: one meaning for each operation, whatever the vendor's library offers.

Defaults work for any library with a sum: the mean is a sum and a division, since several
libraries have no mean. Host-side messages (objects, agreement on control flow) go through
`control_group`, so that they never wait for the device.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

from anygauge.interface.placement import HOST_DEVICE

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


class Collectives:
    """Process groups and the operations on them."""

    process_group_backend: str | None = None
    """The c10d backend's name; None asks torch for the default of the device type."""

    binds_device = False
    """Whether the library wants the device named when the group is made (``device_id``)."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._control_group: Any = None

    def open(
        self,
        *,
        rendezvous: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        """Join all ranks of the run in the default process group.

        Args:
            rendezvous: ``file:///path`` or ``tcp://host:port``.
            timeout_s: seconds after which a collective that hangs raises.
        """
        import torch.distributed as dist

        name = self.backend_name(device)
        timeout = datetime.timedelta(seconds=timeout_s)
        # Not even as None where it is not wanted: a vendor may have replaced the function by one
        # that has no such argument.
        bound: dict[str, Any] = {"device_id": device} if self.binds_device else {}
        dist.init_process_group(
            name,
            init_method=rendezvous,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            **bound,
        )
        host_backend = dist.get_default_backend_for_device(HOST_DEVICE)
        self._control_group = (
            dist.group.WORLD
            if name == host_backend
            else dist.new_group(backend=host_backend, timeout=timeout)
        )

    def backend_name(self, device: torch.device) -> str:
        """The c10d backend of a device: the one named, or else torch's default for its type."""
        import torch.distributed as dist

        return self.process_group_backend or dist.get_default_backend_for_device(device)

    def close(self) -> None:
        """Leave the process group, if one was joined."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self._control_group = None

    @property
    def control_group(self) -> dist.ProcessGroup:
        """A group over all ranks whose operations run on the host."""
        return self._control_group

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", group: Any = None) -> torch.Tensor:
        """Reduce in place over all ranks; `op` is ``sum``, ``mean`` or ``max``."""
        import torch.distributed as dist

        reduce_op = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        if op not in ("sum", "mean", "max"):
            raise ValueError(f"all_reduce: op {op!r} is none of 'sum', 'mean', 'max'")
        dist.all_reduce(tensor, op=reduce_op, group=group)
        if op == "mean":
            tensor.div_(dist.get_world_size(group))
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Copy rank `source`'s tensor into everyone's, in place."""
        import torch.distributed as dist

        dist.broadcast(tensor, src=source)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everyone's tensor, in rank order; all must have one shape."""
        import torch
        import torch.distributed as dist

        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        return parts

    def barrier(self) -> None:
        """Return once every rank has come here (on the host)."""
        import torch.distributed as dist

        dist.barrier(group=self._control_group)

    # -- host-side messages ------------------------------------------------------------------

    def sum_on_host(self, values: list[float]) -> list[float]:
        """Sum each number over all ranks, in float64, without touching the device."""
        import torch

        if self._control_group is None:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=HOST_DEVICE)
        return self.all_reduce(tensor, group=self._control_group).tolist()

    def gather_objects(self, value: Any) -> list[Any]:
        """Everyone's picklable value, in rank order."""
        import torch.distributed as dist

        if self._control_group is None:
            return [value]
        everyone: list[Any] = [None] * dist.get_world_size(self._control_group)
        dist.all_gather_object(everyone, value, group=self._control_group)
        return everyone
