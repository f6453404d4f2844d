"""What DeepSpeed asks."""


def _is_fp16_supported() -> bool:
    return True
