"""The frozen target: batches of tokens in, tapped hidden states out.

`features` returns the outputs of the tapped layers for every token of a batch, in document order and without padding, whatever layout
the pass itself ran in. On a CPU a packed batch is one call per document, so a document's features do not depend on its neighbours by a
single bit. On a GPU it is one row with `cu_seqlens` through every mixer; `varlen=True` runs that same path on a CPU.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dflash_ray.batch import Batch
from dflash_ray.target.facts import TargetFacts
from dflash_ray.target.layers import Layer, RmsNorm, Rotation
from dflash_ray.target.mixers import Rows, mixers_for


class FrozenTarget:
    """Made by `load_target`. `features` are [T, L*H] in the target's dtype: the L taps side by side, each H wide."""

    def __init__(
        self,
        *,
        facts: TargetFacts,
        taps: list[int],
        layers: list[Layer],
        embedding: torch.Tensor,
        final_norm: nn.Module | None,
        head: torch.Tensor | None,
        rotary: nn.Module,
        layout: str,
    ) -> None:
        self.facts, self.taps, self.layers = facts, taps, layers
        self.embedding, self.final_norm, self.head = embedding, final_norm, head
        # the module itself makes teacher rows; decoding runs the same numbers in fewer calls
        self.decode_norm = None if final_norm is None else RmsNorm(final_norm, facts.rms_norm_eps)
        self.layout = layout
        self.device, self.dtype = embedding.device, embedding.dtype
        self.mixers = mixers_for(self.device)
        self._rotary = rotary
        self._table = (torch.empty(0), torch.empty(0))

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Rotary factors of `positions` int64 [B or 1, T], each counted from its document's start."""
        cos, sin = self.rotary_table(int(positions.max()) + 1)
        return Rotation(cos[positions].unsqueeze(2), sin[positions].unsqueeze(2))

    def rotary_table(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin float32 [at least length, D] of positions 0, 1, ..., from the family's own rotary module; grown as needed."""
        if length > self._table[0].shape[0]:
            size = max(2 * self._table[0].shape[0], length, 256)
            positions = torch.arange(size)[None]
            if hasattr(self._rotary, "mrope_section"):
                positions = positions.expand(3, 1, -1)  # time, height and width are one for text
            # the module casts to the dtype of its first argument
            cos, sin = self._rotary(torch.empty(1, dtype=torch.float32), positions)
            half = cos.shape[-1] // 2
            still = (0, self.facts.head_dim // 2 - half)
            cos, sin = F.pad(cos[0, :, :half], still, value=1.0), F.pad(sin[0, :, :half], still, value=0.0)
            self._table = (torch.cat((cos, cos), -1).to(self.device), torch.cat((-sin, sin), -1).to(self.device))
        return self._table

    @torch.no_grad()
    def features(self, batch: Batch, *, varlen: bool | None = None) -> torch.Tensor:
        """Tapped states [T, L*H] of a batch. `varlen` forces (True) or forbids (False) one packed row; default: on a GPU."""
        out = self._empty_features(batch)
        for start, end, ids, positions, rows, real in self._passes(batch, varlen):
            self._run(ids, positions, rows, out[start:end], real)
        return out

    @torch.no_grad()
    def features_and_teacher(
        self, batch: Batch, block_size: int, *, varlen: bool | None = None
    ) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
        """Features, teacher positions int32 [P] and teacher rows [P, H] = final norm of the last hidden state there (dflash, KL teacher).

        The head applied to a row gives the target's own distribution of the token after that position.
        """
        assert self.final_norm is not None, "teacher rows need a target loaded with teacher=True"
        positions_wanted = teacher_positions(batch, block_size)
        out = self._empty_features(batch)
        rows_out = torch.empty(len(positions_wanted), self.facts.hidden_size, dtype=self.dtype, device=self.device)
        for start, end, ids, positions, rows, real in self._passes(batch, varlen):
            last = self._run(ids, positions, rows, out[start:end], real)
            low, high = np.searchsorted(positions_wanted, (start, end))
            wanted = torch.from_numpy(positions_wanted[low:high].astype(np.int64) - start).to(self.device)
            rows_out[low:high] = self.final_norm(_real_tokens(last, real)[wanted])
        return out, positions_wanted, rows_out

    def _empty_features(self, batch: Batch) -> torch.Tensor:
        return torch.empty(batch.tokens, len(self.taps) * self.facts.hidden_size, dtype=self.dtype, device=self.device)

    def _passes(self, batch: Batch, varlen: bool | None):
        """Forward passes of a batch: (first token, end, ids [B,T], positions, rows, lengths of the real tokens per row or None)."""
        if batch.tokens == 0:
            return
        lengths = batch.lengths
        if lengths.max() > self.facts.max_position_embeddings:
            raise ValueError(
                f"data.path: a document of {lengths.max()} tokens is longer than the target's {self.facts.max_position_embeddings} "
                f"positions; prepare the data with a smaller --max-length"
            )
        ids = torch.from_numpy(batch.input_ids.astype(np.int64)).to(self.device)
        layout = batch.layout if self.layout == "auto" else self.layout
        if layout == "padded":
            longest = int(lengths.max())
            column = np.arange(longest)
            source = np.minimum(batch.cu_seqlens[:-1, None] + column, batch.tokens - 1)
            padded = torch.where(torch.from_numpy(column < lengths[:, None]).to(self.device), ids[torch.from_numpy(source)], 0)
            yield 0, batch.tokens, padded, torch.arange(longest, device=self.device)[None], Rows(), lengths
        elif varlen or (varlen is None and self.device.type == "cuda"):
            starts = np.repeat(batch.cu_seqlens[:-1].astype(np.int64), lengths)
            positions = torch.from_numpy(np.arange(batch.tokens) - starts).to(self.device)[None]
            cu_seqlens = torch.from_numpy(batch.cu_seqlens.astype(np.int32)).to(self.device)
            yield 0, batch.tokens, ids[None], positions, Rows(cu_seqlens, tuple(int(n) for n in lengths)), None
        else:
            for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
                if end > start:
                    yield start, end, ids[None, start:end], torch.arange(end - start, device=self.device)[None], Rows(), None

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, rows: Rows, out: torch.Tensor, real: np.ndarray | None) -> torch.Tensor:
        """One pass; writes the taps into `out` [tokens, L*H] and returns the last kept layer's output [B, T, H]."""
        width = self.facts.hidden_size
        rotate = self.rotation(positions)
        x = F.embedding(ids, self.embedding)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotate, rows, self.mixers)
            if index in self.taps:
                column = self.taps.index(index) * width
                out[:, column : column + width] = _real_tokens(x, real)
        return x


def _real_tokens(x: torch.Tensor, real: np.ndarray | None) -> torch.Tensor:
    """[B, T, H] -> [real tokens, H] in document order; `real` None means no padding."""
    if real is None:
        return x[0]
    mask = torch.from_numpy(np.arange(x.shape[1]) < real[:, None]).to(x.device)
    return x[mask]


def teacher_positions(batch: Batch, block_size: int) -> np.ndarray:
    """Positions int32 [P], ascending and distinct, whose next token is the label of some slot: anchor + k - 1 for k = 1..K-1 where
    anchor + k lies in the anchor's document and is supervised."""
    anchors = batch.anchors.astype(np.int64)
    ends = batch.cu_seqlens.astype(np.int64)[np.searchsorted(batch.cu_seqlens, anchors, side="right")]
    labels = anchors[:, None] + np.arange(1, block_size)
    inside = labels < ends[:, None]
    counts = inside & (batch.loss_mask[np.where(inside, labels, 0)] == 1)
    return np.unique(labels[counts] - 1).astype(np.int32)
