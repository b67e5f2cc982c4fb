"""Sends a run's `metrics.jsonl` to experiment trackers, in processes of their own."""
