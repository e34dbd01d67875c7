"""Recipes trained for a fixed time and served: which runs, for how many epochs, and what is told of each.

A recipe is a name and the settings in which it differs from a base config. The schedule of a run needs its number of steps, so a time
becomes a number of epochs by the recipe's measured rate; what the run really took is told beside it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from dflash_ray.config.loading import load_config, read_flags, read_yaml
from dflash_ray.config.schema import Config
from dflash_ray.json_file import read_json_object
from dflash_ray.records import finite
from dflash_ray.run.folder import METRICS, RunFolder
from dflash_ray.run.metric_records import read_steps, read_validations

CHOSEN = ("run", "train.epochs")  # settings, or sections, that are the job's to choose
TOLERANCE = 0.05  # share of the wanted time by which a run may miss it
CURVE_POINTS = 60
SHOWN = ("seed", "steps", "training_seconds", "total_seconds", "planned_steps_per_second", "tokens", "loss", "tokens_per_second")
SHOWN += ("plain_tokens_per_second", "speedup", "divergences", "prompts")  # numbers of a run that none lacks
SERVED = ("tau", "per_slot_acceptance", "tokens_per_second", "plain_tokens_per_second", "speedup", "lossless", "divergences", "prompts")


@dataclass(frozen=True)
class Recipe:
    name: str
    changes: dict[str, Any]  # dotted name -> value

    def flags(self) -> list[str]:
        """As `jobs.train` takes them."""
        return [part for key, value in self.changes.items() for part in (f"--{key}", _as_flag(value))]


def _as_flag(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def read_recipes(path: Path) -> dict[str, Recipe]:
    """ValueError for a file that is not name -> dotted settings, or that sets what the job chooses."""
    out = {}
    for name, changes in read_yaml(path, "--recipes").items():
        if not isinstance(changes, dict) or not all(isinstance(key, str) and "." in key for key in changes):
            raise ValueError(f"--recipes {path}: {name} must hold dotted settings, for instance {{loss.ce: 1.0}}")
        if not name or not all(letter.isalnum() or letter in "+-_." for letter in name) or name.startswith((".", "-")):
            raise ValueError(f"--recipes {path}: {name!r} names a folder too; use letters, digits and + - _ .")
        for key in changes:
            if _is_chosen(key):
                raise ValueError(f"--recipes {path}: {name} sets {key}, which jobs.quality chooses; leave it out")
        out[name] = Recipe(name, changes)
    if not out:
        raise ValueError(f"--recipes {path}: holds no recipe")
    return out


def _is_chosen(name: str) -> bool:
    return name in CHOSEN or name.split(".")[0] in CHOSEN


def refuse_chosen(flags: list[str]) -> None:
    """ValueError for settings on the command line that the job chooses for each run itself."""
    for name, _ in read_flags(flags):
        if _is_chosen(name):
            raise ValueError(f"--{name}: jobs.quality chooses it; leave it out")


def recipe_config(files: list[Path], recipe: Recipe, flags: list[str]) -> Config:
    """ValueError, with the recipe's name, for a setting that does not exist or cannot be."""
    try:
        return load_config(files, [*recipe.flags(), *flags])
    except ValueError as error:
        raise ValueError(f"recipe {recipe.name}: {error}") from None


def fingerprint(config: Config, how: dict[str, Any]) -> str:
    """What must be equal for a result to count: every setting but names and places, and `how` it was trained, or trained and served."""
    tree = config.as_dict()
    del tree["run"], tree["target"]["path"], tree["data"]["path"], tree["train"]["epochs"]
    return hashlib.sha256(json.dumps([tree, how], sort_keys=True).encode()).hexdigest()[:16]


def lanes(names: list[str], seeds: list[int], count: int) -> list[list[tuple[str, int]]]:
    """(recipe, seed) pairs for each of `count` GPUs, in order: seed after seed, each recipe moving on by one GPU with every seed."""
    out: list[list[tuple[str, int]]] = [[] for _ in range(count)]
    for turn, seed in enumerate(seeds):
        for number, name in enumerate(names):
            out[(number + turn) % count].append((name, seed))
    return out


