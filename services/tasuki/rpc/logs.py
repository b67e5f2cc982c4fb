"""Log lines of a service: one each, key=value, on stderr."""

from __future__ import annotations

import logging


def configure_logging(service: str) -> None:
    """Sets the format once, at the start of a service's process."""
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname)s service={service} logger=%(name)s %(message)s", force=True
    )
