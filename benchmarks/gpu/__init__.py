"""One command for whoever has a GPU: ``make gpu``, ``make gpu-full``."""
