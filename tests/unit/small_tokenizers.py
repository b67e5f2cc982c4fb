"""Small tokenizers of every kind in model folders, and chats as transformers renders them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.utils.chat_template_utils import render_jinja_template

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


def trained(kind: str, special: Sequence[str] = SPECIAL) -> Tokenizer:
    """A small tokenizer with the usual parts of its kind."""
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(DIGITS), "isolated"), level])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=340, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "words":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=[*special], show_progress=False)
    elif kind == "pieces":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=[*special], unk_token="<unk>", show_progress=False)
    else:  # as sentencepiece's BPE is converted
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if kind == "fallback":  # bytes are tokens of the vocabulary, not of the text
        table = json.loads(tokenizer.to_str())
        table["added_tokens"] = table["added_tokens"][: len(special)]
        tokenizer = Tokenizer.from_str(json.dumps(table))
    return tokenizer


KINDS = ("bytes", "words", "pieces", "fallback")
TRAINED = {kind: trained(kind).to_str() for kind in KINDS}
PARTS = (
    "{{ bos_token }}{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}{% if terse is defined and terse %}(terse)\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content | trim }}"
    "{% elif m.content is not none %}{% for part in m.content %}{{ part['text'] | trim }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}CALL {{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"x": None}}}]


def rendered(
    template: str, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], *, is_prompt: bool, **tokens: str | None
) -> str:
    """By transformers, with the text of a single part where the template reads only text."""
    options = {"tools": fields.get("tools"), "add_generation_prompt": is_prompt, **(fields.get("chat_template_kwargs") or {})}
    chat = [dict(message) for message in messages]
    if template != PARTS:
        for message in chat:
            if isinstance(message["content"], list):
                (part,) = message["content"]
                message["content"] = part["text"]
    known = {"bos_token": "<bos>", "eos_token": "<eos>", **tokens}
    texts, _ = render_jinja_template([chat], chat_template=template, **known, **options)
    return texts[0]


_NORMALIZERS = st.lists(
    st.sampled_from(
        [
            normalizers.NFC(),
            normalizers.Lowercase(),
            normalizers.Strip(),
            normalizers.Replace("a", "e"),
            normalizers.StripAccents(),
            normalizers.Prepend("▁"),
            normalizers.NFKD(),
            normalizers.Nmt(),
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
        pre_tokenizers.Punctuation("merged_with_previous"),
        pre_tokenizers.UnicodeScripts(),
        pre_tokenizers.CharDelimiterSplit("x"),
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
_FLAGS = st.fixed_dictionaries({name: st.booleans() for name in ("lstrip", "rstrip", "normalized", "special")})
_WORDS = [
    *SPECIAL,
    *["<tool>", "apple", "apples", "2023", "é", "É", "中", "😀", ".", "'s", "x", "ﬁ"],
    " ",
    "  ",
    "\n",
    " ,",
    "\u2028",
]
TEXT = st.lists(st.sampled_from(_WORDS), min_size=1, max_size=8).map("".join)
_FAST = ("LlamaTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast", "BertTokenizer")
CLASSES = st.sampled_from([None, *_FAST])


@st.composite
def random_tokenizers(draw: st.DrawFn) -> Tokenizer:
    table = json.loads(TRAINED[draw(st.sampled_from(KINDS))])
    flagged = draw(st.dictionaries(st.sampled_from(SPECIAL[1:]), _FLAGS, max_size=2))
    for token in table["added_tokens"]:
        token |= flagged.get(token["content"], {})
    tokenizer = Tokenizer.from_str(json.dumps(table))
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
    if draw(st.booleans()) and isinstance(tokenizer.decoder, decoders.ByteLevel):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=draw(st.booleans()))
    if draw(st.booleans()):
        tokenizer.enable_padding(length=50)
    return tokenizer
