"""The `tasuki` command."""

import os

# grpc reads this when it is imported. It writes a line to stderr for each connection that a restarting service closes; a call's error has
# what a user needs. Services inherit it.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # noqa: TID251 - __main__ imports grpc
