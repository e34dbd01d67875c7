"""Train recipes for a fixed time, serve each drafter, and compare: `python -m jobs.quality --config FILE --prompts FILE --output DIR
[--recipe NAME ...] [--seeds N ...] [--seconds S] [--gpus 0,1] [--a.b value ...]`.

Every (recipe, seed) is trained by jobs.train, exported and served by jobs.evaluate, in an order that interleaves recipes. The number of
epochs follows from the recipe's rate, which a short pilot measures. What is finished is not run again: the same command goes on. Settings
such as `--data.path DIR` hold for every recipe."""

from __future__ import annotations

import asyncio
import hashlib
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from dflash_ray.config.loading import load_config
from dflash_ray.file_lock import take_lock
from dflash_ray.json_file import read_json_object
from dflash_ray.planning.quality import (
    fingerprint,
    is_result,
    lanes,
    nearest_epochs,
    read_recipes,
    read_training,
    recipe_config,
    refuse_chosen,
    summarise,
)
from dflash_ray.run.folder import RunFolder
from jobs.support.cli import Arguments, run
from jobs.support.quality_crew import TRAINED, Task, work_all
from jobs.support.tables.quality import show

RESULTS = "quality.json"


def main(argv: list[str]) -> int:
    parser = Arguments(prog="python -m jobs.quality", description=__doc__)
    parser.add_argument("--config", required=True, nargs="+", type=Path, action="extend", metavar="FILE", help="base config")
    parser.add_argument("--recipes", type=Path, metavar="FILE", help="recipe -> dotted settings (default: CONFIG-recipes.yaml beside it)")
    parser.add_argument("--recipe", nargs="+", action="extend", metavar="NAME", help="which, in this order (default: best and plain)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N", help="default 0")
    parser.add_argument("--seconds", type=float, default=150.0, help="of training per run (default %(default)g)")
    parser.add_argument("--pilot-steps", type=int, default=100, help="steps over which a recipe's rate is measured (default %(default)s)")
    parser.add_argument("--rate", nargs="+", action="extend", default=[], metavar="RECIPE=STEPS_PER_SECOND", help="instead of a pilot")
    parser.add_argument("--gpus", metavar="0,1", help="these GPUs, a run on each at a time (default: one run at a time)")
    parser.add_argument("--prompts", required=True, type=Path, metavar="FILE", help="held-out conversations that jobs.evaluate serves")
    parser.add_argument("--limit", type=int, help="prompts served")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts decoded at once (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=192, help="per answer (default %(default)s)")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="run folders, logs and quality.json")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results, read and extended (default: OUTPUT/quality.json)")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="start no run that could end later than this")
    args, flags = parser.parse_known_args(argv)
    began = time.monotonic()
    task, pairs = _prepare(args, flags, began)
    out = args.json or args.output / RESULTS
    with _hold("--output", args.output, args.output / ".lock"), _hold("--json", out, out.with_name(f".{out.name}.lock")):
        return _work(Book(out, task), pairs)


def _work(book: Book, pairs: dict[str | None, list[tuple[str, int]]]) -> int:
    """Runs what the book lacks of `pairs`, and shows all. Returns the exit code."""
    todo = {gpu: [pair for pair in lane if pair not in book.finished()] for gpu, lane in pairs.items()}
    console = Console(highlight=False, markup=False, soft_wrap=True)
    skipped = sum(map(len, pairs.values())) - sum(map(len, todo.values()))
    if skipped:
        console.print(f"{skipped} runs are finished already")
    left = asyncio.run(work_all(book.task, todo, book.add, book.failed, lambda text: console.print(f"{time.strftime('%H:%M:%S')} {text}")))
    book.write()
    show(book.runs, console)
    for name, seed in left:
        console.print(f"not run, --stop-after: {name} seed {seed}")
    for row in book.failures:
        print(f"failed: {row['recipe']} seed {row['seed']}: {row['why']}", file=sys.stderr)
    return 1 if book.failures else 0


