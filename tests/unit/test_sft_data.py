"""Supervised data through real tokenizers: prompts, learned tokens, and errors of bad lines."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tasuki.client.sft_data import read_sft_jsonl, sft_sample
from tasuki.client.types import TrainingSample
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tests.models import BOS, EOS, char_tokenizer

HEADER = "{% if add_generation_prompt %}[assistant]\n{% endif %}"
PLAIN = "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}<eos>\n{% endfor %}" + HEADER
MARKED = (
    "{% for m in messages %}[{{ m.role }}]\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>{% endgeneration %}"
    "{% else %}{{ m.content }}<eos>{% endif %}{{ '\\n' }}{% endfor %}" + HEADER
)
# As templates do that show only the thoughts of the last answer.
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}]\n{% if m.role == 'assistant' and loop.last %}(thought){% endif %}{{ m.content }}<eos>\n"
    "{% endfor %}" + HEADER
)
THINKING = PLAIN.replace("[assistant]\n", "[assistant]\n(think)")
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}" + PLAIN
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4!"},
]


def _saved(folder: Path, tokenizer: PreTrainedTokenizerFast, template: str | None) -> ModelTokenizer:
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return ModelTokenizer(folder)


@pytest.fixture(scope="module")
def by_template(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelTokenizer]:
    templates = {"plain": PLAIN, "marked": MARKED, "forgetful": FORGETFUL, "thinking": THINKING, "strict": STRICT, "none": None}
    return {name: _saved(tmp_path_factory.mktemp(name), char_tokenizer(), text) for name, text in templates.items()}


def _text(tokenizer: ModelTokenizer, token_ids: Sequence[int]) -> str:
    """Renders `$`, which no test writes otherwise, as the end-of-sequence token."""
    return "".join("$" if token == EOS else tokenizer.decode(np.array([token])) for token in token_ids)


def _learned(tokenizer: ModelTokenizer, sample: TrainingSample) -> str:
    mask = np.asarray(sample.loss_mask)
    assert mask.shape == np.shape(sample.completion_token_ids) and set(mask.tolist()) <= {0.0, 1.0}
    assert mask[0] == mask[-1] == 1
    return _text(tokenizer, np.asarray(sample.completion_token_ids)[mask == 1])


@pytest.mark.parametrize("template", ["plain", "marked"])
def test_only_what_the_assistant_wrote_is_learned(by_template: dict[str, ModelTokenizer], template: str):
    tokenizer = by_template[template]
    sample = sft_sample({"messages": CHAT}, tokenizer)
    assert _text(tokenizer, sample.prompt_token_ids) == "[system]\nBe brief.$\n[user]\n1+1?$\n[assistant]\n"
    assert _text(tokenizer, sample.completion_token_ids) == "2$\n[user]\n2+2?$\n[assistant]\n4!$"
    assert _learned(tokenizer, sample) == "2$4!$"
    # As rollout will be prompted.
    assert sample.prompt_token_ids.tolist() == tokenizer.encode_prompt(CHAT[:2])


_TURNS = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text("ab 1", max_size=6)), min_size=1, max_size=6
)


@given(first=st.text("ab", max_size=4), turns=_TURNS, last=st.text("ab 1", max_size=4))
def test_prefixes_find_what_the_mark_says(
    by_template: dict[str, ModelTokenizer], first: str, turns: list[tuple[str, str]], last: str
):
    messages = [{"role": role, "content": text} for role, text in [("user", first), *turns, ("assistant", last)]]
    plain, marked = (sft_sample({"messages": messages}, by_template[name]) for name in ("plain", "marked"))
    for field in ("prompt_token_ids", "completion_token_ids", "loss_mask"):
        np.testing.assert_array_equal(getattr(plain, field), getattr(marked, field))
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert _learned(by_template["plain"], plain) == "".join(f"{answer}$" for answer in answers)


def test_a_completion_is_learned_whole_and_ends_once(by_template: dict[str, ModelTokenizer]):
    tokenizer = by_template["none"]
    for completion in ("2", "2<eos>"):
        sample = sft_sample({"prompt": "1+1=", "completion": completion}, tokenizer)
        assert _text(tokenizer, sample.prompt_token_ids) == "1+1="
        assert _learned(tokenizer, sample) == _text(tokenizer, sample.completion_token_ids) == "2$"
    assert tokenizer.encode_example("", "2").token_ids.count(BOS) == tokenizer.encode_prompt("2").count(BOS)


@pytest.mark.parametrize(
    ("template", "answer", "is_rewritten"),
    [
        (PLAIN, "<think>why</think> 42", False),
        (PLAIN.replace("m.content", "m.content | trim"), " 42\n", False),
        (PLAIN.replace("m.content", "m.content.split('</think>')[-1]"), "<think>why</think>42", True),
        (PLAIN.replace("m.content", "m.content[:24]"), "it is the sum of one and one", True),
    ],
)
def test_learned_text_that_a_template_drops_is_counted(template: str, answer: str, is_rewritten: bool, tmp_path: Path) -> None:
    tokenizer = _saved(tmp_path, char_tokenizer(), template)
    sft_sample({"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": answer}]}, tokenizer)
    assert tokenizer.num_rewritten == is_rewritten


def test_a_prompt_of_messages_with_a_completion_is_a_chat(by_template: dict[str, ModelTokenizer]):
    as_prompt = sft_sample({"prompt": CHAT[:2], "completion": "2"}, by_template["plain"])
    as_chat = sft_sample({"messages": CHAT[:3]}, by_template["plain"])
    for field in ("prompt_token_ids", "completion_token_ids", "loss_mask"):
        np.testing.assert_array_equal(getattr(as_prompt, field), getattr(as_chat, field))


@pytest.mark.parametrize(
    ("template", "row", "problem"),
    [
        ("none", {"messages": CHAT}, "messages: is a list of chat messages, but the model's tokenizer has no chat template"),
        ("plain", {"messages": CHAT, "train": False}, "train: is not read from a row"),
        ("plain", {"messages": CHAT, "labels": [1]}, "labels: is not read from a row"),
        ("plain", {"prompt": "a", "completion": "b", "completion_mask": [1]}, "completion_mask: is not read from a row"),
        ("plain", {"prompt": "a", "completion": "b<eos>c"}, "completion: has '<eos>' in its text"),
        (
            "plain",
            {"messages": [*CHAT[:2], {"role": "assistant", "content": "2<eos>"}]},
            "messages: message 2 has '<eos>' in its text",
        ),
        (
            "marked",
            {"messages": [*CHAT[:2], {"role": "assistant", "content": "2<eos>"}]},
            "messages: message 2 has '<eos>' in its text",
        ),
        ("plain", {"messages": CHAT, "images": ["a.png"]}, "images: is not read by the model's chat template"),
        ("plain", {"messages": CHAT, "parallel_tool_calls": False}, "parallel_tool_calls: is not read by"),
        ("plain", {"prompt": CHAT[:2], "completion": "2", "system": "Be kind."}, "system: is not read by"),
        ("plain", {"prompt": "a", "completion": "b", "images": ["a.png"]}, "images: is for the chat template"),
        ("plain", {"messages": "hi"}, "messages: must be a list of chat messages, is str"),
        ("plain", {"messages": []}, "messages: has no messages"),
        ("plain", {"messages": [{"role": "user"}]}, "messages: message 0"),
        ("plain", {"messages": CHAT[:2]}, "messages: has no tokens by the assistant"),
        ("marked", {"messages": CHAT[:2]}, "messages: has no tokens by the assistant"),
        ("plain", {"messages": CHAT, "prompt": "a"}, "messages: comes with `prompt` or `completion`"),
        ("plain", {"question": "a"}, "messages: missing; give `messages`, or `prompt` and `completion`"),
        ("plain", {"prompt": "a"}, "messages: missing"),
        ("plain", {"prompt": "", "completion": "b"}, "prompt: is empty"),
        ("plain", {"prompt": "a", "completion": ""}, "completion: must be a string with text, is ''"),
        ("plain", {"prompt": "a", "completion": '[{"role": "assistant"}]'}, "completion: is a chat written as text"),
        ("plain", {"prompt": "a", "completion": ["b"]}, "completion: must be a string"),
        ("strict", {"messages": CHAT}, "chat_template.jinja:1: the model's chat template refuses them: begin with the user"),
        ("forgetful", {"messages": CHAT}, "the conversation up to message 2 is rendered differently when more messages follow"),
        ("thinking", {"messages": CHAT}, "the prompt of message 2 is not a prefix of the conversation with that message"),
        ("plain", {"prompt": "a" * 40, "completion": "b" * 40}, "has 81 tokens; at most 80 fit"),
        ("plain", ["a"], "expected an object, got list"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(
    by_template: dict[str, ModelTokenizer], tmp_path: Path, template: str, row: object, problem: str
):
    path = tmp_path / "sft.jsonl"
    path.write_text(f'{{"prompt": "a", "completion": "b"}}\n\n{json.dumps(row)}\n')
    with pytest.raises(InvalidArgument) as raised:
        read_sft_jsonl(path, by_template[template], max_tokens=80)
    assert raised.value.message.startswith(f"dataset: {path}:3: ")
    assert problem in raised.value.message


def test_a_file_gives_a_sample_a_line(by_template: dict[str, ModelTokenizer], tmp_path: Path):
    path = tmp_path / "sft.jsonl"
    rows = [{"prompt": "1+1=", "completion": "2", "source": "x"}, {"messages": CHAT}]
    path.write_text("\n".join(map(json.dumps, rows)))
    samples = read_sft_jsonl(path, by_template["plain"], max_tokens=200)
    assert [_learned(by_template["plain"], sample) for sample in samples] == ["2$", "2$4!$"]
    assert all(sample.loss_mask.dtype == np.float32 and sample.prompt_token_ids.dtype == np.int32 for sample in samples)
    with pytest.raises(PathNotFound):
        read_sft_jsonl(tmp_path / "none.jsonl", by_template["plain"], max_tokens=80)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    """A byte-level BPE whose tokens may span template and message, as those of real models do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<eos>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["assistant\n\n\nuser\n\n\nhello world\n\n\n"] * 20, trainer)
    template = PLAIN.replace("[{{ m.role }}]", "<|im_start|>{{ m.role }}").replace("<eos>", "<|im_end|>")
    template = template.replace("[assistant]", "<|im_start|>assistant")
    return _saved(
        tmp_path_factory.mktemp("bpe"), PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>"), template
    )


def test_a_token_across_prompt_and_answer_is_refused(byte_level: ModelTokenizer):
    def row(answer: str) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": answer}]}

    sample = sft_sample(row("hello world"), byte_level)
    assert byte_level.decode(sample.completion_token_ids) == "hello world"
    assert sample.prompt_token_ids.tolist() == byte_level.encode_prompt(row("")["messages"][:1])
    with pytest.raises(InvalidArgument, match="remove white space around its content"):
        sft_sample(row("\n\nhello"), byte_level)
