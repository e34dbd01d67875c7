"""Rows of `jobs.bench drafter`: micro-steps and steps of the real trainer, and its losses beside float64."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_ray.config.loading import load_config
from dflash_ray.data.batches.batch import Batch
from dflash_ray.draft.blocks.labels import Labels
from dflash_ray.draft.blocks.mask import Blocks
from dflash_ray.draft.dflash.cost import flops_per_label, flops_per_slot, flops_per_token
from dflash_ray.draft.dflash.model import DraftModel
from dflash_ray.draft.dflash.shape import DraftShape, resolve_shape
from dflash_ray.draft.loss import block_losses
from dflash_ray.draft.trainer import DraftTrainer, Staged
from dflash_ray.planning import bench
from dflash_ray.target.shape import known_target_shape
from dflash_ray.transport.channel import Receiver
from dflash_ray.transport.payload import pack
from jobs.benchmarks.flags import default_shape, write_record

# settings of the published drafter; the tiny one has the same kinds of layers
PUBLISHED = dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128, sliding_window=2048, num_layers=5, block_size=16)
TINY = dict(num_attention_heads=4, num_key_value_heads=1, head_dim=16, sliding_window=64, num_layers=2, block_size=8)


def measure_all(args: argparse.Namespace) -> None:
    """Every row of `args`, printed, and written where `args.json` says."""
    device = bench.bench_device()
    if args.profile and device.type != "cuda":
        raise ValueError("--profile: kernels are listed on a GPU only, and there is none here")
    name = args.shape or default_shape(device.type == "cuda")
    trainer = make_trainer(name, device, args.optimizer, args.chunk)
    record = bench.BenchmarkRecord("drafter", name, device, bench.matmul_ceiling(device), bench.sustained_ceiling(device))
    record.about |= {"shape_values": trainer.shape.as_dict(), "fused": trainer.fused is not None, "optimizer": args.optimizer}
    record.about |= {"head_chunk": trainer.config.train.head_chunk, "repeats": args.repeats, "parameters": trainer.shape.parameters}
    print(f"{name}, drafter of {trainer.shape.parameters / 1e6:,.0f} M parameters on {record.about['device']}")
    print(f"ceiling {record.ceiling / 1e12:.1f} TFLOP/s, sustained {record.sustained / 1e12:.1f}", flush=True)
    for case, batch in cases(trainer.shape, device.type == "cuda").items():
        measure(record, trainer, case, batch, args.repeats)
    first = next(iter(cases(trainer.shape, device.type == "cuda").values()))
    record.comparisons |= against_float64(trainer, first)
    record.comparisons["ceiling after, TFLOP/s"] = bench.matmul_ceiling(device) / 1e12
    print(json.dumps(record.comparisons, indent=1))
    if args.profile:
        profile(trainer, first, args.profile)
    write_record(args.json, record.as_dict())


def draft_settings(hidden: int, vocab: int) -> dict[str, Any]:
    """The `draft` section of a config for a target of these sizes: the published drafter, or a tiny one."""
    settings = PUBLISHED if hidden >= 2048 else TINY
    kinds = ["sliding_attention"] * (settings["num_layers"] - 1) + ["full_attention"]
    return {**settings, "layer_types": kinds, "mask_token_id": vocab - 1}


def make_trainer(name: str, device: torch.device, optimizer: str, chunk: int | None) -> DraftTrainer:
    target_shape = known_target_shape(name)
    settings = draft_settings(target_shape.hidden_size, target_shape.vocab_size)
    train = {"head_chunk": chunk} if chunk else {}
    config = load_config(overrides={"draft": settings, "optimizer": {"name": optimizer}, "train": train})
    shape = resolve_shape(config.draft, target_shape)
    generator = torch.Generator(device).manual_seed(1)
    embed, head = (torch.randn(shape.vocab, shape.hidden, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    return DraftTrainer(config, shape, embed.mul_(0.02), head.mul_(0.02), device, total_steps=10_000)


def cases(shape: DraftShape, gpu: bool) -> dict[str, Batch]:
    """Rows x tokens with so many anchors per row, and packed documents of natural lengths with one anchor per so many tokens."""
    unit, anchors = (4096, 512) if gpu else (64, 8)
    natural = bench.document_lengths(1000, 2 * unit)
    packed = natural[: int(np.searchsorted(natural.cumsum(), 4 * unit, side="right"))]
    return {
        f"1 x {unit}, {anchors} anchors": batch([unit], [anchors], shape),
        f"1 x {2 * unit}, {anchors} anchors": batch([2 * unit], [anchors], shape),
        f"4 x {unit}, {anchors} anchors": batch([unit] * 4, [anchors] * 4, shape),
        f"packed {4 * unit}, 1 per 43": batch(packed, [max(1, round(length / 43)) for length in packed], shape),
    }


def batch(lengths: list[int] | np.ndarray, anchors: list[int], shape: DraftShape) -> Batch:
    """Documents of these lengths, each with so many anchors whose labels are all there where the document is long enough."""
    rng, bounds = np.random.default_rng(0), np.concatenate([[0], np.cumsum(lengths)])
    chosen = []
    for start, length, count in zip(bounds, lengths, anchors, strict=False):
        places = max(1, length - shape.block_size + 1)
        chosen.append(start + np.sort(rng.choice(places, min(count, places), replace=False)))
    return Batch(
        number=0,
        epoch=0,
        sample_ids=np.arange(len(lengths)),
        input_ids=rng.integers(0, shape.vocab - 1, bounds[-1]).astype(np.int32),
        cu_seqlens=bounds.astype(np.int32),
        loss_mask=np.ones(bounds[-1], np.uint8),
        anchors=np.concatenate(chosen).astype(np.int32),
    )


def features_of(one: Batch, trainer: DraftTrainer) -> torch.Tensor:
    """[T, L*H] on the host, where features arrive."""
    generator = torch.Generator(trainer.device).manual_seed(2)
    return torch.randn(one.tokens, trainer.shape.features, device=trainer.device, generator=generator).to(trainer.dtype).cpu()


def counted_flops(shape: DraftShape, one: Batch, labels: int) -> float:
    slots = len(one.anchors) * shape.block_size
    return slots * flops_per_slot(shape) + labels * flops_per_label(shape) + one.tokens * flops_per_token(shape)


def measure(record: bench.BenchmarkRecord, trainer: DraftTrainer, name: str, one: Batch, repeats: int) -> None:
    """Rows for a step's first micro-step, for one that adds to others, for the whole step, and for steps during which another thread copies
    the next batch from the host."""
    device = trainer.device
    on_host = features_of(one, trainer)
    staged = trainer.stage(one, on_host)
    step(trainer, staged)  # makes the optimizer's state
    peak = bench.peak_bytes(device, lambda: step(trainer, staged))
    details = {"anchors": len(one.anchors), "labels": staged.labels.count, "documents": one.documents}
    if peak:
        details["beyond_gib"] = (peak - held_bytes(trainer)) / 2**30
    flops = counted_flops(trainer.shape, one, staged.labels.count)

    def add(kind: str, call: Callable[[], Any], peak: int = 0, details: dict[str, Any] | None = None) -> None:
        timing = bench.time_calls(call, device, repeats=repeats)
        record.add(bench.Row(f"{name}: {kind}", timing, one.tokens, flops, peak, details or {}))

    def first() -> None:
        trainer.forget_gradients()
        trainer.train_staged(staged)

    add("forward+backward", first, peak, details)
    add("forward+backward, added", lambda: trainer.train_staged(staged))
    trainer.optimizer_step(trainer.step)
    add("step", lambda: step(trainer, staged), peak)
    receiver, message = Receiver(device), {"features": pack(on_host)}
    with ThreadPoolExecutor(1) as pool:

        def arrive() -> Staged:
            tensors = receiver.receive(message)
            return trainer.stage(one, tensors["features"])

        coming = [pool.submit(arrive)]

        def fed() -> None:
            ready = coming.pop().result()
            coming.append(pool.submit(arrive))
            step(trainer, ready)

        add("step while staging", fed)
        coming.pop().result()
    if peak:
        print(f"    peak beyond weights, gradients, moments, embedding and head: {details['beyond_gib']:.2f} GiB", flush=True)


def step(trainer: DraftTrainer, staged: Staged) -> None:
    trainer.train_staged(staged)
    trainer.optimizer_step(trainer.step)


def held_bytes(trainer: DraftTrainer) -> int:
    """Master weights, float32 gradients, the optimizer's state, embedding and head."""
    state = sum(tensor.nbytes for tensor in trainer.state_dict()[0].values())
    return state + 4 * trainer.shape.parameters + trainer.embed.nbytes + trainer.head.nbytes


