"""A drafter as it serves: weights joined for few calls, and the keys and values of the context it has read.

Numbers are those of `DraftModel.forward_block`. All layers read the same context, so the keys and values of newly accepted tokens are one
matmul for all layers together, computed once per token. A block's own keys and values are written behind the context and overwritten by
the next block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from dflash_ray.draft.dflash.model import DraftModel
from dflash_ray.linear import FrozenLinear
from dflash_ray.serve.cache_slots import CacheSlots, attend
from dflash_ray.target.layers import Rotation


class ServedDrafter:
    """Weights of a `DraftModel` beside the target's embedding and head [V, H], all on one device and in one dtype."""

    def __init__(self, model: DraftModel, embedding: torch.Tensor, head: torch.Tensor) -> None:
        self.shape, self.model = model.shape, model
        self.head = _few(head)
        self.block_size = model.shape.block_size
        self.scale = model.shape.head_dim**-0.5
        self.fc, self.context_norm = _few(model.fc.weight), model.hidden_norm.weight
        self.final_norm = model.norm.weight
        self.embedding = embedding
        self.mask_embedding = embedding[model.shape.mask_token_id]
        self.layers = [_ServedLayer(layer, model.shape) for layer in model.layers]
        attention = [layer.self_attn for layer in model.layers]
        self.context_kv = _few(torch.cat([projection.weight for a in attention for projection in (a.k_proj, a.v_proj)]))
        self.context_k_norm = torch.stack([a.k_norm.weight for a in attention]).float().unsqueeze(1)  # [layers, 1, D]

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), weight.shape, weight.float(), self.shape.rms_norm_eps).to(x.dtype)


def _few(weight: torch.Tensor) -> FrozenLinear:
    frozen = FrozenLinear(weight)
    frozen.expect_few_rows()
    return frozen


class _ServedLayer:
    def __init__(self, layer: nn.Module, shape) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _few(torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)))
        qk_norms = (attention.q_norm.weight.expand(shape.heads, -1), attention.k_norm.weight.expand(shape.kv_heads, -1))
        self.qk_norm = torch.cat(qk_norms).float()  # [N + M, D]
        self.out = _few(attention.o_proj.weight)
        self.gate_up, self.down = _few(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))), _few(mlp.down_proj.weight)
        self.input_norm, self.mlp_norm = layer.input_layernorm.weight, layer.post_attention_layernorm.weight


class DraftState:
    """What a drafter knows of `batch` sequences of at most `capacity` tokens. `lengths` are the tokens whose features it has read."""

    def __init__(self, drafter: ServedDrafter, batch: int, capacity: int) -> None:
        shape = drafter.shape
        self.drafter, self.batch, self.capacity = drafter, batch, capacity
        self.lengths = [0] * batch
        like = drafter.embedding
        self.keys = like.new_zeros(shape.num_layers, batch, shape.kv_heads, capacity, shape.head_dim)
        self.values = torch.zeros_like(self.keys)
        cos, sin = (part.squeeze(-2).float() for part in drafter.model.rotation(torch.arange(capacity, device=like.device)))
        self._cos, self._sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        self._block = drafter.mask_embedding.expand(batch, drafter.block_size, -1).clone()

    def prefill(self, features: torch.Tensor, lengths: list[int], rows: list[int]) -> None:
        """Start sequences in `rows` with features [R, longest, L*H], right-padded; `lengths` are the real tokens of each."""
        longest = features.shape[1]
        k, v = self._context(features, self._cos[:longest, None, None], self._sin[:longest, None, None])
        for layer in range(self.drafter.shape.num_layers):
            self.keys[layer, rows, :, :longest] = k[:, :, layer].transpose(1, 2)
            self.values[layer, rows, :, :longest] = v[:, :, layer].transpose(1, 2)
        for row, length in zip(rows, lengths, strict=True):
            self.lengths[row] = length

    def append(self, features: torch.Tensor, new: int, counts: list[int]) -> None:
        """Features [B*new, L*H] of the tokens just verified, of which counts[b] were accepted."""
        if self.batch == 1:
            features, new = features[: counts[0]], counts[0]
        cache_slots = CacheSlots(self.lengths, new, self.capacity, features.device)
        k, v = self._context(features, cache_slots.rows_of(self._cos).unsqueeze(1), cache_slots.rows_of(self._sin).unsqueeze(1))
        for layer in range(self.drafter.shape.num_layers):
            cache_slots.write(self.keys[layer], k[:, layer])
            cache_slots.write(self.values[layer], v[:, layer])
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def propose(self, last_tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, K-1, V] of slots 1..K-1 of the block that starts at each sequence's next position with `last_tokens` int64 [B]."""
        drafter, shape = self.drafter, self.drafter.shape
        block = drafter.block_size
        n, m = shape.heads, shape.kv_heads
        cache_slots = CacheSlots(self.lengths, block, self.capacity, last_tokens.device)
        rotate = Rotation(cache_slots.rows_of(self._cos), cache_slots.rows_of(self._sin))
        self._block[:, 0] = F.embedding(last_tokens, drafter.embedding)
        x = self._block.flatten(0, 1)
        for index, layer in enumerate(drafter.layers):
            joined = layer.qkv(drafter.norm(x, layer.input_norm)).view(len(x), -1, shape.head_dim)
            qk = F.rms_norm(joined[:, : n + m].float(), (shape.head_dim,), None, shape.rms_norm_eps) * layer.qk_norm
            qk = rotate(qk).to(x.dtype)
            cache_slots.write(self.keys[index], qk[:, n:])
            cache_slots.write(self.values[index], joined[:, n + m :])
            window = shape.window(index)
            mixed = attend(
                qk[:, :n], self.keys[index], self.values[index], cache_slots, scale=drafter.scale, causal=window is not None, window=window
            )
            x = x + layer.out(mixed.flatten(1))
            gate, up = layer.gate_up(drafter.norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        hidden = drafter.norm(x.view(self.batch, block, -1)[:, 1:], drafter.final_norm)
        return drafter.head(hidden)

    def _context(self, features: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [..., layers, M, D] of features [..., L*H]."""
        drafter, shape = self.drafter, self.drafter.shape
        context = drafter.norm(drafter.fc(features), drafter.context_norm)
        joined = drafter.context_kv(context).view(*context.shape[:-1], shape.num_layers, 2, shape.kv_heads, shape.head_dim)
        keys = F.rms_norm(joined[..., 0, :, :].float(), (shape.head_dim,), None, shape.rms_norm_eps) * drafter.context_k_norm
        return Rotation(cos, sin)(keys).to(features.dtype), joined[..., 1, :, :]
