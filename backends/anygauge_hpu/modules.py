"""Which module each card of this machine is: the number by which Gaudi's library takes a card.

The kernel numbers device files as it finds cards (``accel0``), and a card's module is the place on
the board where it sits: the two need not agree, and a container may have any of the cards.
Source: Linux, Documentation/ABI/testing/sysfs-driver-habanalabs, ``module_id``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

DEVICE_FILES = "/dev/accel/accel*"
MODULE_FILES = "/sys/class/accel/accel*/device/module_id"
PATTERNS = (DEVICE_FILES, MODULE_FILES)
"""Files that say which modules a machine or container has."""


def modules_here(texts: Mapping[str, str]) -> tuple[str, ...] | None:
    """Module numbers of the cards that have a device file, in ascending order.

    Args:
        texts: path -> text of the files of `PATTERNS`; the text of a device file is not read.

    Returns:
        None where there is no card, or the driver does not say the module of each.
    """
    cards = {m[1] for path in texts if (m := re.fullmatch(r"/dev/accel/(accel\d+)", path))}
    found = {card: texts.get(MODULE_FILES.replace("accel*", card), "").strip() for card in cards}
    # Chips of other vendors have device files of this kind, but no module.
    numbers = sorted(int(text) for text in found.values() if text.isdigit())
    if not numbers or len(set(numbers)) < len(numbers):
        return None
    return tuple(map(str, numbers))


def look(root: Path = Path("/")) -> dict[str, str]:
    """The files of `PATTERNS` below a folder; opens no device."""
    found = {}
    for pattern in PATTERNS:
        for path in root.glob(pattern.lstrip("/")):
            try:
                text = path.read_text() if path.is_file() else ""
            except OSError:
                text = ""
            found[f"/{path.relative_to(root)}"] = text
    return found
