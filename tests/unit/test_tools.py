"""Tools of an episode: calls as templates write them, and prompts that extend an answer exactly."""

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tasuki.client.episode import Asked
from tasuki.client.policy import Chat, Message, Policy, Reply
from tasuki.client.turns import Turns
from tasuki.client.types import FinishReason, Sample
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.errors import InvalidArgument
from tests.models import EOS, char_tokenizer

ROLES = (
    "{%- if tools %}[tools]{{ tools[0].function.name }}<eos>{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}CALLS<eos>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CALLS = {
    "hermes": "{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}",
    "llama": '{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}',
    "mistral": "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}{{ ', ' if not loop.last }}"
    "{% endfor %}]{% endif %}",
    "coder": "{% for c in m.tool_calls %}\n<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    "glm": "{% for c in m.tool_calls %}\n<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "xml": "{% for c in m.tool_calls %}<call name={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}"
    "{% endfor %}{% endfor %}",
}
WRITTEN = {
    "hermes": 'so<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]',
}
ROW = {"tools": [{"type": "function", "function": {"name": "add"}}]}


def folder_with(
    folder: Path, template: str, *, stops: Sequence[int] = (EOS,), tokenizer: PreTrainedTokenizerFast | None = None
) -> ModelTokenizer:
    tokenizer = tokenizer or char_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(stops)}))
    return ModelTokenizer(folder)


@pytest.fixture(scope="module")
def by_form(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelTokenizer]:
    return {form: folder_with(tmp_path_factory.mktemp(form), ROLES.replace("CALLS", calls)) for form, calls in CALLS.items()}


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("value", [1, "<tool_call>[TOOL_CALLS]"])
def test_calls_are_read_as_the_template_writes_them(by_form: dict[str, ModelTokenizer], form: str, value: object):
    arguments = {"a": value}
    text = WRITTEN[form].replace('{"a": 1}', json.dumps(arguments))
    read = by_form[form].read_answer([*by_form[form].encode_text(text), EOS], ROW)
    names = ["add"] if form == "llama" else ["add", "f"]
    calls = [
        {"type": "function", "function": {"name": name, "arguments": arguments if name == "add" else {}}} for name in names
    ]
    assert read["tool_calls"] == calls
    assert read["message"] == {"role": "assistant", "content": "so" if form == "hermes" else "", "tool_calls": calls}


@pytest.mark.parametrize("form", WRITTEN)
def test_a_call_that_cannot_be_read_is_told_to_the_policy(by_form: dict[str, ModelTokenizer], form: str):
    for wrong in ("{a}", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}'):
        text = WRITTEN[form].replace('{"a": 1}', wrong)
        read = by_form[form].read_answer(by_form[form].encode_text(text), ROW)
        assert "JSON" in read["tool_calls"][0]["error"]
    text = WRITTEN[form].replace('{"a": 1}', "[1]") if form == "llama" else WRITTEN[form].replace('"name": "add"', '"name": 3')
    read = by_form[form].read_answer(by_form[form].encode_text(text), ROW)
    assert "a tool call is" in read["tool_calls"][0]["error"]


