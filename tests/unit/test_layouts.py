"""Small folders in the layouts of popular models: ids, texts, chats, stop tokens and what is learned are those of their own files.

Rebuilt from the published tokenizer.json, tokenizer_config.json and generation_config.json of each: normalizer, splitting, decoder, model's
switches, flags of added tokens, and keys of the configuration; vocabularies are small, and templates shortened to what they do with turns.
"""

# ruff: noqa: RUF001 - DeepSeek's tokens have their own bars
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizers import Tokenizer

from tasuki.client.sft_data import sft_sample
from tasuki.models.tokenizer import check_tokenizer, read_stop_token_ids
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.errors import InvalidArgument
from tests.unit.small_tokenizers import TOOLS, rendered, trained, write_folder

_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_THINKING = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]
_TEKKEN = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
_GLM = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
_PLAIN = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<｜User｜>", "<｜Assistant｜>", "\n", "\n\n", "▁▁", "<table>"
)  # fmt: skip
"""Added tokens that are not special, which the texts of rewards have."""
_NEXT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TURNS = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}" + _NEXT
_REASONS = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endif %}"
    "{% endfor %}{{ bos_token }}{{ ns.system }}{% for m in messages %}{% if m['role'] == 'user' %}<｜User｜>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<｜Assistant｜>{{ m['content'].split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
_REASONED = (
    "<｜begin▁of▁sentence｜>Be brief.<｜User｜>2+2?<｜Assistant｜>4<｜end▁of▁sentence｜><｜User｜>sure?<｜Assistant｜><think>\n"
)
_TURNED = "".join(
    f"<|im_start|>{role}\n{text}<|im_end|>\n"
    for role, text in (("system", "Be brief."), ("user", "2+2?"), ("assistant", "4"), ("user", "sure?"))
)


def _split(pattern: str) -> dict[str, Any]:
    """Byte-level tokens of what the pattern splits."""
    parts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        _LEVEL | {"use_regex": False},
    ]
    return {"normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}, "decoder": _LEVEL}


_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = _split(_WORDS % r"\p{N}{1,3}")
_QWEN = _split(_WORDS % r"\p{N}") | {"normalizer": {"type": "NFC"}}
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_MISTRAL = _split(rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}" + _TAIL)
_DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _LEVEL]}
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_SENTENCE = {
    "normalizer": _SPACES,
    "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    },
}
"""Without the first space that Llama 2 adds."""

_DEEPSEEK = {
    "bos_token": {"__type": "AddedToken", "content": _THINKING[0], "lstrip": False, "normalized": True, "rstrip": False},
    "add_bos_token": True, "add_eos_token": False, "legacy": True, "sp_model_kwargs": {}, "unk_token": None,
}  # fmt: skip
_OF_QWEN = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "errors": "replace",
    "split_special_tokens": False,
    "unk_token": None,
}


class Layout(NamedTuple):
    """A folder. `bos`, `eos`: of tokenizer_config.json; `ends`: of generation_config.json."""

    kind: str
    name: str
    family: str
    special: Sequence[str]
    bos: str | None
    eos: str
    around: str | None
    ends: Sequence[str]
    template: str
    prompt: str
    """The chat below."""
    learned: str | None
    """Of its last answer; None if it cannot be found."""
    parts: Mapping[str, Any]
    """Of tokenizer.json."""
    keys: Mapping[str, Any] = {}
    """Of tokenizer_config.json besides."""
    flags: Mapping[str, bool] = {}
    """Of its special tokens, where they are true."""


