"""torch.compile on the device."""