TAGS = {
    "coder": ("<function={}>\n{}</function>\n", "<parameter={}>\n{}\n</parameter>\n"),
    "glm": ("{}\n{}", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
}
ARGUMENTS = {
    "text": '5\n</parameter></arg_value> <tool_call>"',
    "number": 5,
    "list": [{"a": None}],
    "maybe": None,
    "flag": True,
    "other": "x y",
}
KINDS = {
    "text": {"type": "string"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "flag": {"type": "boolean"},
    "number": 3,
}
TAGGED_ROW = {"tools": [{"type": "function", "function": {"name": "add", "parameters": {"properties": KINDS}}}]}


def tagged(form: str, arguments: Mapping[str, object]) -> str:
    call, argument = TAGS[form]
    told = "".join(
        argument.format(key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items()
    )
    return f"<tool_call>\n{call.format('add', told)}</tool_call>"


@pytest.mark.parametrize("form", TAGS)
def test_calls_in_tags_have_arguments_by_their_schemas(by_form: dict[str, ModelTokenizer], form: str):
    text = f"so\n{tagged(form, ARGUMENTS)}\n{tagged(form, {})}"
    for written in (text, text.replace(">\n", ">"), text.replace("true", "True")):
        read = by_form[form].read_answer([*by_form[form].encode_text(written), EOS], TAGGED_ROW)
        found: Any = read["tool_calls"]
        calls = [call["function"] for call in found]
        assert (read["text"], calls) == ("so", [{"name": "add", "arguments": one} for one in (ARGUMENTS, {})])


@pytest.mark.parametrize("form", TAGS)
def test_a_call_in_tags_that_is_cut_off_is_told_to_the_policy(by_form: dict[str, ModelTokenizer], form: str):
    whole = tagged(form, ARGUMENTS).rpartition("</function>" if form == "coder" else "</tool_call>")
    for length in range(len("<tool_call>"), len(whole[0])):
        (call,) = by_form[form].read_answer(by_form[form].encode_text(whole[0][:length]), TAGGED_ROW)["tool_calls"][:1]
        assert re.search("a tool call is <tool_call>.*NAME.*PARAMETER.*VALUE", call["error"], re.DOTALL)


@pytest.mark.parametrize("form", TAGS)
def test_a_call_in_tags_is_read_in_linear_time(by_form: dict[str, ModelTokenizer], form: str):
    for start in (
        tagged(form, ARGUMENTS)[:-20],
        "<tool_call>",
        "<tool_call><function=",
        "<tool_call>f",
        "<tool_call><function=f>",
    ):
        (*_, last) = by_form[form].tool_call_form(TAGGED_ROW).read(start + " " * 200_000 + "x", {})[1]
        assert "error" in last


@pytest.mark.parametrize("form", TAGS)
def test_calls_whose_argument_never_ends_are_read_in_linear_time(by_form: dict[str, ModelTokenizer], form: str):
    begun = tagged(form, {"a": 1}).partition("1")[0]
    (call,) = by_form[form].tool_call_form(TAGGED_ROW).read(begun * 20_000, {})[1]  # in quadratic time, minutes
    assert "error" in call


def test_functions_that_share_a_tag_are_calls_each(by_form: dict[str, ModelTokenizer]):
    text = tagged("coder", {"a": 1}).replace("</tool_call>", "<function=f>\n</function>\n</tool_call>")
    found: Any = by_form["coder"].read_answer(by_form["coder"].encode_text(text), TAGGED_ROW)["tool_calls"]
    assert [call["function"]["name"] for call in found] == ["add", "f"]


@pytest.mark.parametrize(
    "schema", [{"enum": ["1", "2"]}, {"const": "1"}, {"allOf": [{"type": "string"}]}, {"anyOf": [{"$ref": "#/$defs/again"}]}]
)
def test_an_argument_in_tags_is_a_text_if_its_schema_names_texts(by_form: dict[str, ModelTokenizer], schema: object):
    again = {"anyOf": [{"$ref": "#/$defs/again"}, {"$ref": "#/$defs/missing"}, {"type": "string"}]}
    parameters = {"properties": {"a": schema}, "$defs": {"again": again}}
    _, (call,) = by_form["coder"].tool_call_form(TAGGED_ROW).read(tagged("coder", {"a": 1}), {"add": parameters})
    assert call["function"]["arguments"] == {"a": "1"}
    tools = {"add": {"properties": {"a": {"enum": ["1", None]}}}}
    assert by_form["coder"].tool_call_form(TAGGED_ROW).read(tagged("coder", {"a": None}), tools)[1][0]["function"][
        "arguments"
    ] == {"a": None}


@pytest.mark.parametrize("form", [*TAGS, *WRITTEN])
def test_the_end_of_a_thought_in_an_argument_hides_no_call_and_a_thought_has_none(
    by_form: dict[str, ModelTokenizer], form: str
):
    value = "a</think>b"
    text = tagged(form, {"text": value}) if form in TAGS else WRITTEN[form].replace('{"a": 1}', json.dumps({"text": value}))
    for thought in ("", "so</think>", f"{text.replace('</think>', '')}</think>", f"{text.partition('</think>')[0]}</think>"):
        found: Any = by_form[form].read_answer(by_form[form].encode_text(f"{thought}{text}"), TAGGED_ROW)["tool_calls"]
        assert [call["function"]["arguments"] for call in found][:1] == [{"text": value}]
        assert len(found) == (1 if form in TAGS or form == "llama" else 2)


@pytest.mark.parametrize("form", TAGS)
async def test_a_chat_goes_on_after_calls_in_tags(by_form: dict[str, ModelTokenizer], form: str):
    policy = Drawn(by_form[form], [tagged(form, {"a": 1}), tagged(form, {"a": "x"}), "done"])
    chat = Chat(policy, [], tools={"add": add})
    assert (await chat.say("question")).text == "done"
    assert [message["content"][:8] for message in chat.messages if message["role"] == "tool"] == ["2", "error: T"]


class Drawn(Policy):
    """Answers with `texts`, as turns that extend each other."""

    def __init__(self, tokenizer: ModelTokenizer, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts, self.turns = tokenizer, texts, Turns()

    async def chat_completion(self, messages: Sequence[Message], tools: object = (), **_: object) -> Reply:
        before = self.turns.turns[-1:]
        fields = {"messages": list(messages), "tools": tools}
        asked = Asked.of("chat", fields, {}, turns=self.turns, tokenizer=self.tokenizer)
        assert asked.parent is (before[0] if before else None)
        drawn = np.array([*self.tokenizer.encode_text(self.texts[len(self.turns.turns)]), EOS], np.int32)
        sample = Sample(0, 0, drawn, np.zeros(len(drawn), np.float32), FinishReason.STOP, 3)
        answer = asked.answered(sample, turns=self.turns, tokenizer=self.tokenizer)
        return Reply(**{name: answer[name] for name in Reply.__slots__})


async def test_results_follow_the_calls_of_the_message_whatever_cannot_be_read_among_them(by_form: dict[str, ModelTokenizer]):
    texts = ["<tool_call>\n{\n</tool_call>" + WRITTEN["hermes"], "<tool_call>\nno\n</tool_call>", "done"]
    policy = Drawn(by_form["hermes"], texts)
    chat = Chat(policy, [], {"add": add, "f": f})
    assert (await chat.say("question")).text == "done"
    told = [(message.get("name"), message["content"][:8]) for message in chat.messages if message["role"] == "tool"]
    assert told == [("add", "2"), ("f", "error: T"), (None, "error: t"), (None, "error: t")]


def add(a: int) -> int:
    """Adds one."""
    return a + 1


def f(a: int) -> int:
    """Needs an argument."""
    return a


THINKS = ROLES.replace(
    "{{ m.content or '' }}",
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content or '' }}",
)


@pytest.mark.parametrize("thought", ["", "<think>\n\n</think>\n\n", "<think>\nnot <tool_call> yet\n</think>\n\n", "so\n"])
def test_calls_are_read_beside_a_thought_that_the_template_writes_itself(tmp_path: Path, thought: str):
    tokenizer = folder_with(tmp_path, THINKS.replace("CALLS", CALLS["hermes"]))
    thought = thought.replace("\n", " ")  # which the tokenizer has
    drawn = tokenizer.encode_text(thought + '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    read = tokenizer.read_answer([*drawn, EOS], ROW)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert (read["text"], read["tool_calls"]) == (thought.rstrip(), [call])


def test_the_end_of_a_thought_in_an_argument_hides_no_call(tmp_path: Path):
    tokenizer = folder_with(tmp_path, THINKS.replace("CALLS", CALLS["hermes"]))
    drawn = '<think> so </think> <tool_call>\n{"name": "add", "arguments": {"a": "</think>"}}\n</tool_call>'
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "</think>"}}}
    assert tokenizer.read_answer([*tokenizer.encode_text(drawn), EOS], ROW)["tool_calls"] == [call]


