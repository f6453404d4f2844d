"""Switches of the bridge. The original is made when it is built, from scripts/env_flags.yaml."""

import os


def get_pt_enable_comm_group_cache():
    return os.getenv("PT_ENABLE_COMM_GROUP_CACHE", "true").lower() in ("1", "true")
