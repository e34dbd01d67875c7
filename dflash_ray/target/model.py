"""The frozen target: batches of tokens in, tapped hidden states out.

`features` returns the outputs of the tapped layers for every token of a batch, in document order and without padding, whatever layout
the pass itself ran in. On a CPU a packed batch is one call per document, so a document's features do not depend on its neighbours by a
single bit. On a GPU it is one row through the fast path, packed or padded alike, unless the start found that path wanting (`kernels`).
`varlen=True` runs the plain layers over one row with `cu_seqlens`.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dflash_ray.data.batches.batch import Batch
from dflash_ray.linear import FrozenLinear
from dflash_ray.target.fast import FastLayer, documents, run_layers
from dflash_ray.target.layers import Layer, RmsNorm, RotaryTable, Rotation
from dflash_ray.target.plain.mixers import DocumentBounds, Mixers
from dflash_ray.target.self_test import KernelReport
from dflash_ray.target.shape import TargetShape


class FrozenTarget:
    """Made by `load_target`. `features` are [T, L*H] in the target's dtype: the L taps side by side, each H wide.

    `layers` are the plain ones (none in 8 bits), `fast` the same for one packed pass, or None; `kernels` says which runs and why.
    """

    def __init__(
        self,
        *,
        target_shape: TargetShape,
        taps: list[int],
        layers: list[Layer],
        embedding: torch.Tensor,
        final_norm: nn.Module | None,
        head: torch.Tensor | None,
        rotary_table: RotaryTable,
        layout: str,
        mixers: Mixers,
        fast: list[FastLayer] | None,
        kernels: KernelReport,
    ) -> None:
        self.shape, self.taps, self.layers = target_shape, taps, layers
        self.embedding, self.final_norm, self.head = embedding, final_norm, head
        # the module itself makes teacher rows; decoding runs the same numbers in fewer calls
        self.logits = None
        if head is not None:
            self.logits = FrozenLinear(head)  # of final-normed rows
            self.logits.expect_few_rows()
        self.decode_norm = None if final_norm is None else RmsNorm(final_norm, target_shape.rms_norm_eps)
        self.layout = layout
        self.device, self.dtype = embedding.device, embedding.dtype
        self.rotary_table, self.mixers, self.fast, self.kernels = rotary_table, mixers, fast, kernels

    def rotation(self, positions: np.ndarray) -> Rotation:
        """Rotary factors of `positions` int64 [B or 1, T], each counted from its document's start."""
        cos, sin = self.rotary_table(int(positions.max()) + 1)
        at = torch.from_numpy(positions).to(self.device)
        return Rotation(cos[at].unsqueeze(2), sin[at].unsqueeze(2))

    @torch.no_grad()
    def features(self, batch: Batch, *, varlen: bool | None = None) -> torch.Tensor:
        """Tapped states [T, L*H] of a batch. `varlen` True: the plain layers in one row; False: document by document; default: fast."""
        out = self._empty_features(batch)
        if self.fast is not None and varlen is None:
            self._run_fast(batch, out)
            return out
        for start, end, ids, positions, bounds, real in self._passes(batch, varlen):
            self._run(ids, positions, bounds, out[start:end], real)
        return out

    @torch.no_grad()
    def features_and_teacher(
        self, batch: Batch, block_size: int, *, varlen: bool | None = None
    ) -> tuple[torch.Tensor, np.ndarray, torch.Tensor]:
        """Features, teacher positions int32 [P] and teacher rows [P, H] = final norm of the last hidden state there.

        The head applied to a row gives the target's own distribution of the token after that position.
        """
        assert self.final_norm is not None, "teacher rows need a target loaded with teacher=True"
        positions_wanted = teacher_positions(batch, block_size)
        out = self._empty_features(batch)
        if self.fast is not None and varlen is None:
            last, real = self._run_fast(batch, out)
            wanted = torch.from_numpy(positions_wanted.astype(np.int64)).to(self.device)
            return out, positions_wanted, self.final_norm(last[wanted if real is None else real[wanted]])
        rows_out = torch.empty(len(positions_wanted), self.shape.hidden_size, dtype=self.dtype, device=self.device)
        for start, end, ids, positions, bounds, real in self._passes(batch, varlen):
            last = self._run(ids, positions, bounds, out[start:end], real)
            low, high = np.searchsorted(positions_wanted, (start, end))
            wanted = torch.from_numpy(positions_wanted[low:high].astype(np.int64) - start).to(self.device)
            rows_out[low:high] = self.final_norm(_real_tokens(last, real)[wanted])
        return out, positions_wanted, rows_out

    def _empty_features(self, batch: Batch) -> torch.Tensor:
        longest = batch.lengths.max(initial=0)
        if longest > self.shape.max_position_embeddings:
            raise ValueError(
                f"data.path: a document of {longest} tokens is longer than the target's {self.shape.max_position_embeddings} "
                f"positions; prepare the data with a smaller --max-length"
            )
        return torch.empty(batch.tokens, len(self.taps) * self.shape.hidden_size, dtype=self.dtype, device=self.device)

    def _run_fast(self, batch: Batch, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One pass of the fast layers; writes the taps. The last output [allocated tokens, H], and where in it each token of the batch is.

        A padded batch is one of equally long documents: padding at the end of a document reaches no token before it.
        """
        ids, lengths, real = batch.input_ids, batch.lengths[batch.lengths > 0], None
        if batch.tokens == 0:
            return self.embedding[:0], None
        if self._layout(batch) == "padded":
            longest = int(lengths.max())
            starts = np.repeat(np.arange(len(lengths)) * longest - batch.cu_seqlens[:-1][batch.lengths > 0], lengths)
            place = np.arange(batch.tokens) + starts
            padded = np.zeros(len(lengths) * longest, dtype=np.int32)
            padded[place] = ids
            ids, lengths, real = padded, np.full(len(lengths), longest), self._to_device(place)
        delta = self.shape.has_linear_attention
        docs = documents(lengths, self.device, self.rotary_table(int(lengths.max())), delta=delta)
        return run_layers(self.fast, self._to_device(ids), self.embedding, docs, self.taps, out, real), real

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        """A copy on the device that the host does not wait for."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _layout(self, batch: Batch) -> str:
        return batch.layout if self.layout == "auto" else self.layout

    def _passes(self, batch: Batch, varlen: bool | None):
        """Passes of the plain layers: (first token, end, ids [B,T], positions [B or 1,T], document bounds, real tokens per row or None)."""
        if batch.tokens == 0:
            return
        lengths = batch.lengths
        ids = torch.from_numpy(batch.input_ids.astype(np.int64)).to(self.device)
        if self._layout(batch) == "padded":
            longest = int(lengths.max())
            column = np.arange(longest)
            source = np.minimum(batch.cu_seqlens[:-1, None] + column, batch.tokens - 1)
            padded = torch.where(torch.from_numpy(column < lengths[:, None]).to(self.device), ids[torch.from_numpy(source)], 0)
            yield 0, batch.tokens, padded, column[None], DocumentBounds(), lengths
        elif varlen:
            starts = np.repeat(batch.cu_seqlens[:-1].astype(np.int64), lengths)
            cu_seqlens = torch.from_numpy(batch.cu_seqlens.astype(np.int32)).to(self.device)
            bounds = DocumentBounds(cu_seqlens, tuple(lengths.tolist()))
            yield 0, batch.tokens, ids[None], (np.arange(batch.tokens) - starts)[None], bounds, None
        else:
            for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
                if end > start:
                    yield start, end, ids[None, start:end], np.arange(end - start)[None], DocumentBounds(), None

    def _run(
        self, ids: torch.Tensor, positions: np.ndarray, bounds: DocumentBounds, out: torch.Tensor, real: np.ndarray | None
    ) -> torch.Tensor:
        """One pass; writes the taps into `out` [tokens, L*H] and returns the last kept layer's output [B, T, H]."""
        width = self.shape.hidden_size
        rotate = self.rotation(positions)
        x = F.embedding(ids, self.embedding)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotate, bounds, self.mixers)
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
