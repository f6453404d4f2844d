"""The `single` strategy: plain torch in one process."""
