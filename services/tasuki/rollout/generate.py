"""Generation requests: their validation, and the samples of one call."""

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tasuki.algorithms.setting import GREEDY_BELOW, RANGES
from tasuki.models.images import ImageProcessor, Prepared
from tasuki.models.tokenizer import TOKENIZER_FILE
from tasuki.rollout.model import ModelFacts
from tasuki.rollout.seeds import given_sampling, sample_seed
from tasuki.v1 import types_pb2
from tasuki.v1.rollout_pb2 import GenerateRequest
from tasuki.wire.errors import InvalidArgument, PolicyDiverged

if TYPE_CHECKING:
    from tasuki.rollout.sglang.engine import RolloutEngine

_MAX_SAMPLES = 65_536
_MAX_KEY = 128
# SGLang's default.
_DEFAULT_MAX_NEW_TOKENS = 128
_WITHOUT_EFFECT = {
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "min_new_tokens": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": None,
    "json_schema": None,
}
_MAX_STOPS, _MAX_STOP_BYTES, _MAX_SCHEMA_BYTES = 16, 256, 65_536
_MAX_BIAS = 100
CUT = "abort"
"""SGLang's finish reason for an aborted completion."""
_REASONS = {
    "stop": types_pb2.FINISH_REASON_STOP,
    "length": types_pb2.FINISH_REASON_LENGTH,
    CUT: types_pb2.FINISH_REASON_CUT,
}


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished or cut completion. log_probs: natural, one per token."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    reason: str
    """SGLang's finish reason: "stop", "length" or "abort"."""
    routed_experts: bytes = b""
    """See types.proto."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sample to generate. id: unique in the engine, and no prefix of another, since SGLang aborts by prefix."""

    id: str
    token_ids: Sequence[int]
    sampling: Mapping[str, object]
    images: Prepared | None = None
    """Of the token ids, which have a placeholder for each square of patches."""


def check_request(request: GenerateRequest, model: ModelFacts) -> None:
    """Raises InvalidArgument naming the first invalid field."""
    if not request.prompts:
        raise InvalidArgument("prompts", "give at least one")
    if request.num_samples < 1:
        raise InvalidArgument("num_samples", "must be at least 1")
    if len(request.prompts) * request.num_samples > _MAX_SAMPLES:
        asked = len(request.prompts) * request.num_samples
        raise InvalidArgument("num_samples", f"{asked} samples in one call; at most {_MAX_SAMPLES}, split the call")
    for name in ("request_id", "session_key"):
        if (length := len(getattr(request, name))) > _MAX_KEY:
            raise InvalidArgument(name, f"has {length} characters; at most {_MAX_KEY}")
    sampling = given_sampling(request)
    _check_sampling(sampling, model)
    for index, prompt in enumerate(request.prompts):
        _check_token_ids(f"prompts[{index}].token_ids", prompt.token_ids, model)
        _check_length(f"prompts[{index}]", len(prompt.token_ids), sampling, model)
        if model.images is not None:
            model.images.places(prompt.token_ids, len(prompt.images), field=f"prompts[{index}].token_ids")
        elif prompt.images:
            raise InvalidArgument(f"prompts[{index}].images", "the model reads text alone; send no images")


def _check_length(field: str, num_tokens: int, sampling: Mapping[str, object], model: ModelFacts) -> None:
    if not num_tokens:
        raise InvalidArgument(f"{field}.token_ids", "give at least one token")
    room = model.context_length - num_tokens
    if room < 1:
        raise InvalidArgument(
            f"{field}.token_ids",
            f"{num_tokens} tokens leave no room for a completion in a context of {model.context_length}",
        )
    max_new_tokens = sampling.get("max_new_tokens")
    if isinstance(max_new_tokens, int) and max_new_tokens > room:
        raise InvalidArgument(
            "sampling_params.max_new_tokens",
            f"{field} has {num_tokens} tokens, so {max_new_tokens} more do not fit in a context of {model.context_length}",
            prompt=field,
        )


def _check_token_ids(field: str, token_ids: Sequence[int], model: ModelFacts) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < model.vocab_size):
        return
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < model.vocab_size:
            raise InvalidArgument(f"{field}[{index}]", f"{token_id} is not in the vocabulary of {model.vocab_size} tokens")


def _check_sampling(sampling: Mapping[str, object], model: ModelFacts) -> None:
    for name, (is_allowed, wanted) in RANGES.items():
        value = sampling.get(name)
        if isinstance(value, (int, float)) and not is_allowed(value):
            raise InvalidArgument(f"sampling_params.{name}", f"must be {wanted}, not {value:g}")
    _check_combinations(sampling, model)
    stop_token_ids = sampling.get("stop_token_ids", ())
    assert isinstance(stop_token_ids, Sequence)
    _check_token_ids("sampling_params.stop_token_ids", stop_token_ids, model)
    _check_texts(sampling, model)


