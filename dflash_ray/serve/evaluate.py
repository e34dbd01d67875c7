"""A drafter measured as it would serve: speculative and plain decoding of the same prompts, in one run, on one engine.

For every prompt both decoders run one after the other, in alternating order, so that a machine that slows down slows both. `tau` is
served tau: tokens produced by verification passes per pass. `lossless`: in float32 every greedy token equals plain decoding's; in bf16 a
first divergence is excused where the one-token pass itself was undecided, both tokens no more than four bf16 steps below the best logit
(dflash.md, two numbers, says both). `divergences` counts the prompts whose tokens differ at all.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dflash_ray.data.prepare.prompts import Prompt, read_prompts
from dflash_ray.data.prepare.tokenizer import ChatTokenizer
from dflash_ray.draft.dflash.export import load_drafter, read_shape, trained_for
from dflash_ray.serve.drafter import ServedDrafter
from dflash_ray.serve.plain import generate_batch
from dflash_ray.serve.speculative import Answer, per_slot_acceptance, served_tau, speculative
from dflash_ray.serve.state import TargetState
from dflash_ray.target.load import load_target
from dflash_ray.target.model import FrozenTarget
from dflash_ray.target.shape import TargetShape, read_target_shape
from dflash_ray.target.weights import WeightFiles

# four steps of bf16 (8 bits of mantissa) relative to the larger logit
UNDECIDED = 2.0**-5


@dataclass(frozen=True)
class EvaluateSettings:
    drafter: Path
    target: Path
    prompts: tuple[Path, ...]  # one set each
    max_new_tokens: int = 256
    limit: int | None = None  # prompts per set
    thinking: tuple[bool, ...] = (False,)  # each makes a set of its own
    temperature: float = 0.0
    seed: int = 0
    batch_size: int = 1
    device: str = "auto"
    precision: str = "auto"
    chat_template: Path | None = None
    trace: Path | None = None


@dataclass
class SetResult:
    """What was measured on one set of prompts."""

    prompts: list[Prompt]
    skipped: dict[str, int]
    answers: list[Answer] = field(default_factory=list)
    plain: list[list[int]] = field(default_factory=list)
    seconds: list[tuple[float, float]] = field(default_factory=list)  # plain, speculative, per batch of prompts
    sizes: list[tuple[int, int]] = field(default_factory=list)  # tokens of the same
    excused: list[bool] = field(default_factory=list)  # per divergence


def evaluate(settings: EvaluateSettings, progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """The numbers of `summarise` over all prompts, and under `sets` those of each set. ValueError for what the user got wrong."""
    target_shape = read_target_shape(settings.target)
    check_drafter(settings, target_shape)
    check_settings(settings, target_shape)
    tokenizer = ChatTokenizer(settings.target, settings.chat_template)
    sets = read_sets(settings, tokenizer, target_shape)
    other = other_target(settings)
    target, drafter = load_pair(settings, target_shape)
    stops = target_shape.eos_token_ids
    total = sum(len(one.prompts) for one in sets.values())
    done = 0
    warm = next(iter(sets.values())).prompts[:1]
    _measure(SetResult(warm, {}), target, drafter, settings, stops, most=2 * drafter.block_size)
    for one in sets.values():
        for start in range(0, len(one.prompts), settings.batch_size):
            batch = SetResult(one.prompts[start : start + settings.batch_size], {})
            _measure(batch, target, drafter, settings, stops, speculative_first=bool(done % 2))
            for name in ("answers", "plain", "seconds", "sizes", "excused"):
                getattr(one, name).extend(getattr(batch, name))
            done += 1
            progress(min(done * settings.batch_size, total), total)
    result = summarise(list(sets.values()), drafter.block_size, greedy=settings.temperature == 0)
    result["sets"] = {
        name: summarise([one], drafter.block_size, greedy=settings.temperature == 0) | {"skipped": one.skipped}
        for name, one in sets.items()
    }
    result |= {
        "block_size": drafter.block_size,
        "precision": "float32" if target.dtype == torch.float32 else "bf16",
        "device": target.device.type,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "batch_size": settings.batch_size,
        "other_target": other,
    }
    if settings.trace is not None:
        _write_trace(settings.trace, sets, tokenizer)
    return result


def check_drafter(settings: EvaluateSettings, target_shape: TargetShape) -> None:
    """ValueError unless the drafter's shape fits the target."""
    shape = read_shape(settings.drafter)
    for name, ours, theirs in (
        ("hidden size", shape.hidden, target_shape.hidden_size),
        ("vocabulary", shape.vocab, target_shape.vocab_size),
        ("number of target layers", shape.num_target_layers, target_shape.num_layers),
    ):
        if ours != theirs:
            raise ValueError(f"--drafter {settings.drafter}: made for a {name} of {ours}, the target has {theirs}; give its own target")


