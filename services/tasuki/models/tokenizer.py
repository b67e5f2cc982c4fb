"""The tokenizer of a model folder: tokenizer.json alone says which ids a text has, and which text ids have.

transformers rebuilds parts of it from the class that tokenizer_config.json or config.json names, so it is not asked:
https://github.com/huggingface/transformers/issues/45488.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasuki.models.config_json import read_json_object, refuse_pointer
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, NotInstalled, PathNotFound, TasukiError
from tasuki.wire.extras import install_extras
from tasuki.wire.regular_file import read_regular

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from tasuki.models.chat_template import ChatTemplate

_KEY = "model.path"
TOKENIZER_FILE, _CONFIG, _ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
_MAP = "special_tokens_map.json"
CHAT_TEMPLATES = "additional_chat_templates"
"""Folder of named templates."""
_OTHER_FILES = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
_SUFFIXES = (".json", ".jinja", ".model", ".txt")
_MAX_BYTES = 500_000_000
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_AROUND = ("", " ", "x", "1", "\n")
"""Neighbors of a token of the vocabulary, within words and between them."""
_MOVED_SHARE = 0.01
_MIN_SHARE, _PADDING = 0.5, 128
"""A vocabulary that fills less of the embedding is suspicious, unless only a multiple of 128 pads it; real ones fill 0.9. So is one that
is larger by more than Gemma 3's, which has a token without a row."""
_LONG_TEXT = 16_384