def _check_texts(sampling: Mapping[str, Any], model: ModelFacts) -> None:
    """What SGLang computes with the tokenizer, and by token."""
    for index, text in enumerate(stops := sampling.get("stop", ())):
        field, num_bytes = f"sampling_params.stop[{index}]", len(text.encode())
        if index >= _MAX_STOPS:
            raise InvalidArgument("sampling_params.stop", f"has {len(stops)} texts; at most {_MAX_STOPS}")
        if not 1 <= num_bytes <= _MAX_STOP_BYTES:
            raise InvalidArgument(field, f"has {num_bytes} bytes; give 1 to {_MAX_STOP_BYTES}")
    schema = sampling.get("json_schema")
    for name in ("stop", "json_schema"):
        if sampling.get(name) is not None and not (Path(model.path) / TOKENIZER_FILE).exists():
            raise InvalidArgument(f"sampling_params.{name}", f"needs the model's {TOKENIZER_FILE}, and {model.path} has none")
    for token_id, bias in sampling.get("logit_bias", {}).items():
        if not 0 <= int(token_id) < model.vocab_size:
            problem = f"{token_id} is not in the vocabulary of {model.vocab_size} tokens"
            raise InvalidArgument("sampling_params.logit_bias", problem)
        if not abs(bias) <= _MAX_BIAS:
            problem = f"must be a number in [-{_MAX_BIAS}, {_MAX_BIAS}], not {bias:g}"
            raise InvalidArgument(f"sampling_params.logit_bias[{token_id}]", problem)
    if schema is not None:
        if len(schema) > _MAX_SCHEMA_BYTES:
            raise InvalidArgument("sampling_params.json_schema", f"has {len(schema)} characters; at most {_MAX_SCHEMA_BYTES}")
        if not model.stop_token_ids or sampling.get("min_new_tokens"):
            problem = "needs an end-of-sequence token after the JSON text: the model has none, or min_new_tokens forbids it"
            raise InvalidArgument("sampling_params.json_schema", problem)
        from tasuki.rollout.sglang.json_grammar import check_schema

        check_schema(schema)


def _check_combinations(sampling: Mapping[str, object], model: ModelFacts) -> None:
    least, most = sampling.get("min_new_tokens", 0), sampling.get("max_new_tokens", _DEFAULT_MAX_NEW_TOKENS)
    assert isinstance(least, int) and isinstance(most, int)
    if least > most:
        raise InvalidArgument("sampling_params.min_new_tokens", f"{least} is more than max_new_tokens, {most}")
    if least and not model.stop_token_ids:
        raise InvalidArgument("sampling_params.min_new_tokens", "the model has no end-of-sequence token to suppress")
    if model.is_seeded and sampling.get("min_p"):
        raise InvalidArgument(
            "sampling_params.min_p", "SGLang cannot combine it with the per-sample seeds that this engine uses"
        )
    if model.is_speculative and sampling.get("min_p"):
        raise InvalidArgument("sampling_params.min_p", "SGLang ignores it with speculative decoding, which this engine uses")
    if not model.is_seeded and "sampling_seed" in sampling:
        raise InvalidArgument("sampling_params.sampling_seed", "this engine does not support seeds")


def is_greedy(sampling: Mapping[str, object]) -> bool:
    """Whether only the most likely token can be sampled."""
    temperature = sampling.get("temperature", 1.0)
    assert isinstance(temperature, (int, float))
    return temperature < GREEDY_BELOW or sampling.get("top_k") == 1


def log_prob_temperature(sampling: Mapping[str, object]) -> float:
    """Temperature of the distribution behind the reported log-probs."""
    temperature = 1.0 if is_greedy(sampling) else sampling.get("temperature", 1.0)
    assert isinstance(temperature, (int, float))
    return temperature


def has_exact_log_probs(sampling: Mapping[str, object]) -> bool:
    """Whether tokens are sampled exactly from softmax(logits / temperature), the distribution of the log-probs.

    Penalties, biases, grammars and min_new_tokens change the logits, so that the trainer's log-probs differ; top_p, top_k and min_p
    exclude tokens that the reported distribution includes.
    """
    return not is_greedy(sampling) and all(sampling.get(name, default) == default for name, default in _WITHOUT_EFFECT.items())


