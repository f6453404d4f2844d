"""Kernels of the device."""
