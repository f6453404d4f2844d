"""What DeepSpeed and optimum-habana ask: which generation the card is of."""

import enum


class synDeviceType(enum.Enum):  # the original's is made by its C++
    synDeviceGaudi = 1
    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5


def _get_device_type() -> int:
    return synDeviceType.synDeviceGaudi2


def _is_fp16_supported() -> bool:
    return _get_device_type() != synDeviceType.synDeviceGaudi
