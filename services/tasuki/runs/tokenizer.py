"""Prompts, completions and chats of rows as token ids of the model folder's tokenizer."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasuki.client.chat import ASSISTANT, ChatTokens, Message, chat_tokens, is_learned
from tasuki.client.dataset import Row, prompt_problem
from tasuki.client.images import images_of
from tasuki.models.chat_template import IMAGE, ChatTemplate, texts_of
from tasuki.models.images import ImageProcessor, read_image_processor
from tasuki.models.tokenizer import read_stop_token_ids, read_tokenizer
from tasuki.models.tool_calls import Call, ToolCallForm, form_of
from tasuki.runs.recipe import field_as_key
from tasuki.wire.errors import InvalidArgument, PathNotFound, UnsupportedModel

_ANSWERS = ("\ufdd2", "\ufdd3", "\ufddc")
"""Each stands for an answer in a rendered chat: noncharacters of Unicode, of which a chat has at most two."""
_QUESTION = "\ufdd4"
"""The same for a question."""
_HARMONY_ENDS = ("<|return|>", "<|call|>")
"""Stops of gpt-oss, which end a message in place of the `<|end|>` that its template writes after an earlier one."""
_OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "strftime_now")
_TOOL = {"name": "f", "description": "f", "parameters": {"type": "object", "properties": {}}}
_WITH_TOOL: Row = {"tools": [{"type": "function", "function": _TOOL}]}
_CHAT_FIELDS = (
    "documents", "system", "functions", "function_call", "tool_choice", "parallel_tool_calls", "response_format",
    "image", "images", "video", "videos", "audio", "audios",
)  # fmt: skip
"""Of a row beside its messages, as other programs have them: a template that reads one gets it."""


class ModelTokenizer:
    """The tokenizer of a Hugging Face model folder. `fields` are a row's: its `tools` and `chat_template_kwargs` reach the template."""

    def __init__(self, model_path: Path | str, *, now: datetime | None = None) -> None:
        """now: local time that chat templates read, that of the call by default; it does not go on, so that equal rows are equal prompts.

        Raises as read_tokenizer.
        """
        model_path = Path(model_path)
        self.now = now or datetime.now().astimezone().replace(tzinfo=None)
        self._tokenizer = read_tokenizer(model_path)
        self._forms: dict[int, ToolCallForm] = {}
        self.stop_token_ids = read_stop_token_ids(model_path, vocab_size=self._tokenizer.vocab_size)
        """Tokens with which an answer ends, by the model's files."""
        self.num_rewritten = 0
        """Chats of `encode_chat` so far with a learned text that the template writes otherwise, or not at all."""

    def encode_prompt(self, prompt: object, fields: Row | None = None) -> list[int]:
        """Encodes a string as it is, or chat messages by the chat template, ending with the generation prompt. An image is one token."""
        if isinstance(prompt, str):
            _refuse_template_fields(fields)
            return self._with_placeholders(self._tokenizer.encode_start(prompt), 0, "prompt")
        problem = prompt_problem(prompt)
        if problem or not isinstance(prompt, list):
            raise InvalidArgument("prompt", problem)
        if weighted := [index for index, message in enumerate(prompt) if message.get("weight")]:
            problem = f"message {weighted[0]} has a weight, but nothing of a prompt is trained; remove it"
            raise InvalidArgument("prompt", problem)
        prompt, num_images = self._without_files(prompt, "prompt")
        template, variables = self._template("prompt", fields)
        variables["add_generation_prompt"] = True
        with field_as_key("messages", "prompt"):
            messages = template.settle(prompt, variables)
            template.check(messages, variables, field="prompt")
            return self._with_placeholders(
                self._tokenizer.encode(template.render(messages, variables)).ids, num_images, "prompt"
            )

    def num_prompt_tokens(self, prompt: object, fields: Row | None = None) -> int:
        """The tokens of a prompt with those of its images, which are read and decoded. Raises InvalidArgument naming one of no use."""
        return len(self.encode_prompt(prompt, fields)) + self.num_image_tokens(images_of(prompt))

    def num_image_tokens(self, images: Sequence[bytes]) -> int:
        """The tokens of a prompt's images beside their placeholders. Raises InvalidArgument naming one of no use."""
        if not images:
            return 0
        if self._images is None:
            raise InvalidArgument("image 0", "is for a model that reads text alone; remove it")
        return sum(self._images.num_tokens(image, field=f"image {index}") - 1 for index, image in enumerate(images))

    def encode_text(self, text: str) -> list[int]:
        """Encodes a text without the tokens that begin a sequence."""
        return self._tokenizer.encode(text).ids

    def encode_example(self, prompt: str, completion: str, fields: Row | None = None) -> ChatTokens:
        """Encodes both as one text and appends the end-of-sequence token. The prompt is as rollout encodes it, unless a token spans both,
        which belongs to the completion.
        """
        _refuse_template_fields(fields, _CHAT_FIELDS)
        if (eos_token_id := self._tokenizer.eos_token_id) is None:
            raise InvalidArgument("completion", "the model's tokenizer has no end-of-sequence token to end it with")
        prompt_ids, token_ids = (self._tokenizer.encode_start(text) for text in (prompt, prompt + completion))
        start = len(prompt_ids)
        if token_ids[:start] != prompt_ids:
            encoding = self._tokenizer.encode(prompt + completion)
            start = len(token_ids) - len(encoding.ids) + sum(end <= len(prompt) for _, end in encoding.offsets)
        if token_ids[start:][-1:] != [eos_token_id]:
            token_ids = [*token_ids, eos_token_id]
        self._refuse_stops(token_ids[start:-1], "completion")
        return ChatTokens(token_ids, [0] * start + [1] * (len(token_ids) - start))

    def encode_chat(self, messages: Sequence[Message], fields: Row | None = None) -> ChatTokens:
        """Encodes a conversation by the model's chat template. Takes the assistant's tokens from the template's `{% generation %}` marks,
        or else finds them by rendering prefixes; refuses templates that do not allow that.
        """
        template, variables = self._template("messages", fields)
        if problem := prompt_problem(messages):
            raise InvalidArgument("messages", problem)
        messages, num_images = self._without_files(messages, "messages")
        for name in sorted(_given(fields, _CHAT_FIELDS).keys() - template.variables):
            raise InvalidArgument(name, "is not read by the model's chat template; remove it")
        messages = template.settle(messages, variables)
        template.check(messages, variables, field="messages")
        written, is_rewritten = " ".join(template.render(messages, variables).split()), False
        for index, message in enumerate(messages):
            if not is_learned(message):
                continue
            texts: Any = texts_of(content := message["content"])
            if isinstance(content, list) and len(texts) < len(content):
                problem = f"message {index} has an image, which no answer draws; give it `weight` 0, or remove the image"
                raise InvalidArgument("messages", problem)
            for text in texts:
                self._refuse_stops(self.encode_text(text), "messages", place=f"message {index} ")
                is_rewritten |= " ".join(text.split()) not in written
        self.num_rewritten += is_rewritten

        def render(some: Sequence[Message], *, is_prompt: bool = False) -> list[int]:
            return self._tokenizer.encode(template.render(some, {**variables, "add_generation_prompt": is_prompt})).ids

        if template.has_marks:
            tokens = self._marked(template, messages, variables)
        else:
            tokens = chat_tokens(
                messages,
                render=render,
                render_prompt=lambda some: render(some, is_prompt=True),
                stop_token_ids=self.stop_token_ids,
            )
        self._with_placeholders(tokens.token_ids, num_images, "messages")
        return tokens

    def encode_next(self, messages: Sequence[Message], place: int, fields: Row, *, last_token_id: int | None) -> list[int]:
        """Encodes what the chat template writes after the answer `messages[place]`, up to the next one's start.

        The answer's own tokens are never rendered, so that the prompt extends them exactly. last_token_id: of the answer; if it is a
        stop token, the template's is left out. Raises InvalidArgument for a template that does not write an answer as it is.
        """
        _, num_images = self._without_files(messages[place + 1 :], "messages")
        messages, _ = self._without_files(messages, "messages")
        template, variables = self._template("messages", fields)
        variables["add_generation_prompt"] = True
        for mark in _ANSWERS:
            answer = {"role": ASSISTANT, "content": mark}
            known = template.settle([*messages[:place], answer, *messages[place + 1 :]], variables)
            text = template.render(known, variables)
            if text.count(mark) == 1:
                break
        else:
            problem = "the model's chat template does not write an answer as it is, so the next turn cannot extend it; use policy.generate"
            raise InvalidArgument("messages", problem)
        template.check(known, variables, field="messages", drawn=messages[: place + 1])
        token_ids = self._with_placeholders(self._tokenizer.encode(text.partition(mark)[2]).ids, num_images, "messages")
        if last_token_id is None or last_token_id not in self.stop_token_ids:
            return token_ids
        if self._text(last_token_id) in _HARMONY_ENDS and self._text(*token_ids[:1]) == "<|end|>":
            return token_ids[1:]
        end = ""
        with suppress(InvalidArgument):  # of a template that refuses the shortest chat
            chat = [{"role": "user", "content": _QUESTION}, answer]  # the whole one would be rendered twice
            end = template.render(chat, {**variables, "add_generation_prompt": False}).partition(mark)[2]
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(token_ids, self._tokenizer.encode(end).ids, strict=False))
        stops = [number for number, (token_id, _) in enumerate(shared) if token_id in self.stop_token_ids]
        # Without one, a stop begins the next message, as GLM's.
        return token_ids[stops[-1] + 1 if stops else int(token_ids[:1] == [last_token_id]) :]

    def read_answer(self, token_ids: Sequence[int], fields: Row) -> dict[str, object]:
        """The `text` of an answer, its `tool_calls` if the row has tools, and the `message` that the next prompt repeats.

        `written` is the text with its calls.
        """
        own = token_ids[:-1] if token_ids[-1:] and token_ids[-1] in self.stop_token_ids else token_ids
        written = text = self._tokenizer.decode(own)
        calls = list[Call]()
        tools: Any = fields.get("tools")
        if tools:
            written = self._tokenizer.decode(own, has_special=True)
            told = [one for tool in tools if isinstance(one := tool.get("function", tool), dict)]
            schemas = {str(one.get("name")): one.get("parameters") for one in told}
            before, calls = self.tool_call_form(fields).read(written, schemas)
            text = self._tokenizer.without_special(before) if calls else text
        message: dict[str, object] = {"role": ASSISTANT, "content": text}
        if valid := [call for call in calls if "function" in call]:
            message["tool_calls"] = valid
        return {"text": text, "written": written, "tool_calls": calls, "message": message}

    def tool_call_form(self, fields: Row) -> ToolCallForm:
        """How the chat template of a row with tools writes calls. Raises InvalidArgument if they cannot be read."""
        template, variables = self._template("messages", fields)
        form = self._forms.get(id(template))
        if form is None:
            form = form_of(lambda some, is_prompt: template.render(some, {**variables, "add_generation_prompt": is_prompt}))
            self._forms[id(template)] = form
        return form

    def tool_doubts(self) -> list[str]:
        """Why turns with tools will be refused, if the chat template reads tools, but its calls cannot be read."""
        with suppress(InvalidArgument):  # of a template without tools
            self._template("messages", _WITH_TOOL)
            try:
                self.tool_call_form(_WITH_TOOL)
            except InvalidArgument as error:
                return [f"turns with tools will be refused: {error.message}"]
        return []

    def doubts(self, *, is_chat: bool, stop_token_ids: Sequence[int], stop: Sequence[str]) -> list[str]:
        """What is likely wrong with the ends of completions, of chats or texts. stop_token_ids, stop: ends that the run adds."""
        stops, end = {*self.stop_token_ids, *stop_token_ids}, ""
        if is_chat:
            with suppress(InvalidArgument):  # told with the row that has it
                template, variables = self._template("messages", None)
                chat = [("user", "1"), (ASSISTANT, _ANSWERS[0]), ("user", _QUESTION)]
                text = template.render([{"role": role, "content": content} for role, content in chat], variables)
                end = text.partition(_ANSWERS[0])[2].partition(_QUESTION)[0]
        is_ended = stops.intersection(self.encode_text(end)) if end else stops
        if is_ended or any(one in end or not end for one in stop):
            return []
        known = ", ".join(repr(self._text(one)) for one in sorted(stops)) or "none"
        problem = f"the chat template ends an answer with {end!r}, which has no stop token" if end else "there is no stop token"
        return [f"{problem} ({known}), so completions go on to max_new_tokens; set train.stop_token_ids, or eos_token_id"]

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        """Decodes without special tokens such as end of sequence."""
        return self._tokenizer.decode(token_ids.tolist())

    def decode_whole(self, token_ids: NDArray[np.int32]) -> str:
        """Decodes with special tokens, as the engine does to find stop texts."""
        return self._tokenizer.decode(token_ids.tolist(), has_special=True)

    def _text(self, *token_ids: int) -> str:
        return self._tokenizer.decode(token_ids, has_special=True)

    @cached_property
    def _images(self) -> ImageProcessor | None:
        """None if the model reads text alone."""
        try:
            return read_image_processor(self._tokenizer.folder)
        except (PathNotFound, UnsupportedModel):
            return None  # no node trains it; its tokenizer is of use by itself

    def _without_files(self, messages: Sequence[Message], field: str) -> tuple[list[Message], int]:
        """The messages with images as the template reads them, and how many these are. Raises InvalidArgument if the model reads none."""
        num_images = 0

        def part_of(part: Any) -> Any:
            nonlocal num_images
            num_images += part.get("type") == IMAGE
            return {"type": IMAGE} if part.get("type") == IMAGE else part

        shown = [
            {**message, "content": list(map(part_of, content))} if isinstance(content := message["content"], list) else message
            for message in messages
        ]
        if num_images and self._images is None:
            raise InvalidArgument(field, "has an image, but the model reads text alone; remove it")
        return shown, num_images

    def _with_placeholders(self, token_ids: list[int], num_images: int, field: str) -> list[int]:
        """The ids as they are. Raises InvalidArgument if the template has not written one placeholder for each image, or a text has one."""
        if self._images is not None:
            self._images.check_rendered(token_ids, num_images, field=field)
        return token_ids

    def _marked(self, template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any]) -> ChatTokens:
        text, spans = template.render_marked(messages, variables)
        answers = [message for message in messages if message["role"] == ASSISTANT]
        if any(message.get("weight") is not None for message in answers):
            if len(spans) != len(answers):
                problem = (
                    f"the chat template marks {len(spans)} texts of {len(answers)} answers, so weights cannot be told apart"
                )
                raise InvalidArgument("messages", problem)
            spans = [span for span, message in zip(spans, answers, strict=True) if is_learned(message)]
        encoding = self._tokenizer.encode(text)
        mask = [int(any(start < end and first < stop for first, end in spans)) for start, stop in encoding.offsets]
        return ChatTokens(encoding.ids, mask)

    def _refuse_stops(self, token_ids: Sequence[int], field: str, *, place: str = "") -> None:
        """Raises InvalidArgument for a stop token in the text of an answer, since no rollout goes on after it."""
        if inside := [token_id for token_id in token_ids if token_id in self.stop_token_ids]:
            raise InvalidArgument(
                field, f"{place}has {self._text(inside[0])!r} in its text, with which an answer ends; remove it"
            )

    def _template(self, field: str, fields: Row | None) -> tuple[ChatTemplate, dict[str, Any]]:
        tools, options = ((fields or {}).get(name) for name in ("tools", "chat_template_kwargs"))
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise InvalidArgument("tools", "must be a list of objects")
        if options is not None and not isinstance(options, dict):
            raise InvalidArgument("chat_template_kwargs", "must be an object")
        templates = self._tokenizer.templates
        template = templates.get("tool_use") if tools else None
        template = templates.get("default") if template is None else template
        if template is None and templates:
            problem = f"the model has chat templates only as {', '.join(templates)}; rows with `tools` take tool_use, others need a default"
            raise InvalidArgument(field, problem)
        if template is None:
            raise InvalidArgument(field, "is a list of chat messages, but the model's tokenizer has no chat template")
        if tools and "tools" not in template.variables:
            raise InvalidArgument(
                "tools", "is not read by the model's chat template; remove it, or use a template that reads it"
            )
        for name in options or ():
            if name in _OWN_VARIABLES or name not in template.variables:
                problem = "is set by tasuki" if name in _OWN_VARIABLES else "is not read by the model's chat template"
                raise InvalidArgument(f"chat_template_kwargs.{name}", f"{problem}; remove it")
        for name, value in (fields or {}).items():
            if value is not None and name in template.variables and name not in (*_OWN_VARIABLES, *_CHAT_FIELDS):
                raise InvalidArgument(
                    name, "is read by the model's chat template; give it in `chat_template_kwargs`, or rename it"
                )
        passed = {name: value for name, value in _given(fields, _CHAT_FIELDS).items() if name in template.variables}
        documents = passed.get("documents", [])
        if not (isinstance(documents, list) and all(isinstance(one, dict) for one in documents)):
            raise InvalidArgument("documents", "must be a list of objects: the model's chat template reads it")
        common = {"tools": tools, "documents": None, "add_generation_prompt": False, "strftime_now": self.now.strftime}
        return template, {**common, **passed, **self._tokenizer.special_tokens, **(options or {})}


def _given(fields: Row | None, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := (fields or {}).get(name)) not in (None, "", [], {})}


def _refuse_template_fields(fields: Row | None, more: Sequence[str] = ()) -> None:
    for name in _given(fields, ("tools", "chat_template_kwargs", *more)):
        raise InvalidArgument(name, "is for the chat template, but `prompt` is a string; give it as chat messages")
