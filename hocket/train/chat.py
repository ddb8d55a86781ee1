"""Rows of which only part is learnt: the answer after a prompt, and the assistant's turns in a chat.

Note: [What of a chat is learnt]
A chat template renders messages as one text. If the template has `{% generation %}` tags, what they enclose is learnt,
as in transformers' `return_assistant_tokens_mask`. Otherwise a turn of the assistant is the text that the template adds
to the earlier turns and their generation prompt. Some templates render an earlier turn differently once later turns
follow: those of Qwen3 and DeepSeek drop its thoughts. Such a chat becomes several documents. Each ends with a turn of
the assistant and renders the earlier turns as the model will see them when it writes that turn. It learns the turns
that no earlier document has learnt. So each turn is learnt once, and documents share as many turns as they can.

Some generation prompts open a thought that the template does not repeat in the answer (DeepSeek-R1's). The answer then
begins where the text first differs from the prompt, whatever the answer says.

Note: [A chat is the same from any file]
An Arrow table has every key in every message, and null for those that a message lacks. So null keys are dropped from
messages and tools of every file format. A message with `tool_calls` and no content keeps `content` as null, because
templates read that key; the template renders null as no text.

Note: [A template comes from somebody else]
Templates are untrusted. They run in jinja's sandbox, without access to files or Python's internals, as in transformers.
A template may still raise any exception: each becomes one line that names the template and the row.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hocket.config import BYTES, DataConfig
from hocket.config.rule import show
from hocket.files import json_in, regular_file
from hocket.train.documents import BadFileError, Marked

ROLE = "assistant"
"""The role whose turns are learnt."""
OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Marks around generated text while a template is rendered: code points that occur in no text."""
ANSWER = "\ufdd2"
"""A placeholder answer, which shows what the template writes after one."""
TEMPLATE = "chat_template.jinja"
SETTINGS = "tokenizer_config.json"
"""Files of a tokenizer's folder that can hold a chat template. The second also lists special tokens."""
NAMING = "data.chat_template = a template of Jinja, or data.tokenizer = a folder that has one"


def template_files(data: DataConfig) -> list[Path]:
    """Files, besides the tokenizer's own, that the tokens of chats depend on."""
    folder = Path(data.tokenizer) if data.tokenizer != BYTES else Path()
    folder = folder if folder.is_dir() else folder.parent
    names = [TEMPLATE, SETTINGS] if data.tokenizer != BYTES else []
    files = [folder / name for name in names]
    return [*([Path(data.chat_template)] if data.chat_template else []), *(file for file in files if file.is_file())]


@dataclass(frozen=True)
class _Chat:
    messages: list[Any]
    tools: Any
    where: str
    """Its line or row number, in words."""


