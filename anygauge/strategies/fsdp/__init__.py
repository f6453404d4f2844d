"""The `fsdp` strategy: torch's FSDP2."""
