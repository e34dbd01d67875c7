"""Block-wise speculative decoding: a drafter proposes K-1 tokens at once, the target checks them in one pass of K tokens.

A pass appends [last token, K-1 proposals], keeps the leading proposals that match the target's own choice, and takes the target's next
token as a bonus. The target sees prefill + passes x K tokens and not one more: rejected tokens are rolled back, never recomputed. With the
target in float32 the greedy answer is the plain one, token for token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dflash_ray.serve.drafter import DraftState, ServedDrafter
from dflash_ray.serve.plain import check_prompts, token_limit
from dflash_ray.serve.sampling import PromptRandom, accept, probabilities, sample
from dflash_ray.serve.state import TargetState
from dflash_ray.target.model import FrozenTarget


@dataclass
class Pass:
    """One verification pass: the block's proposals, how many leading ones the target agreed with, and the tokens that came out."""

    proposals: list[int]
    accepted: int
    produced: list[int]  # min(accepted + 1, tokens left), ended at a stop token


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)  # the prefill's token first; the stop token included where one came
    passes: list[Pass] = field(default_factory=list)


@torch.inference_mode()
def speculative(
    target: FrozenTarget,
    drafter: ServedDrafter,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 1,
) -> list[Answer]:
    """Answers to `prompts` in their order. Settings mean what they mean in `generate_batch`."""
    check_prompts(target, prompts)
    block = drafter.block_size
    stops = set(stop_ids)
    answers = [Answer() for _ in prompts]
    limits = [token_limit(target, prompt, max_new_tokens) for prompt in prompts]
    waiting = list(range(len(prompts)))[::-1]
    rows: list[int | None] = [None] * min(batch_size, len(prompts))
    if not rows:
        return answers
    # the last block may reach past the answer's end
    capacity = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)) + block
    state, draft = TargetState(target, len(rows), capacity), DraftState(drafter, len(rows), capacity)
    random = [PromptRandom(seed, number) for number in range(len(prompts))]
    last = [0] * len(rows)

    def take(row: int, tokens: list[int]) -> list[int]:
        """The tokens that still belong to the answer in `row`; frees the row when it ends."""
        answer = answers[rows[row]]
        left = limits[rows[row]] - len(answer.tokens)
        end = next((index + 1 for index, token in enumerate(tokens[:left]) if token in stops), left)
        produced = tokens[:end]
        answer.tokens += produced
        last[row] = produced[-1]
        if last[row] in stops or len(answer.tokens) >= limits[rows[row]]:
            rows[row] = None
        return produced

    def draw(distribution: torch.Tensor, numbers: list[int | None]) -> torch.Tensor:
        """One token per distribution [R, ..., V], from the random streams of their prompts."""
        count = distribution[0, ..., 0].numel()
        uniforms = [[0.0] * count if number is None else random[number].draw(count) for number in numbers]
        return sample(distribution, torch.tensor(uniforms, dtype=torch.float64, device=target.device).view(distribution.shape[:-1]))

    def start() -> None:
        """Fill free rows with waiting prompts."""
        free = [row for row, number in enumerate(rows) if number is None][: len(waiting)]
        for row in free:
            rows[row] = waiting.pop()
        numbers = [rows[row] for row in free]
        logits, features = state.prefill([prompts[number] for number in numbers], free)
        draft.prefill(features, [len(prompts[number]) for number in numbers], free)
        first = logits.argmax(-1) if temperature == 0 else draw(probabilities(logits, temperature), numbers)
        for row, token in zip(free, first.tolist(), strict=True):
            take(row, [token])

    while True:
        while waiting and None in rows:
            start()
        if all(number is None for number in rows):
            break
        anchors = torch.tensor(last, device=target.device)
        draft_logits = draft.propose(anchors)
        if temperature == 0:
            proposals = draft_logits.argmax(-1)
        else:
            draft_distribution = probabilities(draft_logits, temperature)
            proposals = draw(draft_distribution, rows)
        ids = torch.cat((anchors[:, None], proposals), 1)
        logits, features = state.append(ids.flatten(), block)
        if temperature == 0:
            both = torch.cat((ids, logits.argmax(-1).view(len(rows), block)), 1).tolist()  # one transfer for the pass
        else:
            both = ids.tolist()
            target_distribution = probabilities(logits.view(len(rows), block, -1), temperature)
        counts = []
        for row, number in enumerate(rows):
            if number is None:
                counts.append(0)
                continue
            proposed = both[row][1:block]
            if temperature == 0:
                chosen = both[row][block:]
                accepted = next((slot for slot in range(block - 1) if proposed[slot] != chosen[slot]), block - 1)
                bonus = chosen[accepted]
            else:
                accepted, bonus = accept(proposed, target_distribution[row], draft_distribution[row], random[number])
            produced = take(row, [*proposed[:accepted], bonus])
            counts.append(len(produced))  # what is accepted past an answer's end is dropped: a row that idles must not reach further
            answers[number].passes.append(Pass(proposed, accepted, produced))
        state.keep(counts)
        draft.append(features, block, counts)
    passes = sum(len(answer.passes) for answer in answers)
    assert state.processed == sum(map(len, prompts)) + passes * block, (state.processed, passes)
    return answers


def served_tau(answers: Sequence[Answer]) -> float | None:
    """Tokens produced by verification passes / verification passes (dflash.md, two numbers); None without a pass."""
    produced = [len(one.produced) for answer in answers for one in answer.passes]
    return sum(produced) / len(produced) if produced else None


def per_slot_acceptance(answers: Sequence[Answer], block_size: int) -> list[float]:
    """Share of passes in which slots 1..k were all accepted and stand in the answer, for k = 1..K-1."""
    reached = [min(one.accepted, len(one.produced)) for answer in answers for one in answer.passes]
    return [sum(count >= slot for count in reached) / len(reached) if reached else 0.0 for slot in range(1, block_size)]
