"""The target's decoding state for B sequences: append T tokens in one pass, then keep as many of them as were accepted.

`keep` is exact and recomputes nothing. Attention keys past the accepted length are simply not valid any more. For a gated delta net the
pass stores the block's keys, pseudo-values and cumulative decays, all of which depend on earlier tokens only; the state after any prefix is
the old state decayed plus one small matmul of that prefix. Every append of more than one token must be followed by `keep`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dflash_ray.serve.cache_slots import CacheSlots, attend
from dflash_ray.target.layers import Attention, GatedDeltaNet, Rotation
from dflash_ray.target.model import FrozenTarget
from dflash_ray.target.plain.mixers import DocumentBounds, Mixers, conv_valid, decayed, delta_chunk, delta_heads, delta_state, delta_step


class AttentionCache:
    """Keys and values [B, M, capacity, D] of one layer."""

    def __init__(self, mixer: Attention, batch: int, capacity: int, like: torch.Tensor) -> None:
        self.mixer = mixer
        self.keys = like.new_zeros(batch, mixer.kv_heads, capacity, mixer.head_dim)
        self.values = torch.zeros_like(self.keys)

    def prefill(self, x: torch.Tensor, rotate: Rotation, lengths: torch.Tensor, rows: list[int], mixers: Mixers) -> torch.Tensor:
        q, k, v, gate = self.mixer.project(x, rotate)
        for buffer, new in ((self.keys, k), (self.values, v)):
            buffer[rows, :, : x.shape[1]] = new.transpose(1, 2)
        return self.mixer.finish(mixers.attention(q, k, v, scale=self.mixer.scale, window=self.mixer.window, bounds=DocumentBounds()), gate)

    def append(self, x: torch.Tensor, rotate: Rotation, cache_slots: CacheSlots) -> torch.Tensor:
        q, k, v, gate = self.mixer.project(x, rotate)
        cache_slots.write(self.keys, k)
        cache_slots.write(self.values, v)
        mixed = attend(q, self.keys, self.values, cache_slots, scale=self.mixer.scale, causal=True, window=self.mixer.window)
        return self.mixer.finish(mixed, gate)


class DeltaCache:
    """Convolution inputs [B, W-1, C] and recurrent state float32 [B*Nv, Dk, Dv] of one layer, and the last block until it is kept."""

    def __init__(self, mixer: GatedDeltaNet, batch: int, like: torch.Tensor) -> None:
        self.mixer, self.batch = mixer, batch
        self.past = mixer.w_conv.shape[1] - 1
        self.conv = like.new_zeros(batch, self.past, mixer.conv_dim)
        self.state = like.new_zeros(batch * mixer.v_heads, mixer.k_dim, mixer.v_dim, dtype=torch.float32)
        self.block: tuple[torch.Tensor, ...] | None = None

    def prefill(self, x: torch.Tensor, rotate: Rotation, lengths: torch.Tensor, rows: list[int], mixers: Mixers) -> torch.Tensor:
        mixer = self.mixer
        mixed, z, g, beta = mixer.project(x)
        real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        qk, v = mixer.heads(mixers.short_conv(mixed, mixer.w_conv, bounds=DocumentBounds()))
        q, k = qk.chunk(2, 2)
        out, state = mixers.delta_prefill(q, k, v, g * real[..., None], beta * real[..., None])
        last = lengths[:, None] + torch.arange(self.past, device=x.device)  # the W-1 inputs before each row's end, in padded coordinates
        conv_inputs = F.pad(mixed, (0, 0, self.past, 0))
        self.conv[rows] = conv_inputs.gather(1, last[..., None].expand(-1, -1, mixer.conv_dim))
        self.state.view(self.batch, -1, mixer.k_dim, mixer.v_dim)[rows] = state
        return mixer.finish(out, z)

    def append(self, x: torch.Tensor, rotate: Rotation, cache_slots: CacheSlots) -> torch.Tensor:
        assert self.block is None, "append after an append that was not kept"
        mixer, batch, new = self.mixer, self.batch, cache_slots.new
        mixed, z, g, beta = mixer.project(x)
        conv_inputs = torch.cat((self.conv, mixed.view(batch, new, -1)), 1)
        qk, v = mixer.heads(F.silu(conv_valid(conv_inputs, mixer.w_conv)))
        qk, v, g, beta = delta_heads(qk, v, g.view(batch, new, -1), beta.view(batch, new, -1))
        if new == 1:
            self.conv = conv_inputs[:, 1:]
            out, self.state = delta_step(qk, v, g, beta, self.state)
        else:
            decay = g.cumsum(-1)
            out, pseudo = delta_chunk(qk, v, decay, beta, self.state)
            self.block = (conv_inputs, qk[:, 1], pseudo, decay)
        out = out.view(batch, mixer.v_heads, new, mixer.v_dim).transpose(1, 2).reshape(batch * new, mixer.v_heads, mixer.v_dim)
        return mixer.finish(out.to(x.dtype), z)


def keep_blocks(caches: list[DeltaCache], counts: list[int]) -> None:
    """The last block of every layer rolled back to the first counts[b] tokens of each sequence, all layers in one matmul."""
    if not caches or caches[0].block is None:
        return
    conv_inputs, *parts = zip(*(cache.block for cache in caches), strict=True)
    k, pseudo, decay = (torch.cat(part) for part in parts)  # [layers*B*Nv, T, ...]
    state = torch.cat([cache.state for cache in caches])
    past, layers = caches[0].past, len(caches)
    if len(set(counts)) == 1:
        n = max(counts[0], 1)
        state = delta_state(k[:, :n], pseudo[:, :n], decay[:, :n], state)
        conv = [inputs[:, n : n + past] for inputs in conv_inputs]
    else:
        kept = torch.tensor(counts, device=k.device).clamp(min=1)  # a sequence that has ended may hold anything
        last = (kept[:, None] + torch.arange(past, device=k.device))[..., None]
        conv = [inputs.gather(1, last.expand(-1, -1, inputs.shape[-1])) for inputs in conv_inputs]
        per_head = kept.repeat_interleave(caches[0].mixer.v_heads).repeat(layers)[:, None]  # [layers*B*Nv, 1]
        dropped = torch.arange(k.shape[1], device=k.device) >= per_head
        end = decay.gather(1, per_head - 1)
        weight = decayed(end - decay).masked_fill(dropped, 0).unsqueeze(-1)
        state = torch.baddbmm(state * decayed(end).unsqueeze(-1), (k * weight).transpose(1, 2), pseudo)
    for cache, inputs, of_layer in zip(caches, conv, state.chunk(layers), strict=True):
        cache.conv, cache.state, cache.block = inputs, of_layer, None


class TargetState:
    """Buffers for `batch` sequences of at most `capacity` tokens each, rejected ones included.

    `lengths` are the valid tokens of each sequence; `processed` counts the tokens that went through the target for sequences that had not
    ended, kept or not.
    Features are the target's taps side by side, [..., L*H].
    """

    def __init__(self, target: FrozenTarget, batch: int, capacity: int) -> None:
        assert target.head is not None, "decoding needs a target loaded with with_head=True"
        self.target, self.batch, self.capacity = target, batch, capacity
        self.lengths = [0] * batch
        self.processed = 0
        self._new = 0
        self._cos, self._sin = target.rotary_table(capacity)
        self._caches = [
            AttentionCache(layer.mixer, batch, capacity, target.embedding)
            if isinstance(layer.mixer, Attention)
            else DeltaCache(layer.mixer, batch, target.embedding)
            for layer in target.layers
        ]
        self._recurrent = [cache for cache in self._caches if isinstance(cache, DeltaCache)]
        self._tapped = [index in target.taps for index in range(len(target.layers))]

    def prefill(self, prompts: list[list[int]], rows: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Fill sequences `rows` (default all) with `prompts`: logits [R, V] after each prompt, features [R, longest, L*H] right-padded."""
        rows = list(range(self.batch)) if rows is None else rows
        device = self.target.device
        longest = max(map(len, prompts))
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
        rotate = Rotation(self._cos[:longest].unsqueeze(1), self._sin[:longest].unsqueeze(1))
        x = F.embedding(ids, self.target.embedding)
        taps = []
        for layer, cache, tapped in zip(self.target.layers, self._caches, self._tapped, strict=True):
            x = x + cache.prefill(layer.input_norm(x), rotate, lengths, rows, self.target.mixers)
            x = x + layer.mlp(layer.post_norm(x))
            if tapped:
                taps.append(x)
        for row, prompt in zip(rows, prompts, strict=True):
            self.lengths[row] = len(prompt)
            self.processed += len(prompt)
        last = x[torch.arange(len(rows), device=device), lengths - 1]
        return self._logits(last), torch.cat(taps, -1) if taps else None

    def append(self, ids: torch.Tensor, new: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One pass over `new` tokens of every sequence, ids int64 [B*new]: logits [B*new, V] and features [B*new, L*H].

        They count as part of the sequences once `keep` says how many.
        """
        cache_slots = CacheSlots(self.lengths, new, self.capacity, self.target.device)
        rotate = Rotation(cache_slots.rows_of(self._cos), cache_slots.rows_of(self._sin))
        x = F.embedding(ids, self.target.embedding)
        taps = []
        for layer, cache, tapped in zip(self.target.layers, self._caches, self._tapped, strict=True):
            x = x + cache.append(layer.input_norm(x), rotate, cache_slots)
            x = x + layer.mlp(layer.post_norm(x))
            if tapped:
                taps.append(x)
        self._new = new
        return self._logits(x), torch.cat(taps, -1) if taps else None

    def keep(self, counts: list[int]) -> None:
        """The first counts[b] of the tokens just appended stay; the others never were.

        0 is for a sequence that has ended: nothing may be appended to it until `prefill` starts another one in its row.
        """
        assert len(counts) == self.batch and all(0 <= count <= self._new for count in counts), (counts, self._new)
        keep_blocks(self._recurrent, counts)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.processed += self._new * sum(count > 0 for count in counts)
        self._new = 0

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.target.logits(self.target.decode_norm(x))
