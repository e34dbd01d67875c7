"""Engines that answer prompts of token ids: our own batched decoding, or vLLM where it is installed.

An answer is the ids the target chose, the stop token included where one came. It depends on the prompt, the settings and the prompt's own
random stream; what it ran beside moves it by rounding only.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class AnswerSettings:
    target: Path
    engine: str  # own | vllm
    device: str
    precision: str
    max_new_tokens: int
    temperature: float
    seed: int
    batch_size: int
    threads: int
    stop_ids: tuple[int, ...]


class Engine(Protocol):
    def answer(self, prompts: list[list[int]], streams: list[int]) -> list[list[int]]:
        """Answers in the order of the prompts; `streams` numbers each prompt's random stream."""


def choose_engine(wanted: str, device: str) -> str:
    """`generation.engine` to own or vllm. ValueError for an engine that is asked for and not there."""
    installed = importlib.util.find_spec("vllm") is not None
    if wanted == "vllm" and not installed:
        raise ValueError("generation.engine: vllm is not installed; install it, or use auto")
    if wanted == "vllm" or (wanted == "auto" and installed and device == "cuda"):
        return "vllm"
    return "own"


def load_engine(settings: AnswerSettings) -> Engine:
    return VllmEngine(settings) if settings.engine == "vllm" else OwnEngine(settings)


class OwnEngine:
    def __init__(self, settings: AnswerSettings):
        from dflash_ray.machine.processes import set_threads
        from dflash_ray.target.load import load_target

        set_threads(settings.threads)
        self._settings = settings
        self._target = load_target(settings.target, taps=None, device=settings.device, precision=settings.precision, with_head=True)

    def answer(self, prompts: list[list[int]], streams: list[int]) -> list[list[int]]:
        from dflash_ray.machine.processes import set_threads
        from dflash_ray.serve.plain import generate_batch

        set_threads(self._settings.threads)
        return generate_batch(
            self._target,
            prompts,
            max_new_tokens=self._settings.max_new_tokens,
            stop_ids=self._settings.stop_ids,
            temperature=self._settings.temperature,
            seed=self._settings.seed,
            batch_size=self._settings.batch_size,
            streams=streams,
        )


class VllmEngine:
    def __init__(self, settings: AnswerSettings):
        import vllm

        self._settings, self._vllm = settings, vllm
        dtype = {"auto": "auto", "bf16": "bfloat16", "float32": "float32"}[settings.precision]
        self._model = vllm.LLM(model=str(settings.target), dtype=dtype, seed=settings.seed, max_num_seqs=settings.batch_size)

    def answer(self, prompts: list[list[int]], streams: list[int]) -> list[list[int]]:
        params = [
            self._vllm.SamplingParams(
                max_tokens=self._settings.max_new_tokens,
                temperature=self._settings.temperature,
                seed=(self._settings.seed + stream) % 2**63 if self._settings.temperature > 0 else None,
                stop_token_ids=list(self._settings.stop_ids),
                detokenize=False,
            )
            for stream in streams
        ]
        outputs = self._model.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
