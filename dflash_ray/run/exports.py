"""What an export needs to know of a run: which checkpoint, and what its model card says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_ray.config.loading import load_config
from dflash_ray.config.schema import Config
from dflash_ray.draft.dflash.shape import DraftShape
from dflash_ray.json_file import read_json_object
from dflash_ray.run.checkpoint import NAME, Checkpoint, newest_whole, read_checkpoint
from dflash_ray.run.folder import RunFolder
from dflash_ray.run.metric_records import read_steps, read_validations

BEST, LATEST = "best", "latest"
HELD_OUT = "held-out conversations, mean over fixed blocks"
REPLAYED = "held-out conversations, replayed block after block as in serving"


def run_config(folder: Path) -> Config:
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"--run {folder}: no config.yaml; this is not the folder of a run")
    return load_config([folder / "config.yaml"])


def choose_checkpoint(folder: Path, which: str | None = None) -> Checkpoint:
    """The checkpoint named best, latest or by its folder, verified whole; None means best where there is one, else latest."""
    best = _read_json(folder / "best.json")
    if which is None:
        which = BEST if best else LATEST
    if which == BEST:
        if not best:
            raise ValueError(f"--checkpoint best: {folder} has no validated checkpoint; use latest, or set validation.every_steps")
        name = best.get("checkpoint")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"{folder / 'best.json'}: {str(name)[:60]!r} is not the name of a checkpoint")
        return read_checkpoint(folder / "checkpoints" / name)
    if which != LATEST:
        return read_checkpoint(Path(which))
    checkpoint, refused = newest_whole(folder / "checkpoints")
    if checkpoint is None:
        raise ValueError(f"--run {folder}: no whole checkpoint in it{': ' + '; '.join(refused) if refused else ''}")
    return checkpoint


def shape_of(checkpoint: Checkpoint) -> DraftShape:
    """The drafter's shape. ValueError where a checkpoint holds none."""
    try:
        return DraftShape(**checkpoint.meta.shape)
    except TypeError:
        raise ValueError(f"checkpoint {checkpoint.path}: shape of meta.json is not a drafter's; the file was damaged") from None


def card_of_run(folder: Path, config: Config, checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, float]]:
    """Lines of the model card's recipe, and the acceptance lengths that are known of this checkpoint."""
    run, summary = RunFolder(folder), _read_json(folder / "summary.json")
    trainer = checkpoint.meta.trainer
    if type(trainer.get("total_steps")) is not int:
        raise ValueError(f"checkpoint {checkpoint.path}: total_steps of trainer in meta.json is not a whole number; the file was damaged")
    recipe: dict[str, Any] = {"steps": f"{checkpoint.step} of {trainer['total_steps']}"}
    if config.data.path is not None:
        recipe["data"] = config.data.path.name
    if "topology" in summary:
        recipe["topology"] = f"{summary['topology']} (targets-drafters)"
    seen = [record for record in read_steps(run, "step") if record.step <= checkpoint.step]
    tokens, supervised = (sum(record.real_tokens or 0 for record in seen), sum(record.supervised_tokens or 0 for record in seen))
    if tokens and len(seen) == checkpoint.step:  # a run that continues another folder's knows its own steps only
        recipe["tokens"] = f"{tokens:,} seen, {supervised:,} of them supervised"
    recipe["seed"] = config.run.seed
    if trainer.get("tables"):
        recipe["embedding and head it was trained with"] = f"SHA-256 {trainer['tables']}"
    tau = {}
    for record in read_validations(run, "step", "tau"):
        if record.step == checkpoint.step:
            tau[HELD_OUT] = record.tau
            if record.replay_tau is not None:
                tau[REPLAYED] = record.replay_tau
    best = _read_json(folder / "best.json")
    if best.get("checkpoint") == checkpoint.path.name:
        if type(best.get("tau")) not in (int, float):
            raise ValueError(f"{folder / 'best.json'}: tau is {str(best.get('tau'))[:60]!r}, not a number")
        tau.setdefault(REPLAYED if best.get("by") == "replay_tau" else HELD_OUT, best["tau"])
    return recipe, tau


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
