"""Starts the actors that answer, on the running Ray cluster or on one of this job's own."""

from __future__ import annotations

import ray

from actors.generator import ActorCrew
from dflash_ray.config.schema import Config
from dflash_ray.generation.answers import AnswerSettings, choose_engine
from dflash_ray.generation.generate import GenerateSettings
from jobs.support.local_ray import connect


def start_crew(settings: GenerateSettings, config: Config, stops: tuple[int, ...]) -> ActorCrew:
    """ValueError for what the cluster cannot hold."""
    connect()
    gpus = ray.cluster_resources().get("GPU", 0.0)
    wanted = config.targets * config.placement.gpus_per_target
    if gpus and wanted > gpus:
        raise ValueError(f"topology: {config.topology} wants {wanted:g} GPUs for targets, the cluster has {gpus:g}; use fewer targets")
    device = "cuda" if gpus else "cpu"
    answering = AnswerSettings(
        target=settings.target.absolute(),
        engine=choose_engine(config.generation.engine, device),
        device=device,
        precision=config.target.precision,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
        batch_size=config.generation.batch_size,
        threads=config.cpu.threads_per_actor,
        stop_ids=stops,
    )
    return ActorCrew(answering, config.targets, config.placement.gpus_per_target if gpus else 0)
