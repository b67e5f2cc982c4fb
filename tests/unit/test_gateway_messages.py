"""Requests and answers of OpenAI's and Anthropic's clients as the gateway reads and writes them."""

import json
from typing import Any

import pytest

from tasuki.client.episode import shown_message
from tasuki.gateway import responses
from tasuki.gateway.chat_completions import completion, read_chat, read_generate, read_messages
from tasuki.gateway.messages import as_chat_request, as_message
from tasuki.gateway.responses import as_response
from tasuki.wire.errors import InvalidArgument
from tests.models import char_tokenizer

A = char_tokenizer().convert_tokens_to_ids("a")


def test_messages_take_the_form_of_templates():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    other = {**call, "id": "2", "function": {"name": "g", "arguments": ""}}
    read = read_messages(
        [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call, other], "audio": None},
            {"role": "tool", "tool_call_id": "2", "content": "second"},
            {"role": "tool", "tool_call_id": "1", "content": "first"},
            {"role": "user", "name": "bob", "content": "c"},
        ]
    )
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "1"}]
    calls += [{"type": "function", "function": {"name": "g", "arguments": {}}, "id": "2"}]
    assert read == [
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "first", "name": "f", "tool_call_id": "1"},
        {"role": "tool", "content": "second", "name": "g", "tool_call_id": "2"},
        {"role": "user", "content": "c"},
    ]
    for wrong in (
        None, "hi", [], ["hi"], [{"role": "robot", "content": ""}], [{"role": ["user"], "content": ""}], [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "assistant", "tool_calls": [{}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match="messages"):
            read_messages(wrong)


def test_a_call_that_cannot_be_read_is_shown_as_text():
    call = {"type": "function", "id": "000000000", "function": {"name": "f", "arguments": {"x": "é"}}}
    answer = {"text": "so", "written": 'so<call>{"name', "tool_calls": [call, {"error": "error: not JSON"}]}
    told = {"token_ids": [1], "log_probs": [-1.0], "num_prompt_tokens": 1, "finish_reason": "stop"}
    broken = {**told, "shown": shown_message(answer, [])}
    whole = {**told, "shown": shown_message({**answer, "tool_calls": [call]}, ["o"])}
    first, second = completion([broken, whole], model="m", has_log_probs=False)["choices"]
    assert first["message"] == {"role": "assistant", "content": 'so<call>{"name'}
    assert (first["finish_reason"], second["finish_reason"]) == ("stop", "tool_calls")
    assert second["message"]["content"] == "s"
    assert json.loads(second["message"]["tool_calls"][0]["function"]["arguments"]) == {"x": "é"}


def test_images_are_files_in_base64_and_nothing_is_fetched():
    data, inner = "data:image/png;base64,AAAA", [{"type": "text", "text": "a"}, {"type": "image", "bytes": "AAAA"}]
    image = {"type": "image_url", "image_url": {"url": data, "detail": "high"}}
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    text, shown = inner[:1], {"type": "image", "source": source}
    assert read_messages([{"role": "user", "content": [*text, image]}]) == [{"role": "user", "content": inner}]
    blocks = [{"type": "tool_result", "tool_use_id": "1", "content": [*text, shown]}, *text, shown]
    asked = as_chat_request({"messages": [{"role": "user", "content": blocks}]})
    assert [one["content"] for one in read_messages(asked["messages"])] == [inner, inner]
    items = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": data, "detail": "auto"}]
    given = [{"role": "user", "content": items}, {"type": "function_call_output", "call_id": "1", "output": items}]
    asked = responses.as_chat_request({"input": given})
    assert [one["content"] for one in read_messages(asked["messages"])] == [inner, inner]
    for url in ("https://a.b/c.png", "file:///etc/passwd", "data:image/png,AAAA", None, 3):
        for messages in (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
            responses.as_chat_request({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]})[
                "messages"
            ],
            as_chat_request(
                {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}]}
            )["messages"],
        ):
            with pytest.raises(InvalidArgument, match="image"):
                read_messages(messages)
    for part in (
        {"type": "image", "path": "/etc/passwd"},
        {"type": "video_url", "video_url": {"url": data}},
        {"type": "image", "bytes": "AAAA"},
    ):
        with pytest.raises(InvalidArgument):
            read_messages([{"role": "user", "content": [part]}])


