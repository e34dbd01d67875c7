"""Choosing tokens from logits: greedy, or sampling whose randomness belongs to the prompt and not to the batch it happens to run in.

Every prompt has its own random stream, seeded by (seed, prompt number), so the answer to a prompt is the same whatever runs beside it.
Speculative sampling (Leviathan, Kalman, Matias 2023) accepts a drafted token x with probability min(1, p(x) / q(x)) and draws
the first refused one from max(p - q, 0): what comes out is distributed as the target alone would have it.
"""

from __future__ import annotations

import numpy as np
import torch


class PromptRandom:
    """Uniform numbers in [0, 1) of one prompt, in order."""

    def __init__(self, seed: int, prompt: int) -> None:
        self._generator = np.random.default_rng((seed, prompt))

    def draw(self, count: int) -> list[float]:
        return self._generator.random(count).tolist()


def probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """[..., V] float64, so that a cumulative sum over a large vocabulary still ends at 1."""
    return torch.softmax(logits.double() / temperature, -1)


def sample(distribution: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Token ids int64 [...] at the points `uniforms` [...] of cumulative distributions [..., V]; weights need not sum to 1."""
    cumulative = distribution.cumsum(-1)
    point = uniforms.to(cumulative).unsqueeze(-1) * cumulative[..., -1:]
    ids = torch.searchsorted(cumulative, point, right=True).squeeze(-1)
    # rounding may put the point at the very end, behind the last token that has any weight
    last = distribution.shape[-1] - 1 - (distribution > 0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(ids, last)


def accept(proposals: list[int], target: torch.Tensor, draft: torch.Tensor, random: PromptRandom) -> tuple[int, int]:
    """(accepted, next token) for one block: proposals drawn from `draft` [K-1, V], judged by `target` [K, V], both float64.

    The next token is drawn from the target's distribution after the accepted ones, corrected for the refused proposal if there is one.
    """
    count = len(proposals)
    index = torch.arange(count, device=target.device)
    chosen = torch.tensor(proposals, device=target.device)
    p, q = target[index, chosen].tolist(), draft[index, chosen].tolist()
    for slot, uniform in enumerate(random.draw(count)):
        if uniform * q[slot] >= p[slot]:
            left = (target[slot] - draft[slot]).clamp_(min=0)
            if left.sum() <= 0:  # equal distributions up to rounding
                left = target[slot]
            return slot, int(sample(left, torch.tensor(random.draw(1)[0])))
    return count, int(sample(target[count], torch.tensor(random.draw(1)[0])))
