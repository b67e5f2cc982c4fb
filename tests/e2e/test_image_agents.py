"""Images of episodes and of the gateway's clients, on one node of a small Qwen3-VL in float32."""

import asyncio
import json
import socket
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from anthropic import AsyncAnthropic
from openai import APIStatusError, AsyncOpenAI
from PIL import Image

from tasuki.client import AsyncClient, Client, Phase, SamplingParams, TrainingSample
from tasuki.client.carry import CarriedGroup, Carry
from tasuki.client.dataset import Row
from tasuki.client.episode import Episode
from tasuki.client.episodes import EpisodePool
from tasuki.gateway.rollout import Rollout
from tasuki.gateway.server import Sessions, gateway, serving
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.address import unix_target
from tests.conftest import RunningNode, started_node
from tests.e2e.test_images import save_model

pytestmark = pytest.mark.timeout(600)
TEMPLATE = (
    "{% for m in messages %}<turn>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<picture><image></picture>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}<turn>"
)
FUNCTIONS = """
import os
from pathlib import Path

PICTURES = [Path(__file__).with_name(f"{number}.png").read_bytes() for number in range(3)]

async def looks(policy, prompt):
    chat = policy.chat()
    await chat.say("a", images=PICTURES[:1])
    await chat.say("b", images=[PICTURES[1], PICTURES[0]])
    third = await chat.say("c")
    await policy.generate([*third.context, 12, 13])
    return 1.0

async def branches(policy, prompt):
    first = await policy.chat_completion(prompt)
    more = {"role": "user", "content": [{"type": "image", "path": str(Path(__file__).with_name("2.png"))}]}
    await policy.chat_completion([*prompt, first.message, more])
    await policy.chat_completion([*prompt, more])
    return 2.0
"""


def picture(seed: int) -> bytes:
    random, file = np.random.default_rng(seed), BytesIO()
    Image.fromarray(random.integers(0, 256, (*random.integers(9, 48, 2), 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    save_model(folder / "model", seed=0)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "agents.py").write_text(FUNCTIONS)
    for number in range(3):
        (folder / f"{number}.png").write_bytes(picture(number))
    return folder


@pytest.fixture(scope="module")
def node(folder: Path) -> Iterator[RunningNode]:
    numbers = ('trainer.compute_dtype="float32"', 'rollout.dtype="float32"')
    sizes = ("trainer.num_ranks=1", "rollout.context_length=200", f'model.path="{folder / "model"}"')
    with started_node(overrides=(*numbers, *sizes)) as node:
        yield node


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ModelTokenizer:
    return ModelTokenizer(folder / "model")


def check(client: Client, samples: Sequence[TrainingSample], *, num_images: Sequence[int]) -> None:
    """The trainer sees what the engine saw, and takes a step."""
    assert [len(sample.images) for sample in samples] == list(num_images)
    for sample, row in zip(samples, client.compute_log_probs(samples), strict=True):
        drawn = np.asarray(sample.loss_mask) > 0
        assert len(row) == len(drawn) > 0 < drawn.sum()
        np.testing.assert_allclose(row[drawn], np.asarray(sample.rollout_log_probs)[drawn], rtol=0, atol=1e-5)
    given = [replace(one, advantages=1.0) for one in samples]
    assert client.forward_backward(given).num_tokens == sum(int(np.sum(one.loss_mask)) for one in samples)
    client.discard_gradients()
    client.acquire(Phase.ROLLOUT)


def test_turns_with_images_are_one_sequence_that_the_trainer_sees_as_the_engine_did(
    node: RunningNode, folder: Path, tokenizer: ModelTokenizer
) -> None:
    prompt = [{"role": "user", "content": [{"type": "image", "path": str(folder / "1.png")}, {"type": "text", "text": "d"}]}]
    rows: list[Row] = [{"prompt": prompt}, {"prompt": prompt}]
    with Client(state_dir=node.state_dir) as client:
        for function, num_images in (("looks", [3] * 4), ("branches", [2, 2] * 4)):
            with EpisodePool(f"agents:{function}", tokenizer=tokenizer, max_tokens=180, folders=[folder]) as pool:
                ran = pool.run(client, rows, SamplingParams(max_new_tokens=6), num_samples=2, number=5)
            assert not any(one.failure for one in ran.episodes), [one.failure for one in ran.episodes]
            samples = [sample for one in ran.episodes for sample in one.training_samples()]
            check(client, samples, num_images=num_images)
            for episode in ran.episodes:
                again = Episode.of(0, episode.row, json.loads(json.dumps(episode.as_json())))
                assert [list(one.images) for one in again.training_samples()] == [
                    list(one.images) for one in episode.training_samples()
                ]


def test_an_image_is_drawn_on_after_a_changeover(node: RunningNode, folder: Path, tokenizer: ModelTokenizer) -> None:
    carry = Carry([CarriedGroup.begin_episodes(number, {"prompt": "d"}, group_size=2) for number in range(2)])
    sampling = SamplingParams(max_new_tokens=20)
    with (
        Client(state_dir=node.state_dir) as client,
        EpisodePool("agents:looks", tokenizer=tokenizer, max_tokens=180, folders=[folder]) as pool,
    ):
        taken = [
            group for _ in range(2) for group in carry.take_episodes(client, pool, sampling, num_groups=1, on_progress=print)
        ]
        samples = [sample for group in taken for one in group.episodes for sample in one.training_samples()]
        check(client, samples, num_images=[3] * 4)


@asynccontextmanager
async def served(node: RunningNode, tokenizer: ModelTokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with Rollout(unix_target(node.state_dir, service="coordinator"), decode=tokenizer.decode_whole) as rollout:
        sessions = Sessions(rollout, tokenizer, model="model", key="secret")
        with socket.create_server(("127.0.0.1", 0)) as port:
            base, headers = f"http://127.0.0.1:{port.getsockname()[1]}", {"authorization": "Bearer secret"}
            async with serving(gateway(sessions), port), httpx.AsyncClient(base_url=base, headers=headers, timeout=120) as http:
                yield http


def url(file: bytes) -> str:
    return f"data:image/png;base64,{b64encode(file).decode()}"


def asked(text: str, *files: bytes) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url(file)}} for file in files]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