@contextmanager
def _hold(flag: str, path: Path, lock: Path) -> Iterator[None]:
    """Keeps `path` for this process: two calls would each drop results that the other adds, and train over its runs."""
    try:
        held = take_lock(lock, required=False)
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be written: {error.strerror}") from None
    if held is None:
        raise ValueError(f"{flag} {path}: another jobs.quality writes there; wait for it, or give another --output and --json")
    try:
        yield
    finally:
        held.release()


def _prepare(args: Any, flags: list[str], began: float) -> tuple[Task, dict[str | None, list[tuple[str, int]]]]:
    """Everything that can be refused, before anything runs: the task, the pairs of each GPU."""
    for flag, value in (("--seconds", args.seconds), ("--pilot-steps", args.pilot_steps - 1)):
        if not 0 < value < math.inf:
            raise ValueError(f"{flag} {value:g}: too little to train; use more")
    if len(set(args.seeds)) < len(args.seeds):
        raise ValueError(f"--seeds {args.seeds}: each seed once")
    if not args.prompts.is_file():
        raise ValueError(f"--prompts {args.prompts}: no such file")
    load_config(args.config, flags)
    refuse_chosen(flags)
    known = read_recipes(args.recipes or args.config[-1].with_name(f"{args.config[-1].stem}-recipes.yaml"))
    names = list(dict.fromkeys(args.recipe or ("plain", "best")))
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--recipe {unknown[0]}: no such recipe; there are {', '.join(known)}")
    gpus: list[str | None] = [None]
    if args.gpus is not None:
        gpus = args.gpus.split(",")
        if not all(gpu.isdigit() for gpu in gpus) or len(set(gpus)) < len(gpus):
            raise ValueError(f"--gpus {args.gpus}: give their numbers, for instance 0,1")
    rates = dict(_rate(text, names) for text in args.rate)
    serving = {"limit": args.limit, "batch_size": args.batch_size, "max_new_tokens": args.max_new_tokens}
    served = [part for key, value in serving.items() if value is not None for part in (f"--{key.replace('_', '-')}", str(value))]
    serving["prompts"] = _digest("--prompts", args.prompts)
    recipes = {name: known[name] for name in names}
    configs = {name: recipe_config(args.config, recipe, flags) for name, recipe in recipes.items()}
    materials = {name: _materials(name, config) for name, config in configs.items()}
    for name, recipe in recipes.items():
        epochs = nearest_epochs(args.seconds, rates[name], materials[name][0]) if name in rates else 1
        for seed in args.seeds:
            recipe_config(args.config, recipe, [*flags, "--train.epochs", str(epochs), "--run.seed", str(seed)])
    for target in {config.target.path for config in configs.values()}:
        _check_serving(args, target)
    how = {name: {"seconds": args.seconds, **marks} for name, (_, marks) in materials.items()}
    task = Task(
        configs=args.config,
        flags=flags,
        recipes=recipes,
        steps_per_epoch={name: steps for name, (steps, _) in materials.items()},
        targets={name: config.target.path for name, config in configs.items()},
        output=args.output,
        seconds=args.seconds,
        pilot_steps=args.pilot_steps,
        serving=["--prompts", str(args.prompts), *served],
        rates=rates,
        keys={name: fingerprint(config, how[name] | serving) for name, config in configs.items()},
        training_keys={name: fingerprint(config, how[name]) for name, config in configs.items()},
        deadline=None if args.stop_after is None else began + args.stop_after,
    )
    for name in names:
        for seed in args.seeds:
            path = args.output / f"{name}-seed{seed}" / TRAINED
            trained = read_training(path)
            if trained is not None and trained["key"] != task.training_keys[name]:
                raise ValueError(
                    f"--output {args.output}: {name} seed {seed} was trained with other settings, data, weights or another --seconds; "
                    "give another --json and --output"
                )
    try:
        for folder in {args.output, (args.json or args.output / RESULTS).parent}:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output {args.output}: {error.filename}: {error.strerror}") from None
    return task, dict(zip(gpus, lanes(names, args.seeds, len(gpus)), strict=True))


