"""Runs of `jobs.bench pipeline`: each side alone, then all of them."""

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

from actors.answers import RunFailed
from actors.drafter import DrafterActor
from actors.placement import actor_options
from actors.target import TargetActor
from dflash_ray.config.loading import load_config, merge, validate
from dflash_ray.data.store.writer import DatasetWriter
from dflash_ray.planning import bench
from dflash_ray.run.build import open_batches
from dflash_ray.run.spec import resolve
from dflash_ray.target.shape import known_target_shape
from dflash_ray.transport.payload import pack
from jobs.benchmarks.flags import default_shape, write_record
from jobs.benchmarks.measure_drafter import draft_settings
from jobs.benchmarks.sampler import Sampler
from jobs.support.local_ray import connect
from jobs.support.run_driver import drive, prepare

LIMIT = 600
WARM_BATCHES, TIMED_BATCHES = 2, 4  # one optimizer step in the timed ones


def measure_all(args: argparse.Namespace, flags: list[str]) -> None:
    """A run for each number of tokens per anchor; the record is written after each, where `args.json` says."""
    gpu = torch.cuda.is_available()
    args.shape = args.shape or default_shape(gpu)
    args.seconds = args.seconds or (180 if gpu else 5)
    if args.token_budget is None:
        args.token_budget = 16384 if gpu else 512
    connect()
    record = {"job": "pipeline", "shape": args.shape, "topology": args.topology, "versions": bench.versions(), "runs": []}
    with tempfile.TemporaryDirectory(prefix="dflash-ray-bench-") as scratch:
        documents(Path(scratch) / "data", args)
        target_rate = None
        for per_anchor in args.tokens_per_anchor:
            one = Case(args, flags, Path(scratch), per_anchor)
            target_rate = target_rate or one.target_alone()
            record["runs"].append(one.measure(target_rate))
            record["device"] = bench.device_name(torch.device(one.spec.device))
            write_record(args.json, record)