async def test_clients_of_the_gateway_send_images_and_sessions_keep_them(node: RunningNode, tokenizer: ModelTokenizer) -> None:
    async with AsyncClient(state_dir=node.state_dir) as client, served(node, tokenizer) as http:
        await client.acquire(Phase.ROLLOUT)
        base = str(http.base_url)

        async def converse(name: str, *files: bytes) -> dict[str, Any]:
            openai, messages = AsyncOpenAI(base_url=f"{base}/sessions/{name}/v1", api_key="secret", max_retries=0), list[Any]()
            for text, images in (("a", files[:1]), ("b", files[1:]), ("c", ())):
                messages.append(asked(text, *images))
                reply = await openai.chat.completions.create(model="any", messages=messages, max_tokens=6)
                messages.append(reply.choices[0].message)
            assert reply.usage is not None and reply.usage.prompt_tokens > 12 + len(files) * 4
            return (await http.get(f"/sessions/{name}/samples")).json()

        first, second, third = (picture(number) for number in range(3))
        told = await asyncio.gather(converse("one", first, second, first), converse("two", third))
        (one,), (two,) = (each["samples"] for each in told)
        assert one["images"] == [b64encode(file).decode() for file in (first, second, first)]
        assert two["images"] == [b64encode(third).decode()]
        plain: dict[str, Any] = {"model": "any", "max_tokens": 8, "extra_body": {"temperature": 0}}
        openai = AsyncOpenAI(base_url=f"{base}/v1", api_key="secret", max_retries=0)
        whole = await openai.chat.completions.create(messages=[asked("a", first)], n=2, logit_bias={"20": 1}, **plain)
        whole = await openai.chat.completions.create(messages=[asked("a", first)], n=2, **plain)
        texts = {choice.message.content for choice in whole.choices}
        source = {"type": "base64", "media_type": "image/png", "data": b64encode(first).decode()}
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": "a"}]
        anthropic: Any = AsyncAnthropic(base_url=base, api_key="secret", max_retries=0)
        message = await anthropic.messages.create(messages=[{"role": "user", "content": blocks}], **plain)
        items: Any = [{"type": "input_image", "image_url": url(first), "detail": "auto"}, {"type": "input_text", "text": "a"}]
        answer: Any = await openai.responses.create(
            model="any", input=[{"role": "user", "content": items}], max_output_tokens=8, temperature=0
        )
        assert {"".join(block.text for block in message.content), answer.output_text} == texts
        assert message.usage.input_tokens == whole.usage.prompt_tokens
        large = BytesIO()
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (1200, 1200, 3), dtype=np.uint8)).save(large, "PNG")
        for wrong in (
            asked("a", b"no image"), asked("a", first[:40]), asked("a", *[first] * 17), asked("a", *[first] * 10_000),
            asked("a", large.getvalue()),
            asked("<image>", first), asked("<picture><image></picture>"),
        ):  # fmt: skip
            with pytest.raises(APIStatusError) as refused:
                await openai.chat.completions.create(messages=[wrong], **plain)
            assert refused.value.status_code in (400, 413)
    samples = []
    for each in (one, two):
        images, digest = [b64decode(file) for file in each.pop("images")], bytes.fromhex(each.pop("image_digest"))
        own = {name: value for name, value in each.items() if name not in ("version_spans", "has_exact_log_probs")}
        samples.append(TrainingSample(**own, images=images, image_digest=digest))
    with Client(state_dir=node.state_dir) as sync:
        check(sync, samples, num_images=[3, 1])
