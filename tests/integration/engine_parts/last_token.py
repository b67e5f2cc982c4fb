"""A request that is cut at its last token."""

from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from tasuki.rollout.sglang.scheduler import stop_at_the_last_token
from tests.models import EOS


@pytest.mark.parametrize(
    ("tokens", "cut", "reason", "settings"),
    [
        ([5, 9], FINISH_ABORT(), "stop", {}),
        ([5, 9], FINISH_ABORT(), "abort", {"ignore_eos": True}),
        ([5, 6], FINISH_ABORT(), "abort", {}),
        ([5, 9], FINISH_ABORT("a bad request", status_code=400), "abort", {}),
        ([5, 9], None, "stop", {"max_new_tokens": 2}),
        ([5, 6], None, "length", {"max_new_tokens": 2}),
    ],
)
def test_a_completion_that_ends_as_it_is_cut_has_ended(
    tokens: list[int], cut: FINISH_ABORT | None, reason: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be continued after its end."""
    monkeypatch.setattr(Req, "update_finish_state", Req.update_finish_state)
    stop_at_the_last_token()
    sampling = SamplingParams(stop_token_ids=[9], **{"max_new_tokens": 8, **settings})
    sampling.normalize(None)
    request = Req("a", "", [1, 2], sampling, vocab_size=100, eos_token_ids={EOS})
    for token in tokens:
        request.output_ids.append(token)
        request.to_finish = cut if len(request.output_ids) == len(tokens) else None
        request.update_finish_state()
    assert request.finished_reason.to_json()["type"] == reason
