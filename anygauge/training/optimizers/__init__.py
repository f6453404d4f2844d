"""Optimizers that torch does not bring in the form we need, and what they ask of a run."""