def check_settings(settings: EvaluateSettings, target_shape: TargetShape) -> None:
    """ValueError unless the numbers make sense and the target can end an answer."""
    for flag, value in (
        ("--max-new-tokens", settings.max_new_tokens),
        ("--batch-size", settings.batch_size),
        ("--limit", 1 if settings.limit is None else settings.limit),
    ):
        if value < 1:
            raise ValueError(f"{flag} {value}: must be at least 1")
    if settings.seed < 0:
        raise ValueError(f"--seed {settings.seed}: must be at least 0")
    if not 0 <= settings.temperature < float("inf"):
        raise ValueError(f"--temperature {settings.temperature}: must be 0 (greedy) or more")
    if not target_shape.eos_token_ids:
        raise ValueError(f"--target {settings.target}: config.json and generation_config.json name no eos_token_id; answers would not end")


def other_target(settings: EvaluateSettings) -> bool | None:
    """Whether the drafter was trained for other weights than the target's; None where its folder does not tell."""
    theirs = trained_for(settings.drafter)
    return None if theirs is None else theirs != WeightFiles(settings.target).fingerprint()


def load_pair(settings: EvaluateSettings, target_shape: TargetShape) -> tuple[FrozenTarget, ServedDrafter]:
    """Target with head and drafter on one device, in one precision."""
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device}: torch sees no CUDA device here; use cpu")
    try:
        torch.device(device)
    except RuntimeError:
        raise ValueError(f"--device {device}: not a device; use auto, cpu or cuda") from None
    taps = list(read_shape(settings.drafter).target_layer_ids)
    target = load_target(settings.target, taps=taps, device=device, precision=settings.precision, with_head=True)
    model, _ = load_drafter(settings.drafter, target.embedding, target.head)
    return target, ServedDrafter(model, target.embedding, target.head)


def read_sets(settings: EvaluateSettings, tokenizer: ChatTokenizer, target_shape: TargetShape) -> dict[str, SetResult]:
    """The prompts of every set, by its name. ValueError for a file without any."""
    tokenizer.check_thinking(settings.thinking)
    sets = {}
    longest = target_shape.max_position_embeddings - 1
    for path in settings.prompts:
        for thinking in settings.thinking:
            prompts, skipped = read_prompts(path, tokenizer, thinking=thinking, limit=settings.limit, longest=longest)
            name = path.stem if len({other.stem for other in settings.prompts}) == len(settings.prompts) else str(path)
            sets[f"{name} (thinking)" if thinking and len(settings.thinking) > 1 else name] = SetResult(prompts, dict(skipped))
    return sets


def _measure(
    one: SetResult,
    target: FrozenTarget,
    drafter: ServedDrafter,
    settings: EvaluateSettings,
    stops: tuple[int, ...],
    *,
    speculative_first: bool = False,
    most: int | None = None,
) -> None:
    """Both decoders on the prompts of `one` as a single batch, results into `one`."""
    prompts = [prompt.ids for prompt in one.prompts]
    common = {
        "max_new_tokens": most or settings.max_new_tokens,
        "stop_ids": stops,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "batch_size": settings.batch_size,
    }

    def plain() -> float:
        start = time.perf_counter()
        one.plain = generate_batch(target, prompts, **common)
        return time.perf_counter() - start

    def drafted() -> float:
        start = time.perf_counter()
        one.answers = speculative(target, drafter, prompts, **common)
        return time.perf_counter() - start

    if speculative_first:
        fast, slow = drafted(), plain()
    else:
        slow, fast = plain(), drafted()
    one.seconds = [(slow, fast)]
    one.sizes = [(sum(map(len, one.plain)), sum(len(answer.tokens) for answer in one.answers))]
    if settings.temperature == 0:
        answers = zip(prompts, one.plain, (answer.tokens for answer in one.answers), strict=True)
        differing = [row for row in answers if row[1] != row[2]]
        one.excused = [False] * len(differing) if target.dtype == torch.float32 else undecided(target, differing)


