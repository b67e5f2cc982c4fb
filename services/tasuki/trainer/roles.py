"""Roles of the trainer's networks."""

from enum import StrEnum


class Role(StrEnum):
    POLICY = "policy"
    """Trained and served."""
    REFERENCE = "reference"
    """The frozen weights that training started from."""
    CRITIC = "critic"
    """Trained; estimates the value of each token."""
