"""Fleets: nodes that change phase together under one coordinator."""

EXIT_FLEET_ENDED = 75
"""Exit code of a node whose fleet has ended, so that the job is restarted (EX_TEMPFAIL of sysexits.h)."""
