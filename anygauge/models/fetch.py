"""Fetch a model of the hub by hand: ``python -m anygauge.models.fetch NAME``."""

from __future__ import annotations

import argparse
import os
import sys

from anygauge.config.schema import ModelSection
from anygauge.interface import AnygaugeError
from anygauge.models.hub import download_requests, fetch
from anygauge.util.text import format_bytes


def main() -> int:
    """Fetch; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m anygauge.models.fetch", description=__doc__)
    parser.add_argument("name", help="of the hub, such as owner/name")
    parser.add_argument("--revision", help="branch, tag or commit")
    arguments = parser.parse_args()

    def log(text: str) -> None:
        print(text, file=sys.stderr)

    try:
        for request in download_requests(
            ModelSection(name=arguments.name, revision=arguments.revision)
        ):
            found = fetch(request, log=log)
            log(f"{request.name}: {format_bytes(found.new)} fetched, in {found.folder}")
    except AnygaugeError as error:
        log(f"error: {error}")
        return error.exit_status
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a download that still runs has no use any more
