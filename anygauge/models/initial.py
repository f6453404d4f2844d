"""How an adapter's factors begin: which of peft's ``init_lora_weights`` are served."""

from __future__ import annotations

from anygauge.interface import UnsupportedError

CHANGES_BASE = (
    "it takes the factors out of the base's weights and changes these, which would have to be "
    "undone where the adapter is saved; that is not written yet"
)
NOT_SERVED = {
    "pissa": CHANGES_BASE,
    "olora": CHANGES_BASE,
    "corda": f"it needs covariances of activations, and {CHANGES_BASE}",
    "lora_ga": f"it needs gradients of the base's weights, and {CHANGES_BASE}",
    "mica": "it takes a factor out of the base's weights, and some strategies shard these first",
    "eva": "it needs activations of the training rows before training begins, which no run takes",
    "loftq": "it needs a base that peft quantises itself",
}
"""Value, or its beginning -> why it is not."""


def check_init(init: bool | str) -> None:
    """Refuse initial values that need more than a seed.

    Raises:
        UnsupportedError: says what it needs; values that peft does not know are peft's to refuse.
    """
    if isinstance(init, bool):
        return
    for name, why in NOT_SERVED.items():
        if init == name or init.startswith(f"{name}_niter_"):
            raise UnsupportedError(
                f"adapter.init: {init} is not served: {why}. Use one of true, false, gaussian or "
                "orthogonal, which are drawn from the seed alone"
            )
