"""What a run takes, worked out before it: by rehearsing it on tensors that have no values."""
