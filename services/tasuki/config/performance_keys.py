"""Trainer settings that affect speed and memory but not results."""

PERFORMANCE_TRAINER_KEYS = {
    "listen", "num_ranks", "devices", "export", "export_stays",
    "expert_parallel", "reshard_after_forward", "reference_on_host", "empty_cache_early",
}  # fmt: skip
