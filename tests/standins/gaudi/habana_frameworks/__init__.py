"""Namespace of the stand-in; see `habana_standin`."""
