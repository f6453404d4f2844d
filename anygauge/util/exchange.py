"""Messages between ranks on the host: bytes with a proof of who sent them, and never a pickle.

Torch's store and the sockets of its groups know no authentication: whoever reaches them can join as
a rank that is late. So each message carries an HMAC-SHA256 over the sender's rank, the number of
the message, what it is for, and what it says. Its key comes from the job's secret and from a number
that each rank draws when the group is made: no message of another group is taken for one of this.
A message without its proof ends the run, and nothing that it says is looked at.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import TYPE_CHECKING, Any

from anygauge.util.errors import AnygaugeError

if TYPE_CHECKING:
    import torch

MAX_BYTES = 16 * 1024 * 1024
"""Bytes of one rank's message: what a stranger can make the others set aside for it."""

_PROOF = hashlib.sha256().digest_size
_NONCE = 16


def derived_key(secret: str | bytes, purpose: str) -> bytes:
    """A key for one purpose, from which neither the secret nor another purpose's key follows."""
    key = secret.encode() if isinstance(secret, str) else secret
    return hmac.digest(key, purpose.encode(), "sha256")


class SignedExchange:
    """Gathers bytes of all ranks of a group that works on the host. All ranks call it alike."""

    def __init__(self, group: Any, secret: str) -> None:
        """Meet the other ranks.

        Args:
            group: a process group over all ranks, for tensors on the host.

        Raises:
            AnygaugeError: one of them does not know the secret.
        """
        import torch.distributed as dist

        self._group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        self._count = 0
        # Everyone's own number is in it, so that nobody can have recorded what follows.
        self._key = derived_key(secret, "messages between ranks")
        self._key = hmac.digest(self._key, b"".join(self._all(os.urandom(_NONCE))), "sha256")
        self.gather_alike(b"", "greeting")

    def gather(self, payload: bytes, purpose: str) -> list[bytes]:
        """Everyone's bytes, in rank order, of whatever length.

        Args:
            purpose: what the message is for; the same on all ranks.

        Raises:
            AnygaugeError: a message is too long, or lacks its proof.
        """
        sizes = [
            struct.unpack("<q", size)[0] for size in self._all(struct.pack("<q", len(payload)))
        ]
        for rank, size in enumerate(sizes):
            if not 0 <= size <= MAX_BYTES:
                raise AnygaugeError(
                    f"rank {rank} announced a message of {size:,} bytes ({purpose}); at most "
                    f"{MAX_BYTES:,} are taken"
                )
        frames = self._all(self._proof(self._rank, payload, purpose) + payload, _PROOF + max(sizes))
        return self._verify(
            [f[: _PROOF + size] for f, size in zip(frames, sizes, strict=True)], purpose
        )

    def gather_alike(self, payload: bytes, purpose: str) -> list[bytes]:
        """Everyone's bytes, in rank order, where all ranks send equally many: one collective.

        Raises:
            AnygaugeError: a message lacks its proof.
        """
        return self._verify(self._all(self._proof(self._rank, payload, purpose) + payload), purpose)

    def _verify(self, frames: list[bytes], purpose: str) -> list[bytes]:
        for rank, frame in enumerate(frames):
            wanted = self._proof(rank, frame[_PROOF:], purpose)
            if not hmac.compare_digest(frame[:_PROOF], wanted):
                raise AnygaugeError(
                    f"what came from rank {rank} ({purpose}) does not prove that its sender knows "
                    "this job's secret; none of it was believed. Either a process that is not of "
                    f"this job has joined in the place of rank {rank}, or rank {rank} was started "
                    "with another job file. The ports of ranks belong on a network without "
                    "strangers: SECURITY.md"
                )
        self._count += 1
        return [frame[_PROOF:] for frame in frames]

    def _proof(self, rank: int, payload: bytes, purpose: str) -> bytes:
        name = purpose.encode()
        head = struct.pack("<qqq", rank, self._count, len(name))
        return hmac.digest(self._key, head + name + payload, "sha256")

    def _all(self, own: bytes, size: int | None = None) -> list[bytes]:
        """Everyone's bytes as they came; `own` is filled up to `size`."""
        import torch
        import torch.distributed as dist

        mine = torch.zeros(len(own) if size is None else size, dtype=torch.uint8)
        mine[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        parts: list[torch.Tensor] = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(parts, mine, group=self._group)
        return [part.numpy().tobytes() for part in parts]
