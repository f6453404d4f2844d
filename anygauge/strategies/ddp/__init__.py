"""The `ddp` strategy: the whole model on every rank."""
