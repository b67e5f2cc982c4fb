"""Tokenizers of model folders: ids, texts and chats are those of the folder's own files."""

import json
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import AddedToken, Encoding, Tokenizer, decoders, models, processors
from transformers import AutoTokenizer

from tasuki.client.sft_data import sft_sample
from tasuki.models.tokenizer import check_tokenizer, read_tokenizer
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.errors import InvalidArgument, PathNotFound
from tests.extent import examples
from tests.unit.small_tokenizers import CLASSES, KINDS, TEXT, TRAINED, random_tokenizers, write_folder


def _encoded(tokenizer: Tokenizer, text: str) -> Encoding:
    """Rejects what makes tokenizers itself panic."""
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            reject()
        raise


@settings(max_examples=examples(400), deadline=None)
@given(
    tokenizer=random_tokenizers(),
    text=TEXT,
    completion=TEXT,
    name=CLASSES,
    family=st.sampled_from(["llama", "olmo2", "qwen2", "gemma3"]),
)
def test_ids_and_texts_are_those_of_tokenizer_json(
    tokenizer: Tokenizer, text: str, completion: str, name: str | None, family: str
) -> None:
    with TemporaryDirectory() as path:
        shapes = {"model_type": family, "vocab_size": 1000}
        config: dict[str, Any] = {"tokenizer_class": name, "clean_up_tokenization_spaces": True}
        config |= {"pad_token": "<tool>", "additional_special_tokens": ["<|im_end|>", "</think>"]}
        folder = write_folder(Path(path), tokenizer, tokenizer_config=config, config=shapes)
        own = Tokenizer.from_file(str(folder / "tokenizer.json"))
        own.no_padding()
        plain, joint = (_encoded(own, one) for one in (text, text + completion))
        plain, bos, eos = plain.ids, own.token_to_id("<bos>"), own.token_to_id("<eos>")
        found = ModelTokenizer(folder)
        ids = found.encode_prompt(text)
        if plain[:1] == [bos]:  # is not added a second time
            assert ids[: ids.index(bos) + 1] + plain[1:] == ids
        else:
            whole = own.encode(text)
            appended = sum(part is None for part in whole.sequence_ids[whole.sequence_ids.index(0) :]) if plain else len(whole)
            assert ids == whole.ids[: len(whole) - appended]
        learned = joint.ids[len(plain) :]
        if joint.ids[: len(plain)] != plain:  # a token spans both
            learned = [token_id for token_id, (_, end) in zip(joint.ids, joint.offsets, strict=True) if end > len(text)]
        if eos in learned[:-1]:
            with pytest.raises(InvalidArgument, match="completion: has '<eos>' in its text"):
                found.encode_example(text, completion)
            return
        example = found.encode_example(text, completion)
        start, joined = example.assistant_mask.index(1), found.encode_prompt(text + completion)
        assert example.token_ids == joined + [eos] * (joined[start:][-1:] != [eos])
        assert example.assistant_mask == [0] * start + [1] * (len(example.token_ids) - start)
        if joined[: len(ids)] == ids:  # no token spans both
            assert start == len(ids)
        else:
            assert start < len(joined) and own.decode(joined[:start]) in own.decode(joined)
        assert found.decode(np.array(ids, dtype=np.int32)) == own.decode(ids)
        rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        assert found.encode_prompt([{"role": "user", "content": text}]) == own.encode(rendered, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("around", ["$A <eos>", "<bos> $A <eos>", "<bos> <bos> $A"])
def test_a_completion_follows_its_prompt_and_no_prompt_ends(tmp_path: Path, kind: str, around: str) -> None:
    own = Tokenizer.from_str(TRAINED[kind])
    ids = [(text, own.token_to_id(text)) for text in ("<bos>", "<eos>")]
    own.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    found = ModelTokenizer(write_folder(tmp_path, own))
    sample = sft_sample({"prompt": "the answer is", "completion": " 42"}, found)
    prompt, completion = sample.prompt_token_ids.tolist(), sample.completion_token_ids.tolist()
    assert prompt + completion[:-1] == found.encode_prompt("the answer is 42") and own.token_to_id("<eos>") not in prompt
    assert completion.count(own.token_to_id("<eos>")) == 1 and prompt.count(own.token_to_id("<bos>")) == around.count("<bos>")
    assert found.decode(np.array([*prompt, *completion])) == "the answer is 42"
    chat = found.encode_prompt([{"role": "user", "content": "the answer"}])
    assert not {own.token_to_id("<bos>"), own.token_to_id("<eos>")} & set(chat)


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


def _pieces() -> bytes:
    """A model of sentencepiece."""
    model, texts = BytesIO(), ["how many apples are there"] * 4
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=99, hard_vocab_limit=False, minloglevel=2
    )
    return model.getvalue()


