"""Small drafters and batches for the drafter's tests."""

import numpy as np
import torch

from dflash_ray.config.loading import load_config, merge
from dflash_ray.data.batches.batch import Batch
from dflash_ray.draft.dflash.model import DraftModel, initialise
from dflash_ray.draft.dflash.shape import FULL, SLIDING, DraftShape
from dflash_ray.draft.trainer import DraftTrainer

VOCAB = 23
QWEN = DraftShape(
    hidden=5120,
    vocab=248320,
    intermediate=17408,
    num_layers=5,
    heads=32,
    kv_heads=8,
    head_dim=128,
    layer_types=(SLIDING,) * 4 + (FULL,),
    sliding_window=2048,
    block_size=16,
    mask_token_id=248070,
    target_layer_ids=(1, 16, 31, 46, 61),
    num_target_layers=64,
    rope_theta=1e7,
    rms_norm_eps=1e-6,
    max_position_embeddings=262144,
)


def small_shape(**changes) -> DraftShape:
    values = dict(
        hidden=12,
        vocab=VOCAB,
        intermediate=20,
        num_layers=2,
        heads=4,
        kv_heads=2,
        head_dim=6,
        layer_types=(FULL, FULL),
        sliding_window=None,
        block_size=4,
        mask_token_id=VOCAB - 1,
        target_layer_ids=(1, 3),
        num_target_layers=6,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
    )
    return DraftShape(**(values | changes))


def small_batch(lengths=(9, 7), anchors=(1, 3, 10), *, seed=0, unsupervised=(), number=0, sample_ids=None) -> Batch:
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    mask = np.ones(tokens, np.uint8)
    mask[list(unsupervised)] = 0
    return Batch(
        number=number,
        epoch=0,
        sample_ids=np.arange(len(lengths)) if sample_ids is None else np.asarray(sample_ids),
        input_ids=rng.integers(0, VOCAB - 1, tokens).astype(np.int32),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        loss_mask=mask,
        anchors=np.asarray(anchors, np.int32),
    )


def random(*size, seed=0, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def small_model(shape: DraftShape, seed: int = 0, std: float = 0.3) -> DraftModel:
    """float64, with norm weights away from 1 so that a forgotten one shows."""
    model = DraftModel(shape).double()
    initialise(model, seed, std)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.2 * random(len(parameter), seed=100 + index))
    return model


def small_trainer(shape: DraftShape | None = None, total_steps: int = 20, **overrides) -> DraftTrainer:
    shape = shape or small_shape()
    config = load_config(overrides=merge({"draft": {"block_size": shape.block_size}, "train": {"head_chunk": 5}}, overrides))
    embed, head = random(shape.vocab, shape.hidden, seed=7).float(), random(shape.vocab, shape.hidden, seed=8).float()
    return DraftTrainer(config, shape, embed, head, "cpu", total_steps, tables="0f1e2d")


def features_for(batch: Batch, shape: DraftShape, seed: int = 3) -> torch.Tensor:
    return random(batch.tokens, shape.features, seed=seed, dtype=torch.float32)