def test_anthropics_messages_are_the_same_chat_as_openais():
    call = {"type": "function", "id": "000000000", "function": {"name": "f", "arguments": {"x": 1}}}
    told = {"token_ids": [1], "log_probs": [-1.0], "num_prompt_tokens": 2, "finish_reason": "stop"}
    shown = {"role": "assistant", "content": "so", "tool_calls": [call]}
    answer = as_message(completion([{**told, "shown": shown}], model="m", has_log_probs=False))
    assert (answer["stop_reason"], answer["usage"]) == ("tool_use", {"input_tokens": 2, "output_tokens": 1})
    ended = {**told, "shown": {"role": "assistant", "content": "a"}, "stop": "c"}
    stopped_by = as_message(completion([ended], model="m", has_log_probs=False))
    assert (stopped_by["stop_reason"], stopped_by["stop_sequence"]) == ("stop_sequence", "c")
    asked = {
        "max_tokens": 5, "stop_sequences": ["c"], "thinking": {"type": "enabled"}, "system": [{"type": "text", "text": "s"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"},
        "messages": [
            {"role": "user", "content": "q"}, {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": answer["content"][1]["id"], "content": [{"type": "text", "text": "r"}]},
                {"type": "text", "text": "more", "cache_control": {}},
            ]},
        ],
    }  # fmt: skip
    choices = read_chat(as_chat_request(asked))
    assert choices.fields["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        shown,
        {"role": "tool", "content": "r", "name": "f", "tool_call_id": "000000000"},
        {"role": "user", "content": "more"},
    ]
    assert (choices.fields["max_new_tokens"], choices.fields["stop"]) == (5, ["c"])
    for name, wrong in (
        ("messages", None), ("messages", "hi"), ("messages", ["hi"]), ("tools", 3), ("tools", [{}]), ("tool_choice", {"type": "tool"}),
        ("mcp_servers", []), ("messages", [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]),
        ("messages", [{"role": "user", "content": [{"type": "image"}]}]), ("max_tokens", 0),
        ("messages", [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": 3}]}]),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=name):
            read_chat(as_chat_request({**asked, name: wrong}))


def test_openais_responses_are_the_same_chat():
    drawn = [
        {"type": "function", "id": one, "function": {"name": "f", "arguments": {"x": 1}}} for one in ("000000000", "000000001")
    ]
    told = {"token_ids": [1], "log_probs": [-1.0], "num_prompt_tokens": 2, "finish_reason": "length"}
    shown = {"role": "assistant", "content": "so", "tool_calls": drawn}
    answer = as_response(completion([{**told, "shown": shown}], model="m", has_log_probs=False))
    calls = [item["call_id"] for item in answer["output"][1:]]
    results = [{"type": "function_call_output", "call_id": one, "output": text} for one, text in zip(calls, "rs", strict=True)]
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    asked: dict[str, Any] = {
        "instructions": "s", "max_output_tokens": 5, "tools": [tool], "tool_choice": "required", "store": False, "include": [],
        "background": False,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "q"}]}, {"type": "reasoning", "summary": []}, *answer["output"],
            *reversed(results), {"type": "message", "role": "user", "content": "more"},
        ],
    }  # fmt: skip
    choices = read_chat(responses.as_chat_request(asked))
    assert choices.fields["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        shown,
        {"role": "tool", "content": "r", "name": "f", "tool_call_id": "000000000"},
        {"role": "tool", "content": "s", "name": "f", "tool_call_id": "000000001"},
        {"role": "user", "content": "more"},
    ]
    assert choices.fields["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert (choices.fields["max_new_tokens"], choices.fields["sampling"]["json_schema"]) == (5, {"type": "object"})
    for name, wrong in (
        ("input", None), ("input", []), ("input", ["hi"]), ("input", [{"type": "item_reference", "id": "1"}]),
        ("messages", [{"role": "user", "content": [{"type": "input_image"}]}]), ("tools", [{"type": "web_search"}]), ("tools", 3),
        ("text", 3), ("previous_response_id", "resp_1"), ("background", True), ("tool_choice", {"type": "function"}),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=name):
            read_chat(responses.as_chat_request({**asked, "input" if name == "messages" else name: wrong}))


def test_a_sampling_parameter_that_nothing_follows_is_refused_by_name() -> None:
    assert read_generate({"token_ids": [A], "sampling_params": {"top_k": 2, "model": "any"}}).fields["sampling"] == {"top_k": 2}
    choices = read_generate({"token_ids": [A], "sampling_params": {"n": 2, "seed": 7}})
    assert [fields["sampling"] for fields in choices.turns] == [{"sampling_seed": 7}, {"sampling_seed": 8}]
    with pytest.raises(InvalidArgument, match="^beam: is not supported; remove it"):
        read_generate({"token_ids": [A], "sampling_params": {"beam": 3}})