def test_calls_are_read_before_a_text_that_the_template_writes_after_them(tmp_path: Path):
    template = ROLES.replace("{{ m.content or '' }}CALLS", "CALLS{{ m.content or '' }}").replace("CALLS", CALLS["hermes"])
    tokenizer = folder_with(tmp_path, template)
    assert tokenizer.read_answer([*tokenizer.encode_text(WRITTEN["hermes"]), EOS], ROW)["text"] == "so"


async def test_calls_and_their_results_have_the_ids_that_a_template_demands(tmp_path: Path):
    refuse = "{{ raise_exception('id') }}{% endif %}"
    demands = "{% for c in m.tool_calls %}{% if c.id | length != 9 %}" + refuse + "{{ c.function | tojson }}{% endfor %}"
    result = "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}" + refuse
    texts = ['{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "id": "callabcde", "arguments": {"a": 2}}', "done"]
    policy = Drawn(folder_with(tmp_path, ROLES.replace("CALLS", demands + result)), texts)
    chat = Chat(policy, [], {"add": add})
    assert (await chat.say("question")).text == "done"
    ids = [call["id"] for message in chat.messages for call in list(message.get("tool_calls", []))]
    assert [message["tool_call_id"] for message in chat.messages if message["role"] == "tool"] == ids
    assert (len(set(ids)), ids[1]) == (2, "callabcde")


