"""Where the rates of a topology plan come from: a run's files, benchmark records, or the model's arithmetic.

Every reader returns what its source tells and nothing else, in one `Known`, with a sentence on where each number is from. What is more
direct goes over what is less: `over` keeps the known values of both.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from dflash_ray.config.loading import load_config
from dflash_ray.config.schema import Config
from dflash_ray.draft.dflash.cost import flops_per_anchor, flops_per_token
from dflash_ray.draft.dflash.shape import DraftShape, resolve_shape
from dflash_ray.json_file import read_json_object
from dflash_ray.planning.balance import WAITING_SHARE, DrafterCost, Power, Rates
from dflash_ray.run.folder import METRICS, RunFolder
from dflash_ray.run.metric_records import read_steps
from dflash_ray.run.spec import RunSpec
from dflash_ray.target.cost import counted_flops
from dflash_ray.target.shape import known_target_shape, read_target_shape
from dflash_ray.watch.meter import WARMUP_STEPS

MEAN_LENGTH = 2026  # tokens of a document where nothing says more, the corpus of the benchmarks


@dataclass(frozen=True)
class Known:
    """Tokens/s of one target; of one drafter its cost, or its tokens/s where the cost is not known; power, tokens of the whole run, tokens
    per anchor. None is unknown."""

    target: float | None = None
    drafter: float | None = None
    cost: DrafterCost | None = None
    power: Power | None = None
    tokens: float | None = None
    tokens_per_anchor: float | None = None
    said: tuple[str, ...] = ()

    def over(self, other: Known) -> Known:
        """This one's values, and `other`'s where this one knows nothing. A drafter's rate of its own speeds up `other`'s cost."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {key: value for key, value in values.items() if value is not None} | {"said": other.said + self.said}
        per_anchor = self.tokens_per_anchor or other.tokens_per_anchor
        if self.cost is not None:
            values["drafter"] = None
        elif self.drafter is not None and other.cost is not None:
            values |= {"drafter": None, "cost": scaled(other.cost, self.drafter, per_anchor) if per_anchor else None}
        elif other.drafter is not None and self.drafter is None and per_anchor != other.tokens_per_anchor:
            raise ValueError(
                f"--tokens-per-anchor {per_anchor:g}: the drafter was measured with other anchors, and how its time splits is not known; "
                "give the run's config with --config, or a drafter's record with --bench"
            )
        return replace(other, **values)

    def rates(self) -> Rates:
        """ValueError, saying what to give, where a side is not known."""
        if self.target is None:
            raise ValueError("the target's rate is not known; give --run, --bench TARGET.json, --config or --target-rate")
        if self.cost is None and self.drafter is None:
            raise ValueError("the drafter's rate is not known; give --run, --bench DRAFTER.json, --config or --drafter-rate")
        drafter = self.drafter
        if self.cost is not None:
            if self.tokens_per_anchor is None:
                raise ValueError("anchors decide what the drafter costs; give --tokens-per-anchor")
            drafter = 1 / self.cost.seconds_per_token(self.tokens_per_anchor)
        return Rates(self.target, drafter, self.cost, self.power)


def scaled(cost: DrafterCost, rate: float, tokens_per_anchor: float) -> DrafterCost:
    """The same split of time at another speed: `rate` tokens/s at `tokens_per_anchor`."""
    factor = 1.0 / rate / cost.seconds_per_token(tokens_per_anchor)
    return DrafterCost(cost.context * factor, cost.anchor * factor, cost.optimizer * factor)


