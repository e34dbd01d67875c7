"""Conversations to samples whose mask is right by construction.

For every assistant turn the template is rendered twice: the messages before it with the generation prompt, as a server renders them
(the prefix), and the messages up to it. Supervised is what the second adds to the first, up to and with the end-of-turn token. Nothing is
found by searching for markers, so text that spells a marker opens nothing. If the next turn's prefix begins with this turn's prefix and
answer, both share a sample; where the template rewrites history (Qwen3 drops earlier reasoning) each turn gets a sample of its own.
Turns that carry the target's own `prompt_ids` and `output_ids` use those ids as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from dflash_ray.data.prepare.conversations import Conversation, Message, Tokenised
from dflash_ray.data.prepare.rows import Refused
from dflash_ray.data.prepare.tokenizer import TEMPLATE_ERRORS, ChatTokenizer, one_line

_TURNS_BEYOND = 8  # turns in a row past max_length after which the rest is not rendered: rendering all is quadratic in the turns
_CHARACTERS_AHEAD = 1 << 18  # of a row's turns, with all that stands before each, that are placed before the first is encoded
_EMPTY_THINK = re.compile(r"\s*(?:<think>\s*)?</think>\s*")


@dataclass
class Rendered:
    """What one row became. `samples`: (input_ids int32 [T], loss_mask uint8 [T])."""

    samples: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    turns: int = 0  # assistant turns whose tokens are supervised
    refused_turns: list[Refused] = field(default_factory=list)  # the others
    clipped: int = 0
    with_ids: int = 0  # turns that came with the target's own ids
    ids_differ: int = 0  # of those: turns whose text encodes to other ids
    spelled_specials: int = 0  # answers whose text spells a special token; it is encoded as the ordinary text it is


@dataclass(frozen=True)
class _Turn:
    prefix: str
    answer: str  # up to the end-of-turn token, without it
    end: str
    tail: str  # written by the template after it
    literal: bool  # special tokens in the answer are ordinary text

    @property
    def text(self) -> str:
        return self.prefix + self.answer + self.end


@dataclass(frozen=True)
class Row:
    """A row whose first answers are placed in the text; the rest of it is placed when its turn comes."""

    content: Conversation | Tokenised
    turns: dict[int, _Turn | Refused] = field(default_factory=dict)  # by number of the message

    @property
    def texts(self) -> Iterator[str]:
        """What will be encoded, with repetitions."""
        for turn in self.turns.values():
            if isinstance(turn, _Turn):
                yield from (turn.prefix, turn.tail) if turn.literal else (turn.prefix, turn.answer, turn.tail)


class _Sample:
    """A sample under construction."""

    def __init__(self):
        self.ids: list[int] = []
        self.spans: list[tuple[int, int]] = []
        self.text: str | None = ""  # rendered so far; None if ids came without a text that matches
        self.tail: list[int] = []

    def add(self, ids: list[int], supervised: bool) -> None:
        if supervised:
            self.spans.append((len(self.ids), len(self.ids) + len(ids)))
        self.ids += ids


class Renderer:
    """`max_length`: tokens after which a sample is cut."""

    def __init__(self, tokenizer: ChatTokenizer, max_length: int):
        self.tokenizer = tokenizer
        self.max_length = max_length

    def render(self, content: Conversation | Tokenised) -> Rendered:
        """Samples of a row. `Refused` if it gives none."""
        return self.finish(self.place(content))

    def place(self, content: Conversation | Tokenised) -> Row:
        """First half of `render`: what needs no ids."""
        if isinstance(content, Tokenised):
            return Row(content)
        messages = [self.template_message(message) for message in content.messages]
        turns: dict[int, _Turn | Refused] = {}
        room = _CHARACTERS_AHEAD
        for index, message in enumerate(content.messages):
            if message.role == "assistant" and message.supervised:
                turn = self._turn_or_refusal(content, messages, index)
                room -= 0 if isinstance(turn, Refused) else len(turn.prefix) + len(turn.answer)
                if room < 0:
                    break  # the rest is rendered one by one: a long conversation's history stands in every turn
                turns[index] = turn
        return Row(content, turns)

    def finish(self, row: Row) -> Rendered:
        """Second half of `render`."""
        out = Rendered()
        if isinstance(content := row.content, Tokenised):
            self._check_ids(content.input_ids, "input_ids")
            self._finish(out, np.asarray(content.input_ids, np.int32), np.asarray(content.loss_mask, np.uint8))
        else:
            self._conversation(content, row.turns, out)
            if not out.samples:
                unwanted = any(message.role == "assistant" and not message.supervised for message in content.messages)
                none = Refused("weight_0", "no other answer stands beside those of weight 0") if unwanted else Refused("no_assistant_turn")
                raise (out.refused_turns or [none])[0]
        return out

    def _conversation(self, conversation: Conversation, placed: dict[int, _Turn | Refused], out: Rendered) -> None:
        messages = [self.template_message(message) for message in conversation.messages]
        shrinks = any(message.reasoning for message in conversation.messages)  # a later prefix may be shorter than an earlier one
        beyond = 0
        sample: _Sample | None = None
        for index, message in enumerate(conversation.messages):
            if message.role != "assistant" or not message.supervised:
                continue
            if beyond >= _TURNS_BEYOND and not shrinks:
                out.refused_turns.append(self._too_long())
                continue
            turn = placed[index] if index in placed else self._turn_or_refusal(conversation, messages, index)
            if isinstance(turn, Refused):
                if message.output_ids is None:
                    out.refused_turns.append(turn)
                    continue
                turn = None
            joined = self._with_ids(sample, turn, message, out) if message.output_ids is not None else self._with_text(sample, turn, out)
            if joined is not sample:
                self._close(sample, out)
                sample = joined
            beyond = beyond + 1 if sample.spans[-1][0] >= self.max_length else 0
        self._close(sample, out)

    # ---- one turn as text

    def template_message(self, message: Message) -> dict:
        """The message as the chat template reads it: reasoning apart where it knows `reasoning_content`, else in the content."""
        made: dict = {"role": message.role, "content": message.content}
        if message.role == "assistant":
            if "reasoning_content" not in (self.tokenizer.template or ""):
                made["content"] = message.inline or message.content
            elif message.reasoning or "</think>" in message.content:  # given, even empty, it keeps the template from searching the content
                made["reasoning_content"] = message.reasoning
            if message.tool_calls:
                made["tool_calls"] = list(message.tool_calls)
        for key in ("name", "tool_call_id"):
            if getattr(message, key):
                made[key] = getattr(message, key)
        return made

    def _turn_or_refusal(self, conversation: Conversation, messages: list[dict], index: int) -> _Turn | Refused:
        try:
            return self._turn(conversation.messages[: index + 1], messages[: index + 1], list(conversation.tools) or None)
        except Refused as refusal:
            return refusal

    def _turn(self, messages: tuple[Message, ...], rendered: list[dict], tools: list[dict] | None) -> _Turn:
        """The last message as the answer to those before it. `Refused` if the template cannot place it."""
        self.tokenizer.require_template()
        message = messages[-1]
        if len(messages) == 1:
            raise Refused("no_prompt", "nothing stands before this answer")
        try:
            prefix, written = self._place(rendered[:-1], rendered[-1], tools, bool(message.reasoning))
        except Refused:
            raise
        except TEMPLATE_ERRORS as error:
            raise Refused(f"template_refused: {one_line(error)}") from None
        ending = self.tokenizer.split_ending(written)
        if ending is None:
            raise Refused("no_end_of_turn", "the template ends this answer with no special token")
        answer, end, tail = ending
        content = message.content.strip()
        if not message.reasoning and (scaffold := _EMPTY_THINK.match(answer)) and content in answer[scaffold.end() :]:
            prefix, answer = prefix + scaffold.group(), answer[scaffold.end() :]
        words = [message.reasoning, content, *(call["function"]["name"] for call in message.tool_calls)]
        if not all(word in answer for word in words):
            raise Refused("template_drops_text", "the template does not write all of this answer")
        spelled = sum(self.tokenizer.special_strings(text) for text in (message.reasoning, content, *map(str, message.tool_calls)))
        if spelled and spelled != self.tokenizer.special_strings(answer):
            raise Refused("special_token_in_answer", "the answer spells a special token that the template uses too")
        return _Turn(prefix, answer, end, tail, bool(spelled))

    def _place(self, history: list[dict], answer: dict, tools: list[dict] | None, thinking: bool) -> tuple[str, str]:
        """(history with the generation prompt, what the answer adds to it)."""
        full = self.tokenizer.render([*history, answer], tools, generation=False, thinking=thinking)
        for mode in (thinking, not thinking):
            prefix = self.tokenizer.render(history, tools, generation=True, thinking=mode)
            if full.startswith(prefix):
                return prefix, full[len(prefix) :]
        if history[-1]["role"] == "assistant":  # an answer after an answer: the template may place only the last of them as one
            question = max((index for index, message in enumerate(history) if message["role"] != "assistant"), default=-1)
            _, written = self._place(history[: question + 1], answer, tools, thinking)
            return self.tokenizer.render(history, tools, generation=True, thinking=thinking), written
        raise Refused("prefix_mismatch", "the template writes the history of this turn differently once it is answered")

    # ---- ids

    def _with_text(self, sample: _Sample | None, turn: _Turn, out: Rendered) -> _Sample:
        """`sample` itself with the turn added, or a new one that holds it."""
        if sample is not None and sample.text is not None and turn.prefix.startswith(sample.text):
            sample.add(self._encode(turn.prefix[len(sample.text) :], sample), False)
        else:
            sample = _Sample()
            sample.add(self._encode(turn.prefix, sample), False)
        sample.add(self._answer_ids(turn, self.max_length + 1 - len(sample.ids)), True)
        out.spelled_specials += turn.literal
        sample.text, sample.tail = turn.text, self.tokenizer.encode(turn.tail, start=False)
        return sample

    def _with_ids(self, sample: _Sample | None, turn: _Turn | None, message: Message, out: Rendered) -> _Sample:
        prompt, output = list(message.prompt_ids), list(message.output_ids)
        self._check_ids(prompt, "prompt_ids")
        self._check_ids(output, "output_ids")
        if sample is not None and prompt[: len(sample.ids)] == sample.ids:
            sample.add(prompt[len(sample.ids) :], False)
        else:
            sample = _Sample()
            sample.add(prompt, False)
        sample.add(output, True)
        encoded = None if turn is None else self._answer_ids(turn, len(output) + 2)
        out.with_ids += 1
        out.ids_differ += encoded is None or (encoded != output and encoded[:-1] != output)
        sample.text, sample.tail = turn.text if turn else None, []
        return sample

    def _encode(self, text: str, sample: _Sample) -> list[int]:
        room = self.max_length + 1 - len(sample.ids)
        return self.tokenizer.encode(text, room, start=not sample.ids) if room > 0 else []

    def _answer_ids(self, turn: _Turn, room: int) -> list[int]:
        if room <= 0:
            return []
        encode = self.tokenizer.encode_literally if turn.literal else self.tokenizer.encode
        ids = encode(turn.answer, room) if turn.literal else encode(turn.answer, room, start=False)
        return [*ids, self.tokenizer.token_id(turn.end)]

    def _check_ids(self, ids: list[int], name: str) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.tokenizer.vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise Refused("id_out_of_range", f"{name} holds {wrong}; the vocabulary has {self.tokenizer.vocab_size} rows")

    def _close(self, sample: _Sample | None, out: Rendered) -> None:
        if sample is None:
            return
        ids = np.asarray(sample.ids + sample.tail, np.int32)
        mask = np.zeros(len(ids), np.uint8)
        for start, stop in sample.spans:
            mask[start:stop] = 1
        try:
            if mask.all():
                raise Refused("all_supervised", "every token of a rendered conversation would be supervised")
            self._finish(out, ids, mask)
        except Refused as refusal:
            out.refused_turns += [refusal] * len(sample.spans)
            return
        kept = sum(start < self.max_length for start, _ in sample.spans)
        out.turns += kept
        out.refused_turns += [self._too_long()] * (len(sample.spans) - kept)

    def _finish(self, out: Rendered, ids: np.ndarray, mask: np.ndarray) -> None:
        """Adds the sample, cut to `max_length`. `Refused` if no anchor can stand in it."""
        over = len(ids) > self.max_length
        ids, mask = ids[: self.max_length], mask[: self.max_length]
        if not (mask[1:] & mask[:-1]).any():
            if over:
                raise self._too_long()
            raise Refused("no_anchor", "no two adjacent supervised tokens")
        out.clipped += over
        out.samples.append((ids, mask))

    def _too_long(self) -> Refused:
        return Refused("too_long", f"no answer within {self.max_length} tokens")
