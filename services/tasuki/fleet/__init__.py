"""Fleets: nodes that change phase together under one coordinator."""
