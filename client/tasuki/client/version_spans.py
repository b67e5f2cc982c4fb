"""Versions by token of what is drawn over several changeovers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tasuki.client.encode import TokenIds
from tasuki.client.types import FinishReason, Sample, SamplingParams, VersionSpan, joined_routes

Decode = Callable[[NDArray[np.int32]], str]


def spans_of(sample: Sample) -> Sequence[VersionSpan]:
    """The versions of its tokens; empty without tokens."""
    if sample.version_spans or not len(sample.token_ids):
        return sample.version_spans
    return [VersionSpan(num_tokens=len(sample.token_ids), policy_version=sample.policy_version)]


def merged(spans: Iterable[VersionSpan]) -> list[VersionSpan]:
    """Successive spans of one version as one."""
    found: list[VersionSpan] = []
    for span in spans:
        if found and found[-1].policy_version == span.policy_version:
            span = VersionSpan(num_tokens=found.pop().num_tokens + span.num_tokens, policy_version=span.policy_version)
        found.append(span)
    return found


def unfinished(prompt_token_ids: TokenIds, *, sample_index: int = 0) -> Sample:
    """A sample without tokens, to be continued."""
    none = np.zeros(0, np.int32)
    prompt = np.array(prompt_token_ids, np.int32)
    return Sample(0, sample_index, none, none.astype(np.float32), FinishReason.CUT, 0, prompt_token_ids=prompt)


def left_of(sampling: SamplingParams, before: Sample) -> SamplingParams:
    """The parameters that continue `before`."""
    assert sampling.max_new_tokens is not None
    return replace(sampling, max_new_tokens=sampling.max_new_tokens - len(before.token_ids))


def continued(before: Sample, after: Sample, sampling: SamplingParams, decode: Decode) -> Sample:
    """`before` with the tokens that `after` has drawn from its prompt and tokens, up to a stop text that the cut has split."""
    assert sampling.max_new_tokens is not None
    token_ids = np.concatenate([before.token_ids, after.token_ids])
    spans = merged([*spans_of(before), *spans_of(after)])
    is_full = after.finish_reason is FinishReason.CUT and len(token_ids) >= sampling.max_new_tokens
    joined = replace(
        after,
        prompt_index=before.prompt_index,
        sample_index=before.sample_index,
        token_ids=token_ids,
        rollout_log_probs=np.concatenate([before.rollout_log_probs, after.rollout_log_probs]),
        finish_reason=FinishReason.LENGTH if is_full else after.finish_reason,
        policy_version=spans[-1].policy_version if spans else after.policy_version,
        has_exact_log_probs=before.has_exact_log_probs and after.has_exact_log_probs,
        prompt_token_ids=before.prompt_token_ids,
        version_spans=spans if len(spans) > 1 else (),
        routed_experts=joined_routes([one.routed_experts for one in (before, after) if len(one.token_ids)]),
    )
    return stopped(joined, sampling.stop, decode, num_before=len(before.token_ids))


def stopped(sample: Sample, stop: Sequence[str], decode: Decode, *, num_before: int) -> Sample:
    """The sample up to the token that completes a stop text which a cut after `num_before` tokens has split.

    Rollout sees all others. As it does, searches as many of the latest tokens as the longest text has bytes, and one more.
    """
    longest = max((len(one.encode()) for one in stop), default=0) if num_before else 0
    for most in range(num_before + 1, min(num_before + longest, len(sample.token_ids)) + 1):
        text = decode(sample.token_ids[max(0, most - longest - 1) : most])
        if any(one in text for one in stop):
            break
    else:
        return sample
    spans, left = list[VersionSpan](), most
    for span in spans_of(sample):
        spans.append(VersionSpan(num_tokens=min(left, span.num_tokens), policy_version=span.policy_version))
        left -= spans[-1].num_tokens
    spans = merged([span for span in spans if span.num_tokens])
    return replace(
        sample,
        token_ids=sample.token_ids[:most],
        rollout_log_probs=sample.rollout_log_probs[:most],
        finish_reason=FinishReason.STOP,
        policy_version=spans[-1].policy_version,
        version_spans=spans if len(spans) > 1 else (),
        routed_experts=sample.routed_experts[: len(sample.routed_experts) - len(sample.token_ids) + most],
    )