def test_vocabularies_in_other_formats_may_lie_beside_their_own_tokenizer(tmp_path: Path) -> None:
    own = Tokenizer.from_str(TRAINED["words"])
    folder = write_folder(tmp_path, own, vocab=own.get_vocab(), config={})
    tokens = [token for token, _ in sorted(own.get_vocab().items(), key=lambda one: one[1])]
    (folder / "vocab.txt").write_text("\n".join(tokens))
    (folder / "tokenizer.model").write_text("aGk= 0\nYQ== 1\n")  # tiktoken's
    assert check_tokenizer(folder) == []
    pieces, read = _pieces(), SentencePieceProcessor()
    read.load_from_serialized_proto(pieces)
    own = Tokenizer(models.Unigram([(read.id_to_piece(n), read.get_score(n)) for n in range(len(read))], unk_id=0))
    own.add_special_tokens(["<unk>", "<s>", "</s>", "<pad>"])
    ends = {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "pieces").mkdir()
    folder = write_folder(tmp_path / "pieces", own, tokenizer_config=ends, config={})
    (folder / "tokenizer.model").write_bytes(pieces)
    assert check_tokenizer(folder) == []
    tokenizer = ModelTokenizer(folder)
    for text in ("how many apples", "zebra"):
        assert tokenizer.encode_prompt(f"\u2581{text}".replace(" ", "\u2581")) == read.encode(text)
    table = json.loads((folder / FILE).read_text())
    table["model"]["vocab"][4:] = [[f"{piece}x", score] for piece, score in table["model"]["vocab"][4:]]
    (folder / FILE).write_text(json.dumps(table))
    with pytest.raises(InvalidArgument, match=f"tokenizer.model has {len(read)} tokens, which are not the {len(read) + 1}"):
        check_tokenizer(folder)


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens", "pad_token"])
def test_tokens_that_the_folder_names_are_never_split_and_in_no_text_unless_tokenizer_json_says_so(
    tmp_path: Path, key: str
) -> None:
    table = json.loads(TRAINED["bytes"])
    table["added_tokens"] = [token for token in table["added_tokens"] if token["content"] != "<|im_end|>"]
    table["model"]["vocab"]["<|im_end|>"] = number = Tokenizer.from_str(TRAINED["bytes"]).token_to_id("<|im_end|>")
    for token in table["added_tokens"]:
        token["special"] = False
    named = {key: "<|im_end|>" if key == "pad_token" else ["<|im_end|>"]}
    write_folder(tmp_path, Tokenizer.from_str(json.dumps(table)), tokenizer_config=named)
    tokenizer = read_tokenizer(tmp_path)
    ids = tokenizer.encode("3<|im_end|><eos>").ids
    assert ids[-2:] == [number, tokenizer.eos_token_id]
    assert tokenizer.decode(ids) == "3<eos>"  # tokenizer.json says that it is not special


@pytest.mark.parametrize("kind", sorted(TRAINED))
def test_a_named_token_that_words_contain_stays_an_ordinary_one(tmp_path: Path, kind: str) -> None:
    own = Tokenizer.from_str(TRAINED[kind])
    texts = ["how many apples", "xhowmanyx", "x apples 12 x"]
    inner = {token for text in texts for token in own.encode(text, add_special_tokens=False).tokens}
    known = {token.content for token in own.get_added_tokens_decoder().values()}
    for index, token in enumerate(sorted(inner - known)):
        (folder := tmp_path / str(index)).mkdir()
        write_folder(folder, own, tokenizer_config={"additional_special_tokens": [token], "pad_token": token})
        tokenizer = read_tokenizer(folder)
        for text in texts:
            ids = own.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text).ids == ids, token
            assert tokenizer.decode(ids) == own.decode(ids), token


