"""The prompt of a chat's next turn extends the answer before it exactly, by the chat template."""

import tracemalloc
from pathlib import Path

import pytest

from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.errors import InvalidArgument
from tests.models import BOS, EOS, char_tokenizer
from tests.unit.test_tools import CALLS, ROW, by_form, folder_with

__all__ = ["by_form"]


@pytest.mark.parametrize("form", CALLS)
def test_the_next_prompt_is_what_the_template_renders_after_the_answer(by_form: dict[str, ModelTokenizer], form: str):
    tokenizer = by_form[form]
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}, {"role": "tool", "content": "3"}]
    drawn = [*tokenizer.encode_text("2"), EOS]
    extended = [*tokenizer.encode_prompt(chat[:1], ROW), *drawn, *tokenizer.encode_next(chat, 1, ROW, last_token_id=EOS)]
    assert extended == tokenizer.encode_prompt(chat, ROW)
    cut = [*tokenizer.encode_prompt(chat[:1], ROW), *drawn[:-1], *tokenizer.encode_next(chat, 1, ROW, last_token_id=drawn[-2])]
    assert cut == extended


@pytest.mark.parametrize(
    ("template", "last", "next_prompt"),
    [
        ("{% for m in messages %}[{{ m.role[0] }}]{{ m.content }} <eos>{% endfor %}", EOS, "[u]c <eos>"),
        ("{% for m in messages %}{{ '>' if m.role != 'user' else '<bos>' }}{{ m.content }}{% endfor %}>", BOS, "c>"),
        ("{% for m in messages %}{{ '>' if m.role != 'user' else '<bos>' }}{{ m.content }}{% endfor %}>", EOS, "<bos>c>"),
    ],
    ids=["a space before the stop", "the stop begins a question", "another stop than that"],
)
def test_a_drawn_stop_replaces_the_templates_end_of_an_answer_alone(tmp_path: Path, template: str, last: int, next_prompt: str):
    tokenizer = folder_with(tmp_path, template, stops=[EOS, BOS])
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert tokenizer.encode_next(chat, 1, {}, last_token_id=last) == tokenizer.encode_text(next_prompt)


@pytest.mark.parametrize(
    ("last", "next_prompt"), [("<|return|>", "u"), ("<|call|>", "u"), ("<eos>", "<|end|>u"), ("b", "<|end|>u")]
)
def test_a_drawn_stop_of_gpt_oss_is_the_end_that_its_template_writes_after_earlier_answers(
    tmp_path: Path, last: str, next_prompt: str
):
    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|return|>", "<|call|>", "<|end|>"]})
    ends = "{% if loop.last and m.role == 'assistant' and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}" + ends + "{% endfor %}"
    stops = tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>", "<eos>"])
    own = folder_with(tmp_path, template, stops=stops, tokenizer=tokenizer)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    (last_token_id,) = own.encode_text(last)
    assert own.encode_next(chat, 1, {}, last_token_id=last_token_id) == own.encode_text(f"{next_prompt}c<|end|>")


def test_noncharacters_in_a_chat_are_text(by_form: dict[str, ModelTokenizer]):
    chat = [{"role": "user", "content": "a\ufdd2"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "1"}]
    plain = [{"role": "user", "content": "a"}, *chat[1:]]
    own = by_form["hermes"]
    assert own.encode_next(chat, 1, {}, last_token_id=EOS) == own.encode_next(plain, 1, {}, last_token_id=EOS)


def test_a_turn_of_a_long_chat_keeps_no_copy_of_it(by_form: dict[str, ModelTokenizer]):
    pair = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    by_form["hermes"].encode_next(pair * 200 + pair[:1], 399, {}, last_token_id=EOS)
    tracemalloc.start()
    for length in range(201, 231):
        by_form["hermes"].encode_next(pair * length + pair[:1], 2 * length - 1, {}, last_token_id=EOS)
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 100_000


def test_a_template_that_rewrites_earlier_answers_is_bridged_and_one_that_hides_them_refused(tmp_path: Path):
    forgetful = (
        "{% for m in messages %}[{{ m.role }}]{% if loop.last %}(thought){% endif %}{{ m.content }}<eos>{% endfor %}[assistant]"
    )
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    tokenizer = folder_with(tmp_path / "forgetful", forgetful)
    assert tokenizer.encode_next(chat, 1, {}, last_token_id=EOS) == tokenizer.encode_text("[user](thought)c<eos>[assistant]")
    hides = "{% for m in messages if m.role == 'user' %}{{ m.content }}<eos>{% endfor %}"
    with pytest.raises(InvalidArgument, match="does not write an answer as it is"):
        folder_with(tmp_path / "hides", hides).encode_next(chat, 1, {}, last_token_id=EOS)