class FolderTokenizer:
    """Text to token ids and back. Raises InvalidArgument for text that the tokenizer cannot encode."""

    def __init__(self, folder: Path) -> None:
        """Raises PathNotFound without tokenizer.json, InvalidArgument naming a file that cannot be used, NotInstalled."""
        self.folder = folder
        self._config = _table(folder / _CONFIG)
        self.backend = _backend(folder / TOKENIZER_FILE)
        self._named = _named_tokens(folder, self._config)
        self.special_tokens = {name: text for name, text in self._named.items() if text}
        """Texts by name, as templates read them: `bos_token`, `eos_token`, ..."""
        self._declare()
        self._special_ids = {number for number, token in self.backend.get_added_tokens_decoder().items() if token.special}
        self._other_template = ""
        self.vocab_size = _vocab_size(folder)
        """Rows of the embedding; None if config.json does not say."""
        self.templates = self._read_templates()
        """By name; the usual one is "default"."""
        self._check()

    @property
    def eos_token_id(self) -> int | None:
        return self.backend.token_to_id(self.special_tokens.get("eos_token", ""))

    def encode(self, text: str) -> "Encoding":
        """Encodes without the tokens that tokenizer.json would add around a text."""
        return self._encoded(text, add_special_tokens=False)

    def encode_start(self, text: str) -> list[int]:
        """Encodes the start of a sequence: with the tokens that tokenizer.json adds before a text, without those that it adds after it.

        A text that begins with the first of them has its start itself.
        """
        own = self.encode(text).ids
        if not self.backend.num_special_tokens_to_add(False):
            return own
        whole = self._encoded(text, add_special_tokens=True)
        inside = [index for index, part in enumerate(whole.sequence_ids) if part is not None]
        if not own or not inside:
            return own
        added = whole.ids[: inside[0]]
        return own if own[:1] == added[:1] else [*added, *own]

    def decode(self, token_ids: Sequence[int], *, has_special: bool = False) -> str:
        """Decodes, without special tokens such as end of sequence unless told."""
        if not token_ids or (not has_special and self._special_ids.issuperset(token_ids)):
            return ""  # on which some decoders fail
        with _refused(_KEY, f"the decoder of {self.folder / TOKENIZER_FILE} fails on token ids {list(token_ids)[:8]}..."):
            return self.backend.decode(token_ids, skip_special_tokens=not has_special)

    def without_special(self, text: str) -> str:
        for token in self.backend.get_added_tokens_decoder().values():
            text = text.replace(token.content, "") if token.special else text
        return text

    def doubts(self) -> list[str]:
        """What is likely wrong, though it can be used."""
        found = [self._other_template] if self._other_template else []
        file, num_tokens = self.folder / TOKENIZER_FILE, self.backend.get_vocab_size()
        fewest = min(_MIN_SHARE * (self.vocab_size or 0), (self.vocab_size or 0) - _PADDING)
        if self.vocab_size is not None and not fewest <= num_tokens <= self.vocab_size + _PADDING:
            found.append(f"{file} has {num_tokens} tokens, the embedding {self.vocab_size} rows: is it the model's?")
        eos_token = self.backend.get_added_tokens_decoder().get(-1 if self.eos_token_id is None else self.eos_token_id)
        if eos_token is not None and not eos_token.special:
            found.append(f"{file} says that {eos_token.content} is not special, so the texts of rewards end with it")
        adds = self.backend.token_to_id(self.special_tokens.get("bos_token", "")) in self.backend.encode("").ids
        if self._config.get("add_bos_token") is (not adds):
            counts = (
                "adds it: prompts that are strings begin with it"
                if adds
                else "does not: prompts that are strings begin without it"
            )
            found.append(f"{self.folder / _CONFIG} says add_bos_token {not adds}, but tokenizer.json {counts}")
        read = {name for template in self.templates.values() for name in template.variables if name.endswith("_token")}
        if unnamed := sorted(read - self._named.keys()):
            found.append(f"the chat template reads {', '.join(unnamed)}, which no file names: it writes nothing there")
        differing = [name for name in self._named if _content(self._config.get(name, self._named[name])) != self._named[name]]
        found += [f"{self.folder / _MAP} says what {name} is, not {_CONFIG}, which says otherwise" for name in differing]
        return found

    def _encoded(self, text: str, *, add_special_tokens: bool) -> "Encoding":
        """Raises InvalidArgument also for a token without a row in the embedding."""
        with _refused("text", f"the tokenizer of {self.folder} cannot encode it"):
            if len(text) < _LONG_TEXT:
                encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
            else:  # a batch lets other threads of Python run
                (encoding,) = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        largest = max(encoding.ids, default=0)
        if self.vocab_size is not None and largest >= self.vocab_size:
            token = self.backend.id_to_token(largest)
            problem = (
                f"has the token {token!r} with id {largest}, but the model's embedding has {self.vocab_size} rows; remove it"
            )
            raise InvalidArgument("text", problem, token_id=largest, vocab_size=self.vocab_size)
        return encoding

    def _declare(self) -> None:
        """Makes tokens of the vocabulary added tokens, which are never split, where tokenizer_config.json or added_tokens.json says so."""
        from tokenizers import AddedToken

        own = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        known = set(own)
        declared = self._config.get("added_tokens_decoder") or {}
        if not isinstance(declared, Mapping) or not all(key.isdecimal() for key in declared):
            raise InvalidArgument(_KEY, f"{self.folder / _CONFIG}: added_tokens_decoder must be an object of tokens by id")
        listed = _table(self.folder / _ADDED)
        if not all(isinstance(number, int) for number in listed.values()):
            raise InvalidArgument(_KEY, f"{self.folder / _ADDED} must be an object of ids by token")
        entries = {int(key): (value, _CONFIG) for key, value in declared.items()}
        of_file = {number: ({"content": text, "normalized": False}, _ADDED) for text, number in listed.items()}
        whole = [(*one, text) for one in sorted((of_file | entries).items()) if (text := _content(one[1][0]))]
        new: list[AddedToken] = []
        for _, (entry, _), text in whole:
            if text not in known:
                flags = {flag: bool(entry[flag]) for flag in _FLAGS if isinstance(entry, Mapping) and flag in entry}
                new.append(AddedToken(text, **flags))
                known.add(text)
        self.backend.add_tokens(new)  # at once: each call builds the search for all of them
        for token_id, (_, file), text in whole:
            if self.backend.token_to_id(text) != token_id:
                problem = f"{self.folder / file} declares token {text!r} with id {token_id}, which tokenizer.json does not have"
                raise InvalidArgument(_KEY, f"{problem}; save both files together with the tokenizer")
        for name, text in [*self.special_tokens.items(), *_further_tokens(self.folder, self._config)]:
            if text in own or (token_id := self.backend.token_to_id(text)) is None:
                continue  # tokenizer.json says what its added tokens are
            if text not in known and self._is_ordinary(token_id, text):
                if name not in ("bos_token", "eos_token"):  # an ordinary token, such as one that pads
                    continue
                problem = f"{self.folder / _CONFIG} names {text!r} as {name}, which texts contain as an ordinary token"
                raise InvalidArgument(_KEY, f"{problem}; name the special token there, or declare it in added_tokens_decoder")
            # A declared token becomes special, too: decoded texts are without it.
            flags_of = self.backend.get_added_tokens_decoder()
            self.backend.add_special_tokens([flags_of.get(token_id, AddedToken(text, normalized=False))])

    def _is_ordinary(self, token_id: int, text: str) -> bool:
        """Whether texts contain this token of the vocabulary, by itself or within words."""
        # WordPiece writes "##" before what continues a word.
        texts = {text, text.removeprefix("##"), self.backend.decode([token_id], skip_special_tokens=False)}
        around = [f"{before}{each}{after}" for each in texts for before in _AROUND for after in _AROUND]
        return any(token_id in encoding.ids for encoding in self.backend.encode_batch(around, add_special_tokens=False))

    def _read_templates(self) -> "dict[str, ChatTemplate]":
        from tasuki.models.chat_template import ChatTemplate

        texts: dict[str, tuple[Any, Path]] = {}
        in_config = self._config.get("chat_template")
        own = self.folder / "chat_template.jinja"
        named = in_config if isinstance(in_config, list) else [{"name": "default", "template": in_config}] if in_config else []
        if _is_there(own):  # in place of all of these, as transformers reads it
            named = []
        for entry in named:
            if not isinstance(entry, Mapping) or not isinstance(entry.get("template"), str):
                problem = f"{self.folder / _CONFIG}: chat_template must be text, or a list of `name` and `template`"
                raise InvalidArgument(_KEY, problem)
            texts[str(entry.get("name"))] = (entry["template"], self.folder / _CONFIG)
        others = self.folder / CHAT_TEMPLATES
        files = {"default": own} | {file.stem: file for file in sorted(others.glob("*.jinja"))}
        for name, file in files.items():
            if _is_there(file):
                with _refused(_KEY, f"{file} is not UTF-8; save it as that"):
                    texts[name] = (_read(file).decode().removeprefix("\ufeff"), file)
        file = self.folder / "chat_template.json"  # of processors, in older folders
        text = _table(file).get("chat_template")
        if isinstance(text, str) and texts.setdefault("default", (text, file))[0] != text:
            self._other_template = f"{file} has another chat template than {texts['default'][1]}, which counts here: remove one"
        return {name: ChatTemplate(text, source=str(file)) for name, (text, file) in texts.items()}

    def _check(self) -> None:
        """Raises InvalidArgument, also for a vocabulary of another format that is not tokenizer.json's but another model's."""
        whole, base = (self.backend.get_vocab(with_added_tokens=added) for added in (True, False))
        own = base.keys() - {token.content for token in self.backend.get_added_tokens_decoder().values()}
        if not own:
            raise InvalidArgument(_KEY, f"{self.folder / TOKENIZER_FILE} has no tokens for text: take the model's own file")
        for name in ("vocab.json", "vocab.txt", "tokenizer.model"):
            file = self.folder / name
            if not file.is_file():
                continue
            if name == "vocab.json":
                other = read_json_object(file, field=_KEY)
            elif name == "vocab.txt":
                other = {line: number for number, line in enumerate(_read(file).decode(errors="replace").split())}
            else:
                other = {piece: number for number, piece in enumerate(_pieces(_read(file)))}
                moved = sum(whole.get(piece) != number for piece, number in other.items())
                if not other or (len(own) <= len(other) <= len(whole) and moved <= _MOVED_SHARE * len(other)):
                    continue  # the conversion renames a few, such as Gemma's tabulator
            if wrong := [token for token in other.keys() | own if whole.get(token) != other.get(token)]:
                what = f"has {len(other)} tokens, which are not the {len(whole)} of tokenizer.json ({wrong[0]!r:.40})"
                raise InvalidArgument(_KEY, f"{file} {what}; take both from the model's page, or remove {name}")
        read = {"eos_token"}.union(*(template.variables for template in self.templates.values()))
        for name in sorted(read & self.special_tokens.keys()):
            text = self.special_tokens[name]
            if self.backend.token_to_id(text) is None:
                problem = f"{self.folder / _CONFIG} names {text!r} as {name}, which is no token of tokenizer.json"
                raise InvalidArgument(_KEY, f"{problem}; save both files together with the tokenizer")


