"""Arguments and results of the client's verbs. Results are the wire's messages; samples hold numpy arrays. T is the number of tokens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms.setting import RANGES
from tasuki.client.messages import message_of
from tasuki.v1 import coordinator_pb2, rollout_pb2, trainer_pb2, types_pb2
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.stages import Phase as Phase
from tasuki.wire.stages import Stage as Stage
from tasuki.wire.stages import StageStatus as StageStatus
from tasuki.wire.stages import WireEnum

Changeover = coordinator_pb2.Changeover
NodeState = coordinator_pb2.NodeState
OptimStepResult = trainer_pb2.OptimStepResponse
RolloutState = rollout_pb2.GetRolloutStateResponse
StageEvent = coordinator_pb2.StageEvent
TrainerState = trainer_pb2.GetTrainerStateResponse
VersionSpan = types_pb2.VersionSpan
Watched = coordinator_pb2.WatchStateResponse


Routes = NDArray[np.uint8] | tuple[()]


class FinishReason(WireEnum):
    """Why a completion ended."""

    STOP = "STOP"
    """An end-of-sequence or stop token was sampled, and is the last token; or a stop text was completed by the last token."""
    LENGTH = "LENGTH"
    CUT = "CUT"
    """Stopped by a drain. The tokens so far are valid; generating from the prompt and them continues the sample."""


class Role(WireEnum):
    """A network that the trainer holds."""

    POLICY = "POLICY"
    REFERENCE = "REFERENCE"
    """The frozen weights that training started from."""
    CRITIC = "CRITIC"
    """Estimates the value of each token. Only on nodes with a table [trainer.critic]."""


_WANTED = {
    "stop": 'a list of texts, such as ["</answer>"]',
    "logit_bias": "finite numbers by token id",
    "json_schema": "a JSON Schema as a dict or text",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, with SGLang's names and meanings. None takes SGLang's default.

    Raises InvalidArgument naming a parameter with a value of the wrong type or out of range.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    """0 is greedy."""
    top_p: float | None = None
    top_k: int | None = None
    """-1 disables it."""
    min_p: float | None = None
    """Refused on a CPU, where SGLang cannot combine it with a seed per sample, and with speculative decoding, where SGLang ignores it."""
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    """In addition to the model's own, which GetRolloutState reports."""
    ignore_eos: bool | None = None
    """Ignores every stop token, including those in stop_token_ids."""
    sampling_seed: int | None = None
    """Base seed, from which each sample's follows. Not supported on a GPU, where SGLang samples a batch from one generator."""
    stop: Sequence[str] = ()
    """Texts that end a completion with STOP, within a token or over several, also with ignore_eos. The tokens that form the text stay."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens, -100 to 100. Log-probs are then not exact."""
    json_schema: str | Mapping[str, object] | None = None
    """JSON Schema that the completion's text follows. Log-probs are then not exact."""

    def __post_init__(self) -> None:
        message = self.message()
        for name, (is_allowed, text) in RANGES.items():
            if message.HasField(name) and not is_allowed(getattr(message, name)):  # pyright: ignore[reportArgumentType]
                raise InvalidArgument(name, f"is {getattr(self, name)!r}; give {text}")

    def message(self) -> types_pb2.SamplingParams:
        """The message that asks rollout for these parameters."""
        values = {name: getattr(self, name) for name in self.__slots__}
        if isinstance(self.json_schema, Mapping):
            values["json_schema"] = json.dumps(self.json_schema)
        return message_of(types_pb2.SamplingParams, values, wanted={name: text for name, (_, text) in RANGES.items()} | _WANTED)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One completion from rollout."""

    prompt_index: int
    sample_index: int
    token_ids: NDArray[np.int32]
    """[T], completion only."""
    rollout_log_probs: NDArray[np.float32]
    """[T], natural logarithms, computed with `temperature` and penalties, before top_p, top_k and min_p filter the distribution."""
    finish_reason: FinishReason
    policy_version: int
    temperature: float = 1.0
    """Temperature behind rollout_log_probs; 1 for greedy samples."""
    has_exact_log_probs: bool = True
    """Whether every token was drawn from softmax(logits / temperature). False for greedy samples and where top_p, top_k, min_p,
    min_new_tokens, logit_bias, json_schema or a penalty changed the distribution. Importance ratios are then biased."""
    prompt_token_ids: NDArray[np.int32] | tuple[()] = ()
    """The prompt that it completes."""
    loss_mask: Sequence[float] | NDArray[np.float32] = ()
    """[T], 0 for tokens of an episode that the policy did not draw; empty if it drew all."""
    version_spans: Sequence[VersionSpan] = ()
    """Versions by token, of a sample that was cut and continued, the last of them `policy_version`; empty if all tokens have that."""
    routed_experts: NDArray[np.uint8] | tuple[()] = ()
    """[tokens of prompt and completion - 1, bytes], with trainer.router_replay: the experts that each token passed, as in types.proto."""
    images: Sequence[bytes] = ()
    """PNG, JPEG or WebP files of the prompt's placeholders."""
    image_digest: bytes = b""
    """SHA-256 of the images as the engine saw them."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """One sequence to train on or score. Per-token fields have one entry for each completion token, T in all, or are empty."""

    prompt_token_ids: Sequence[int] | NDArray[np.int32]
    completion_token_ids: Sequence[int] | NDArray[np.int32]
    """[T], at least one."""
    rollout_log_probs: Sequence[float] | NDArray[np.float32] = ()
    """Required by every policy loss except SftLoss."""
    advantages: float | Sequence[float] | NDArray[np.float32] = ()
    """[T], or one number for the whole completion. Required by every policy loss except SftLoss."""
    ref_log_probs: Sequence[float] | NDArray[np.float32] = ()
    """Required when kl_coef is not 0."""
    loss_mask: Sequence[float] | NDArray[np.float32] = ()
    """Zeros and ones; empty counts every token."""
    policy_version: int = 0
    """Version of the weights that generated the sample, or its last token."""
    temperature: float | None = None
    """Sampling temperature; None means 1. `TrainingSample.of` copies it from the sample."""
    old_log_probs: Sequence[float] | NDArray[np.float32] = ()
    """From the policy before the first of several steps on the batch. Required with OldPolicy.GIVEN."""
    values: Sequence[float] | NDArray[np.float32] = ()
    """From the critic before the first step on the batch. Required by a clipped ValueLoss."""
    returns: Sequence[float] | NDArray[np.float32] = ()
    """Targets of the critic. Required by ValueLoss."""
    version_spans: Sequence[VersionSpan] = ()
    """Versions by token, as the sample's; empty if all tokens have `policy_version`."""
    routed_experts: NDArray[np.uint8] | tuple[()] = ()
    """As the sample's. Required with trainer.router_replay by every policy loss that needs rollout_log_probs."""
    images: Sequence[bytes] = ()
    """PNG, JPEG or WebP files of the placeholders in prompt and completion, where `loss_mask` is 0 for them. One for each image."""
    image_digest: bytes = b""
    """As the sample's; the trainer refuses images that it sees otherwise."""

    @classmethod
    def of(
        cls,
        sample: Sample,
        *,
        prompt_token_ids: Sequence[int] | NDArray[np.int32] | None = None,
        advantages: float | Sequence[float] | NDArray[np.float32] = (),
        loss_mask: Sequence[float] | NDArray[np.float32] = (),
    ) -> "TrainingSample":
        """Builds a training sample from a rollout sample: copies its tokens, log-probs, temperature and policy version.

        prompt_token_ids: by default the sample's own.
        """
        return cls(
            prompt_token_ids=sample.prompt_token_ids if prompt_token_ids is None else prompt_token_ids,
            completion_token_ids=sample.token_ids,
            rollout_log_probs=sample.rollout_log_probs,
            advantages=advantages,
            loss_mask=loss_mask if len(loss_mask) else sample.loss_mask,
            policy_version=sample.policy_version,
            temperature=sample.temperature,
            version_spans=sample.version_spans,
            routed_experts=sample.routed_experts,
            images=sample.images,
            image_digest=sample.image_digest,
        )

    @classmethod
    def of_turns(
        cls,
        turns: Sequence[Sample | Sequence[int] | NDArray[np.int32]],
        *,
        advantages: float | Sequence[float] | NDArray[np.float32] = (),
    ) -> "TrainingSample":
        """Builds one training sample from the turns of an episode: samples, and between them token ids of prompts, tools or users.

        What precedes the first sample is the prompt. The loss mask counts the sampled tokens alone. advantages: one number, or one for
        each token after the prompt.

        Raises InvalidArgument naming a turn that is no token ids, that does not continue exactly the tokens before it, or that another
        policy version or temperature has sampled.
        """
        tokens, log_probs, mask = list[int](), list[float](), list[float]()
        first: Sample | None = None
        images, image_digest = list[bytes](), b""
        num_prompt_tokens, routes = 0, list[Routes]()
        for index, turn in enumerate(turns):
            if turn is None:  # callers may have no types
                raise InvalidArgument(f"turns[{index}]", "is None; give a Sample or token ids")
            if not isinstance(turn, Sample):
                given = message_of(rollout_pb2.Prompt, {"token_ids": turn}, below=f"turns[{index}].").token_ids
                tokens += given
                log_probs += [0.0] * len(given)
                mask += [0.0] * len(given)
                continue
            if first is None:
                first, num_prompt_tokens = turn, len(tokens)
            _check_turn(turn, index=index, first=first, images=images, before=tokens)
            images, image_digest = list(turn.images), turn.image_digest
            routes.append(turn.routed_experts)
            tokens += turn.token_ids.tolist()
            log_probs += turn.rollout_log_probs.tolist()
            mask += [1.0] * len(turn.token_ids)
        if first is None:
            raise InvalidArgument(
                "turns", "has no Sample; give prompts and tool output as token ids, and the samples of generate"
            )
        num_tokens = len(tokens) - num_prompt_tokens
        if (num_given := np.size(advantages)) not in (0, num_tokens) and np.ndim(advantages):
            problem = f"has {num_given} entries for the {num_tokens} tokens after the prompt; give one for each, or one number"
            raise InvalidArgument("advantages", problem)
        return cls(
            prompt_token_ids=tokens[:num_prompt_tokens],
            completion_token_ids=tokens[num_prompt_tokens:],
            rollout_log_probs=log_probs[num_prompt_tokens:],
            advantages=advantages,
            loss_mask=mask[num_prompt_tokens:],
            policy_version=first.policy_version,
            temperature=first.temperature,
            routed_experts=joined_routes(routes),
            images=images,
            image_digest=image_digest,
        )


