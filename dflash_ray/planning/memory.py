"""What every actor of a run will hold, as arithmetic, before a GPU is touched.

Each number comes with the arithmetic that made it, so that a reader can check it and see what to change. The drafter's part is in
`dflash_ray/draft/dflash/memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_ray.data.batches.plan import EPOCHS_KEPT
from dflash_ray.draft.dflash.memory import Bytes, memory_estimate
from dflash_ray.run.spec import RunSpec
from dflash_ray.target.parameters import count_parameters

SHM_SHARE = 0.7  # of /dev/shm may be features in flight
GIB = 2**30


@dataclass(frozen=True)
class RunMemory:
    target: dict[str, Bytes]
    drafter: dict[str, Bytes]
    drafter_host: dict[str, Bytes]
    message: Bytes
    window: Bytes
    tokens: Bytes  # token batches that wait in the object store


def run_memory(spec: RunSpec, tokens: int, anchors: int) -> RunMemory:
    """`tokens`, `anchors`: of the largest batch."""
    config, shape, width = spec.config, spec.shape, spec.feature_bytes
    whole = config.loss.needs_teacher
    layers = spec.target_shape.num_layers if whole else shape.target_layer_ids[-1] + 1
    weights = count_parameters(spec.target_shape, layers)
    hidden, inner = spec.target_shape.hidden_size, spec.target_shape.intermediate_size
    target = {
        "weights": _target_weights(spec, layers, weights, width),
        "activations": Bytes(
            tokens * (10 * hidden + 3 * inner) * width, f"{tokens:,} tokens x (10 x {hidden:,} + 3 x {inner:,}) x {width} B"
        ),
        "features": Bytes(
            tokens * shape.features * width, f"{tokens:,} tokens x {len(shape.target_layer_ids)} taps x {hidden:,} x {width} B"
        ),
    }
    teacher = spec.teacher_rows(tokens, anchors)
    if whole:
        target["teacher rows"] = Bytes(teacher * hidden * width, f"{teacher:,} rows x {hidden:,} x {width} B")
    if spec.device == "cuda" and config.transport.kind != "object_store":
        slots, each = config.transport.slots, target["features"]
        target["buffers for direct copies"] = Bytes(slots * each.bytes, f"{slots} x {each.arithmetic}")
    tied = bool(spec.target_shape.tie_word_embeddings)
    drafter = memory_estimate(shape, config, tokens, anchors, gpu=spec.device == "cuda", tied=tied)
    state = drafter["master weights"].bytes + drafter["optimizer"].bytes
    host = {"checkpoint snapshot": Bytes(state, "master weights and optimizer state, copied between two steps")}
    each = spec.message_bytes(tokens, anchors)
    rows = f" + {teacher:,} teacher rows x ({hidden:,} x {width} B + 4 B)" if whole else ""
    message = Bytes(each, f"{tokens:,} tokens x {len(shape.target_layer_ids)} taps x {hidden:,} x {width} B{rows}")
    window = Bytes(each * spec.window, f"{spec.window} batches x {each / 1e6:,.0f} MB")
    ahead = config.flow.prefetch_batches
    waiting = Bytes(ahead * (tokens * 5 + anchors * 4), f"{ahead} batches x ({tokens:,} tokens x (4 + 1) B + {anchors:,} anchors x 4 B)")
    return RunMemory(target, drafter, host, message, window, waiting)


def plan_memory(samples: int, epochs: int) -> Bytes:
    """What the batcher holds of a data set beside the interpreter: three numbers per sample, and where each one stands in an epoch."""
    kept = min(epochs, EPOCHS_KEPT)
    return Bytes(8 * samples * (3 + kept), f"{samples:,} samples x (length, candidates, anchors + {kept} epochs) x 8 B")


def _target_weights(spec: RunSpec, layers: int, weights: int, width: int) -> Bytes:
    if spec.config.target.precision != "fp8":
        return Bytes(weights * width, f"{weights / 1e9:.3f} B parameters of {layers} layers and the embedding x {width} B")
    embedding = spec.target_shape.vocab_size * spec.target_shape.hidden_size
    inside = weights - embedding
    return Bytes(
        inside + 2 * embedding, f"{inside / 1e9:.3f} B parameters of {layers} layers x 1 B + {embedding / 1e9:.3f} B of the embedding x 2 B"
    )


def refuse_what_cannot_fit(spec: RunSpec, memory: RunMemory, gpu_bytes: float | None, shm_bytes: float | None) -> None:
    """ValueError with the arithmetic if an actor exceeds its GPU, or not even one message fits /dev/shm."""
    placement = spec.config.placement
    if gpu_bytes is not None:
        for name, parts, share in (
            ("target", memory.target, placement.gpus_per_target),
            ("drafter", memory.drafter, placement.gpus_per_drafter),
        ):
            total, room = sum(part.bytes for part in parts.values()), gpu_bytes * min(share, 1.0)
            if total > room:
                most = max(parts, key=lambda kind: parts[kind].bytes)
                raise ValueError(
                    f"a {name} needs {total / GIB:.1f} GiB and has {room / GIB:.1f} GiB of its GPU; the largest part is {most}: "
                    f"{parts[most].arithmetic} = {parts[most].bytes / GIB:.1f} GiB; lower batching.token_budget or raise "
                    f"anchors.tokens_per_anchor"
                )
    if shm_bytes is not None and memory.message.bytes > SHM_SHARE * shm_bytes:
        raise ValueError(
            f"batching.token_budget: one batch's features are {memory.message.arithmetic} = {memory.message.bytes / GIB:.2f} GiB, over "
            f"{SHM_SHARE:g} of {shm_bytes / GIB:.2f} GiB shared memory; lower the budget or enlarge /dev/shm"
        )
