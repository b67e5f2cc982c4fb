"""Nodes that change over together: who they are, and the coordinator over theirs."""
