"""Spans of a whole node: client, coordinator, trainer and rollout in one trace."""

from __future__ import annotations

from tasuki.client import Client, SamplingParams, TrainingSample
from tests.conftest import started_node
from tests.otlp import receiving


def test_a_step_is_seen_in_all_services_of_a_real_node() -> None:
    with receiving() as receiver:
        with (
            started_node(overrides=[f"telemetry.endpoint={receiver.endpoint}"]) as node,
            Client(state_dir=node.state_dir, otlp_endpoint=receiver.endpoint) as client,
        ):
            (sample,) = client.generate([[5, 6]], SamplingParams(max_new_tokens=4))
            learned = TrainingSample(
                [5, 6], sample.token_ids, sample.rollout_log_probs, 1.0, policy_version=sample.policy_version
            )
            client.forward_backward([learned])
            client.optim_step()
        receiver.one("changeover to ROLLOUT")
        receiver.one("changeover to TRAIN")
    by_id = {span.span_id: span for span in receiver.spans}
    for service, method in (
        ("rollout", "RolloutService/Generate"),
        ("trainer", "TrainerService/ForwardBackward"),
        ("trainer", "TrainerService/OptimStep"),
        ("coordinator", "CoordinatorService/Acquire"),
    ):
        served = [span for span in receiver.named(f"tasuki.v1.{method}") if span.service == f"tasuki-{service}"]
        assert served, method
        for span in served:
            caller = by_id[span.parent_id]
            assert (caller.service, caller.name) == ("tasuki-client", span.name)
            assert caller.attributes["tasuki.request_id"] == span.attributes["tasuki.request_id"]
    for service in ("trainer", "rollout"):  # each at least one stage of both changeovers
        stages = [by_id[span.parent_id] for span in receiver.spans if span.service == f"tasuki-{service}"]
        assert any(by_id[call.parent_id].name.startswith("stage ") for call in stages if call.parent_id)
