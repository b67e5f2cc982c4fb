"""Trainer settings that change speed and memory, and no number that is trained."""

PERFORMANCE_TRAINER_KEYS = {
    "listen", "num_ranks", "num_threads", "devices", "collective_timeout_s", "export", "export_stays", "export_handles"
}  # fmt: skip
