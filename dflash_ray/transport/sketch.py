"""A few kilobytes that tell whether two targets computed the same features, so that the features themselves need not travel twice."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

TOKENS, PROJECTIONS = 256, 4
TOLERANCE = {"float32": 1e-3, "bf16": 5e-2, "fp8": 1e-1}  # relative; replicas of one kind differ by rounding at most


def sketch(features: Tensor, taps: int) -> np.ndarray:
    """float32 [S, taps, 1 + PROJECTIONS] of features [T, taps*H]: norms and fixed random projections of up to TOKENS tokens."""
    chosen = torch.linspace(0, features.shape[0] - 1, min(TOKENS, features.shape[0])).long()
    rows = features[chosen.to(features.device)].view(len(chosen), taps, -1).float()
    signs = torch.randint(0, 2, (rows.shape[-1], PROJECTIONS), generator=torch.Generator().manual_seed(0)).float() * 2 - 1
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return torch.cat([norms, rows @ signs.to(rows.device)], dim=-1).cpu().numpy()


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """Largest relative L2 distance over the taps; infinite where shapes differ or a number is not finite."""
    if one.shape != other.shape or not (np.isfinite(one).all() and np.isfinite(other).all()):
        return float("inf")
    apart = np.linalg.norm(one - other, axis=(0, 2))
    return float((apart / np.maximum(np.linalg.norm(one, axis=(0, 2)), 1e-30)).max())
