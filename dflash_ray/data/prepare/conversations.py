"""Rows to conversations: many spellings in, one out, and nothing guessed.

A role that is unknown or missing, content that is no text, a tool call that is no call: `Refused`, with the reason, never a default that
would put a mask on the wrong text. Reasoning written into the content is taken out of it and kept apart, so that every template sees it in
the one form it can place.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from dflash_ray.data.prepare.rows import Refused, decode_json

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
COLUMNS = ("conversations", "messages", "tools", "system", "input_ids", "loss_mask")  # of a row that are read
_THINK = re.compile(r"\s*(<think>)?(.*?)</think>(.*)", re.DOTALL)


@dataclass(frozen=True)
class Message:
    role: str  # system | user | assistant | tool
    content: str
    reasoning: str = ""  # assistant only: what stood in a think block, or beside the content
    inline: str = ""  # assistant only: content with its think block, where it was written so; for templates that know no reasoning
    tool_calls: tuple[dict, ...] = ()  # assistant only: {"id"?, "type": "function", "function": {"name", "arguments": dict}}
    name: str = ""
    tool_call_id: str = ""
    prompt_ids: tuple[int, ...] | None = None  # assistant only: what the target was given,
    output_ids: tuple[int, ...] | None = None  # and what it answered, token by token
    supervised: bool = True  # False for an answer with `weight: 0`: history, never trained on


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[dict, ...] = ()


@dataclass(frozen=True)
class Tokenised:
    input_ids: list[int]
    loss_mask: list[int]


def parse_row(row: Any, columns: dict[str, str] | None = None) -> Conversation | Tokenised:
    """A decoded row to what it holds; `columns` maps our names to the row's. `Refused` otherwise."""
    if not isinstance(row, dict):
        raise Refused("not_an_object", f"the row is a {_type(row)}; an object with conversations, messages or input_ids is expected")
    if columns:
        row = {**row, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}
    if row.get("input_ids") is not None:
        return _tokenised(row)
    for name in ("conversations", "messages"):
        if row.get(name) is not None:
            return parse_conversation(row[name], row.get("tools"), row.get("system"))
    raise Refused("no_conversation", "the row has neither conversations, messages nor input_ids")


def parse_conversation(messages: Any, tools: Any = None, system: Any = None) -> Conversation:
    """`system`: a system message written beside the messages, as ShareGPT rows have it."""
    messages = _decoded(messages, "conversations")
    if not isinstance(messages, list):
        raise Refused("bad_conversation", f"conversations is a {_type(messages)}; a list of messages is expected")
    if not messages:
        raise Refused("empty_conversation")
    parsed = tuple(_message(message, index) for index, message in enumerate(messages))
    if system and parsed[0].role != "system":
        parsed = (Message("system", _text(system, 0)), *parsed)
    return Conversation(parsed, _tools(tools))


def _tokenised(row: dict) -> Tokenised:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if mask is None:
        raise Refused("no_loss_mask", "input_ids needs a loss_mask of the same length")
    if not isinstance(ids, list) or not all(type(value) is int for value in ids):
        raise Refused("bad_ids", "input_ids must be a list of whole numbers")
    if not isinstance(mask, list) or not all(type(value) in (int, bool) for value in mask):
        raise Refused("bad_loss_mask", "loss_mask must be a list of 0 and 1")
    if len(ids) != len(mask):
        raise Refused("length_mismatch", f"{len(ids)} input_ids, {len(mask)} loss_mask")
    if not set(mask) <= {0, 1}:
        raise Refused("bad_loss_mask", "loss_mask may hold 0 and 1 only")
    return Tokenised(ids, mask)


def _message(message: Any, index: int) -> Message:
    if not isinstance(message, dict):
        raise Refused("bad_message", f"message {index} is a {_type(message)}, not an object")
    named = message["role"] if message.get("role") is not None else message.get("from")
    if named is None:
        raise Refused("missing_role", f"message {index} has no role")
    if not isinstance(named, str) or named.strip().casefold() not in ROLES:
        raise Refused("unknown_role", f"message {index}: {_short(named)}; known are {', '.join(ROLES)}")
    spelled = named.strip().casefold()
    role, other = ROLES[spelled], message.get("from")
    if isinstance(other, str) and ROLES.get(other.strip().casefold(), role) != role:
        raise Refused("two_roles", f"message {index}: role says {_short(named)}, from says {_short(other)}")
    content = message["content"] if message.get("content") is not None else message.get("value")
    if role != "assistant":
        if content is None:
            raise Refused("null_content", f"message {index} ({role}) has no content")
        return Message(role, _text(content, index), name=_label(message, "name"), tool_call_id=_label(message, "tool_call_id"))
    if spelled == "function_call":
        answer = Message(role, "", tool_calls=_calls(_decoded(content, "function_call"), index))
    else:
        answer = _assistant(message, content, index)
    weight = message.get("weight")
    if weight is None or (type(weight) in (int, float, bool) and weight in (0, 1)):
        return replace(answer, supervised=weight is None or bool(weight))
    raise Refused("bad_weight", f"message {index}: weight is {_short(weight)}; 0 (never trained on) and 1 are known")


