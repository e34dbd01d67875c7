"""Where the new tokens of a pass stand in buffers that hold B sequences of different length, and what they may see there.

Buffers are [B, heads, capacity, D] and entry j belongs to position j. A pass writes T new tokens per sequence after its current length;
entries past a sequence's end are left over from rejected tokens, are masked, and are overwritten before they could be valid. So dropping
tokens costs nothing: the length goes back. One sequence, the common case on a CPU, needs slices only.
"""

from __future__ import annotations

import functools

import torch


class CacheSlots:
    """`new` tokens after `lengths` of each sequence."""

    def __init__(self, lengths: list[int], new: int, capacity: int, device: torch.device) -> None:
        self.batch, self.new, self.capacity = len(lengths), new, capacity
        self.start = lengths[0]
        self.end = max(lengths) + new
        assert self.end <= capacity, f"{self.end} tokens in buffers for {capacity}"
        self.device = device
        self.positions = None  # int64 [B, T]; None for a single sequence, whose tokens are start, start + 1, ...
        if self.batch > 1:
            self.positions = torch.tensor(lengths, device=device)[:, None] + torch.arange(new, device=device)
        self._masks: dict[tuple, torch.Tensor | None] = {}

    def rows_of(self, table: torch.Tensor) -> torch.Tensor:
        """Rows of a table [positions, ...] for every new token, [B*T, 1, ...]: one for all heads."""
        if self.positions is None:
            return table[self.start : self.start + self.new].unsqueeze(1)
        return table[self.positions.flatten()].unsqueeze(1)

    def write(self, buffer: torch.Tensor, new: torch.Tensor) -> None:
        """new [B*T, heads, D] into buffer [B, heads, capacity, D]."""
        if self.positions is None:
            buffer[0, :, self.start : self.start + self.new] = new.transpose(0, 1)
            return
        new = new.view(self.batch, self.new, *new.shape[1:]).transpose(1, 2)
        buffer.scatter_(2, self.positions[:, None, :, None].expand_as(new), new)

    def mask(self, groups: int, *, causal: bool, window: int | None) -> torch.Tensor | None:
        """Additive float32 mask [1 or B, groups * T, end], or None where everything written is visible.

        causal: token i sees positions up to its own, with `window` W the last W of them; else it sees the sequence and all new tokens.
        """
        key = (groups, causal, window)
        if key not in self._masks:
            self._masks[key] = self._make_mask(groups, causal, window)
        return self._masks[key]

    def _make_mask(self, groups: int, causal: bool, window: int | None) -> torch.Tensor | None:
        if self.positions is None:
            if not causal or (self.new == 1 and (window is None or self.end <= window)):
                return None
            mask = _causal_mask(self.new, groups, window, self.capacity, self.device)
            return mask[None, :, self.capacity - self.start : self.capacity + self.new]
        key = torch.arange(self.end, device=self.device)
        last = self.positions[..., None] if causal else self.positions[:, -1:, None]
        hidden = key > last  # [B, T or 1, end]
        if window is not None:
            hidden = hidden | (key <= self.positions[..., None] - window)
        mask = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, float("-inf"))
        return mask.expand(-1, self.new, -1).repeat(1, groups, 1)


@functools.lru_cache(maxsize=32)
def _causal_mask(new: int, groups: int, window: int | None, capacity: int, device: torch.device) -> torch.Tensor:
    """[groups * new, capacity + new] for positions counted from the first new token: `capacity` before it, then the new ones."""
    token = torch.arange(new, device=device)[:, None]
    key = torch.arange(-capacity, new, device=device)
    hidden = key > token
    if window is not None:
        hidden = hidden | (key <= token - window)
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf")).repeat(groups, 1)


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cache_slots: CacheSlots, *, scale: float, causal: bool, window: int | None
) -> torch.Tensor:
    """q [B*T, N, D] over buffers [B, M, capacity, D] that already hold the new tokens: [B*T, N, D]. Softmax in float32.

    Query heads that share a key head become rows of one matmul, so no key or value is repeated.
    """
    batch, kv_heads, capacity, width = keys.shape
    heads, new = q.shape[1], cache_slots.new
    groups = heads // kv_heads
    if new > 1:
        q = q.view(batch, new, kv_heads, groups, width).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch * kv_heads, groups * new, width)
    keys = keys.view(batch * kv_heads, capacity, width)[:, : cache_slots.end]
    values = values.view(batch * kv_heads, capacity, width)[:, : cache_slots.end]
    mask = cache_slots.mask(groups, causal=causal, window=window)
    scores = torch.bmm(q, keys.transpose(1, 2)).float() * scale
    if mask is not None:
        if batch > 1:
            scores = (scores.view(batch, kv_heads, groups * new, -1) + mask[:, None]).flatten(0, 1)
        else:
            scores = scores + mask
    out = torch.bmm(torch.softmax(scores, -1).to(q.dtype), values)
    if new > 1:
        out = out.view(batch, kv_heads, groups, new, width).permute(0, 3, 1, 2, 4)
    return out.reshape(batch * new, heads, width)
