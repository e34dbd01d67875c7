"""What a target says of the features that it has computed, beside the features themselves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class FeaturesInfo:
    """`seconds` is the time of the computation. `sent` tells whether the features came with this answer; else a second call brings them."""

    target: str
    seconds: float
    layer_ids: list[int]
    sent: bool
    sketch: np.ndarray | None = None  # where a cross-check was asked for (`sketch.sketch`)
