"""Tensor parallelism: ranks compute parts of every layer."""
