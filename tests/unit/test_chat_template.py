"""Chats of rows are rendered as the template alone would, or refused by the template's line and the row's field."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from tasuki.client.dataset import read_jsonl
from tasuki.client.sft_data import sft_sample
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.errors import InvalidArgument
from tests.extent import examples
from tests.refusal import refusing
from tests.unit.small_tokenizers import CHATML, PARTS, TOOLS, TRAINED, rendered, write_folder

MARKED = CHATML.replace(
    "{{ m['content'] }}<|im_end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>"
    "{% endif %}{{ '' }}",
)
TEXT_ONLY = PARTS.replace(
    "{% elif m.content is not none %}{% for part in m.content %}{{ part['text'] | trim }}{% endfor %}", ""
)
PRINTED = CHATML.replace(
    "{{ m['role'] }}", "{{ m['role'] }}{{ tools }}{{ 'x' ~ terse }}{{ m.weight is sameas none }}{{ m | list }}"
)
JOINED = CHATML.replace("{{ m['content'] }}", "{{ 'says: ' ~ m['content'] }}")
STRICT = "{% if messages[0].role == 'assistant' %}{{ raise_exception('begin with the user') }}{% endif %}" + CHATML
TEMPLATES = {
    "plain": CHATML,
    "marked": MARKED,
    "parts": PARTS,
    "text": TEXT_ONLY,
    "joined": JOINED,
    "printed": PRINTED,
    "strict": STRICT,
}
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
    assert not fields.get("tools") or json.dumps(fields["tools"]) in text or str(fields["tools"]) in text


def test_answers_of_weight_0_are_not_learned_and_the_whole_row_reaches_the_template(by_template: dict[str, ModelTokenizer]):
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
    (folder / "chat_template.jinja").write_text("\ufeff" + template)
    table = json.loads((folder / "tokenizer.json").read_text())
    table["model"]["dropout"] = 0.9
    (folder / "tokenizer.json").write_text(json.dumps(table))
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


def test_a_folder_with_a_template_for_tools_alone_says_so(tmp_path: Path) -> None:
    own, templates = Tokenizer.from_str(TRAINED["bytes"]), [{"name": "tool_use", "template": PARTS}]
    found = ModelTokenizer(write_folder(tmp_path, own, tokenizer_config={"chat_template": templates}))
    assert found.encode_prompt([{"role": "user", "content": "hi"}], {"tools": TOOLS})
    with pytest.raises(InvalidArgument, match="prompt: the model has chat templates only as tool_use"):
        found.encode_prompt([{"role": "user", "content": "hi"}])


CALLS = "{% for m in messages %}\n{{ m.content }}{% for call in m.tool_calls or [] %}\n\n{{ TAKE }}{% endfor %}{% endfor %}"
ARGUMENTS = "call.function.arguments"
TEXT_ALONE = (
    "{% for m in messages %}\n{% if m.content is not string %}{{ raise_exception('only\ntext') }}{% endif %}{{ m.content }}"
    "{% endfor %}"
)
TWO_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("template", "content", "problem"),
    [
        (CALLS.replace("TAKE", f"{ARGUMENTS}.items()"), "hi", ":4: {refuses}`{place}` is text without `items`"),
        (CALLS.replace("TAKE", f"{ARGUMENTS} | items"), "hi", ":4: {refuses}`{place}` is text without items"),
        (CALLS.replace("TAKE", "call.id.x"), "hi", ":4: {refuses}`messages[0].tool_calls[0]` is object without `id`"),
        (CALLS.replace("TAKE", "1 + 'a'"), "hi", ":4: {refuses}unsupported operand"),
        (TEXT_ALONE, TWO_PARTS, ":2: {refuses}only text"),
        (CHATML, TWO_PARTS, "message 0 has 2 text parts, but the model's chat template reads only text"),
    ],
)  # fmt: skip
def test_what_a_template_refuses_is_named_by_its_line_and_the_rows_field(
    tmp_path: Path, template: str, content: object, problem: str
) -> None:
    folder = write_folder(tmp_path, Tokenizer.from_str(TRAINED["bytes"]))
    (folder / "chat_template.jinja").write_text(template + "{# tool_calls #}")
    chat = [{"role": "user", "content": content, "tool_calls": [{"function": {"arguments": '{"x": 1}', "name": '{"x": 1}'}}]}]
    with refusing("prompt") as raised:
        ModelTokenizer(folder).encode_prompt(json.loads(json.dumps(chat)))  # equal texts are different values
    place, refuses = "messages[0].tool_calls[0].function.arguments", "the model's chat template refuses them: "
    assert problem.format(place=place, refuses=refuses) in raised.value.message


KEYS = (
    "{# name #}{% for m in messages %}{% if m.role != 'developer' %}{{ m.content }}{{ m.kind }}{{ m.reasoning_content }}"
    "{% if loop.last and m.thinking %}{{ m.thinking }}{% endif %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    "{% for d in documents or [] %}{{ d.text }}{% endfor %}{% endif %}{% endfor %}"
)
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}], "reasoning_content": "so"}
CALLS_OF = [{"id": one, "function": {"name": name}} for one, name in (("1", "add"), ("2", "mul"))]
RESULTS = [{"role": "tool", "content": "a", "tool_call_id": "1"}, {"role": "tool", "content": "b", "name": "mul"}]


@pytest.mark.parametrize(
    ("called", "results", "problem"),
    [
        ({"content": ""}, [0, 1], ""),
        ({"content": ""}, [1, 0], "message 2 has `name`"),
        ({"content": "", "tool_calls": CALLS_OF[1:]}, [0], "message 2 has `tool_call_id`"),
        ({"content": "", "tool_calls": []}, [0], ""),
        ({"content": "I add"}, [0, 1], "drops the text beside `tool_calls` in message 1"),
    ],
)
def test_what_names_a_call_may_be_dropped_only_where_its_place_tells_the_same(
    tmp_path: Path, called: dict[str, Any], results: list[int], problem: str
) -> None:
    template = KEYS.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}")
    own = Tokenizer.from_str(TRAINED["bytes"])
    found = ModelTokenizer(write_folder(tmp_path, own, tokenizer_config={"chat_template": template}))
    start = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": CALLS_OF, **called}]
    chat = [*start, *(RESULTS[index] for index in results)]
    if called.get("tool_calls") is None:  # the answer's own tokens are not rendered again
        drawn = found.encode_next([*start, *RESULTS], 1, {}, last_token_id=None)
        assert drawn == own.encode("ab", add_special_tokens=False).ids
    if problem:
        with pytest.raises(InvalidArgument, match=problem):
            found.encode_prompt(chat)
    else:
        assert found.encode_prompt(chat)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": "a", "name": "eve"}, "message 1 has `name`"),
        ({"role": "user", "content": "a", "train": False}, "message 1 has `train`"),
        ({"role": "user", "content": "a", "reasoning": "b"}, "message 1 has `reasoning`"),
        ({"role": "developer", "content": "a"}, "drops message 1, of role developer"),
        (CALLED, ""),
        ({"role": "tool", "content": "a", "tool_call_id": "1"}, ""),  # its call was trimmed
        ({"role": "tool", "content": "a", "name": "add"}, "message 1 has `name`"),
        ({"role": "user", "content": "a", "tool_call_id": "1"}, "message 1 has `tool_call_id`"),
        ({"role": "tool", "content": "a", "thinking": "b"}, ""),
    ],
)
def test_what_a_template_drops_of_a_message_is_refused(tmp_path: Path, message: dict[str, Any], problem: str) -> None:
    own = Tokenizer.from_str(TRAINED["bytes"])
    found = ModelTokenizer(write_folder(tmp_path, own, tokenizer_config={"chat_template": KEYS}))
    chat = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "<eos>"}]
    if problem:
        with pytest.raises(InvalidArgument, match=problem):
            found.encode_prompt(chat)
        return
    read = [[*found.encode_prompt(chat, {"documents": [{"text": "how"}]})], found.encode_prompt(chat)]
    assert [own.decode(ids).count("how") for ids in read] == [3, 0]
    with pytest.raises(InvalidArgument, match="documents: must be a list of objects"):
        found.encode_prompt(chat, {"documents": "how"})


def test_what_a_row_gives_the_template_is_written_or_refused(tmp_path: Path) -> None:
    reads_tools = "{% if messages[0].role == 'system' and tools %}{{ tools|tojson }}{% endif %}"
    template = reads_tools + "{{ terse }}{{ tool_choice }}" + TEMPLATES["plain"]
    found = ModelTokenizer(
        write_folder(tmp_path, Tokenizer.from_str(TRAINED["bytes"]), tokenizer_config={"chat_template": template})
    )
    system, user = ({"role": role, "content": "hi"} for role in ("system", "user"))
    assert found.encode_prompt([system, user], {"tools": TOOLS}) != found.encode_prompt([system, user])
    for encode in (found.encode_prompt, lambda chat, row=None: found.encode_chat(chat, row).token_ids):
        assert [*encode([user], {"tool_choice": "auto"})] == [*found.encode_text("auto"), *encode([user])]
        with pytest.raises(InvalidArgument, match="^tools: the model's chat template does not write them"):
            encode([user], {"tools": TOOLS})
        with pytest.raises(InvalidArgument, match="^terse: is read by the model's chat template; give it in"):
            encode([user], {"terse": True})
        for chat in ([], ["a"], [{"role": "user"}], [{"role": "user", "content": 5}], [{"role": "user", "content": []}]):
            with pytest.raises(InvalidArgument, match="^(prompt|messages): "):
                encode(chat)


def test_a_null_of_tools_or_documents_is_never_written_as_text(tmp_path: Path) -> None:
    template = "{% for one in (tools or []) + (documents or []) %}{{ one.text or '' }}{{ one.title }}{% endfor %}" + CHATML
    found = ModelTokenizer(
        write_folder(tmp_path, Tokenizer.from_str(TRAINED["bytes"]), tokenizer_config={"chat_template": template})
    )
    chat = [{"role": "user", "content": "hi"}]
    for name in ("tools", "documents"):
        read = found.encode_prompt(chat, {name: [{"title": "how", "text": None}]})
        assert read == [*found.encode_text("how"), *found.encode_prompt(chat)]
        with pytest.raises(InvalidArgument, match="it prints a null as if it were text"):
            found.encode_prompt(chat, {name: [{"title": None, "text": "how"}]})


def test_a_weight_that_the_templates_marks_do_not_follow_is_refused(tmp_path: Path) -> None:
    last = (
        "{% for message in messages %}{% if loop.last %}{% generation %}{{ message.content }}{% endgeneration %}"
        "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    found = ModelTokenizer(
        write_folder(tmp_path, Tokenizer.from_str(TRAINED["bytes"]), tokenizer_config={"chat_template": last})
    )
    chat = [{"role": role, "content": text} for role, text in (("assistant", "how"), ("user", "hi"), ("assistant", "many"))]
    assert any(found.encode_chat(chat).assistant_mask)
    with pytest.raises(InvalidArgument, match="marks 1 texts of 2 answers"):
        found.encode_chat([{**chat[0], "weight": 1}, *chat[1:]])


def test_a_message_is_judged_by_the_rows_own_options_in_any_order(tmp_path: Path) -> None:
    terse = "{% for m in messages %}{% if mode != 'terse' or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    found = ModelTokenizer(
        write_folder(tmp_path, Tokenizer.from_str(TRAINED["bytes"]), tokenizer_config={"chat_template": terse})
    )
    chat = [{"role": "system", "content": "how"}, {"role": "user", "content": "hi"}]
    for _ in range(2):
        assert found.encode_prompt(chat, {"chat_template_kwargs": {"mode": "full"}}) == found.encode_text("howhi")
        with pytest.raises(InvalidArgument, match="drops message 0, of role system"):
            found.encode_prompt(chat, {"chat_template_kwargs": {"mode": "terse"}})


def test_each_message_has_its_parts_or_its_text_as_the_template_reads_it(tmp_path: Path) -> None:
    mixed = (
        "{% for m in messages %}{% if m.role == 'user' %}{% for part in m.content %}[{{ part.text }}]{% endfor %}"
        "{% else %}{{ m.role + ':' + m.content }}{% endif %}{% endfor %}"
    )
    found = ModelTokenizer(
        write_folder(tmp_path, Tokenizer.from_str(TRAINED["bytes"]), tokenizer_config={"chat_template": mixed})
    )
    one, two = ([{"type": "text", "text": text} for text in texts] for texts in (["how"], ["many", "apples"]))
    chat = [{"role": "system", "content": one}, {"role": "user", "content": two}, {"role": "user", "content": one}]
    assert found.encode_prompt(chat) == found.encode_text("system:how[many][apples][how]")
    with pytest.raises(InvalidArgument, match="message 0 has 2 text parts"):
        found.encode_prompt([{"role": "system", "content": two}, chat[1]])
