"""Conversations as prompts: what a server would feed the target before it answers.

A final assistant turn is ignored, except that its `prompt_ids`, where present, are the prompt as the target was given it. Rows that cannot
be a prompt are counted by reason and never guessed at.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from dflash_ray.data.prepare.conversations import Conversation, Tokenised, parse_row
from dflash_ray.data.prepare.render import Renderer
from dflash_ray.data.prepare.rows import Refused, decode_row, find_files, is_blank, read_chunks
from dflash_ray.data.prepare.tokenizer import TEMPLATE_ERRORS, ChatTokenizer, one_line


@dataclass(frozen=True)
class Prompt:
    where: str  # file:line
    ids: list[int]


def read_prompts(
    path: Path, tokenizer: ChatTokenizer, *, thinking: bool = False, limit: int | None = None, longest: int | None = None
) -> tuple[list[Prompt], Counter]:
    """The first `limit` prompts of at most `longest` tokens in a file of conversations, and the rows skipped by reason.

    ValueError for a file that cannot be read or gives no prompt.
    """
    if not path.is_file():
        raise ValueError(f"--prompts {path}: no such file")
    prompts: list[Prompt] = []
    skipped: Counter = Counter()
    first = ""
    for chunk in read_chunks(find_files([path])):
        for line, row in chunk:
            if limit is not None and len(prompts) >= limit:
                return prompts, skipped
            if is_blank(row):
                continue
            try:
                ids = prompt_ids(parse_row(decode_row(row)), tokenizer, thinking=thinking)
                if longest is not None and len(ids) > longest:
                    raise Refused("too_long", f"{len(ids)} tokens, the target has positions for {longest} before an answer")
                prompts.append(Prompt(f"{path}:{line}", ids))
            except Refused as refusal:
                skipped[refusal.reason] += 1
                first = first or f"{path}:{line}: {refusal}"
    if not prompts:
        raise ValueError(f"--prompts {path}: no row is a prompt{f'; the first reason is {first}' if first else ''}")
    return prompts, skipped


def prompt_ids(row: Conversation | Tokenised, tokenizer: ChatTokenizer, *, thinking: bool) -> list[int]:
    """Token ids before the answer. Of a row of ids: those before the first supervised one. `Refused` where there are none."""
    if isinstance(row, Tokenised):
        ids = row.input_ids[: row.loss_mask.index(1)] if 1 in row.loss_mask else row.input_ids
        return _checked(ids, tokenizer)
    messages = row.messages
    if messages[-1].role == "assistant":
        if messages[-1].prompt_ids is not None:
            return _checked(list(messages[-1].prompt_ids), tokenizer)
        messages = messages[:-1]
    if not messages:
        raise Refused("no_prompt", "nothing stands before the answer")
    tokenizer.require_template()
    renderer = Renderer(tokenizer, max_length=0)
    try:
        text = tokenizer.render(
            [renderer.template_message(message) for message in messages], list(row.tools) or None, generation=True, thinking=thinking
        )
    except TEMPLATE_ERRORS as error:
        raise Refused("template_refused", one_line(error)) from None
    return _checked(tokenizer.encode(text), tokenizer)


def _checked(ids: list[int], tokenizer: ChatTokenizer) -> list[int]:
    if not ids:
        raise Refused("no_prompt", "no token stands before the answer")
    if not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
        raise Refused("bad_ids", f"a token outside 0..{tokenizer.vocab_size - 1}; were the ids made with another tokenizer?")
    return ids
