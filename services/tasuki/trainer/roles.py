"""What a network of the trainer is for."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    POLICY = "policy"
    """Is trained and served."""
    REFERENCE = "reference"
    """Frozen weights that training started from."""
    CRITIC = "critic"
    """Is trained and gives values to tokens."""