@torch.inference_mode()
def undecided(target: FrozenTarget, rows: Sequence[tuple[list[int], list[int], list[int]]]) -> list[bool]:
    """Of each (prompt, plain answer, other answer): whether one-token passes leave the first token that differs open: both candidates
    score the best logit, or less by at most `UNDECIDED` of the larger. False where one answer is only the other's beginning: something else
    ended it."""
    first = [next((at for at, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None) for _, a, b in rows]
    left = [number for number, at in enumerate(first) if at is not None]
    out = [False] * len(rows)
    if not left:
        return out
    prompts = [rows[number][0] for number in left]
    state = TargetState(target, len(left), max(len(prompt) + first[number] for number, prompt in zip(left, prompts, strict=True)) + 1)
    logits, _ = state.prefill(prompts)
    for step in range(max(first[number] for number in left) + 1):
        for place, number in enumerate(left):
            if first[number] == step:
                scores, (_, plain, other) = logits[place].float(), rows[number]
                best, worse = scores.max().item(), scores[[plain[step], other[step]]].min().item()
                out[number] = best - worse <= UNDECIDED * max(abs(best), abs(worse))
        going = [first[number] > step for number in left]
        if any(going):
            tokens = [rows[number][1][step] if goes else 0 for number, goes in zip(left, going, strict=True)]
            logits, _ = state.append(torch.tensor(tokens, device=target.device), 1)
            state.keep([int(goes) for goes in going])
    return out


def summarise(sets: list[SetResult], block_size: int, *, greedy: bool) -> dict[str, Any]:
    """tau, per_slot_acceptance, lossless, divergences, tokens_per_second, plain_tokens_per_second, speedup (of the totals),
    speedup_median (over prompts), prompts, tokens, passes. `lossless` and `divergences` are None when sampling."""
    answers = [answer for one in sets for answer in one.answers]
    seconds = [pair for one in sets for pair in one.seconds]
    sizes = [pair for one in sets for pair in one.sizes]
    excused = [flag for one in sets for flag in one.excused]
    slow, fast = (sum(part) for part in zip(*seconds, strict=True))
    plain_tokens, tokens = (sum(part) for part in zip(*sizes, strict=True))
    rates = [(b[1] / a[1]) / (b[0] / a[0]) for a, b in zip(seconds, sizes, strict=True)]
    return {
        "tau": served_tau(answers),
        "per_slot_acceptance": per_slot_acceptance(answers, block_size),
        "lossless": all(excused) if greedy else None,
        "divergences": len(excused) if greedy else None,
        "tokens_per_second": tokens / fast,
        "plain_tokens_per_second": plain_tokens / slow,
        "speedup": (tokens / fast) / (plain_tokens / slow),
        "speedup_median": statistics.median(rates),
        "prompts": len(answers),
        "tokens": tokens,
        "passes": sum(len(answer.passes) for answer in answers),
    }


def _write_trace(path: Path, sets: dict[str, SetResult], tokenizer: ChatTokenizer) -> None:
    """One line per prompt: where it stands, its answer, and for every pass the proposed text, how much was accepted, what came out."""
    with path.open("w", encoding="utf-8") as file:
        for name, one in sets.items():
            for prompt, answer in zip(one.prompts, one.answers, strict=True):
                passes = [
                    {"proposed": tokenizer.decode(step.proposals), "accepted": step.accepted, "produced": tokenizer.decode(step.produced)}
                    for step in answer.passes
                ]
                row = {"set": name, "prompt": prompt.where, "answer": tokenizer.decode(answer.tokens), "passes": passes}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
