"""Nodes that change over together: who they are, and the coordinator over theirs."""

EXIT_FLEET_ENDED = 75
"""Exit code of a node whose fleet has ended: the job is to be restarted (EX_TEMPFAIL of sysexits.h)."""