def _assistant(message: dict, content: Any, index: int) -> Message:
    calls = message.get("tool_calls")
    if calls is None:
        calls = message.get("function_call")
    tool_calls = _calls(_decoded(calls, "tool_calls"), index) if calls not in (None, [], "") else ()
    reasoning = next((message[key] for key in ("reasoning_content", "reasoning", "thinking") if message.get(key) is not None), None)
    ids = _answer_ids(message, index)
    if content is None:
        if not tool_calls and reasoning is None and ids[0] is None:
            raise Refused("null_content", f"message {index} (assistant) has neither content nor tool calls")
        content = ""
    text, inline, written = _split_reasoning(_text(content, index))
    if ids[1] is None and text.lstrip().startswith("<think>") and "</think>" not in text:
        raise Refused("reasoning_not_closed", f"message {index}: the answer was cut off inside its think block")
    beside = _text(reasoning, index).strip() if reasoning is not None else ""
    if beside and written and written != beside:
        raise Refused("reasoning_twice", f"message {index} has reasoning beside its content and other reasoning in it")
    if beside and not written:
        inline = f"<think>\n{beside}\n</think>\n\n{text}"
    return Message("assistant", text, beside or written, inline, tool_calls, prompt_ids=ids[0], output_ids=ids[1])


def _split_reasoning(text: str) -> tuple[str, str, str]:
    """(content without its think block, content with it, reasoning); a raw completion has only the closing tag, and gets the other."""
    match = _THINK.match(text)
    if match is None or "<think>" in match[2]:
        return text, "", ""
    return match[3].lstrip("\n"), text if match[1] else "<think>\n" + text.lstrip(), match[2].strip()


def answer_message(text: str, prompt_ids: list[int], output_ids: list[int]) -> Message:
    """The assistant message of an answer as the target wrote it: `text` without the prompt and without the end-of-turn token."""
    content, inline, reasoning = _split_reasoning(text)
    return Message("assistant", content, reasoning, inline, prompt_ids=tuple(prompt_ids), output_ids=tuple(output_ids))


def _answer_ids(message: dict, index: int) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    prompt, output = message.get("prompt_ids"), message.get("output_ids")
    if output is None:
        return None, None
    for name, ids in (("prompt_ids", prompt), ("output_ids", output)):
        if not isinstance(ids, list) or not ids or not all(type(value) is int for value in ids):
            raise Refused("bad_ids", f"message {index}: {name} must be a list of whole numbers")
    return tuple(prompt), tuple(output)


def _text(content: Any, index: int) -> str:
    """Text of a string or of a list of text parts."""
    if isinstance(content, list):
        return "".join(_part(part, index) for part in content)
    if not isinstance(content, str):
        raise Refused("bad_content", f"message {index}: content is a {_type(content)}, not text")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError:
        raise Refused("lone_surrogate", f"message {index}: half of a character (a lone surrogate)") from None
    return content


def _part(part: Any, index: int) -> str:
    if isinstance(part, str):
        return _text(part, index)
    if not isinstance(part, dict):
        raise Refused("bad_content", f"message {index}: a content part is a {_type(part)}")
    kind = part.get("type", "text")
    if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
        raise Refused("not_text", f"message {index}: content part of type {_short(kind)}; only text can be trained on")
    return _text(part["text"], index)


def _calls(calls: Any, index: int) -> tuple[dict, ...]:
    return tuple(_call(call, index) for call in (calls if isinstance(calls, list) else [calls]))


def _call(call: Any, index: int) -> dict:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise Refused("bad_tool_call", f"message {index}: a tool call needs a name")
    arguments = function.get("arguments", function.get("parameters"))
    if arguments is None or arguments == "":
        arguments = {}
    arguments = _decoded(arguments, "arguments")
    if not isinstance(arguments, dict):
        raise Refused("bad_tool_call", f"message {index}: arguments of {_short(function['name'])} are a {_type(arguments)}, not an object")
    _text(json.dumps(call, ensure_ascii=False, default=str), index)
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made


def _tools(tools: Any) -> tuple[dict, ...]:
    tools = _decoded(tools, "tools")
    if tools in (None, [], ""):
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("bad_tools", "tools must be a list of objects")
    _text(json.dumps(tools, ensure_ascii=False, default=str), 0)
    return tuple(tools)


def _decoded(value: Any, name: str) -> Any:
    """A string that holds JSON, as OpenAI writes arguments and as columns of tables hold lists."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return decode_json(value)
    except Refused as error:
        raise Refused(f"bad_{name}", f"{name} is a string but not JSON ({error})") from None


def _label(message: dict, key: str) -> str:
    return _text(message[key], 0) if isinstance(message.get(key), str) else ""


def _type(value: Any) -> str:
    return {dict: "object", list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}.get(
        type(value), type(value).__name__
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