def test_tokens_of_added_tokens_json_are_never_split(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, Tokenizer.from_str(TRAINED["bytes"]))
    number = read_tokenizer(folder).backend.get_vocab_size()
    (folder / "added_tokens.json").write_text(json.dumps({"<think>": number, "<eos>": 2}))
    tokenizer = read_tokenizer(folder)
    assert number in (ids := tokenizer.encode("3<think>4").ids) and tokenizer.decode(ids) == "3<think>4"
    (folder / "added_tokens.json").write_text(json.dumps({"<think>": number + 1}))
    with pytest.raises(InvalidArgument, match=rf"added_tokens\.json declares token '<think>' with id {number + 1}"):
        read_tokenizer(folder)


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
        (lambda folder: (folder / CONFIG).write_text("version https://git-lfs.github.com/spec/v1\n"), "tokenizer_config.json is a Git LFS"),
        (_edited(CONFIG, lambda table: table.update(bos_token=5)), "the tokenizer's bos_token must be text"),
        (_edited(CONFIG, lambda table: table.update(eos_token="<end>")), "names '<end>' as eos_token, which is no token"),
        (_edited(CONFIG, lambda table: table.update(chat_template="{% for %}")), "tokenizer_config.json:1: the chat template is no Jinja"),
        (_edited(CONFIG, lambda table: table.update(chat_template=7)), "chat_template must be text"),
        (_edited(CONFIG, lambda table: table.update(added_tokens_decoder={"900": "<new>"})), "declares token '<new>' with id 900"),
        (_edited(CONFIG, lambda table: table.update(added_tokens_decoder={"9": "<eos>"})), "declares token '<eos>' with id 9"),
        (_edited(CONFIG, lambda table: table.update(eos_token="3")), "names '3' as eos_token, which texts contain"),
        (lambda folder: (folder / "vocab.json").write_text('{"a": 5}'), "vocab.json has 1 tokens, which are not the 3"),
        (lambda folder: (folder / "vocab.txt").write_text("a\nb"), "vocab.txt has 2 tokens, which are not the 3"),
        (lambda folder: (folder / "tokenizer.model").write_bytes(_pieces()), "tokenizer.model has "),
        (lambda folder: (folder / TEMPLATE).write_text("{{ x | unknown }}"), "chat_template.jinja:1: the chat template"),
        (lambda folder: (folder / TEMPLATE).write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda folder: (folder / TEMPLATE).write_text("ok"), "chat_template.jinja: the chat template does not read `messages`"),
        (lambda folder: (folder / TEMPLATE).write_bytes("{{ messages }} é".encode("latin-1")), "chat_template.jinja is not UTF-8"),
        (_edited(FILE, lambda table: table["added_tokens"][-1].update(id=700)), "has the added token '<|im_end|>' with id 700"),
        (lambda folder: (folder / TEMPLATE).symlink_to("gone"), "chat_template.jinja cannot be read"),
        (lambda folder: (folder / "special_tokens_map.json").symlink_to("gone"), "special_tokens_map.json cannot be read"),
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
    write_folder(tmp_path, own, config={"vocab_size": own.get_vocab_size() - 129})
    assert "rows" in str(check_tokenizer(tmp_path))
    for vocab_size in (own.get_vocab_size() + 128, own.get_vocab_size() - 128):
        write_folder(tmp_path, own, config={"vocab_size": vocab_size})
        assert check_tokenizer(tmp_path) == []
    with_bos = Tokenizer.from_str(TRAINED["bytes"])
    ids = [("<bos>", with_bos.token_to_id("<bos>"))]
    with_bos.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=ids)
    write_folder(tmp_path, with_bos, config={}, tokenizer_config={"add_bos_token": False})
    (with_bos_doubt,) = check_tokenizer(tmp_path)
    assert "add_bos_token False, but tokenizer.json adds it" in with_bos_doubt
    template = "{{ pad_token }}{{ unk_token }}{{ bos_token }}{{ messages[0].content }}"
    write_folder(tmp_path, with_bos, config={}, tokenizer_config={"pad_token": None, "chat_template": template})
    assert check_tokenizer(tmp_path) == ["the chat template reads unk_token, which no file names: it writes nothing there"]
    own.add_tokens([AddedToken("<|end|>", special=False)])
    write_folder(tmp_path, own, tokenizer_config={"eos_token": "<|end|>"}, config={})
    (in_texts,) = check_tokenizer(tmp_path)
    assert "says that <|end|> is not special" in in_texts


