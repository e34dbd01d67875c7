"""Where actors run and what they may use: the one place that knows Ray's resource options.

Every process asks for no CPU, so a laptop with two cores runs all of them; on a machine with GPUs targets and drafter ask for theirs.
Actors without a GPU see none: Ray does not hide GPUs from an actor that asked for 0. The coordinator hides them by itself (`hide_gpus`):
what stands in its runtime environment would be inherited by the actors that it makes, and outweigh what Ray gives them.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dflash_ray.run.spec import RunSpec

PROCESS_BYTES = 0.3e9  # what an actor on a CPU takes before it has loaded anything

# settings of the driver's environment that its actors need on every node; no secrets, Ray shows them to everyone
PASSED = (
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "WANDB_BASE_URL",
    "WANDB_MODE",
)
_started: Counter[str] = Counter()


def start(kind: Any, role: str, name: str, spec: RunSpec, *args: Any) -> Any:
    """A new actor of the class `kind`. Its predecessor of the same name may not be gone yet, so a later one gets a name of its own."""
    _started[name] += 1
    options = actor_options(role, name, spec)
    if _started[name] > 1:
        options["name"] = f"{name}~{_started[name]}"
    if role == "batcher":
        options |= on_this_node()
    return kind.options(**options).remote(*args)


def on_this_node() -> dict[str, Any]:
    """Options that keep an actor on its maker's node: what a run cannot do without lives and dies with its driver, not with some node
    that a target happens to be on."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)}


def environment(spec: RunSpec) -> dict[str, str]:
    """What every actor gets, whatever node it runs on."""
    ours = {"OMP_NUM_THREADS": str(spec.config.cpu.threads_per_actor), "TOKENIZERS_PARALLELISM": "false"}
    return {name: os.environ[name] for name in PASSED if name in os.environ} | ours


def actor_options(role: str, name: str, spec: RunSpec) -> dict[str, Any]:
    """Options for one actor of `role` (coordinator, batcher, target, drafter) under the actor name `name`."""
    env = environment(spec)
    options: dict[str, Any] = {"name": name, "namespace": spec.namespace, "num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
    if spec.device == "cuda" and role in ("target", "drafter"):
        placement = spec.config.placement
        options["num_gpus"] = placement.gpus_per_target if role == "target" else placement.gpus_per_drafter
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    elif role != "coordinator":
        env["CUDA_VISIBLE_DEVICES"] = ""
    resources = {"target": spec.config.placement.target_resources, "drafter": spec.config.placement.drafter_resources}.get(role)
    if resources:
        options["resources"] = resources
    if role == "coordinator":
        options["max_concurrency"] = 1000
    options["runtime_env"] = {"env_vars": env}
    return options


def hide_gpus() -> None:
    """For a process that needs none. Before CUDA starts there."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def gpus_wanted(spec_targets: int, gpus_per_target: float, gpus_per_drafter: float) -> float:
    return spec_targets * gpus_per_target + gpus_per_drafter


def refuse_too_many_processes(setting: str, targets: int, resources: dict[str, float]) -> None:
    """ValueError, with the name of the setting, where a cluster without GPUs could not even start the actors."""
    processes, memory = targets + 3, resources.get("memory")
    needed = processes * PROCESS_BYTES
    if memory is not None and needed > memory:
        raise ValueError(
            f"{setting}: {targets:,} targets are {processes:,} processes x {PROCESS_BYTES / 1e9:g} GB = {needed / 1e9:,.1f} GB before any "
            f"model is loaded, and Ray has {memory / 1e9:,.1f} GB of memory; use fewer targets"
        )
