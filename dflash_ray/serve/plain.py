"""Plain decoding: one token per pass for each sequence of a batch, rows refilled as answers end.

With one prompt this is what speculative decoding is compared with; with many it is the generator of training answers. An answer depends on
its prompt, the settings and the seed; beside which other prompts it ran moves it by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dflash_ray.serve.sampling import PromptRandom, probabilities, sample
from dflash_ray.serve.state import TargetState
from dflash_ray.target.model import FrozenTarget


@torch.inference_mode()
def generate_batch(
    target: FrozenTarget,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 64,
    streams: Sequence[int] | None = None,
    on_answer: Callable[[int, list[int]], None] | None = None,
) -> list[list[int]]:
    """Answers (token ids, the stop token included where one came) to `prompts`, in their order.

    An answer ends after a stop id, `max_new_tokens`, or the target's last position. `on_answer(number, tokens)` is called as each ends.
    `streams` numbers each prompt's own random stream, by default its index in `prompts`.
    """
    check_prompts(target, prompts)
    stops = set(stop_ids)
    answers: list[list[int]] = [[] for _ in prompts]
    limits = [token_limit(target, prompt, max_new_tokens) for prompt in prompts]
    waiting = list(range(len(prompts)))[::-1]
    rows: list[int | None] = [None] * min(batch_size, len(prompts))
    if not rows:
        return answers
    state = TargetState(target, len(rows), max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)))
    random = [PromptRandom(seed, number) for number in (streams or range(len(prompts)))] if temperature > 0 else []
    last = [0] * len(rows)

    def take(row: int, token: int) -> None:
        """Token `token` belongs to the answer in `row`, which may end with it."""
        number = rows[row]
        answers[number].append(token)
        last[row] = token
        if token in stops or len(answers[number]) >= limits[number]:
            rows[row] = None
            if on_answer is not None:
                on_answer(number, answers[number])

    def choose(logits: torch.Tensor, numbers: list[int | None]) -> list[int]:
        if temperature == 0:
            return logits.argmax(-1).tolist()
        uniforms = torch.tensor([0.0 if number is None else random[number].draw(1)[0] for number in numbers], dtype=torch.float64)
        return sample(probabilities(logits, temperature), uniforms.to(logits.device)).tolist()

    while True:
        while waiting and None in rows:
            free = [row for row, number in enumerate(rows) if number is None][: len(waiting)]
            for row in free:
                rows[row] = waiting.pop()
            logits, _ = state.prefill([prompts[rows[row]] for row in free], free)
            for row, token in zip(free, choose(logits, [rows[row] for row in free]), strict=True):
                take(row, token)
        if all(number is None for number in rows):
            return answers
        logits, _ = state.append(torch.tensor(last, device=target.device), 1)
        state.keep([0 if number is None else 1 for number in rows])
        for row, token in enumerate(choose(logits, rows)):
            if rows[row] is not None:
                take(row, token)


def plain_greedy(target: FrozenTarget, prompt_ids: list[int], max_new_tokens: int, stop_ids: Sequence[int]) -> list[int]:
    """Greedy answer to one prompt, one token per pass."""
    return generate_batch(target, [prompt_ids], max_new_tokens=max_new_tokens, stop_ids=stop_ids, batch_size=1)[0]


def check_prompts(target: FrozenTarget, prompts: Sequence[list[int]]) -> None:
    """ValueError for a prompt that is empty, has a token the target does not know, or leaves no position for an answer."""
    shape = target.shape
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} has no token; give at least one")
        if not 0 <= min(prompt) <= max(prompt) < shape.vocab_size:
            raise ValueError(f"prompt {number} has a token outside 0..{shape.vocab_size - 1}; was it made with another tokenizer?")
        if len(prompt) >= shape.max_position_embeddings:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; the target has {shape.max_position_embeddings} positions, shorten the prompt"
            )


def token_limit(target: FrozenTarget, prompt: list[int], max_new_tokens: int) -> int:
    """Most tokens an answer may have: the setting, or what the target's positions leave."""
    return min(max_new_tokens, target.shape.max_position_embeddings - len(prompt))
