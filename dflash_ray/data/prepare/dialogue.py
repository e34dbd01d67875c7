"""A conversation that the target answers anew, turn by turn.

Each assistant turn is asked for with the prompt a server would build from the messages before it, of which the answers are already the
target's own. A conversation that does not end with an assistant turn gets one more. An answer that reaches its limit of tokens ends the
conversation: what would follow it was never said.
"""

from __future__ import annotations

import hashlib
from typing import Any

from dflash_ray.data.prepare.conversations import Conversation, Message, answer_message
from dflash_ray.data.prepare.render import Renderer
from dflash_ray.data.prepare.rows import Refused
from dflash_ray.data.prepare.tokenizer import TEMPLATE_ERRORS, ChatTokenizer, one_line


def dialogue_key(row_id: Any, conversation: Conversation, thinking: bool, made_with: str) -> str:
    """A hash of the row's id and everything the answers depend on, which is not the old answers.

    `made_with` names the target and the way it is asked.
    """
    asked = [
        message.role if message.role == "assistant" and message.supervised else (*_words(message), message.name, message.tool_call_id)
        for message in conversation.messages
    ]
    return hashlib.sha256(repr((row_id, asked, conversation.tools, thinking, made_with)).encode()).hexdigest()[:32]


def _words(message: Message) -> tuple:
    return (message.role, message.content, *((message.reasoning, message.tool_calls) if message.role == "assistant" else ()))


class Dialogue:
    """`place` is where the conversation stands, `row_id` its id there. `longest`: tokens a prompt may have, so that an answer fits."""

    def __init__(
        self,
        key: str,
        place: str,
        row_id: Any,
        conversation: Conversation,
        thinking: bool,
        tokenizer: ChatTokenizer,
        longest: int,
    ):
        self.key, self.place = key, place
        self.failures = 0  # of calls in a row
        self.turns = 0  # answered so far
        self.ended_early = ""  # why turns are missing
        self._row_id = row_id
        self._tools = conversation.tools
        self._thinking = thinking
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer, longest)
        self._longest = longest
        self._said: list[Message] = []
        self._left = list(conversation.messages)
        if self._left[-1].role != "assistant":
            self._left.append(Message("assistant", ""))
        self._advance()

    @property
    def done(self) -> bool:
        return not self._left

    def prompt(self) -> list[int]:
        """Ids to answer next. `Refused` if there is nothing to answer, or the template or the length forbids it."""
        if self.done:
            raise Refused("no_prompt", "nothing stands before an answer")
        self._tokenizer.require_template()
        messages = [self._renderer.template_message(message) for message in self._said]
        try:
            text = self._tokenizer.render(messages, list(self._tools) or None, generation=True, thinking=self._thinking)
        except TEMPLATE_ERRORS as error:
            raise Refused(f"template_refused: {one_line(error)}") from None
        ids = self._tokenizer.encode(text)
        if len(ids) > self._longest:
            raise Refused("too_long", f"a prompt of {len(ids)} tokens; the target has positions for {self._longest}")
        return ids

    def take(self, prompt: list[int], output: list[int], stops: set[int]) -> None:
        """The answer to the last prompt."""
        ended = output[-1] in stops
        text = self._tokenizer.decode(output[:-1] if ended else output)
        self._said.append(answer_message(text, prompt, output))
        self.turns += 1
        self._left.pop(0)
        if ended:
            self._advance()
        else:
            self.stop("token_limit")

    def stop(self, reason: str) -> None:
        """Nothing more is asked; what was answered stays."""
        self.ended_early = reason
        self._left = []

    def row(self) -> dict[str, Any]:
        """What `jobs.prepare_data` reads, ids included."""
        conversation = [self._written(message) for message in self._said]
        row = {"conversations": conversation, "thinking": self._thinking, "key": self.key}
        if self._tools:
            row["tools"] = list(self._tools)
        return row if self._row_id is None else {"id": self._row_id, **row}

    def _advance(self) -> None:
        """Moves to the next turn to answer. An answer that opens a conversation has no prompt and stays, as does one of weight 0."""
        while self._left and (self._left[0].role != "assistant" or not self._left[0].supervised or not self._said):
            self._said.append(self._left.pop(0))

    def _written(self, message: Message) -> dict[str, Any]:
        knows_reasoning = "reasoning_content" in (self._tokenizer.template or "")
        out: dict[str, Any] = {"role": message.role, "content": message.content if knows_reasoning else message.inline or message.content}
        if message.reasoning and knows_reasoning:
            out["reasoning_content"] = message.reasoning
        for key in ("name", "tool_call_id"):
            if getattr(message, key):
                out[key] = getattr(message, key)
        if message.tool_calls:
            out["tool_calls"] = list(message.tool_calls)
        if not message.supervised:
            out["weight"] = 0
        if message.output_ids is not None:
            out |= {"prompt_ids": list(message.prompt_ids), "output_ids": list(message.output_ids)}
        return out