def of_run(folder: Path) -> Known:
    """From config.yaml, metrics.jsonl and, of a run that has ended, summary.json. ValueError where the folder holds no steps."""
    run = RunFolder(folder)
    if not (folder / "config.yaml").exists():
        raise ValueError(f"--run {folder}: holds no config.yaml; give the folder of a run")
    config = load_config([folder / "config.yaml"])
    records = read_steps(run, "real_tokens_per_second", "drafter_wait", "target_wait", "targets")[WARMUP_STEPS:]
    if not records:
        raise ValueError(f"--run {folder}: no step after the first {WARMUP_STEPS} is in {METRICS} yet; let the run go on for a while")
    late = records[len(records) // 2 :]
    rate, drafter_wait, target_wait = (
        median(getattr(record, key) for record in late) for key in ("real_tokens_per_second", "drafter_wait", "target_wait")
    )
    targets = median(record.targets for record in late)
    summary = _json(folder / "summary.json")
    if summary.get("target_tokens_per_second") and summary.get("drafter_tokens_per_second"):
        target, drafter, how = summary["target_tokens_per_second"], summary["drafter_tokens_per_second"], "busy actors, summary.json"
    else:
        target, drafter = rate / (targets * (1 - min(target_wait, 0.95))), rate / (1 - min(drafter_wait, 0.95))
        how = f"{rate:,.0f} tokens/s over the shares of time in which actors did not wait, {METRICS}"
    watts = [record.watts for record in late if record.watts]
    power = shared_power(median(watts), targets, target_wait, drafter_wait) if watts else None
    per_anchor = config.anchors.tokens_per_anchor
    shape = _shape(config)
    cost = scaled(_cost(shape), drafter, per_anchor) if shape else None
    said = f"{target:,.0f} tokens/s per target, {drafter:,.0f} per drafter: run {folder} with {targets:.0f} targets ({how})"
    return Known(target, None if cost else drafter, cost, power, _tokens_of(config), per_anchor, (said,))


def shared_power(watts: float, targets: float, target_wait: float, drafter_wait: float) -> Power:
    """`watts` of all devices of a run with one drafter, as if each drew the same while it works."""
    each = watts / (targets * (1 - (1 - WAITING_SHARE) * target_wait) + 1 - (1 - WAITING_SHARE) * drafter_wait)
    return Power(each, each, WAITING_SHARE * each)


def of_bench(path: Path) -> Known:
    """From what `jobs.bench target`, `drafter` or `pipeline --json` wrote."""
    record = _json(path)
    rows = {row["name"]: row for row in record.get("rows", [])}
    where = f"{path.name}, {record.get('device')}, {str(record.get('date'))[:10]}"
    if record.get("job") == "target":
        whole = known_target_shape(record["shape"]).num_layers - 2
        if record["layers"] < whole:
            raise ValueError(f"--bench {path}: measured only {record['layers']} of {whole} layers; measure without --layers")
        packed = sorted((name for name in rows if "packed" in name), key=lambda name: ("16k" not in name, name.startswith("fp8"), name))
        if not packed:
            raise ValueError(f"--bench {path}: has no packed row; measure with `python -m jobs.bench target --json {path}`")
        rate = rows[packed[0]]["tokens_per_second"]
        return Known(target=rate, said=(f"{rate:,.0f} tokens/s per target: {packed[0]}, {record['shape']} ({where})",))
    if record.get("job") == "drafter":
        cost = fitted_cost(list(rows.values()))
        said = (
            f"drafter: {1e6 * cost.context:.2f} us per context token + {1e6 * cost.anchor:.1f} us per anchor + "
            f"{1e6 * cost.optimizer:.2f} us per token for the optimizer ({where})"
        )
        return Known(cost=cost, said=(said,))
    if record.get("job") == "pipeline" and record.get("runs"):
        return _of_pipeline(record, path.name)
    raise ValueError(f"--bench {path}: no record of `jobs.bench target`, `drafter` or `pipeline`")


def _of_pipeline(record: dict[str, Any], name: str) -> Known:
    """Stages alone; from two densities of anchors on, also how the drafter's time splits. The first run's anchors are the run's."""
    runs = {run["tokens_per_anchor"]: run for run in record["runs"]}
    first = record["runs"][0]
    target, per_anchor = first["alone"]["target"], first["tokens_per_anchor"]
    cost = None
    if len(runs) > 1:
        table = np.array([[1.0, 1 / density, 1 / run["alone"]["drafter"]] for density, run in runs.items()])
        solved, *_ = np.linalg.lstsq(table[:, :2] / table[:, 2:], np.ones(len(table)), rcond=None)
        if solved[0] >= 0 and solved[1] > 0:
            cost = DrafterCost(float(solved[0]), float(solved[1]))
    drafter = None if cost else first["alone"]["drafter"]
    ran, targets = first["run"], int(record["topology"].split("-")[0])
    power = shared_power(ran["watts"], targets, ran["target_wait"], ran["drafter_wait"]) if ran.get("watts") else None
    said = (
        f"{target:,.0f} tokens/s per target, {first['alone']['drafter']:,.0f} per drafter at one anchor per {per_anchor:g} tokens: each "
        f"alone, {record['shape']} ({name}, {record.get('device')})"
    )
    return Known(target, drafter, cost, power, None, per_anchor, (said,))


def fitted_cost(rows: list[dict[str, Any]]) -> DrafterCost:
    """Least squares of seconds = context x tokens + anchor x anchors over the forward+backward rows, relative errors alike; the
    optimizer's share is the mean of what a whole step takes longer, per token of that step."""
    passes = {row["name"].removesuffix(": forward+backward"): row for row in rows if row["name"].endswith(": forward+backward")}
    if len(passes) < 2:
        raise ValueError("--bench: a drafter's record needs two forward+backward rows that differ in tokens per anchor")
    table = np.array([[row["tokens"], row["facts"]["anchors"], row["timing"]["median"]] for row in passes.values()])
    solved, *_ = np.linalg.lstsq(table[:, :2] / table[:, 2:], np.ones(len(table)), rcond=None)
    if solved[1] <= 0 or solved[0] < 0:
        solved = np.array([0.0, float(np.mean(table[:, 2] / table[:, 1]))])  # noise larger than the context's part
    steps = {row["name"].removesuffix(": step"): row for row in rows if row["name"].endswith(": step")}
    extra = [
        max(steps[name]["timing"]["median"] - passes[name]["timing"]["median"], 0.0) / steps[name]["tokens"]
        for name in passes
        if name in steps
    ]
    return DrafterCost(float(solved[0]), float(solved[1]), float(np.mean(extra)) if extra else 0.0)


def of_arithmetic(spec: RunSpec, flops: float, target_share: float, drafter_share: float) -> Known:
    """From counted FLOPs at `flops` per second, of which so much is reached; what hardware.* names goes first."""
    config, target_shape, shape = spec.config, spec.target_shape, spec.shape
    layers = target_shape.num_layers if config.loss.needs_teacher else shape.target_layer_ids[-1] + 1
    length = round(config.data.tokens / config.data.samples) if config.data.tokens and config.data.samples else MEAN_LENGTH
    of_token = counted_flops(target_shape, layers, np.array([length])) / length
    per_anchor = config.anchors.tokens_per_anchor
    exact = _cost(shape)
    cost = DrafterCost(exact.context / (flops * drafter_share), exact.anchor / (flops * drafter_share))
    target = config.hardware.target_tokens_per_second or flops * target_share / of_token
    drafter = config.hardware.drafter_tokens_per_second or 1 / cost.seconds_per_token(per_anchor)
    said = (
        f"target: {of_token / 1e9:.3g} GFLOP per token in {layers} layers, {target_share:g} of {flops / 1e12:,.0f} TFLOP/s = "
        f"{flops * target_share / of_token:,.0f} tokens/s",
        f"drafter: {exact.context / 1e9:.3g} GFLOP per token + {exact.anchor / 1e9:.3g} per anchor, one per {per_anchor:g} tokens, "
        f"{drafter_share:g} of {flops / 1e12:,.0f} TFLOP/s = {1 / cost.seconds_per_token(per_anchor):,.0f} tokens/s "
        "(optimizer not counted)",
    )
    if config.hardware.target_tokens_per_second or config.hardware.drafter_tokens_per_second:
        said += (f"hardware.*_tokens_per_second instead: target {target:,.0f}, drafter {drafter:,.0f}",)
    return Known(target, None, scaled(cost, drafter, per_anchor), None, _tokens_of(config), per_anchor, said)


def _cost(shape: DraftShape) -> DrafterCost:
    """In FLOPs instead of seconds."""
    return DrafterCost(flops_per_token(shape), flops_per_anchor(shape))


def _shape(config: Config) -> DraftShape | None:
    """None where this machine does not have the run's target."""
    try:
        target_shape = known_target_shape(config.target.shape) if config.target.path is None else read_target_shape(config.target.path)
        return resolve_shape(config.draft, target_shape)
    except ValueError:
        return None


def _tokens_of(config: Config) -> float | None:
    """Tokens of all epochs: of the config where it names them, else of the data set where it can be opened."""
    if config.data.tokens:
        return float(config.data.tokens * config.train.epochs)
    if config.data.path is None or not config.data.path.is_dir():
        return None
    from dflash_ray.data.store.dataset import open_dataset

    try:
        return float(open_dataset(config.data.path, "train", config.data.columns).lengths.sum()) * config.train.epochs
    except ValueError:
        return None


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        if path.name == "summary.json":
            return {}
        raise ValueError(f"--bench {path}: no such file") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
