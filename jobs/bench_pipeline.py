"""Measure a whole run: `python -m jobs.bench pipeline [--shape NAME] [--topology 1-1] [--seconds N] [--tokens-per-anchor X] [--json OUT]`.

First each stage alone (the real actors, one after the other, on the first batches of the run), then a real run of all of them on random
weights and documents of natural lengths. Compared: the run's real tokens per second and those of the slower stage alone. The first tenth
of the run is left out. Memory is sampled twice a second; power is the GPUs' own energy counter. Every setting of a run is a flag too.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import yaml

from actors.drafter import DrafterActor
from actors.placement import actor_options
from actors.target import TargetActor
from dflash_ray import bench
from dflash_ray.batch import Batch
from dflash_ray.config import Config, load_config, merge, validate
from dflash_ray.dataset_writer import DatasetWriter
from dflash_ray.payload import pack
from dflash_ray.setup import RunSpec, open_batches, resolve
from dflash_ray.target.facts import shape_facts
from dflash_ray.target.shapes import SHAPES
from jobs.bench_drafter import PUBLISHED, TINY
from jobs.run_driver import connect, drive, prepare
from jobs.sampler import Sampler

LIMIT = 600
WARM_BATCHES, TIMED_BATCHES = 3, 8


def main(argv: list[str]) -> int:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench pipeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3.6-27b" if gpu else "tiny-hybrid")
    parser.add_argument("--topology", default="1-1")
    parser.add_argument("--seconds", type=float, default=180 if gpu else 5, help="about how long the run takes")
    parser.add_argument("--tokens-per-anchor", type=float, default=43)
    parser.add_argument("--token-budget", type=int, default=16384 if gpu else 512)
    parser.add_argument("--transport", choices=("auto", "direct", "object_store"), default="auto")
    parser.add_argument("--json", type=Path, help="write the record there")
    args, rest = parser.parse_known_args(argv)
    if args.seconds <= 0:
        raise ValueError(f"--seconds: {args.seconds:g} is no time; use at least 1")
    with tempfile.TemporaryDirectory(prefix="dflash-ray-bench-") as scratch:
        record = measure(args, rest, Path(scratch))
    print(json.dumps({key: record[key] for key in ("alone", "run", "share_of_slower_stage")}, indent=1))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1))
    return 0


def measure(args: argparse.Namespace, flags: list[str], scratch: Path) -> dict[str, Any]:
    facts = shape_facts(args.shape)
    samples = max(64, int(args.token_budget * 400 / 2026)) if torch.cuda.is_available() else 400
    documents(scratch / "data", samples, args.token_budget // 2, facts.vocab_size)
    base = scratch / "config.yaml"
    base.write_text(yaml.safe_dump(settings(args, scratch, facts.hidden_size, facts.vocab_size)))
    config = load_config([base], flags)
    connect()
    device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
    spec = resolve(config, device=device, run_dir=scratch / "run", namespace="dflash-ray-bench")
    batches = [open_batches(spec).batch("train", number) for number in range(WARM_BATCHES + TIMED_BATCHES)]
    alone = {"target": target_alone(spec, batches), "drafter": drafter_alone(spec, batches)}
    both = {"target": alone["target"] * config.targets, "drafter": alone["drafter"]}
    slower = min(both, key=both.get)
    print(f"alone: {alone['target']:,.0f} tokens/s per target, {alone['drafter']:,.0f} drafter; {slower} is the slower stage", flush=True)
    tokens = float(np.mean([batch.tokens for batch in batches]))
    steps = max(4, math.ceil(args.seconds * both[slower] / tokens / config.train.batches_per_step))
    plan = prepare(with_steps(config, steps))
    with Sampler() as sampler:
        summary, code = drive(plan)
    if code or "failed" in summary:
        raise RuntimeError(f"the run failed: {summary.get('failed', code)}")
    lines = [json.loads(line) for line in (plan.folder.path / "metrics.jsonl").read_text().splitlines()]
    run = rates(lines) | sampler.summary(lines)
    events = [json.loads(line) for line in (plan.folder.path / "events.jsonl").read_text().splitlines()]
    return {
        "job": "pipeline",
        "shape": args.shape,
        "topology": config.topology,
        "tokens_per_anchor": args.tokens_per_anchor,
        "device": bench.device_name(torch.device(device)),
        "versions": bench.versions(),
        "alone": alone,
        "run": run,
        "share_of_slower_stage": run["real_tokens_per_second"] / both[slower],
        "slower_stage": slower,
        "summary": summary,
        "transport": [event["reason"] for event in events if event["event"] == "transport"],
        "samples": sampler.samples,
    }


def settings(args: argparse.Namespace, scratch: Path, hidden: int, vocab: int) -> dict[str, Any]:
    draft = dict(PUBLISHED if hidden >= 2048 else TINY)
    draft["layer_types"] = ["sliding_attention"] * (draft["num_layers"] - 1) + ["full_attention"]
    return {
        "run": {"name": "bench", "dir": str(scratch / "run")},
        "topology": args.topology,
        "target": {"shape": args.shape, "weights": "random"},
        "draft": {**draft, "mask_token_id": vocab - 1},
        "data": {"path": str(scratch / "data")},
        "batching": {"strategy": "packed", "token_budget": args.token_budget},
        "anchors": {"tokens_per_anchor": args.tokens_per_anchor},
        "train": {"epochs": 1000, "batches_per_step": 4},
        "validation": {"batches": 0},
        "transport": {"kind": args.transport},
        "checkpoint": {"every_steps": 10**6, "every_minutes": 10**6},
    }


def with_steps(config: Config, steps: int) -> Config:
    return validate(merge(config.as_dict(), {"run": {"max_steps": steps}}))


def documents(folder: Path, samples: int, longest: int, vocab: int) -> None:
    rng = np.random.default_rng(0)
    with DatasetWriter(folder) as writer:
        for length in bench.document_lengths(samples, longest):
            writer.add("train", rng.integers(0, vocab - 1, length), np.ones(length, dtype=bool))
        writer.finish({"vocab_size": vocab})


def target_alone(spec: RunSpec, batches: list[Batch]) -> float:
    """Real tokens per second of one target that nothing waits for and nothing holds up."""
    actor = TargetActor.options(**actor_options("target", "target-alone", spec)).remote("target-alone", spec)
    for position, batch in enumerate(batches):
        if position == WARM_BATCHES:
            began = time.perf_counter()
        ray.get(actor.compute.remote(position, batch), timeout=LIMIT)
        actor.drop.remote(position)
    seconds = time.perf_counter() - began
    ray.kill(actor)
    return sum(batch.tokens for batch in batches[WARM_BATCHES:]) / seconds


def drafter_alone(spec: RunSpec, batches: list[Batch]) -> float:
    """Real tokens per second of the drafter, optimizer steps included, with the features of every batch already on its device."""
    actor = DrafterActor.options(**actor_options("drafter", "drafter-alone", spec)).remote(spec, 10**6)
    told = {"layer_ids": list(spec.shape.target_layer_ids)}
    dtype = torch.bfloat16 if spec.feature_bytes == 2 else torch.float32
    noise = torch.randn(1024, spec.shape.features).to(dtype)
    seconds, steps = 0.0, 0
    for position, batch in enumerate(batches):
        features = noise.repeat(-(-batch.tokens // 1024), 1)[: batch.tokens]
        problem = ray.get(actor.stage.remote(position, batch, told, {"features": pack(features)}), timeout=LIMIT)
        if problem:
            raise RuntimeError(problem)
        began = time.perf_counter()
        ray.get(actor.train.remote(position), timeout=LIMIT)
        if (position + 1 - WARM_BATCHES) % spec.config.train.batches_per_step == 0:
            ray.get(actor.step.remote(steps), timeout=LIMIT)
            steps += 1
        if position >= WARM_BATCHES:
            seconds += time.perf_counter() - began
    ray.kill(actor)
    return sum(batch.tokens for batch in batches[WARM_BATCHES:]) / seconds


def rates(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the steps after the first tenth."""
    start = max(1, len(lines) // 10)
    seconds = lines[-1]["time"] - lines[start - 1]["time"]
    rest = lines[start:]
    return {
        "steps": len(rest),
        "seconds": seconds,
        "real_tokens_per_second": sum(line["real_tokens"] for line in rest) / seconds,
        "drafter_wait": float(np.mean([line["drafter_wait"] for line in rest])),
        "target_wait": float(np.mean([line["target_wait"] for line in rest])),
    }
