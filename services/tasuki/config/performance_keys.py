"""Settings that do not change the numbers that come out."""

NEUTRAL_TRAINER_KEYS = {
    "listen", "num_ranks", "num_threads", "devices", "collective_timeout_s", "export", "export_stays", "export_handles"
}  # fmt: skip