def against_float64(trainer: DraftTrainer, one: Batch) -> dict[str, float]:
    """Relative difference of the losses from those of the same weights and features in float64 throughout."""
    features = features_of(one, trainer)
    exact = DraftModel(trainer.shape).to(trainer.device, torch.float64)
    exact.load_state_dict(trainer.model.state_dict())
    labels = Labels.of(one, trainer.shape.block_size, trainer.gamma, trainer.device)
    blocks = Blocks.of(one, trainer.shape.block_size, trainer.device)
    with torch.no_grad():
        rows = exact(features.to(trainer.device, torch.float64), blocks, trainer.embed.double(), labels.slots)
    del exact
    theirs = block_losses(rows, trainer.head.double(), labels, trainer.config.loss, 512, gradients=False).sums
    ours = trainer.micro_step(one, features)
    trainer.optimizer_step(trainer.step)
    return {f"{name} against float64": abs(ours[name] / theirs[name] - 1) for name in ("ce", "dpace")}


def profile(trainer: DraftTrainer, one: Batch, path: Path) -> None:
    """Writes the device time by kernel of two whole steps."""
    staged = trainer.stage(one, features_of(one, trainer))
    step(trainer, staged)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(2):
            step(trainer, staged)
        torch.cuda.synchronize()
    path.write_text(seen.key_averages().table(sort_by="self_device_time_total", row_limit=60, max_name_column_width=110))
