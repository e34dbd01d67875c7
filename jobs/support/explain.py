"""`--dry-run`: what would run, what every actor will hold, and how long it takes, with the arithmetic. Touches no GPU, starts no Ray."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from dflash_ray.config.schema import Config
from dflash_ray.machine.nvml import nvml
from dflash_ray.planning.memory import GIB, SHM_SHARE, Bytes, plan_memory, refuse_what_cannot_fit, run_memory
from dflash_ray.run.build import open_batches
from dflash_ray.run.checks import check_data
from dflash_ray.run.spec import RunSpec, resolve
from jobs.support.paths import refuse_relative_paths, run_dir

PACKED_FILL = 0.99  # of the budget, what packing reaches on realistic lengths


def explain(config: Config) -> dict[str, Any]:
    refuse_relative_paths(config)
    hardware = config.hardware
    gpu_bytes = hardware.gpu_memory_gib * GIB if hardware.gpu_memory_gib else _gpu_bytes()
    device = "cuda" if gpu_bytes else "cpu"
    shm_bytes = hardware.shm_gib * GIB if hardware.shm_gib else _shm_bytes()
    spec = resolve(config, device=device, run_dir=run_dir(config))
    sizes = plan_sizes(spec)
    memory = run_memory(spec, sizes["most_tokens"], sizes["most_anchors"])
    console = Console(highlight=False, soft_wrap=True)
    console.print(yaml.safe_dump(spec.config.as_dict(), sort_keys=False), markup=False)
    shape = spec.shape
    console.print(
        f"target: {spec.target_shape.model_type}, {spec.target_shape.num_layers} layers, hidden {spec.target_shape.hidden_size:,}, taps "
        f"{list(shape.target_layer_ids)}, runs {_layers_run(spec)} layers on {device}; {config.targets} of them\n"
        f"drafter: {shape.num_layers} layers, block {shape.block_size}, {shape.parameters / 1e9:.3f} B trainable parameters "
        f"({shape.parameters:,})\n"
        f"batching: {spec.strategy} ({spec.strategy_reason}), at most {sizes['most_tokens']:,} tokens, {sizes['most_anchors']:,} anchors "
        f"per batch\n"
        f"data: {sizes['samples']:,} samples x {config.train.epochs} epochs = {sizes['tokens']:,} tokens, {sizes['batches']:,} batches"
        f"{'' if sizes['exact'] else ' (estimated from data.samples and data.tokens)'}, {sizes['steps']:,} steps of "
        f"{config.train.batches_per_step} batches",
        markup=False,
    )
    table = Table("actor", "what", "GiB", "arithmetic", title="memory", title_justify="left")
    for actor, parts in (("each target", memory.target), ("drafter", memory.drafter), ("drafter, host", memory.drafter_host)):
        for kind, part in parts.items():
            table.add_row(actor, kind, f"{part.bytes / GIB:.2f}", part.arithmetic)
        table.add_row(actor, "total", f"{_total(parts) / GIB:.2f}", "", style="bold", end_section=True)
    plan = plan_memory(sizes["samples"], config.train.epochs)
    table.add_row("batcher, host", "plan", f"{plan.bytes / GIB:.2f}", plan.arithmetic)
    table.add_row("coordinator, host", "references", "0.00", "it holds what names a batch, never the batch", end_section=True)
    table.add_row("object store", "token batches", f"{memory.tokens.bytes / GIB:.2f}", memory.tokens.arithmetic)
    table.add_row("object store", "one message", f"{memory.message.bytes / GIB:.2f}", memory.message.arithmetic)
    table.add_row("object store", "window", f"{memory.window.bytes / GIB:.2f}", memory.window.arithmetic)
    console.print(table)
    if shm_bytes:
        room = SHM_SHARE * shm_bytes
        fits = "fits" if memory.window.bytes <= room else "does not fit: fewer batches will be in flight"
        console.print(f"window: {memory.window.bytes / GIB:.2f} GiB of {SHM_SHARE:g} x {shm_bytes / GIB:.0f} GiB shared memory {fits}")
    if gpu_bytes:
        gib = ", ".join(f"{who} {_total(parts) / GIB:.1f}" for who, parts in (("a target", memory.target), ("the drafter", memory.drafter)))
        console.print(f"of {gpu_bytes / GIB:.0f} GiB on a GPU: {gib} GiB")
    days = _days(spec, sizes["tokens"])
    if days is not None:
        console.print(days["text"])
    refuse_what_cannot_fit(spec, memory, gpu_bytes, shm_bytes)
    return {
        "parameters": shape.parameters,
        **sizes,
        "topology": config.topology,
        "strategy": spec.strategy,
        "target_bytes": _total(memory.target),
        "drafter_bytes": _total(memory.drafter),
        "drafter_host_bytes": _total(memory.drafter_host),
        "message_bytes": memory.message.bytes,
        "window_bytes": memory.window.bytes,
        "batcher_bytes": plan.bytes,
        "days": days["days"] if days else None,
        "config": spec.config.as_dict(),
    }


def _total(parts: dict[str, Bytes]) -> int:
    return sum(part.bytes for part in parts.values())


def _layers_run(spec: RunSpec) -> int:
    return spec.target_shape.num_layers if spec.config.loss.needs_teacher else spec.shape.target_layer_ids[-1] + 1


def plan_sizes(spec: RunSpec) -> dict[str, Any]:
    """Of the real plan where the dataset is there, else from the two numbers in the config."""
    config = spec.config
    if config.data.path is not None:
        check_data(spec)
        plan = open_batches(spec).info
        sizes = {key: getattr(plan, key) for key in ("samples", "tokens", "batches", "most_tokens", "most_anchors")}
        return {**sizes, "steps": -(-plan.batches // config.train.batches_per_step), "exact": True}
    if config.data.samples is None or config.data.tokens is None:
        raise ValueError("data.path: not set; give a dataset folder, or data.samples and data.tokens to explain a run without it")
    budget = config.batching.token_budget
    fill = PACKED_FILL if spec.strategy == "packed" else 0.868  # padding efficiency of six buckets on the corpus this comes from
    batches = config.train.epochs * -(-config.data.tokens // int(budget * fill))
    return {
        "samples": config.data.samples,
        "tokens": config.data.tokens * config.train.epochs,
        "batches": batches,
        "most_tokens": budget,
        "most_anchors": round(budget / config.anchors.tokens_per_anchor) + config.batching.max_rows,
        "steps": -(-batches // config.train.batches_per_step),
        "exact": False,
    }


def _days(spec: RunSpec, tokens: int) -> dict[str, Any] | None:
    hardware, targets = spec.config.hardware, spec.config.targets
    if hardware.target_tokens_per_second is None:
        return None
    made = hardware.target_tokens_per_second * targets
    taken = hardware.drafter_tokens_per_second or made
    rate = min(made, taken)
    slower = "targets" if made <= taken else "drafter"
    days = tokens / rate / 86400
    text = (
        f"time: {targets} targets x {hardware.target_tokens_per_second:,.0f} tokens/s = {made:,.0f}, drafter {taken:,.0f}; the {slower} "
        f"decide: {tokens:,} tokens / {rate:,.0f} per second = {days:.2f} days"
    )
    return {"days": days, "text": text}


def _gpu_bytes() -> float | None:
    """Of the first GPU that this process may use; None without one. torch, which takes seconds to load, is asked only where there is a
    driver to ask."""
    if nvml() is None:
        return None
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.device_count() else None


def _shm_bytes() -> float | None:
    return shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None
