"""Rows of `jobs.bench target`: the frozen target on batches of every layout."""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch

from dflash_ray.config.schema import DraftConfig
from dflash_ray.data.batches.batch import Batch
from dflash_ray.draft.dflash.shape import resolve_taps
from dflash_ray.planning import bench
from dflash_ray.target.cost import counted_flops
from dflash_ray.target.load import load_target
from dflash_ray.target.model import FrozenTarget
from dflash_ray.target.shape import known_target_shape
from jobs.benchmarks.flags import default_shape, write_record

# of the corpus the lengths are drawn like; shorter corpora scale them
EDGES, LONGEST = (0, 770, 1216, 1728, 2432, 3296, 8192), 8192
SAMPLES = 20_000


def measure_all(args: argparse.Namespace) -> None:
    """Every row of `args`, printed, and written where `args.json` says."""
    device = bench.bench_device()
    gpu = device.type == "cuda"
    shape = args.shape or default_shape(gpu)
    longest = args.longest or (LONGEST if gpu else 256)
    target_shape = known_target_shape(shape)
    layers = args.layers or target_shape.num_layers - 2
    if not 1 <= layers < target_shape.num_layers:
        raise ValueError(f"--layers: {layers} is outside 1..{target_shape.num_layers - 1} of {shape}")
    if longest < 256:
        raise ValueError(f"--longest: {longest} leaves length buckets empty; use at least 256")
    taps = [tap for tap in resolve_taps(DraftConfig(), target_shape.num_layers) if tap < layers - 1] + [layers - 1]
    record = bench.BenchmarkRecord("target", shape, device, bench.matmul_ceiling(device), bench.sustained_ceiling(device))
    record.about |= {"layers": layers, "taps": taps, "longest": longest, "repeats": args.repeats}
    ceilings = f"ceiling {record.ceiling / 1e12:.1f} TFLOP/s, sustained {record.sustained / 1e12:.1f}"
    print(f"{shape}, {layers} layers on {record.about['device']}: {ceilings}", flush=True)
    for precision in ("bf16", "fp8") if args.precision == "both" else (args.precision,):
        target = load_target(None, taps=taps, device=device, precision=precision, random_shape=shape, fast=True)
        record.about[f"kernels_{precision}"] = vars(target.kernels)
        for name, one in cases(longest, target_shape.vocab_size).items():
            if precision == args.precision or precision == "bf16" or name.startswith("packed"):
                measure(record, target, f"{precision} {name}", one, layers, args.repeats)
        if f"{precision} uniform 32k" in {row.name for row in record.rows}:
            compare(record, precision, longest)
        del target
    if args.precision == "both":
        record.comparisons["fp8 over bf16, packed"] = rate(record, "fp8 packed 16k") / rate(record, "bf16 packed 16k")
    print(json.dumps(record.comparisons, indent=1))
    write_record(args.json, record.as_dict())


def cases(longest: int, vocab: int) -> dict[str, Batch]:
    """Batches by name. "16k" is 16,384 tokens where the longest document has 8,192, and twice the longest otherwise."""
    lengths = bench.document_lengths(SAMPLES, longest)
    small, large = 2 * longest, 4 * longest
    found = {
        "packed 16k": batch(take(lengths, small, padded=False), "packed", vocab),
        "packed 32k": batch(take(lengths, large, padded=False), "packed", vocab),
        "uniform 32k": batch(np.full(16, longest // 4), "padded", vocab),
        "random padded 32k": batch(take(lengths, large, padded=True), "padded", vocab),
    }
    for low, high in buckets(longest):
        inside = lengths[(lengths > low) & (lengths <= high)]
        found[f"bucket {high} padded 32k"] = batch(take(inside, large, padded=True), "padded", vocab)
    return found


def buckets(longest: int) -> list[tuple[int, int]]:
    edges = [edge * longest // LONGEST for edge in EDGES]
    return list(zip(edges, edges[1:], strict=False))


def take(lengths: np.ndarray, budget: int, *, padded: bool) -> np.ndarray:
    """The first documents whose allocated tokens (rectangle if `padded`) stay within `budget`."""
    count = np.arange(1, len(lengths) + 1)
    allocated = np.maximum.accumulate(lengths) * count if padded else np.cumsum(lengths)
    return lengths[: int(np.searchsorted(allocated, budget, side="right"))]


def batch(lengths: np.ndarray, layout: str, vocab: int) -> Batch:
    tokens = int(lengths.sum())
    return Batch(
        number=0,
        epoch=0,
        sample_ids=np.arange(len(lengths)),
        input_ids=np.random.default_rng(0).integers(0, vocab, tokens).astype(np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask=np.ones(tokens, dtype=np.uint8),
        anchors=np.empty(0, dtype=np.int32),
        layout=layout,
    )


def measure(record: bench.BenchmarkRecord, target: FrozenTarget, name: str, one: Batch, layers: int, repeats: int) -> None:
    with torch.inference_mode():
        peak = bench.peak_bytes(target.device, lambda: target.features(one))
        timing = bench.time_calls(lambda: target.features(one), target.device, repeats=repeats, warm=0)
    flops = counted_flops(target.shape, layers, one.lengths)
    details = {"documents": one.documents, "allocated_tokens": one.allocated_tokens}
    record.add(bench.Row(name, timing, one.tokens, flops, peak, details))


def rate(record: bench.BenchmarkRecord, name: str, *, allocated: bool = False) -> float:
    """Real (or allocated) tokens per second of a row."""
    row = next(row for row in record.rows if row.name == name)
    return (row.details["allocated_tokens"] if allocated else row.tokens) / row.timing.median


def compare(record: bench.BenchmarkRecord, precision: str, longest: int) -> None:
    """Speed ratios in real tokens per second. A padded row's speed per allocated token is measured on one batch, the share of them that is
    real comes from batches of all documents; the buckets' speed is an epoch's."""
    lengths, budget = bench.document_lengths(SAMPLES, longest), 4 * longest
    packed = rate(record, f"{precision} packed 32k")
    seconds = 0.0
    for low, high in buckets(longest):
        inside = lengths[(lengths > low) & (lengths <= high)]
        seconds += allocated(inside, budget) / rate(record, f"{precision} bucket {high} padded 32k", allocated=True)
    random = rate(record, f"{precision} random padded 32k", allocated=True) * lengths.sum() / allocated(lengths, budget)
    record.comparisons |= {
        f"{precision} packed over uniform": packed / rate(record, f"{precision} uniform 32k"),
        f"{precision} packed over six buckets": packed * seconds / lengths.sum(),
        f"{precision} packed over random padded": packed / random,
    }


def allocated(lengths: np.ndarray, budget: int) -> int:
    """Tokens allocated for all documents in padded batches filled one after the other."""
    total = 0
    while len(lengths):
        part = take(lengths[: budget + 1], budget, padded=True)
        total += int(part.max()) * len(part)
        lengths = lengths[len(part) :]
    return total
