"""Supervises a node: starts its services, restarts those that end or hang, and leaves nothing behind."""