def read_tokenizer(folder: Path) -> FolderTokenizer:
    """Reads a folder's tokenizer. Reading the same files again costs nothing. Raises as FolderTokenizer."""
    with named_if_denied(folder, key=_KEY):
        files = [path for path in sorted(folder.iterdir()) if path.suffix in _SUFFIXES and path.is_file()]
        return _cached(folder, tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in map(Path.stat, files)))


@lru_cache(maxsize=2)
def _cached(folder: Path, facts: tuple[tuple[int, int, int], ...]) -> FolderTokenizer:
    return FolderTokenizer(folder)


def check_tokenizer(folder: Path) -> list[str]:
    """Checks the files that say what a token and a chat are; returns doubts. Raises as FolderTokenizer."""
    return read_tokenizer(folder).doubts()


@contextmanager
def _refused(field: str, problem: str) -> Iterator[None]:
    """Turns what tokenizers raises, Exception itself or a panic of Rust, into InvalidArgument."""
    from tasuki.models.chat_template import one_line

    try:
        yield
    except (TasukiError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is not an Exception
        raise InvalidArgument(field, f"{problem}: {one_line(error)}") from error


def _backend(file: Path) -> "Tokenizer":
    try:
        import tokenizers
    except ImportError as error:
        text = f"the model's tokenizer needs tokenizers: {install_extras('trainer')}"
        raise NotInstalled(text, packages="tokenizers", extras="trainer") from error
    if not file.exists():
        others = [name for name in _OTHER_FILES if (file.parent / name).exists()]
        found = f"only {', '.join(others)}, which" if others else "and nothing else that"
        problem = f"{file.parent} has no {file.name}, {found} says what its tokens are"
        cure = "take tokenizer.json from the model's page, or convert the tokenizer and compare ids"
        raise PathNotFound(f"{_KEY}: {problem}; {cure}", path=file)
    # Spaces that a post-processor trims from offsets still belong to the text that a template marks.
    content = re.sub(rb'(?<!\\)("trim_offsets"\s*:\s*)true', rb"\1false", _read(file))
    version = tokenizers.__version__
    with _refused(_KEY, f"{file} is damaged, or newer than tokenizers {version}; save it with that release or an older one"):
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
        stated = json.loads(content).get("added_tokens") or []
    for token in stated:  # which tokenizers would number anew
        if tokenizer.token_to_id(token["content"]) != token["id"]:
            problem = f"{file} has the added token {token['content']!r} with id {token['id']}"
            raise InvalidArgument(_KEY, f"{problem}, which its vocabulary does not leave to it; take the model's own file")
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None  # a way to train tokenizers: a text would have other ids each time
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read(file: Path) -> bytes:
    try:
        with named_if_denied(file, key=_KEY):
            content = read_regular(file, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise InvalidArgument(_KEY, f"{file} cannot be read: {error.strerror}; check its links") from error
    refuse_pointer(content, file, field=_KEY)
    return content


def _pieces(content: bytes) -> list[str]:
    """Pieces of a sentencepiece model: field 1 of its message, and of each its text. Empty for another format, such as tiktoken's."""

    def sized(at: int) -> tuple[int, int]:
        """Start and end of the field at `at`, of bytes."""
        size = shift = 0
        while True:
            at += 1
            size |= (content[at] & 127) << shift
            shift += 7
            if content[at] < 128:
                return at + 1, at + 1 + size

    pieces: list[str] = []
    at = 0
    try:
        while at < len(content):
            if content[at] & 7 != 2:
                return []
            start, end = sized(at)
            if content[at] == 0x0A:
                pieces.append(content[slice(*sized(start))].decode())
            at = end
    except (IndexError, UnicodeDecodeError):
        return []
    return pieces if at == len(content) else []


def _table(file: Path) -> dict[str, Any]:
    return read_json_object(file, field=_KEY) if _is_there(file) else {}


def _is_there(file: Path) -> bool:
    """Raises InvalidArgument for a link without a file behind it, such as a download that was broken off."""
    if os.path.lexists(file) and not file.is_file():
        raise InvalidArgument(_KEY, f"{file} cannot be read: it is no regular file; check its links")
    return file.is_file()


def _named_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str | None]:
    """Of each name the text, None for null. As in transformers, special_tokens_map.json counts before a tokenizer_config.json that has
    no added_tokens_decoder.
    """
    extra = config.get("extra_special_tokens")
    tables = [extra if isinstance(extra, Mapping) else {}, config]
    tables.insert(0 if "added_tokens_decoder" in config else 2, _table(folder / _MAP))
    given = {name: value for table in tables for name, value in table.items() if name.endswith("_token")}
    for name, value in given.items():
        if not (value is None or isinstance(value, bool) or isinstance(_content(value), str)):
            problem = f"{folder}: the tokenizer's {name} must be text, or an object with `content`, is {value!r:.40}"
            raise InvalidArgument(_KEY, problem)
    return {name: _content(value) for name, value in given.items()}


def _further_tokens(folder: Path, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for table in (_table(folder / _MAP), config):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = table.get(key)
            values = list(listed.values()) if isinstance(listed, Mapping) else listed if isinstance(listed, list) else []
            found += [(key, text) for value in values if (text := _content(value))]
    return found


def _content(token: object) -> str | None:
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None


def _vocab_size(folder: Path) -> int | None:
    config = _table(folder / "config.json")
    text = config.get("text_config")
    number = (text if isinstance(text, dict) else config).get("vocab_size")
    return number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else None


_log = logging.getLogger(__name__)


def read_stop_token_ids(folder: Path, *, vocab_size: int | None) -> tuple[int, ...]:
    """Returns the end-of-sequence token ids of config.json, generation_config.json and the tokenizer, ascending.

    Logs and skips ids outside the vocabulary. Raises InvalidArgument for a file that is not JSON, and as read_tokenizer.
    """
    found = set[int]()
    for file in (folder / "config.json", folder / "generation_config.json"):
        table = _table(file)
        for each in (table, table.get("text_config")):
            if isinstance(each, dict):
                found |= _ids(each.get("eos_token_id"), file)
    if (folder / TOKENIZER_FILE).exists() and (own := read_tokenizer(folder).eos_token_id) is not None:
        found.add(own)
    limit = max(found, default=0) + 1 if vocab_size is None else vocab_size
    known = range(limit)
    for token_id in sorted(one for one in found if one not in known):
        _log.warning("event=eos_token_outside_vocabulary token_id=%d vocab_size=%d path=%s", token_id, limit, folder)
    return tuple(sorted(one for one in found if one in known))


def _ids(value: object, file: Path) -> set[int]:
    """Parses an `eos_token_id`: a number, a list of numbers, or nothing."""
    values: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [one for one in values if not isinstance(one, int) or isinstance(one, bool)]:
        raise InvalidArgument("model.path", f"{file}: eos_token_id has {wrong[0]!r}, which is no token id; give whole numbers")
    return set(values)