def test_special_tokens_are_no_text_also_with_tools(by_form: dict[str, ModelTokenizer]):
    own = by_form["hermes"]
    for text, shown in (("so", "so"), (WRITTEN["hermes"], "so")):
        assert own.read_answer([EOS, *own.encode_text(text), EOS], ROW)["text"] == shown


async def test_a_tool_that_returns_bytes_answers_with_an_image(tmp_path: Path):
    texts = ['{"name": "draw", "arguments": {}}', "done"]
    policy = Drawn(
        folder_with(tmp_path, ROLES.replace("CALLS", "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}")), texts
    )
    chat = Chat(policy, [], {"draw": draw})
    with pytest.raises(InvalidArgument, match="image"):  # the model reads text alone
        await chat.say("question")
    assert chat.messages[-1]["content"] == [{"type": "image", "bytes": "AAEC"}]


class Untold(Exception):
    def __str__(self) -> str:
        raise ValueError


async def test_what_a_tool_returns_or_raises_is_told_though_it_is_no_text(by_form: dict[str, ModelTokenizer]):
    def names() -> str:
        """Lists files."""
        return os.fsdecode(b"caf\xe9")

    def fails() -> str:
        """Fails."""
        raise Untold

    async def fails_later() -> str:
        """Fails."""
        raise Untold

    tools = {"names": names, "fails": fails, "fails_later": fails_later}
    text = "".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in tools)
    chat = Chat(Drawn(by_form["hermes"], [text, "done"]), [], tools)
    async with asyncio.timeout(10):
        assert (await chat.say("question")).text == "done"
    failed = "error: Untold: its text raised ValueError"
    assert [message["content"] for message in chat.messages if message["role"] == "tool"] == ["caf\\udce9", failed, failed]


def draw() -> bytes:
    """Draws."""
    return bytes(range(3))


def test_an_answer_without_calls_is_text(by_form: dict[str, ModelTokenizer]):
    for form in WRITTEN:
        read = by_form[form].read_answer([*by_form[form].encode_text("4 {x}"), EOS], ROW)
        assert (read["text"], read["tool_calls"]) == ("4 {x}", [])


@pytest.mark.parametrize(
    "text", ['{"answer": 4}', '{"name": "Ada", "parameters": {}}', '{"x": {"name": "add"}}', "[1, 2]", "{a}", "{"]
)
def test_json_that_names_no_tool_is_an_answer(by_form: dict[str, ModelTokenizer], text: str):
    read = by_form["llama"].read_answer([*by_form["llama"].encode_text(text), EOS], ROW)
    assert (read["text"], read["tool_calls"]) == (text, [])


NO_FORM = {
    "another form than JSON or tags": CALLS["xml"],
    "another form than JSON or tags ": CALLS["hermes"].replace("| tojson", "| tojson | replace('.5', '')"),
    "cannot write a tool call: .* prints an object": CALLS["llama"].replace("| tojson", ""),
}


@pytest.mark.parametrize("problem", NO_FORM)
def test_templates_whose_calls_cannot_be_read_back_are_told_and_turns_with_tools_refused(tmp_path: Path, problem: str):
    tokenizer = folder_with(tmp_path, ROLES.replace("CALLS", NO_FORM[problem]))
    (doubt,) = tokenizer.tool_doubts()
    assert re.search(f"turns with tools will be refused: .*{problem.strip()}", doubt)
    asked = {"messages": [{"role": "user", "content": "a"}], **ROW}
    with pytest.raises(InvalidArgument, match=f"^tools: .*{problem.strip()}"):
        Asked.of("chat", asked, {}, turns=Turns(), tokenizer=tokenizer)
    Asked.of("chat", {**asked, "tools": []}, {}, turns=Turns(), tokenizer=tokenizer)


def test_templates_whose_calls_are_read_or_that_have_no_tools_are_not_doubted(
    by_form: dict[str, ModelTokenizer], tmp_path: Path
):
    without = folder_with(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert [own.tool_doubts() for own in (without, *map(by_form.get, WRITTEN)) if own is not None] == [[]] * 4