def nearest_epochs(seconds: float, steps_per_second: float, steps_per_epoch: int) -> int:
    """The whole number of epochs, at least 1, whose steps take closest to `seconds`."""
    return max(1, round(min(seconds * steps_per_second / steps_per_epoch, 1e9)))  # the config's own limit is far below


def rate_of(run: RunFolder, warm: int) -> float:
    """Steps per second of a run after its first `warm` steps. ValueError where it has no two steps beyond them."""
    times = [record.time for record in read_steps(run, "time")][warm:]
    if len(times) < 2 or times[-1] <= times[0]:
        raise ValueError(f"{run.path}: {len(times)} steps after the first {warm}; a rate needs two")
    return (len(times) - 1) / (times[-1] - times[0])


def result_of(run: RunFolder, seconds: float) -> dict[str, Any]:
    """The training side of a finished run. `training_seconds` are those from the end of the first step to the end of the last."""
    steps = read_steps(run, "step", "time", "real_tokens", "loss_smooth", "tau", "drafter_wait", "target_wait")
    validation = read_validations(run, "tau", "loss")
    if not steps:
        raise ValueError(f"{run.path}: {METRICS} holds no step")
    took = steps[-1].time - steps[0].time
    every = max(1, len(steps) // CURVE_POINTS)
    shown = steps[every - 1 :: every]
    return {
        "steps": len(steps),
        "training_seconds": took,
        "off_budget": abs(took - seconds) > TOLERANCE * seconds,
        "tokens": sum(record.real_tokens for record in steps),
        "loss": steps[-1].loss_smooth,
        "validation_tau": validation[-1].tau if validation else None,
        "replay_tau": validation[-1].replay_tau if validation else None,
        "validation_loss": validation[-1].loss if validation else None,
        "waits": {"drafter": steps[-1].drafter_wait, "target": steps[-1].target_wait},
        "curve": [[one.step, round(one.time - steps[0].time, 2), one.loss_smooth, one.tau] for one in shown],
    }


TRAINING_FIELDS = {"key": str, "epochs": int, "rate": float, "command": str, "seconds": float}


def read_training(path: Path) -> dict[str, Any] | None:
    """What is known of a training that ended well; None where there is none. ValueError for a file that says something else."""
    try:
        trained = read_json_object(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: {error}; remove it and the run is trained again") from None
    for name, kind in TRAINING_FIELDS.items():
        value = trained.get(name)
        if not isinstance(value, int | float if kind is float else kind) or isinstance(value, bool):
            raise ValueError(f"{path}: {name} is damaged; remove the file and the run is trained again")
    return trained


def is_result(run: Any) -> bool:
    """Whether it has everything that is shown of a run of jobs.quality, of the right kind."""
    if not isinstance(run, dict):
        return False
    slots = run.get("per_slot_acceptance")
    return (
        all(finite(run.get(name)) for name in SHOWN)
        and all(name in run and (run[name] is None or finite(run[name])) for name in ("tau", "validation_tau", "replay_tau"))
        and all(isinstance(run.get(name), str) for name in ("recipe", "key"))
        and all(isinstance(run.get(name), bool) for name in ("off_budget", "lossless"))
        and isinstance(slots, list)
        and all(map(finite, slots))
    )


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per recipe, in the order in which they first occur: how many seeds, and of each number mean, least and most."""
    out = []
    numbers = ("steps", "training_seconds", "tokens", "loss", "validation_tau", "replay_tau", "tau")
    for name in dict.fromkeys(run["recipe"] for run in runs):
        mine = [run for run in runs if run["recipe"] == name]
        row: dict[str, Any] = {"recipe": name, "seeds": len(mine), "off_budget": sum(run["off_budget"] for run in mine)}
        for key in (*numbers, "tokens_per_second", "plain_tokens_per_second"):
            values = [run[key] for run in mine if run[key] is not None]
            row[key] = {"mean": fmean(values), "min": min(values), "max": max(values)} if values else None
        slots = [run["per_slot_acceptance"] for run in mine]
        row["per_slot_acceptance"] = [fmean(column) for column in zip(*slots, strict=True)]
        row["lossless"] = all(run["lossless"] for run in mine)
        out.append(row)
    return out
