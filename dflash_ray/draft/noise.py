"""Gaussian noise on received features: std x RMS of the tap over the batch.

The random numbers of a document come from a stream named (seed, epoch, sample), so they depend neither on the batch it lies in nor on
what was drawn before. The result is a new tensor: what was received may lie in memory that other processes read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_ray.data.batches.batch import Batch
from dflash_ray.random_streams import torch_generator


def add_noise(features: Tensor, batch: Batch, std: float, seed: int, taps: int) -> Tensor:
    """features [T, L*H] -> a new tensor of the same dtype; the same bits on one kind of device wherever and whenever it is computed."""
    if std == 0:
        return features
    by_tap = features.view(len(features), taps, -1)
    power = torch.linalg.vector_norm(by_tap, dim=(0, 2), dtype=torch.float32).square() / by_tap[:, 0].numel()
    scale = std * power.sqrt()[:, None]  # [L, 1]
    noisy = torch.empty_like(by_tap)
    bounds = batch.cu_seqlens.tolist()
    for sample, start, end in zip(batch.sample_ids.tolist(), bounds, bounds[1:], strict=False):
        words = torch_generator("noise", seed, batch.epoch, sample, device=features.device)
        noise = torch.randn(by_tap[start:end].shape, generator=words, device=features.device)
        noisy[start:end] = noise.mul_(scale).add_(by_tap[start:end])
    return noisy.view_as(features)