LAYOUTS = {
    "llama-3": Layout(
        "bytes", "PreTrainedTokenizerFast", "llama",
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|begin_of_text|>", "<|eot_id|>", "<|begin_of_text|> $A", ["<|end_of_text|>", "<|eot_id|>"],
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n2+2?"
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n4<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nsure?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "yes<|eot_id|>",
        _CL100K | {"ignore_merges": True}, {"clean_up_tokenization_spaces": True},
    ),
    "deepseek-r1-distill-llama": Layout(
        "bytes", "LlamaTokenizerFast", "llama", _THINKING, _THINKING[0], _THINKING[1], f"{_THINKING[0]} $A", [_THINKING[1]],
        _REASONS, _REASONED, None, _CL100K | {"ignore_merges": True}, _DEEPSEEK,
    ),
    "deepseek-r1-distill-qwen": Layout(
        "bytes", "LlamaTokenizerFast", "qwen2", _THINKING, _THINKING[0], _THINKING[1], f"{_THINKING[0]} $A", [_THINKING[1]],
        _REASONS, _REASONED, None, _QWEN, _DEEPSEEK,
    ),
    "olmo-2": Layout(  # the roles are no tokens, and BOS is EOS
        "bytes", "GPT2Tokenizer", "olmo2", ["<|endoftext|>", "<|pad|>"], "<|endoftext|>", "<|endoftext|>", None, ["<|endoftext|>"],
        "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}"
        "{% endif %}{% if not loop.last or m['role'] != 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "<|endoftext|><|system|>\nBe brief.\n<|user|>\n2+2?\n<|assistant|>\n4<|endoftext|>\n<|user|>\nsure?\n<|assistant|>\n",
        "yes<|endoftext|>",
        _CL100K, {"add_prefix_space": False, "unk_token": "<|endoftext|>", "pad_token": "<|pad|>"},
    ),
    "yi": Layout(  # a question is followed by the start of its answer, asked for or not
        "fallback", "LlamaTokenizer", "llama", ["<unk>", "<|startoftext|>", *_CHATML], "<|startoftext|>", "<|im_end|>", None,
        ["<|im_end|>"],
        "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}{% for m in messages %}{% if m['role'] == 'user' %}"
        "<|im_start|>user\n{{ m['content'] }}<|im_end|>\n<|im_start|>assistant\n{% elif m['role'] == 'assistant' %}"
        "{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}",
        "Be brief.<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n"
        "<|im_start|>assistant\n",
        "yes<|im_end|>",
        _SENTENCE | {"pre_tokenizer": None}, {"add_bos_token": False, "add_eos_token": False, "legacy": True, "unk_token": "<unk>"},
        {"normalized": True},
    ),
    "mistral-tekken": Layout(
        "bytes", "LlamaTokenizerFast", "mistral", _TEKKEN, "<s>", "</s>", "<s> $A", ["</s>"],
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]{% elif m['role'] == 'system' %}"
        "[SYSTEM_PROMPT]{{ m['content'] }}[/SYSTEM_PROMPT]{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
        "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}",
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]2+2?[/INST]4</s>[INST]sure?[/INST]",
        "yes</s>",
        _MISTRAL | {"ignore_merges": True}, {"add_bos_token": True, "add_prefix_space": None, "unk_token": "<unk>"},
    ),
    "gemma-3": Layout(  # the system's text belongs to the first question
        "fallback", "GemmaTokenizer", "gemma3",
        ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "\n", "\n\n", "▁▁", "<table>"],
        "<bos>", "<eos>", "<bos> $A", ["<eos>", "<end_of_turn>"],
        "{{ bos_token }}{% set own = (messages[0]['role'] == 'system') | int %}{% for m in messages[own:] %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>"
        "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{% if loop.first and own %}{{ messages[0]['content'] }}\n\n{% endif %}"
        "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}{% for part in m['content'] %}{{ part['text'] | trim }}"
        "{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<bos><start_of_turn>user\nBe brief.\n\n2+2?<end_of_turn>\n<start_of_turn>model\n4<end_of_turn>\n<start_of_turn>user\nsure?"
        "<end_of_turn>\n<start_of_turn>model\n",
        "yes<end_of_turn>",
        _SENTENCE,
        {"add_bos_token": True, "extra_special_tokens": {"boi_token": "<start_of_image>"}, "spaces_between_special_tokens": False},
    ),
    "phi-4": Layout(
        "bytes", "GPT2Tokenizer", "phi3",
        [*_CHATML, "<|im_sep|>", "<|dummy_85|>"], "<|endoftext|>", "<|im_end|>", None, ["<|endoftext|>", "<|im_end|>"],
        "{% for m in messages %}{% if m['role'] == 'system' %}<|im_start|>system<|im_sep|>{{ m['content'] }}<|im_end|>"
        "{% elif m['role'] == 'user' %}<|im_start|>user<|im_sep|>{{ m['content'] }}<|im_end|><|im_start|>assistant<|im_sep|>"
        "{% elif m['role'] == 'assistant' %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}",
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>2+2?<|im_end|><|im_start|>assistant<|im_sep|>4<|im_end|>"
        "<|im_start|>user<|im_sep|>sure?<|im_end|><|im_start|>assistant<|im_sep|>",
        "yes<|im_end|>",
        _CL100K, {"add_prefix_space": False, "pad_token": "<|dummy_85|>", "unk_token": "�"}, {"lstrip": True, "rstrip": True},
    ),
    "glm-4": Layout(  # an answer ends with the next message's role
        "bytes", "PreTrainedTokenizer", "glm4", _GLM, None, "<|endoftext|>", "[gMASK] <sop> $A",
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
        "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\n2+2?<|assistant|>\n4<|user|>\nsure?<|assistant|>",
        "\nyes",
        _CL100K, {"do_lower_case": False, "remove_space": False, "pad_token": "<|endoftext|>"},
    ),
    "smollm2": Layout(
        "bytes", "GPT2Tokenizer", "llama", _CHATML, "<|im_start|>", "<|im_end|>", None, ["<|im_end|>"],
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}" + _TURNS,
        f"{_TURNED}<|im_start|>assistant\n",
        "yes<|im_end|>",
        _CL100K | {"pre_tokenizer": _DIGITS}, {"add_prefix_space": False, "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>"},
    ),
    "qwen3": Layout(  # only the last answer has its thoughts
        "bytes", "Qwen2Tokenizer", "qwen3", [*_CHATML, *_PLAIN[:4]], None, "<|im_end|>", None, ["<|im_end|>", "<|endoftext|>"],
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
        "<think>\n\n</think>\n\n{% endif %}{% endif %}",
        f"{_TURNED}<|im_start|>assistant\n",
        "<think>\n\n</think>\n\nyes<|im_end|>",
        _QWEN, _OF_QWEN,
    ),
    "qwen2.5-instruct": Layout(
        "bytes", "Qwen2Tokenizer", "qwen2", [*_CHATML, *_PLAIN[2:4]], None, "<|im_end|>", None, ["<|im_end|>", "<|endoftext|>"],
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + _TURNS,
        f"{_TURNED}<|im_start|>assistant\n",
        "yes<|im_end|>",
        _QWEN, _OF_QWEN,
    ),
    "saved-by-transformers-5": Layout(
        "pieces", "TokenizersBackend", "llama", ["<unk>", "<s>", *_CHATML], "<s>", "<|im_end|>", "<s> $A", ["<|im_end|>"],
        _TURNS, f"{_TURNED}<|im_start|>assistant\n", "yes<|im_end|>",
        {}, {"backend": "tokenizers", "is_local": True, "extra_special_tokens": _CHATML},
    ),
}  # fmt: skip
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "sure?"},
]
TEXT = "how many apples are there in 2023?\n élan 中文 😀 ."


