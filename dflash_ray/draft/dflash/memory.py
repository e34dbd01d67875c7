"""What a drafter will hold, as arithmetic, before a device is touched."""

from __future__ import annotations

from typing import NamedTuple

from dflash_ray.config.schema import Config
from dflash_ray.draft.dflash.shape import DraftShape


class Bytes(NamedTuple):
    bytes: int
    arithmetic: str  # for the dry run


def memory_estimate(
    shape: DraftShape, config: Config, tokens: int, anchors: int, *, gpu: bool = True, tied: bool = False
) -> dict[str, Bytes]:
    """Bytes by kind for a batch of `tokens` with `anchors`; their sum is the drafter's peak.

    Activations count what is kept per block slot and context token, by autograd or by the fused pass. Scores of the plain attention are
    counted for a CPU only, as if all tokens were one document.
    """
    width = 2 if config.train.precision == "bf16" or (config.train.precision == "auto" and gpu) else 4
    dtype = "bf16" if width == 2 else "float32"
    count, vectors = shape.parameters, sum(size[0] for size in shape.tensor_shapes().values() if len(size) == 1)
    billions = f"{count / 1e9:.3f} B parameters"
    loss, slots = config.loss, anchors * shape.block_size
    sums = loss.by_weight + loss.by_anchors
    moments = count + vectors if config.optimizer.name == "muon" else 2 * count
    tables = 1 if tied else 2
    queries, keys, layers = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.num_layers
    fused = gpu and width == 2 and shape.fits_kernels
    if fused:
        per_slot = layers * (2 * shape.hidden + 2 * queries + 2 * keys + 2 * shape.intermediate)
        per_token = 2 * shape.hidden + layers * 2 * keys
    else:
        per_slot = layers * (6 * shape.hidden + 3 * queries + 3 * keys + 4 * shape.intermediate)
        per_token = 3 * shape.hidden + layers * 3 * keys
    kept = {
        "master weights": Bytes(4 * count, f"{billions} x 4 B"),
        "gradient sums": Bytes(4 * count * sums, f"{billions} x 4 B x {sums} divisor{'s' if sums > 1 else ''}"),
        "optimizer": Bytes(4 * moments, f"{moments / 1e9:.3f} B {config.optimizer.name} values x 4 B"),
        "embedding and head": Bytes(
            tables * shape.vocab * shape.hidden * width, f"{tables} x {shape.vocab:,} x {shape.hidden:,} x {width} B ({dtype})"
        ),
        "features": Bytes(
            2 * tokens * shape.features * width,
            f"2 batches x {tokens:,} tokens x {len(shape.target_layer_ids)} taps x {shape.hidden:,} x {width} B",
        ),
        "activations": Bytes(
            (slots * per_slot + tokens * per_token) * width,
            f"({anchors:,} anchors x {shape.block_size} slots x {per_slot:,} + {tokens:,} tokens x {per_token:,}) x {width} B",
        ),
        "logits": _logits(shape, config, slots, width, fused),
    }
    if loss.needs_teacher:
        labels = anchors * (shape.block_size - 1)
        kept["teacher rows"] = Bytes(
            2 * labels * shape.hidden * width, f"2 batches x {anchors:,} anchors x {shape.block_size - 1} x {shape.hidden:,} x {width} B"
        )
    if width == 2:
        kept["bf16 weights"] = Bytes(2 * count, f"{billions} x 2 B")
    else:
        scores = 2 * slots * shape.heads * (tokens + shape.block_size) * layers
        kept["attention scores"] = Bytes(
            4 * scores, f"2 x {slots:,} slots x {shape.heads} heads x {tokens + shape.block_size:,} keys x {layers} layers x 4 B at most"
        )
    if config.train.ema is not None:
        kept["averaged weights"] = Bytes(4 * count, f"{billions} x 4 B")
    return kept


def _logits(shape: DraftShape, config: Config, slots: int, width: int, fused: bool) -> Bytes:
    rows = min(config.train.head_chunk, slots)
    per_logit = (4 if width == 4 else 6) * (4 if config.loss.needs_teacher else 1)
    if fused and not config.loss.needs_teacher:
        per_logit = 2
    return Bytes(rows * shape.vocab * per_logit, f"{rows:,} rows x {shape.vocab:,} x {per_logit} B")
