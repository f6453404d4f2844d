"""The `zero` strategy: DeepSpeed's ZeRO."""