def documents(folder: Path, args: argparse.Namespace) -> None:
    """The corpus: random tokens in documents of natural lengths, a few hundred batches of them."""
    folder.mkdir()
    rng, vocab = np.random.default_rng(0), known_target_shape(args.shape).vocab_size
    samples = max(400, args.token_budget * 200 // 2026) if args.token_budget >= 8192 else 400
    with DatasetWriter(folder / "all") as writer:
        for length in bench.document_lengths(samples, args.token_budget // 2):
            writer.add("train", rng.integers(0, vocab - 1, length), np.ones(length, dtype=bool))
        writer.finish({"vocab_size": vocab})


class Case:
    """One run and what it is compared with."""

    def __init__(self, args: argparse.Namespace, flags: list[str], scratch: Path, per_anchor: float):
        self.args, self.per_anchor = args, per_anchor
        target_shape, base = known_target_shape(args.shape), scratch / f"config-{per_anchor:g}.yaml"
        base.write_text(yaml.safe_dump(settings(args, scratch, per_anchor, target_shape.hidden_size, target_shape.vocab_size)))
        self.config = load_config([base], flags)
        device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
        self.spec = resolve(self.config, device=device, run_dir=scratch / "run", namespace="dflash-ray-bench")
        opened = open_batches(self.spec)
        self.batches = [opened.batch("train", number) for number in range(WARM_BATCHES + TIMED_BATCHES)]

    def target_alone(self) -> float:
        """Real tokens per second of one target that nothing waits for and nothing holds up."""
        began = time.perf_counter()
        actor = TargetActor.options(**actor_options("target", "target-alone", self.spec)).remote("target-alone", self.spec)
        for position, batch in enumerate(self.batches):
            if position == WARM_BATCHES:
                print(f"one target alone: up and warm after {time.perf_counter() - began:.0f} s", flush=True)
                began = time.perf_counter()
            ray.get(actor.compute.remote(position, "train", batch, False)[0], timeout=LIMIT)
            actor.drop.remote(position)
        seconds = time.perf_counter() - began
        ray.kill(actor)
        return sum(batch.tokens for batch in self.batches[WARM_BATCHES:]) / seconds

    def drafter_alone(self) -> float:
        """Real tokens per second of the drafter, optimizer steps included, with the features of every batch already on its device."""
        spec, began = self.spec, time.perf_counter()
        actor = DrafterActor.options(**actor_options("drafter", "drafter-alone", spec)).remote(spec, 10**6)
        layer_ids = list(spec.shape.target_layer_ids)
        dtype = torch.bfloat16 if spec.feature_bytes == 2 else torch.float32
        noise = torch.randn(1024, spec.shape.features).to(dtype)
        seconds, steps = 0.0, 0
        for position, batch in enumerate(self.batches):
            features = noise.repeat(-(-batch.tokens // 1024), 1)[: batch.tokens]
            problem = ray.get(actor.stage.remote(position, layer_ids, batch, {"features": pack(features)}), timeout=LIMIT)
            if problem:
                raise RunFailed(problem)
            if position == WARM_BATCHES:
                print(f"the drafter alone: up and warm after {time.perf_counter() - began:.0f} s", flush=True)
            began_batch = time.perf_counter()
            ray.get(actor.train.remote(position), timeout=LIMIT)
            if (position + 1 - WARM_BATCHES) % spec.config.train.batches_per_step == 0:
                ray.get(actor.step.remote(steps), timeout=LIMIT)
                steps += 1
            if position >= WARM_BATCHES:
                seconds += time.perf_counter() - began_batch
        ray.kill(actor)
        return sum(batch.tokens for batch in self.batches[WARM_BATCHES:]) / seconds

    def measure(self, target_rate: float) -> dict[str, Any]:
        config = self.config
        alone = {"target": target_rate, "drafter": self.drafter_alone()}
        both = {"target": target_rate * config.targets, "drafter": alone["drafter"]}
        slower = min(both, key=both.get)
        print(f"alone: {target_rate:,.0f} tokens/s per target, {alone['drafter']:,.0f} drafter; the slower stage: {slower}", flush=True)
        tokens = float(np.mean([batch.tokens for batch in self.batches]))
        steps = max(4, math.ceil(self.args.seconds * both[slower] / tokens / config.train.batches_per_step))
        plan = prepare(validate(merge(config.as_dict(), {"run": {"max_steps": steps, "fresh": True}})))
        with Sampler() as sampler:
            summary, code = drive(plan)
        if code or "failed" in summary:
            raise RunFailed(f"the run failed: {summary.get('failed', code)}")
        lines = [json.loads(line) for line in (plan.folder.path / "metrics.jsonl").read_text().splitlines()]
        events = [json.loads(line) for line in (plan.folder.path / "events.jsonl").read_text().splitlines()]
        run = rates(lines) | sampler.summary(lines)
        found = {
            "tokens_per_anchor": self.per_anchor,
            "alone": alone,
            "slower_stage": slower,
            "run": run,
            "share_of_slower_stage": run["real_tokens_per_second"] / both[slower],
            "transport": [event["reason"] for event in events if event["event"] == "transport"],
            "seconds_to_first_step": lines[0]["time"] - sampler.began,
            "summary": summary,
        }
        print(json.dumps(found, indent=1), flush=True)
        return found


def settings(args: argparse.Namespace, scratch: Path, per_anchor: float, hidden: int, vocab: int) -> dict[str, Any]:
    return {
        "run": {"name": "bench", "dir": str(scratch / "run")},
        "topology": args.topology,
        "target": {"shape": args.shape, "weights": "random"},
        "draft": draft_settings(hidden, vocab),
        "data": {"path": str(scratch / "data" / "all")},
        "batching": {"strategy": "packed", "token_budget": args.token_budget},
        "anchors": {"tokens_per_anchor": per_anchor},
        "train": {"epochs": 1000, "batches_per_step": TIMED_BATCHES},
        "validation": {"batches": 0},
        "transport": {"kind": args.transport},
        "checkpoint": {"every_steps": 10**6, "every_minutes": 10**6},
    }


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
