"""A tiny run that everything can be tried on: a random hybrid target, a few dozen documents of its own vocabulary, one config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflash_ray.config.loading import merge, validate
from dflash_ray.data.store.writer import DatasetWriter
from dflash_ray.run.folder import RunFolder
from tests.support.tiny_targets import VOCAB, save_target

MASK_TOKEN = VOCAB - 1


def tiny_dataset(folder: Path, documents: int = 40, seed: int = 0, held_out: int = 6) -> Path:
    """Documents of 12 to 60 tokens: an unsupervised prompt, then a supervised answer."""
    rng = np.random.default_rng(seed)

    with DatasetWriter(folder) as writer:
        for split, count in (("train", documents), ("validation", held_out)):
            for _ in range(count):
                length, prompt = int(rng.integers(12, 60)), int(rng.integers(2, 8))
                writer.add(split, rng.integers(3, MASK_TOKEN, length), np.arange(length) >= prompt)
        writer.finish({"vocab_size": VOCAB})
    return folder


def dense_material(folder: Path) -> Path:
    """A dense target for many short runs: it loads in two thirds of the time that a hybrid one takes."""
    save_target("qwen3", folder / "target")
    return folder


def tiny_config(folder: Path, run_folder: Path, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """A config tree over a target and a dataset made under `folder`; `sections` are merged over it."""
    folder.mkdir(parents=True, exist_ok=True)
    target, data = folder / "target", folder / "data"
    if not target.exists():
        save_target("qwen3_5", target)
    if not data.exists():
        tiny_dataset(data)
    tree = {
        "run": {"name": "tiny", "dir": str(run_folder)},
        "topology": "1-1",
        "target": {"path": str(target)},
        "draft": {"block_size": 4, "num_layers": 1, "num_taps": 2, "mask_token_id": MASK_TOKEN, "num_attention_heads": 2, "head_dim": 16},
        "data": {"path": str(data)},
        "batching": {"token_budget": 128},
        "anchors": {"tokens_per_anchor": 5},
        "train": {"epochs": 3, "batches_per_step": 2},
        "checkpoint": {"every_steps": 5},
        "validation": {"every_steps": 10, "batches": 2},
    }
    return merge(tree, sections)


def train(material: Path, folder: Path, /, **sections: Any) -> tuple[RunFolder, dict[str, Any], int]:
    """A run in this process's Ray. Returns its folder, its summary and its exit code."""
    from jobs.support.run_driver import drive, prepare

    summary, code = drive(prepare(validate(tiny_config(material, folder, **sections))))
    return RunFolder(folder), summary, code
