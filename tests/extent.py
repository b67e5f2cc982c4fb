"""How far the long proofs go: a sample of each in `make test`, all of it in `make chaos`."""

from __future__ import annotations

import os

IS_WHOLE = os.environ.get("TASUKI_PROOFS") == "whole"
