"""Tokenizers of model folders: ids, texts and chats are those of the folder's own files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.utils.chat_template_utils import render_jinja_template

from tasuki.client.dataset import read_jsonl
from tasuki.client.sft_data import sft_sample
from tasuki.models.stop_tokens import read_stop_token_ids
from tasuki.models.tokenizer import check_tokenizer
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tests.extent import examples

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["how many apples are there in 2023 and 2024? there are 650841823 apples\nso the answer is 42, élan 中文 😀"] * 4
SPECIAL = ["<unk>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
DIGITS = r"\p{N}{1,3}|[^\p{N}]+"


def write_folder(folder: Path, tokenizer: Tokenizer, **files: Mapping[str, Any]) -> Path:
    """Writes tokenizer.json and the named JSON files; tokenizer_config.json has the usual tokens and template besides."""
    tokenizer.save(str(folder / "tokenizer.json"))
    usual = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": CHATML}
    tables = {"config": {"vocab_size": 1000}, **files, "tokenizer_config": {**usual, **files.get("tokenizer_config", {})}}
    for name, table in tables.items():
        (folder / f"{name}.json").write_text(json.dumps(table))
    return folder


def trained(kind: str) -> Tokenizer:
    """A small tokenizer with the usual parts of its kind."""
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(DIGITS), "isolated"), level])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "words":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False)
    elif kind == "pieces":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    else:  # as sentencepiece's BPE is converted
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if kind == "fallback":  # bytes are tokens of the vocabulary, not of the text
        table = json.loads(tokenizer.to_str())
        table["added_tokens"] = table["added_tokens"][: len(SPECIAL)]
        tokenizer = Tokenizer.from_str(json.dumps(table))
    return tokenizer


KINDS = ("bytes", "words", "pieces", "fallback")
TRAINED = {kind: trained(kind).to_str() for kind in KINDS}
_NORMALIZERS = st.lists(
    st.sampled_from(
        [
            normalizers.NFC(),
            normalizers.Lowercase(),
            normalizers.Strip(),
            normalizers.Replace("a", "e"),
            normalizers.StripAccents(),
            normalizers.Prepend("▁"),
        ]
    ),
    max_size=2,
)
_PRE_TOKENIZERS = st.sampled_from(
    [
        None,
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Whitespace(),
        pre_tokenizers.Metaspace(prepend_scheme="first"),
        pre_tokenizers.Punctuation(),
        pre_tokenizers.Split(Regex(DIGITS), "isolated"),
    ]
)
_AROUND = st.sampled_from([None, "<bos> $A", "$A <eos>", "<bos> $A <eos>", "<bos> <bos> $A <eos>"])
_ADDED = st.lists(
    st.builds(
        AddedToken,
        st.sampled_from(["<tool>", "apple", " ", "</think>", "2023", "é"]),
        single_word=st.booleans(),
        lstrip=st.booleans(),
        rstrip=st.booleans(),
        normalized=st.booleans(),
        special=st.booleans(),
    ),
    max_size=3,
)
_TEXT = st.lists(
    st.sampled_from(
        [
            *SPECIAL,
            "<tool>",
            "apple",
            "apples",
            "2023",
            " ",
            "  ",
            "\n",
            "é",
            "É",
            "中",
            "😀",
            ".",
            " ,",
            "'s",
            "x",
            "\u2028",
            "ﬁ",
        ]
    ),
    min_size=1,
    max_size=8,
).map("".join)
_CLASSES = st.sampled_from(
    [
        None,
        "LlamaTokenizerFast",
        "LlamaTokenizer",
        "GPT2Tokenizer",
        "Qwen2Tokenizer",
        "PreTrainedTokenizerFast",
        "BertTokenizer",
    ]
)


@st.composite
def random_tokenizers(draw: st.DrawFn) -> Tokenizer:
    tokenizer = Tokenizer.from_str(TRAINED[draw(st.sampled_from(KINDS))])
    more = draw(_NORMALIZERS)
    if more:
        tokenizer.normalizer = normalizers.Sequence([*more, *([] if tokenizer.normalizer is None else [tokenizer.normalizer])])
    first = draw(_PRE_TOKENIZERS)
    if first is not None:
        parts = [first, *([] if tokenizer.pre_tokenizer is None else [tokenizer.pre_tokenizer])]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    if (around := draw(_AROUND)) is not None:
        ids = [(text, tokenizer.token_to_id(text)) for text in ("<bos>", "<eos>")]
        tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    tokenizer.add_tokens(draw(_ADDED))
    if draw(st.booleans()):
        tokenizer.enable_padding(length=50)
    return tokenizer


@settings(max_examples=examples(400), deadline=None)
@given(tokenizer=random_tokenizers(), text=_TEXT, name=_CLASSES, family=st.sampled_from(["llama", "olmo2", "qwen2", "gemma3"]))
def test_ids_and_texts_are_those_of_tokenizer_json(tokenizer: Tokenizer, text: str, name: str | None, family: str) -> None:
    with TemporaryDirectory() as path:
        shapes = {"model_type": family, "vocab_size": 1000}
        config = {"tokenizer_class": name, "clean_up_tokenization_spaces": True}
        folder = write_folder(Path(path), tokenizer, tokenizer_config=config, config=shapes)
        own = Tokenizer.from_file(str(folder / "tokenizer.json"))
        own.no_padding()
        plain, bos, eos = own.encode(text, add_special_tokens=False).ids, own.token_to_id("<bos>"), own.token_to_id("<eos>")
        found = ModelTokenizer(folder)
        ids = found.encode_prompt(text)
        if plain[:1] == [bos]:  # is not added a second time
            assert ids[: ids.index(bos) + 1] + plain[1:] == ids
        else:
            whole = own.encode(text)
            appended = sum(part is None for part in whole.sequence_ids[whole.sequence_ids.index(0) :]) if plain else len(whole)
            assert ids == whole.ids[: len(whole) - appended]
        assert found.encode_completion(text) == plain + [eos] * (plain[-1:] != [eos])
        assert found.decode(np.array(ids, dtype=np.int32)) == own.decode(ids)
        rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        assert found.encode_prompt([{"role": "user", "content": text}]) == own.encode(rendered, add_special_tokens=False).ids


MARKED = CHATML.replace(
    "{{ m['content'] }}<|im_end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>"
    "{% endif %}{{ '' }}",
)
PARTS = (
    "{{ bos_token }}{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}{% if terse is defined and terse %}(terse)\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content | trim }}"
    "{% elif m.content is not none %}{% for part in m.content %}{{ part['text'] | trim }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}CALL {{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT_ONLY = PARTS.replace(
    "{% elif m.content is not none %}{% for part in m.content %}{{ part['text'] | trim }}{% endfor %}", ""
)
JOINED = CHATML.replace("{{ m['content'] }}", "{{ 'says: ' ~ m['content'] }}")
STRICT = "{% if messages[0].role == 'assistant' %}{{ raise_exception('begin with the user') }}{% endif %}" + CHATML
TEMPLATES = {"plain": CHATML, "marked": MARKED, "parts": PARTS, "text": TEXT_ONLY, "joined": JOINED, "strict": STRICT}
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"x": None}}}]
_WORDS = st.sampled_from(["hi", " 1+1?", "a\nb ", "", "<eos>", "None"])
_CONTENTS = st.one_of(
    _WORDS,
    _WORDS.map(lambda text: [{"type": "text", "text": text}]),
    st.lists(st.builds(lambda text: {"type": "text", "text": text}, _WORDS), max_size=2),
    st.sampled_from([None, 7, True, {"text": "a"}, ["a"], [{"type": "image", "url": "x"}], [{"type": "text"}]]),
)
_CALLS = st.sampled_from([None, [], [{"function": {"name": "calc", "arguments": {"x": [1, None]}}}], [{"function": None}]])
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": _CONTENTS},
        optional={"tool_calls": _CALLS, "name": st.none(), "weight": st.sampled_from([0, 1, None, 0.5, "1"])},
    ),
    min_size=1,
    max_size=4,
)
_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.sampled_from([None, [], TOOLS, "calc", ["calc"]]),
        "chat_template_kwargs": st.sampled_from([None, {}, {"terse": True}, {"tools": []}, {"unknown": 1}, [1]]),
    },
)


def rendered(template: str, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], *, is_prompt: bool) -> str:
    """By transformers, with the text of a single part where the template reads only text."""
    options = {"tools": fields.get("tools"), "add_generation_prompt": is_prompt, **(fields.get("chat_template_kwargs") or {})}
    chat = [dict(message) for message in messages]
    if template != PARTS:
        for message in chat:
            if isinstance(message["content"], list):
                (part,) = message["content"]
                message["content"] = part["text"]
    texts, _ = render_jinja_template([chat], chat_template=template, bos_token="<bos>", eos_token="<eos>", **options)
    return texts[0]


@pytest.fixture(scope="module")
def by_template(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelTokenizer]:
    own = Tokenizer.from_str(TRAINED["bytes"])
    folders = {name: tmp_path_factory.mktemp(name) for name in TEMPLATES}
    return {
        name: ModelTokenizer(write_folder(folder, own, tokenizer_config={"chat_template": TEMPLATES[name]}))
        for name, folder in folders.items()
    }


@settings(max_examples=examples(2000), deadline=None)
@given(messages=_MESSAGES, fields=_FIELDS, name=st.sampled_from(list(TEMPLATES)))
def test_a_chat_is_rendered_as_the_template_alone_would_or_refused(
    by_template: dict[str, ModelTokenizer], messages: list[dict[str, Any]], fields: dict[str, Any], name: str
) -> None:
    own, template = Tokenizer.from_str(TRAINED["bytes"]), TEMPLATES[name]
    line = json.dumps({"prompt": messages, **fields})
    with TemporaryDirectory() as path:
        file = Path(path) / "rows.jsonl"
        file.write_text(line)
        try:
            (row,) = read_jsonl(file)
            ids = by_template[name].encode_prompt(row["prompt"], row)
        except InvalidArgument:
            return
    text = rendered(template, messages, fields, is_prompt=True)
    assert ids == own.encode(text, add_special_tokens=False).ids
    assert all(str(message["content"]) not in text for message in messages if isinstance(message["content"], list))
    assert not fields.get("tools") or json.dumps(fields["tools"]) in text


def test_answers_of_weight_0_are_not_learned_and_the_whole_row_reaches_the_template(
    by_template: dict[str, ModelTokenizer],
) -> None:
    own = Tokenizer.from_str(TRAINED["bytes"])
    messages = [
        {"role": "assistant", "content": "hello", "weight": 0},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": [{"type": "text", "text": "how many apples"}], "weight": 1},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "how", "weight": 0},
    ]
    for name in ("plain", "marked", "parts"):
        fields = {"tools": TOOLS, "chat_template_kwargs": {"terse": True}} if name == "parts" else {}
        sample = sft_sample({"messages": messages, **fields}, by_template[name])
        ids = [*sample.prompt_token_ids.tolist(), *sample.completion_token_ids.tolist()]
        assert own.decode(ids, skip_special_tokens=False) in rendered(TEMPLATES[name], messages, fields, is_prompt=False)
        learned = sample.completion_token_ids[np.asarray(sample.loss_mask) == 1].tolist()
        assert own.decode(learned, skip_special_tokens=False).strip() == "how many apples<|im_end|>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("around", ["$A <eos>", "<bos> $A <eos>", "<bos> <bos> $A"])
def test_a_completion_follows_its_prompt_and_no_prompt_ends(tmp_path: Path, kind: str, around: str) -> None:
    own = Tokenizer.from_str(TRAINED[kind])
    ids = [(text, own.token_to_id(text)) for text in ("<bos>", "<eos>")]
    own.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    found = ModelTokenizer(write_folder(tmp_path, own))
    sample = sft_sample({"prompt": "the answer is", "completion": " 42"}, found)
    prompt, completion = sample.prompt_token_ids.tolist(), sample.completion_token_ids.tolist()
    assert prompt == found.encode_prompt("the answer is") and own.token_to_id("<eos>") not in prompt
    assert completion.count(own.token_to_id("<eos>")) == 1 and prompt.count(own.token_to_id("<bos>")) == around.count("<bos>")
    assert found.decode(np.array([*prompt, *completion])) == "the answer is 42"
    chat = found.encode_prompt([{"role": "user", "content": "the answer"}])
    assert not {own.token_to_id("<bos>"), own.token_to_id("<eos>")} & set(chat)


LAYOUTS: dict[str, tuple[str, str | None, str, str | None, Sequence[str]]] = {
    # kind, tokenizer_class, model_type, tokens around a text, end-of-sequence tokens of generation_config.json
    "llama-3": ("bytes", "PreTrainedTokenizerFast", "llama", "<bos> $A", ["<eos>", "<|im_end|>"]),
    "deepseek-r1-distill-llama": ("bytes", "LlamaTokenizerFast", "llama", "<bos> $A", ["<eos>"]),
    "deepseek-r1-distill-qwen": ("bytes", "LlamaTokenizerFast", "qwen2", "<bos> $A", ["<eos>"]),
    "olmo-2": ("bytes", "GPT2Tokenizer", "olmo2", None, ["<eos>"]),
    "yi": ("fallback", "LlamaTokenizer", "llama", None, ["<|im_end|>"]),
    "mistral-tekken": ("bytes", "LlamaTokenizerFast", "mistral", "<bos> $A", ["<eos>"]),
    "gemma-3": ("fallback", "GemmaTokenizer", "gemma3_text", "<bos> $A", ["<eos>", "<|im_end|>"]),
    "phi-4": ("bytes", "GPT2Tokenizer", "phi3", None, ["<|im_end|>"]),
    "glm-4": ("bytes", "PreTrainedTokenizer", "glm4", "<|im_start|> <bos> $A", ["<eos>", "<|im_start|>"]),
    "smollm2": ("bytes", "GPT2Tokenizer", "llama", None, ["<|im_end|>"]),
    "qwen3": ("bytes", "Qwen2Tokenizer", "qwen3", None, ["<|im_end|>", "<eos>"]),
    "qwen2.5-instruct": ("bytes", "Qwen2Tokenizer", "qwen2", None, ["<|im_end|>", "<eos>"]),
    "saved-by-transformers-5": ("pieces", "TokenizersBackend", "llama", "<bos> $A", ["<eos>"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_popular_layout_is_read_by_its_own_files(tmp_path: Path, layout: str) -> None:
    kind, name, family, around, ends = LAYOUTS[layout]
    own = Tokenizer.from_str(TRAINED[kind])
    if around is not None:
        ids = [(text, own.token_to_id(text)) for text in SPECIAL]
        own.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    end_ids = [own.token_to_id(text) for text in ends]
    shapes = {"model_type": family, "eos_token_id": end_ids[0]}
    vocab = {"vocab_size": own.get_vocab_size()}
    config = {**shapes, "text_config": vocab} if layout == "gemma-3" else {**shapes, **vocab}
    declared = {str(own.token_to_id(text)): {"content": text, "special": True} for text in SPECIAL}
    write_folder(
        tmp_path,
        own,
        config=config,
        generation_config={"eos_token_id": end_ids},
        tokenizer_config={"tokenizer_class": name, "eos_token": {"content": ends[0]}, "added_tokens_decoder": declared},
        tekken={"config": {}},
    )
    (tmp_path / "chat_template.jinja").write_text(PARTS)
    text = "how many apples are there in 2023?\n élan 中文 😀 ."
    found = ModelTokenizer(tmp_path)
    assert check_tokenizer(tmp_path) == []
    assert found.encode_prompt(text) == own.encode(text).ids
    assert found.decode(np.array(own.encode(text).ids)) == own.decode(own.encode(text).ids)
    chat = [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": text}]}]
    by_hand = rendered(PARTS, chat, {"tools": TOOLS}, is_prompt=True)
    assert found.encode_prompt(chat, {"tools": TOOLS}) == own.encode(by_hand, add_special_tokens=False).ids
    assert set(read_stop_token_ids(tmp_path, vocab_size=500)) == set(end_ids)


def _without(name: str) -> Any:
    def edit(folder: Path) -> None:
        (folder / name).unlink()
        for other in ("tokenizer.model", "tekken.json"):
            (folder / other).write_text("{}")

    return edit


def _edited(name: str, edit: Any) -> Any:
    def write(folder: Path) -> None:
        table = json.loads((folder / name).read_text())
        edit(table)
        (folder / name).write_text(json.dumps(table))

    return write


CONFIG, FILE, TEMPLATE = "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_without(FILE), "has no tokenizer.json, only tokenizer.model, tekken.json"),
        (_edited(FILE, lambda table: table["model"].update(type="FutureBPE")), "tokenizer.json is damaged, or newer"),
        (_edited(FILE, lambda table: table.update(version="2.0")), "tokenizer.json is damaged, or newer"),
        (_edited(FILE, lambda table: table.update(decoder={"type": "Future"})), "tokenizer.json is damaged, or newer"),
        (_edited(FILE, lambda table: table["model"].update(vocab={}, merges=[])), "has no tokens for text"),
        (lambda folder: (folder / FILE).write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda folder: (folder / FILE).write_bytes((folder / FILE).read_bytes()[:999]), "tokenizer.json is damaged, or newer"),
        (lambda folder: (folder / CONFIG).write_text("{"), "tokenizer_config.json is not JSON"),
        (_edited(CONFIG, lambda table: table.update(eos_token="<end>")), "names '<end>' as eos_token, which is no token"),
        (_edited(CONFIG, lambda table: table.update(chat_template="{% for %}")), "tokenizer_config.json:1: the chat template is no Jinja"),
        (_edited(CONFIG, lambda table: table.update(chat_template=7)), "chat_template must be text"),
        (_edited(CONFIG, lambda table: table.update(added_tokens_decoder={"900": "<new>"})), "declares token '<new>' with id 900"),
        (lambda folder: (folder / TEMPLATE).write_text("{{ x | unknown }}"), "chat_template.jinja:1: the chat template"),
        (lambda folder: (folder / TEMPLATE).write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda folder: (folder / TEMPLATE).write_text("ok"), "chat_template.jinja: the chat template does not read `messages`"),
        (lambda folder: (folder / TEMPLATE).write_bytes("{{ messages }} é".encode("latin-1")), "chat_template.jinja is not UTF-8"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_cannot_be_read_is_refused_by_file(tmp_path: Path, damage: Any, problem: str) -> None:
    damage(write_folder(tmp_path, Tokenizer.from_str(TRAINED["bytes"])))
    with pytest.raises((InvalidArgument, PathNotFound)) as raised:
        check_tokenizer(tmp_path)
    assert problem in raised.value.message and "\n" not in raised.value.message


def test_what_is_likely_wrong_is_told(tmp_path: Path) -> None:
    own = Tokenizer.from_str(TRAINED["bytes"])
    write_folder(tmp_path, own, config={"vocab_size": 4000}, tokenizer_config={"add_bos_token": True})
    few, without_bos = check_tokenizer(tmp_path)
    assert "the embedding 4000 rows" in few and "add_bos_token" in without_bos


def test_a_token_beyond_the_embedding_and_text_without_tokens_are_refused(tmp_path: Path) -> None:
    own = Tokenizer.from_str(TRAINED["bytes"])
    found = ModelTokenizer(write_folder(tmp_path, own, config={"vocab_size": 320}))
    with pytest.raises(InvalidArgument, match="but the model's embedding has 320 rows"):
        for token_id in range(320, own.get_vocab_size()):
            found.encode_prompt(own.decode([token_id]))


def test_a_key_of_a_message_that_the_template_does_not_read_is_refused(tmp_path: Path) -> None:
    found = ModelTokenizer(write_folder(tmp_path, Tokenizer.from_str(TRAINED["bytes"])))
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    for chat in ([{"role": "user", "content": "2+2?"}, called], [{"role": "user", "content": "a", "name": "eve"}]):
        for encode in (found.encode_prompt, found.encode_chat):
            with pytest.raises(InvalidArgument, match=r"message \d has `(tool_calls|name)`, which the model's chat template"):
                encode(chat)
    assert found.encode_prompt([{"role": "user", "content": "a", "name": None}])


def test_a_text_has_one_encoding_and_its_marked_spaces_count(tmp_path: Path) -> None:
    own = Tokenizer.from_str(TRAINED["bytes"])
    own.post_processor = processors.ByteLevel(trim_offsets=True)
    marked = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
    template = marked + "{{ m.content }}{% endif %}{% endfor %}"
    folder = write_folder(tmp_path, own, tokenizer_config={"chat_template": [{"name": "tool_use", "template": CHATML}]})
    (folder / TEMPLATE).write_text("\ufeff" + template)
    table = json.loads((folder / FILE).read_text())
    table["model"]["dropout"] = 0.9
    (folder / FILE).write_text(json.dumps(table))
    found = ModelTokenizer(folder)
    chat = [{"role": "user", "content": "how many"}, {"role": "assistant", "content": "apples  "}]
    first = found.encode_chat(chat)
    text = own.encode("how manyapples  ", add_special_tokens=False)
    assert (list(first.token_ids), first.assistant_mask[-1]) == (text.ids, 1)
    assert all(list(found.encode_chat(chat).token_ids) == text.ids for _ in range(20))
    with pytest.raises(InvalidArgument, match="is not read by the model's chat template"):
        found.encode_prompt(chat[:1], {"tools": TOOLS})  # chat_template.jinja is in the place of the named ones


def test_a_named_template_is_for_tools(tmp_path: Path) -> None:
    own = Tokenizer.from_str(TRAINED["bytes"])
    templates = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": PARTS}]
    found = ModelTokenizer(write_folder(tmp_path, own, tokenizer_config={"chat_template": templates}))
    chat = [{"role": "user", "content": "hi"}]
    for fields, template in (({}, CHATML), ({"tools": TOOLS}, PARTS)):
        text = rendered(template, chat, fields, is_prompt=True)
        assert found.encode_prompt(chat, fields) == own.encode(text, add_special_tokens=False).ids
    with pytest.raises(InvalidArgument, match="tools: is for the chat template"):
        found.encode_prompt("hi", {"tools": TOOLS})
