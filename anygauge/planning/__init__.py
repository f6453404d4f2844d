"""What a run takes of memory and time, worked out before it starts."""
