"""The collectives facet: one meaning for each operation, whatever the vendor's library offers.

Defaults work for any library with a sum: the mean is a sum and a division, since several
libraries have no mean. Host-side messages (objects, agreement on control flow) go through
`control_group`, so that they never wait for the device, and carry proofs (`exchange`).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from anygauge.interface.placement import HOST_DEVICE
from anygauge.util.exchange import SignedExchange
from anygauge.util.limits import PATIENT_S, limit_groups, release_groups
from anygauge.util.rendezvous import open_store

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["Collectives"]


class Collectives:
    """Process groups and the operations on them."""

    process_group_backend: str | None = None
    """The c10d backend's name; None asks torch for the default of the device type."""

    binds_device = False
    """Whether the library wants the device named when the group is made (``device_id``)."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._control_group: Any = None
        self._exchange: SignedExchange | None = None

    def open(
        self,
        *,
        rendezvous: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        device: torch.device,
        secret: str = "",
        listener: int | None = None,
    ) -> None:
        """Join all ranks of the run in the default process group.

        Args:
            rendezvous: ``file:///path``, the path as it is; ``tcp://host:port``; or
                ``served://host:port``, where a store is served already.
            timeout_s: seconds after which a collective that hangs raises.
            secret: what all ranks of the job know, and nobody else; needed where they meet at a
                port.
            listener: descriptor of a socket that listens at that port, for rank 0.

        Raises:
            AnygaugeError: who joined as one of the ranks does not know the secret.
        """
        import torch.distributed as dist

        # Its functions have the world as a default. Imported later, as torch's optimizers do it,
        # they would keep this one: its threads would outlive `close` and run beside the
        # interpreter's end, where one that gives a tensor back aborts the process.
        import torch.distributed.nn.functional  # noqa: F401

        name = self.backend_name(device)
        timeout = datetime.timedelta(seconds=timeout_s)
        # Not even as None where it is not wanted: a vendor may have replaced the function by one
        # that has no such argument.
        bound: dict[str, Any] = {"device_id": device} if self.binds_device else {}
        dist.init_process_group(
            name,
            store=open_store(
                rendezvous,
                secret=secret,
                rank=rank,
                world_size=world_size,
                timeout=timeout,
                listener=listener,
            ),
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
        self._exchange = SignedExchange(self._control_group, secret)

    def backend_name(self, device: torch.device) -> str:
        """The c10d backend of a device: the one named, or else torch's default for its type."""
        import torch.distributed as dist

        return self.process_group_backend or dist.get_default_backend_for_device(device)

    def close(self) -> None:
        """Leave the process group, if one was joined."""
        import torch.distributed as dist

        self._control_group = self._exchange = None
        if dist.is_initialized():
            dist.destroy_process_group()
        release_groups()

    # -- how long collectives may wait -------------------------------------------------------

    def set_timeout(self, seconds: float) -> tuple[str, ...]:
        """Give all groups of this process this limit, those of other libraries among them, and
        those that are made from now on. Nothing happens in a process that has joined none.

        Returns:
            Names of libraries whose groups keep the limit that they were made with.
        """
        return limit_groups(seconds) if self._control_group is not None else ()

    @contextlib.contextmanager
    def patient_timeout(self, *, then: float) -> Iterator[None]:
        """Let ranks wait for each other as long as work takes that is not the same on all: loading,
        saving. All ranks enter it; none leaves it before the last has come to its end.

        Args:
            then: the limit afterwards, in seconds.
        """
        self.set_timeout(max(PATIENT_S, then))
        yield
        if self._control_group is not None:
            self.barrier()
        self.set_timeout(then)

    @property
    def control_group(self) -> dist.ProcessGroup:
        """A group over all ranks whose operations run on the host. For a loop of one's own."""
        return self._control_group

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", group: Any = None) -> torch.Tensor:
        """Reduce in place over all ranks; `op` is ``sum``, ``mean`` or ``max``."""
        import torch.distributed as dist

        reduce_op = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        if op not in ("sum", "mean", "max"):
            raise ValueError(f"all_reduce: op {op!r} is none of 'sum', 'mean', 'max'")
        dense = tensor.contiguous()
        dist.all_reduce(dense, op=reduce_op, group=group)
        if op == "mean":
            dense.div_(dist.get_world_size(group))
        return _copied_back(dense, tensor)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Copy rank `source`'s tensor into everyone's, in place. For a loop of one's own."""
        import torch.distributed as dist

        dense = tensor.contiguous()
        dist.broadcast(dense, src=source)
        return _copied_back(dense, tensor)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everyone's tensor, in rank order; all must have one shape. For a loop of one's own."""
        import torch
        import torch.distributed as dist

        dense = tensor.contiguous()
        parts = [torch.empty_like(dense) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, dense)
        return parts

    def barrier(self) -> None:
        """Return once every rank has come here (on the host)."""
        import torch.distributed as dist

        dist.barrier(group=self._control_group)

    # -- host-side messages ------------------------------------------------------------------

    def sum_on_host(self, values: list[float]) -> list[float]:
        """Sum each number over all ranks, in float64 and the order of ranks, without touching the
        device."""
        exchange = self._messages()
        if exchange is None:
            return values
        form = f"<{len(values)}d"
        everyone = exchange.gather_alike(struct.pack(form, *values), "sum")
        return [sum(each) for each in zip(*(struct.unpack(form, e) for e in everyone), strict=True)]

    def gather_objects(self, value: Any) -> list[Any]:
        """Everyone's value, in rank order, by way of JSON: a tuple comes back as a list.

        Raises:
            TypeError: the value is none of JSON's: text, numbers, booleans, None, lists, and
                dictionaries with keys of text.
        """
        exchange = self._messages()
        if exchange is None:
            return [value]
        everyone = exchange.gather(json.dumps(value).encode(), "value")
        return [json.loads(text) for text in everyone]

    def gather_bytes(self, value: bytes) -> list[bytes]:
        """Everyone's bytes, in rank order; at most 16 MiB each."""
        exchange = self._messages()
        return [value] if exchange is None else exchange.gather(value, "bytes")

    def _messages(self) -> SignedExchange | None:
        """The exchange of bytes with other ranks; None for a process that is alone."""
        if self._exchange is None and self._control_group is not None:
            raise RuntimeError(
                f"{type(self).__name__}.open made a group without Collectives.open, which makes "
                "what carries messages between ranks"
            )
        return self._exchange


def _copied_back(dense: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Give a view with gaps, or of another order, what was received for it; returns the view.

    Libraries get contiguous tensors alone: some move memory from the first element on, whatever
    the strides, without an error.

    Raises:
        RuntimeError: elements of the view share memory, as those of an expanded tensor do.
    """
    if dense is not tensor:
        import torch

        with torch.no_grad():
            tensor.copy_(dense)
    return tensor