def joined_routes(parts: Sequence[Routes]) -> Routes:
    """The experts of a sample whose tokens were drawn part by part, each part after all tokens before it.

    parts: each of all tokens up to its end. A token has those of the first part that reports it, from which the next token was drawn.
    Empty if a part has none.
    """
    if not all(len(part) for part in parts):
        return ()
    ends = [0, *(len(part) for part in parts)]
    return np.concatenate([part[start:] for part, start in zip(parts, ends, strict=False)]) if parts else ()


def _check_turn(turn: Sample, *, index: int, first: Sample, images: Sequence[bytes], before: Sequence[int]) -> None:
    if not before:
        raise InvalidArgument(f"turns[{index}]", "is a Sample; begin with the token ids of its prompt")
    for name in ("policy_version", "temperature"):
        found, expected = getattr(turn, name), getattr(first, name)
        if found != expected:
            problem = (
                f"was sampled with {name} {found:g}, the turns before it with {expected:g}; make a training sample of each part"
            )
            raise InvalidArgument(f"turns[{index}]", problem)
    if list(turn.images)[: len(images)] != list(images):
        raise InvalidArgument(f"turns[{index}]", "has other images than the turns before it; give theirs, then its own")
    if turn.version_spans:
        raise InvalidArgument(f"turns[{index}]", "has tokens of several versions; make a training sample of it alone")
    prompt = list(turn.prompt_token_ids)
    if prompt and prompt != before:
        pairs = enumerate(zip(prompt, before, strict=False))
        place = next((place for place, (own, other) in pairs if own != other), min(len(prompt), len(before)))
        problem = (
            f"continues a prompt of {len(prompt)} tokens that differs from the {len(before)} tokens of the turns before it at token "
            f"{place}; give exactly the tokens that were sampled and sent, without decoding and encoding them again"
        )
        raise InvalidArgument(f"turns[{index}]", problem, token=place)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardResult:
    """Result of forward_backward.

    loss: of the call, divided by `denominator`. num_tokens: counted by the loss. metrics: by name (docs/reference/algorithms.md), those
    that the samples' fields allow. log_probs: messages with `log_probs` of each entry of log_probs_of; empty if repeated after a restart.
    """

    loss: float
    num_samples: int
    num_tokens: int
    denominator: float
    metrics: dict[str, float]
    num_micro_batches: int
    seconds: float
    log_probs: Sequence[trainer_pb2.TokenLogProbs]


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Result of save or export_model."""

    path: str
    policy_version: int
    num_bytes: int
    seconds: float


def role_versions(state: TrainerState) -> dict[Role, int]:
    """Optimizer steps of each role that is trained."""
    return {Role.known(role.role): role.version for role in state.roles}
