"""Samples of a call as messages, for tests of their decoding."""

from typing import Any

from tasuki.v1.types_pb2 import TrainingSample


def make_sample(**fields: Any) -> TrainingSample:
    """Makes a valid sample of two and three tokens, except for `fields`."""
    good: dict[str, Any] = {
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3, 4, 5],
        "rollout_log_probs": [-0.1, -0.2, -0.3],
        "advantages": [1.0],
    }
    return TrainingSample(**{**good, **fields})
