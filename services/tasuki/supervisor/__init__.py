"""Runs a node: starts its services, restarts one that ends or hangs, and leaves nothing behind."""