def write_layout(folder: Path, layout: Layout) -> Tokenizer:
    table = json.loads(trained(layout.kind, special=layout.special).to_str())
    table |= {key: part for key, part in layout.parts.items() if key in table}
    table["model"] |= {key: switch for key, switch in layout.parts.items() if key in table["model"]}
    named = [text for text in layout.special if text not in _PLAIN]
    for token in table["added_tokens"]:
        token |= {
            "normalized": False,
            **(layout.flags | {"special": True} if token["content"] in named else {"special": False}),
        }
    declared = {str(token["id"]): {key: token[key] for key in token.keys() - {"id"}} for token in table["added_tokens"]}
    level = [_LEVEL] if layout.kind == "bytes" else []
    table["post_processor"] = {"type": "Sequence", "processors": level}
    if layout.around is not None:
        numbers = {token["content"]: token["id"] for token in table["added_tokens"]}
        around = [text for text in layout.around.split() if text in numbers]
        single = [{"SpecialToken": {"id": text, "type_id": 0}} for text in around] + [{"Sequence": {"id": "A", "type_id": 0}}]
        known = {text: {"id": text, "ids": [numbers[text]], "tokens": [text]} for text in around}
        added = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": known}
        table["post_processor"]["processors"] = [_LEVEL | {"trim_offsets": True}, added] if level else [added]
    own = Tokenizer.from_str(json.dumps(table))
    end_ids = [own.token_to_id(text) for text in layout.ends]
    sizes = {"vocab_size": own.get_vocab_size(), "eos_token_id": end_ids}
    config: dict[str, Any] = {"model_type": layout.family, **({"text_config": sizes} if layout.family == "gemma3" else sizes)}
    tokens = {"bos_token": layout.bos, "eos_token": {"content": layout.eos}, "tokenizer_class": layout.name}
    files: dict[str, Any] = {"config": config, "generation_config": {"eos_token_id": end_ids}}
    if layout.name in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        vocab = own.get_vocab(with_added_tokens=False)
        files["vocab"] = {text: number for text, number in vocab.items() if text not in layout.special or layout.bos}
    if layout.family in ("mistral", "glm4"):
        files["tekken"] = {"config": {}}
        (folder / "tokenizer.model").write_text("aGk= 0\nYQ== 1\n")  # tiktoken's
    template = layout.template
    if layout.family in ("gemma3", "glm4", "qwen3"):
        (folder / "chat_template.jinja").write_text(template)
        template = None
    listed = {} if "backend" in layout.keys else {"added_tokens_decoder": declared, "additional_special_tokens": named}
    files["tokenizer_config"] = {**tokens, **listed, "chat_template": template, **layout.keys}
    write_folder(folder, own, **files)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_popular_layout_is_read_by_its_own_files(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    own = write_layout(tmp_path, layout)
    found = ModelTokenizer(tmp_path)
    assert check_tokenizer(tmp_path) == [] == found.doubts(is_chat=True, stop_token_ids=[], stop=[])
    for text in (TEXT, " 4 \n".join([TEXT, *layout.special, " "])):
        ids = own.encode(text).ids
        assert found.encode_prompt(text) == ids
        assert found.decode(np.array(ids)) == own.decode(ids)
    prompt = own.encode(layout.prompt, add_special_tokens=False).ids
    assert found.encode_prompt(CHAT) == prompt
    assert {own.token_to_id(text) for text in layout.special if text in layout.prompt} <= set(prompt)
    assert set(read_stop_token_ids(tmp_path, vocab_size=500)) == {own.token_to_id(text) for text in (*layout.ends, layout.eos)}
    kwargs = {"enable_thinking": False} if name == "qwen3" else {}
    for fields in ({}, {"chat_template_kwargs": kwargs}, {"tools": TOOLS} if "qwen" in layout.name.lower() else {}):
        specials = {"bos_token": layout.bos, "eos_token": layout.eos}
        text = rendered(layout.template, CHAT, fields, is_prompt=True, **specials)
        assert found.encode_prompt(CHAT, fields) == own.encode(text, add_special_tokens=False).ids
    messages = [{**one, "weight": 0} if one["role"] == "assistant" else one for one in CHAT]
    row = {"messages": [*messages, {"role": "assistant", "content": "yes"}]}
    if layout.learned is None:
        with pytest.raises(InvalidArgument, match="is not a prefix of the conversation"):
            sft_sample(row, found)
        return
    sample = sft_sample(row, found)
    assert sample.prompt_token_ids.tolist() == prompt
    learned = own.encode(layout.prompt + layout.learned, add_special_tokens=False).ids[len(prompt) :]
    assert sample.completion_token_ids.tolist() == learned


def test_an_answer_ends_with_the_stop_token_that_begins_the_next_message(tmp_path: Path) -> None:
    own = write_layout(tmp_path, LAYOUTS["glm-4"])
    sample = sft_sample({"messages": [*CHAT, {"role": "assistant", "content": "yes"}]}, ModelTokenizer(tmp_path))
    learned = np.asarray(sample.completion_token_ids)[np.asarray(sample.loss_mask) == 1]
    assert own.decode(learned.tolist(), skip_special_tokens=False) == "\n4<|user|>\nyes"
