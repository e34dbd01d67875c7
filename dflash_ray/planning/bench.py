"""What the benchmark jobs share: the matrix-product ceiling, timing, synthetic lengths, and the record that is written.

Every share of the ceiling is taken against a product measured in the same run on the same card: ten products on a card that rests and,
where asked for, products without a pause for a second. A card at its power limit keeps up less than it reaches for a moment (an H200: 0.85
of it), and long passes are held to the lower of the two; both shares are written. Times are medians between CUDA events (the host clock on
a CPU), after warm-up. Counted FLOPs are those a batch needs; padding and recomputation never count.
"""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

_PACKAGES = ("torch", "triton", "transformers", "flash-linear-attention")
# log of tokens per document: mean about 2,026 within the limits, the shape of the corpus this project grew from
_LENGTH_MEAN, _LENGTH_SIGMA, _LENGTH_LEAST, _LENGTH_MOST = 7.3, 0.83, 32, 8192


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, fastest and slowest of `repeats`."""

    median: float
    fastest: float
    slowest: float
    repeats: int


@dataclass(frozen=True)
class Row:
    """One measured case. `tokens` are real ones, `flops` counted ones, `peak_bytes` the most the device held (0 on a CPU)."""

    name: str
    timing: Timing
    tokens: int
    flops: float
    peak_bytes: int = 0
    details: dict[str, Any] = field(default_factory=dict)  # `facts` in a record's file

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.timing.median

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.timing.median


class BenchmarkRecord:
    """Rows of one benchmark run beside the machine, the versions and the ceiling they are compared with."""

    def __init__(self, job: str, shape: str, device: torch.device, ceiling: float, sustained: float | None = None) -> None:
        self.ceiling, self.sustained = ceiling, sustained
        self.rows: list[Row] = []
        self.about: dict[str, Any] = {
            "job": job,
            "shape": shape,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": device_name(device),
            "versions": versions(),
            "ceiling_tflops": ceiling / 1e12,
        }
        if sustained:
            self.about["sustained_ceiling_tflops"] = sustained / 1e12
        self.comparisons: dict[str, Any] = {}

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        print(self.line(row), flush=True)
        return row

    def share(self, row: Row) -> float:
        """Counted FLOP/s of `row` over the ceiling."""
        return row.flops_per_second / self.ceiling

    def line(self, row: Row) -> str:
        sustained = f", {row.flops_per_second / self.sustained:5.3f} of the sustained" if self.sustained else ""
        memory = f"  {row.peak_bytes / 2**30:6.1f} GiB" if row.peak_bytes else ""
        return (
            f"{row.name:<32} {row.timing.median * 1e3:10.2f} ms  {row.tokens_per_second:12,.0f} tokens/s  "
            f"{self.share(row):6.3f} of the ceiling{sustained}{memory}"
        )

    def as_dict(self) -> dict[str, Any]:
        rows = []
        for row in self.rows:
            shares = {"share_of_ceiling": self.share(row)}
            if self.sustained:
                shares["share_of_sustained"] = row.flops_per_second / self.sustained
            values = asdict(row)
            values["facts"] = values.pop("details")
            rows.append({**values, "tokens_per_second": row.tokens_per_second, **shares})
        return {**self.about, "rows": rows, "comparisons": self.comparisons}


def bench_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    found = {name: _version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), "cuda": torch.version.cuda or "none", **found}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def time_calls(function: Callable[[], Any], device: torch.device, *, repeats: int, warm: int = 2) -> Timing:
    """Times single calls of `function` after `warm` untimed ones. Calls are queued without waiting in between, as in training."""
    for _ in range(warm):
        function()
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        torch.cuda.synchronize(device)
        marks[0].record()
        for mark in marks[1:]:
            function()
            mark.record()
        torch.cuda.synchronize(device)
        seconds = [a.elapsed_time(b) / 1e3 for a, b in zip(marks, marks[1:], strict=False)]
    else:
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - began)
    return Timing(statistics.median(seconds), min(seconds), max(seconds), repeats)


def matmul_ceiling(device: torch.device, *, size: int | None = None, repeats: int = 10) -> float:
    """FLOP/s of one square bf16 product of random matrices, `size` 8192 on a GPU and 512 on a CPU."""
    size = size or (8192 if device.type == "cuda" else 512)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    return 2 * size**3 / time_calls(lambda: a @ b, device, repeats=repeats, warm=3).median


def sustained_ceiling(device: torch.device) -> float:
    """FLOP/s of the same product without a pause for a second (a twentieth on a CPU), over the second half: what a power limit leaves."""
    size, seconds = (8192, 1.0) if device.type == "cuda" else (512, 0.05)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    once = 2 * size**3 / matmul_ceiling(device, size=size, repeats=3)
    half = max(1, int(seconds / 2 / once))
    return 2 * size**3 / time_calls(lambda: a @ b, device, repeats=half, warm=half).median


def peak_bytes(device: torch.device, function: Callable[[], Any]) -> int:
    """Most bytes allocated on the device while `function` runs; 0 on a CPU."""
    if device.type != "cuda":
        function()
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def document_lengths(count: int, longest: int, seed: int = 0) -> np.ndarray:
    """int64 [count] log-normal document lengths: 32..8,192 with a mean of about 2,026, and everything scaled for another `longest`."""
    draws = np.clip(np.random.default_rng(seed).lognormal(_LENGTH_MEAN, _LENGTH_SIGMA, count), _LENGTH_LEAST, _LENGTH_MOST)
    return np.maximum(draws * longest / _LENGTH_MOST, 1).astype(np.int64)