def _rate(text: str, names: list[str]) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        rate = float(number)
    except ValueError:
        rate = math.nan
    if name not in names or not 0 < rate < math.inf:
        raise ValueError(f"--rate {text}: write RECIPE=STEPS_PER_SECOND with a recipe that runs, for instance {names[0]}=12.5")
    return name, rate


def _digest(flag: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be read: {error.strerror}") from None


def _materials(name: str, config: Any) -> tuple[int, dict[str, str]]:
    """Optimizer steps of one epoch, from the plan that the run will make, and the fingerprints of its data and its target's weights;
    ValueError for a target or data that it cannot use."""
    from dflash_ray.data.batches.source import plan_run
    from dflash_ray.run.build import open_data
    from dflash_ray.run.checks import check_data
    from dflash_ray.run.spec import resolve, with_weights

    try:
        spec = with_weights(resolve(config, device="cpu", run_dir=Path()))
        check_data(spec)
    except ValueError as error:
        raise ValueError(f"recipe {name}: {error}") from None
    batching = config.batching.model_copy(update={"strategy": spec.strategy})
    data = open_data(config)
    plan = plan_run(data, batching, config.anchors.tokens_per_anchor, config.run.seed, epochs=1)
    return plan.steps(config.train.batches_per_step), {"data": data.fingerprint, "weights": spec.weights}


def _check_serving(args: Any, target: Path) -> None:
    """ValueError for what jobs.evaluate would refuse of the prompts and the numbers, once everything is trained."""
    from dflash_ray.data.prepare.tokenizer import ChatTokenizer
    from dflash_ray.serve.evaluate import EvaluateSettings, check_settings, read_sets
    from dflash_ray.target.shape import read_target_shape

    numbers = {"limit": args.limit, "batch_size": args.batch_size, "max_new_tokens": args.max_new_tokens}
    settings, target_shape = EvaluateSettings(Path(), target, (args.prompts,), **numbers), read_target_shape(target)
    check_settings(settings, target_shape)
    read_sets(settings, ChatTokenizer(target), target_shape)


class Book:
    """The file of results. It may hold runs of earlier calls, of other recipes too."""

    def __init__(self, path: Path, task: Task):
        self.path, self.task = path, task
        self.failures: list[dict[str, Any]] = []
        try:
            before = read_json_object(path)
        except FileNotFoundError:
            before = {}
        except ValueError as error:
            raise ValueError(f"--json {path}: {error}") from None
        self.runs: list[dict[str, Any]] = before.get("runs", [])
        if not isinstance(self.runs, list) or not all(map(is_result, self.runs)):
            raise ValueError(f"--json {path}: is no file of results of jobs.quality; give another one")
        for run_ in self.runs:
            if run_["recipe"] in task.keys and run_["key"] != task.keys[run_["recipe"]]:
                raise ValueError(
                    f"--json {path}: {run_['recipe']} seed {run_['seed']} was trained or served with other settings, data, prompts, "
                    "weights or another --seconds; give another --json and --output"
                )
            task.rates.setdefault(run_["recipe"], run_["planned_steps_per_second"])
        task.overheads += [run_["total_seconds"] - run_["training_seconds"] for run_ in self.runs]

    def finished(self) -> set[tuple[str, int]]:
        return {(run_["recipe"], run_["seed"]) for run_ in self.runs}

    def add(self, result: dict[str, Any]) -> None:
        changes = self.task.recipes[result["recipe"]].changes
        self.runs.append({**result, "key": self.task.keys[result["recipe"]], "changes": changes})
        self.write()

    def failed(self, recipe: str, seed: int, why: str) -> None:
        self.failures.append({"recipe": recipe, "seed": seed, "why": why})
        self.write()

    def write(self) -> None:
        record = {"seconds": self.task.seconds, "summary": summarise(self.runs), "runs": self.runs, "failed": self.failures}
        try:
            RunFolder(self.path.parent).write_json(self.path.name, record)
        except OSError as error:
            raise ValueError(f"--json {self.path}: cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    run(main)