@pytest.mark.parametrize("declared", [{}, {"added_tokens_decoder": {}}])
def test_special_tokens_are_those_that_transformers_reads_of_two_files(tmp_path: Path, declared: dict[str, Any]) -> None:
    template = "{{ bos_token }}|{{ eos_token }}|{{ messages[0].content }}"
    files = {
        "config": {"model_type": "llama"},
        "special_tokens_map": {"eos_token": {"content": "<|im_end|>"}, "bos_token": None},
    }
    config = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast", **declared}
    folder = write_folder(tmp_path, Tokenizer.from_str(TRAINED["bytes"]), tokenizer_config=config, **files)
    chat = [{"role": "user", "content": "how"}]
    found, other = read_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert found.templates["default"].render(chat, found.special_tokens) == other.apply_chat_template(chat, tokenize=False)
    assert found.eos_token_id == other.eos_token_id
    assert sum("special_tokens_map.json says what" in doubt for doubt in found.doubts()) == (0 if declared else 2)


def test_a_template_of_processors_counts_where_there_is_no_other(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, Tokenizer.from_str(TRAINED["bytes"]), config={}, tokenizer_config={"chat_template": None})
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}!"}))
    found = read_tokenizer(folder)
    assert found.decode(ModelTokenizer(folder).encode_prompt([{"role": "user", "content": "3"}])) == "3!"
    assert found.doubts() == []
    (folder / TEMPLATE).write_text("{{ messages[0]['content'] }}?")
    found = read_tokenizer(folder)
    assert found.decode(ModelTokenizer(folder).encode_prompt([{"role": "user", "content": "3"}])) == "3?"
    (doubt,) = found.doubts()
    assert "chat_template.json has another chat template than" in doubt


def test_an_answer_that_is_only_its_end_has_an_empty_text(tmp_path: Path) -> None:
    own = Tokenizer.from_str(TRAINED["bytes"])
    own.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])  # which fails on no tokens
    found = read_tokenizer(write_folder(tmp_path, own))
    eos = own.token_to_id("<eos>")
    assert (found.decode([eos]), found.decode([eos, eos]), found.decode([])) == ("", "", "")
    assert found.decode([], has_special=True) == "" and found.decode([eos], has_special=True) == "<eos>"


def test_a_decoder_that_fails_is_named(tmp_path: Path) -> None:
    own = Tokenizer.from_str(TRAINED["bytes"])
    own.decoder = decoders.Strip("Ġ", 0, 3)
    with pytest.raises(InvalidArgument, match=r"the decoder of .* fails on token ids"):
        read_tokenizer(write_folder(tmp_path, own)).decode([own.token_to_id("Ġ")])


def test_a_chat_template_whose_answers_end_without_a_stop_token_is_told(tmp_path: Path) -> None:
    own = Tokenizer.from_str(TRAINED["bytes"])
    found = ModelTokenizer(write_folder(tmp_path, own, config={}))  # ChatML of a model that ends with <eos>
    (doubt,) = found.doubts(is_chat=True, stop_token_ids=[], stop=[])
    assert r"ends an answer with '<|im_end|>\n<|im_start|>user\n', which has no stop token ('<eos>')" in doubt
    assert found.doubts(is_chat=True, stop_token_ids=[own.token_to_id("<|im_end|>")], stop=[]) == []
    assert (
        found.doubts(is_chat=True, stop_token_ids=[], stop=["\n"])
        == []
        == found.doubts(is_chat=False, stop_token_ids=[], stop=[])
    )
    found = ModelTokenizer(write_folder(tmp_path, own, config={}, tokenizer_config={"eos_token": None}))
    assert "there is no stop token (none)" in str(found.doubts(is_chat=False, stop_token_ids=[], stop=[]))
    assert found.doubts(is_chat=False, stop_token_ids=[], stop=["x"]) == []


def test_a_token_beyond_the_embedding_and_text_without_tokens_are_refused(tmp_path: Path) -> None:
    own = Tokenizer.from_str(TRAINED["bytes"])
    found = ModelTokenizer(write_folder(tmp_path, own, config={"vocab_size": 320}))
    with pytest.raises(InvalidArgument, match="but the model's embedding has 320 rows"):
        for token_id in range(320, own.get_vocab_size()):
            found.encode_prompt(own.decode([token_id]))