@dataclass(frozen=True)
class Chats:
    """The chat template of a configuration, loaded when the first chat is rendered."""

    data: DataConfig

    def marked(self, messages: list[Any], tools: Any, where: str) -> list[Marked]:
        """The documents of a chat. Raises BadFileError if the template is missing or rejects the chat."""
        chat = _Chat([_message(each, where) for each in messages], _tools(tools, where), where)
        if any(mark in str(value) for each in chat.messages for value in each.values() for mark in (OPEN, CLOSE)):
            raise BadFileError(f"has code points in {where} that no text has")
        text = self._render(chat, len(messages))
        return [_without_marks(text)] if OPEN in text else self._by_turns(text, chat)

    @cached_property
    def end(self) -> str:
        """What the template writes after an answer, stripped of white space. Raises BadFileError."""
        chat = _Chat([{"role": "user", "content": "?"}, {"role": ROLE, "content": ANSWER}], None, "a chat of two")
        _, said, after = self._render(chat, 2).rpartition(ANSWER)
        return after.replace(CLOSE, "").strip() if said else ""

    def _by_turns(self, text: str, chat: _Chat) -> list[Marked]:
        """See Note: [What of a chat is learnt]."""
        made = list[Marked]()
        for number, message in enumerate(chat.messages):
            if message["role"] != ROLE:
                continue
            answered = self._render(chat, number + 1)
            turn = self._begin(chat, number, answered), len(answered)
            goes_on = made and answered.startswith(made[-1].text) and turn[0] >= len(made[-1].text)
            learnt = (*made.pop().learnt, turn) if goes_on else (turn,)
            made.append(Marked(answered, learnt, ends=False))
        if not made:
            return [Marked(text, (), ends=False)]
        last = made.pop()
        return [*made, replace(last, text=text) if text.startswith(last.text) else last]

    def _begin(self, chat: _Chat, number: int, answered: str) -> int:
        """Offset in `answered` at which its last turn begins."""
        if not number:
            return 0
        asked = self._render(chat, number, asks=True)
        if answered.startswith(asked):
            return len(asked)
        other = replace(chat, messages=[*chat.messages[:number], {**chat.messages[number], "content": OPEN}])
        begin = len(os.path.commonprefix([asked, self._render(other, number + 1)]))  # noqa: RUF071, of characters
        if not answered.startswith(asked[:begin]) or not asked[:begin].startswith(self._render(chat, number)):
            reason = (
                f"has a chat in {chat.where} of which the template writes the turns before an answer in another way"
            )
            raise BadFileError(reason, "a data.chat_template with {% generation %} around what is learnt")
        return begin

    def _render(self, chat: _Chat, count: int, asks: bool = False) -> str:
        """The text of the first `count` messages. With `asks` it ends with the generation prompt."""
        template, special, name = self._template
        given = {"messages": chat.messages[:count], "tools": chat.tools, "add_generation_prompt": asks}
        try:
            return template.render(**special, **given)
        except Exception as error:  # see Note: [A template comes from somebody else]
            reason = f"has a chat in {chat.where} that the template of {name} refuses ({_in_a_line(error)})"
            raise BadFileError(reason, NAMING) from None

    @cached_property
    def _template(self) -> tuple[Any, Mapping[str, str], Path]:
        """The template, its special tokens by the names templates use, and its file."""
        source, special, name = "", dict[str, str](), Path()
        for file in reversed(template_files(self.data)):
            try:
                if file.name == SETTINGS:
                    found = json_in(file)
                    special = {k: _content(v) for k, v in found.items() if k.endswith("_token") and v}
                    content = _default(found.get("chat_template"))
                else:
                    content = regular_file(file).read_text(encoding="utf-8")
            except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
                raise BadFileError(f"has chats, and {file} cannot be read ({_in_a_line(error)})", NAMING) from None
            source, name = (content, file) if content else (source, name)
        if not source:
            raise BadFileError("has chats, and there is no chat template", NAMING)
        try:
            return _environment().from_string(source), special, name
        except ImportError:
            raise BadFileError("has chats, whose template jinja2 renders", "pip install 'hocket[text]'") from None
        except Exception as error:
            raise BadFileError(f"has chats, and {name} has no template ({_in_a_line(error)})", NAMING) from None


def _in_a_line(error: BaseException) -> str:
    return show(" ".join(str(error).split()) or type(error).__name__)[:200]


EMPTY = "content for it, or data.skip_empty = true, which leaves such chats out"


def _message(given: Any, where: str) -> dict[str, Any]:
    """A message with role and content. See Note: [A chat is the same from any file]."""
    message = _without_nulls(given)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadFileError(f"has no message but {given!r:.40} in {where}", "messages of role and content")
    if "content" not in message and "tool_calls" not in message:
        raise BadFileError(f"has a message of {message['role']} without content in {where}", EMPTY)
    return message if "content" in message else {"content": None, **message}


def _tools(given: Any, where: str) -> Any:
    """The tools of a chat: a list, which some files store as JSON text."""
    try:
        found = json.loads(given) if isinstance(given, str) and given.strip() else given
    except (ValueError, RecursionError):
        raise BadFileError(f"has no JSON but {given!r:.40} as list of tools in {where}") from None
    return _without_nulls(found) or None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _default(templates: Any) -> str:
    """The default template of a tokenizer that may have several, by name."""
    if isinstance(templates, list):
        return next((each["template"] for each in templates if each["name"] == "default"), "")
    return templates or ""


def _environment() -> Any:
    """A sandbox in which an untrusted template can only produce text, set up as in transformers."""
    jinja, *_ = (importlib.import_module(name) for name in ("jinja2", "jinja2.sandbox", "jinja2.ext"))

    class Generation(jinja.ext.Extension):
        """`{% generation %}` marks the text it encloses."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked")
            return jinja.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def refuse(reason: str) -> None:
        raise jinja.TemplateError(reason)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, *more: Any, **named: Any) -> str:
        named |= dict(zip(("separators", "sort_keys"), more, strict=False))
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **named)

    environment = jinja.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        finalize=lambda value: "" if value is None else value,
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
    return environment


def _without_marks(text: str) -> Marked:
    plain, learnt = "", list[tuple[int, int]]()
    for number, part in enumerate(text.split(OPEN)):
        said, _, after = part.partition(CLOSE) if number else ("", "", part)
        if said:
            learnt.append((len(plain), len(plain) + len(said)))
        plain += said + after
    return Marked(plain, tuple(learnt), ends=False)