def sampling_of(given: Mapping[str, Any], model: ModelFacts, *, num_prompt_tokens: int) -> dict[str, object]:
    """SGLang's sampling parameters for a sample of one prompt, without seeds."""
    sampling = dict(given)
    room = model.context_length - num_prompt_tokens
    sampling.setdefault("max_new_tokens", min(_DEFAULT_MAX_NEW_TOKENS, room))
    if model.images is not None:
        sampling["stop_token_ids"] = [*given.get("stop_token_ids", ()), *model.images.placeholder_ids]
    if is_greedy(sampling):
        # With only top_k = 1, whether SGLang's log-probs include the temperature depends on the rest of the batch.
        sampling["temperature"] = 0.0
        sampling.pop("top_k", None)
    return sampling


async def generate(
    engine: "RolloutEngine",
    request: GenerateRequest,
    *,
    images: Mapping[int, Prepared],
    policy_version: int,
    seed: int | str | None,
) -> AsyncGenerator[list[types_pb2.Sample], None]:
    """Yields samples in order of completion; those that ended together come together. Raises PolicyDiverged.

    images: see prepared_images. seed: base of the samples' seeds; None if the engine does not use seeds.
    """
    given = given_sampling(request)
    temperature, is_exact = log_prob_temperature(given), has_exact_log_probs(given)
    # SGLang aborts by prefix: the separators keep this call from aborting another, and sample 1 from aborting sample 10.
    prefix = f"{uuid.uuid4().hex}-"
    requests = _engine_requests(request, images, engine.model, prefix=prefix, seed=seed)
    digests = {prompt: prepared.digest for prompt, prepared in images.items()}
    num_requests = len(request.prompts) * request.num_samples
    running = engine.generate(
        requests,
        num_requests=num_requests,
        prefix=prefix,
        session_key=request.session_key,
        cut_on_drain=request.cut_on_drain,
    )
    async with aclosing(running) as completions:
        async for ended in completions:
            if not all(math.isfinite(log_prob) for _, completion in ended for log_prob in completion.log_probs):
                text = f"policy version {policy_version} yields log-probs that are not finite; load a checkpoint"
                raise PolicyDiverged(text, policy_version=policy_version)
            yield [
                types_pb2.Sample(
                    prompt_index=index // request.num_samples,
                    sample_index=index % request.num_samples,
                    token_ids=completion.token_ids,
                    rollout_log_probs=completion.log_probs,
                    finish_reason=_REASONS[completion.reason],
                    policy_version=policy_version,
                    temperature=temperature,
                    has_exact_log_probs=is_exact,
                    routed_experts=completion.routed_experts,
                    route_bytes=0 if engine.model.routes is None else engine.model.routes.token_bytes,
                    image_digest=digests.get(index // request.num_samples, b""),
                )
                for index, completion in ended
            ]


async def prepared_images(request: GenerateRequest, model: ModelFacts) -> dict[int, Prepared]:
    """The prompts with images, by position. Raises InvalidArgument as `expand`, and for one that is too long with its images."""
    processor, sampling = cast(ImageProcessor, model.images), given_sampling(request)
    asked = {index: prompt for index, prompt in enumerate(request.prompts) if prompt.images}
    if not asked:
        return {}

    def check_lengths() -> None:  # before anything is decoded: small files may be large images
        for index, prompt in asked.items():
            field = f"prompts[{index}].images"
            lengths = (processor.header_tokens(image, field=f"{field}[{place}]") for place, image in enumerate(prompt.images))
            _check_length(f"prompts[{index}]", len(prompt.token_ids) + sum(lengths) - len(prompt.images), sampling, model)

    await asyncio.to_thread(check_lengths)
    threads = (
        asyncio.to_thread(processor.expand, list(prompt.token_ids), prompt.images, field=f"prompts[{index}]")
        for index, prompt in asked.items()
    )
    return dict(zip(asked, await asyncio.gather(*threads), strict=True))


def _engine_requests(
    request: GenerateRequest, images: Mapping[int, Prepared], model: ModelFacts, *, prefix: str, seed: int | str | None
) -> Iterator[EngineRequest]:
    """Created lazily: a call may have very many."""
    given = given_sampling(request)
    for prompt, message in enumerate(request.prompts):
        prepared = images.get(prompt)
        token_ids = list(message.token_ids) if prepared is None else prepared.token_ids
        for sample in range(request.num_samples):
            sampling = sampling_of(given, model, num_prompt_tokens=len(token_ids))
            if seed is not None:
                sampling["sampling_seed"] = sample_seed(seed, prompt=request.first_prompt + prompt, sample=sample)
            yield EngineRequest(f"{prefix}{prompt}-{sample}.", token_ids, sampling, prepared)
