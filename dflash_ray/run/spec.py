"""From a config to everything a run is, resolved once and checked before anything is written.

`resolve` raises ValueError, one line, for whatever the user could have got wrong. Its result travels to the actors, which build their
library objects from it (`build`); so the driver, the actors and `--dry-run` cannot disagree about a default.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_ray.config.loading import merge, validate
from dflash_ray.config.schema import Config

if TYPE_CHECKING:
    from dflash_ray.draft.dflash.shape import DraftShape
    from dflash_ray.target.shape import TargetShape


@dataclass(frozen=True)
class RunSpec:
    config: Config
    device: str  # cpu | cuda
    target_shape: TargetShape
    shape: DraftShape
    strategy: str  # packed | bucketed | random | sorted
    strategy_reason: str
    run_dir: Path
    namespace: str  # of the actors' names
    weights: str = ""  # fingerprint of the target's; empty where they are random or nobody looked

    @property
    def feature_bytes(self) -> int:
        """Bytes of one feature value as it travels: bf16 from a GPU target, float32 from a CPU target unless told otherwise."""
        precision = self.config.target.precision
        if precision == "auto":
            return 4 if self.device == "cpu" else 2
        return 4 if precision == "float32" else 2

    def message_bytes(self, tokens: int, anchors: int) -> int:
        """Most bytes that one batch's features (and teacher rows with their int32 positions) take in the object store."""
        rows = self.teacher_rows(tokens, anchors)
        return (tokens * self.shape.features + rows * self.shape.hidden) * self.feature_bytes + 4 * rows

    def teacher_rows(self, tokens: int, anchors: int) -> int:
        """Most teacher rows of one batch: K-1 of each block, but every position once."""
        return min(tokens, anchors * (self.shape.block_size - 1)) if self.config.loss.needs_teacher else 0

    @property
    def window(self) -> int:
        return self.config.flow.window or 2 * self.config.targets + 2


def resolve(config: Config, *, device: str, run_dir: Path, namespace: str = "dflash-ray") -> RunSpec:
    """Target, drafter shape and batching of a run. Reads the target's config and tokenizer, no weights and no samples."""
    from dflash_ray.data.batches.plan import resolve_strategy
    from dflash_ray.draft.dflash.shape import resolve_shape
    from dflash_ray.target.shape import known_target_shape, read_target_shape, resolve_mask_token

    target = config.target
    if target.shape is not None and (target.weights == "random" or target.path is None):
        target_shape = known_target_shape(target.shape)
        if config.draft.mask_token_id is None:
            raise ValueError("draft.mask_token_id: a target given by target.shape has no tokenizer to ask; set the id")
        mask = config.draft.mask_token_id
    elif target.path is None:
        raise ValueError("target.path: not set; give the folder of the frozen target (or target.shape with --dry-run)")
    else:
        target_shape = read_target_shape(target.path)
        mask = resolve_mask_token(target.path, config.draft.mask_token_id)
    config = validate(merge(config.as_dict(), {"draft": {"mask_token_id": mask}}))
    shape = resolve_shape(config.draft, target_shape)
    config = validate(merge(config.as_dict(), {"draft": {"target_layer_ids": list(shape.target_layer_ids)}}))
    if config.draft.init != "random":
        from dflash_ray.draft.dflash.export import check_warm_start

        if not Path(config.draft.init).is_dir():
            raise ValueError(f"draft.init: {config.draft.init} is no folder; give `random` or the folder of an exported drafter")
        check_warm_start(Path(config.draft.init), shape)
    strategy, reason = resolve_strategy(config.batching, target_shape.isolates_documents(device))
    return RunSpec(config, device, target_shape, shape, strategy, reason, Path(run_dir), namespace)


def with_weights(spec: RunSpec) -> RunSpec:
    """With the fingerprint of the target's weights. ValueError for a target folder without whole weights."""
    return replace(spec, weights=weights_fingerprint(spec.config))


def weights_fingerprint(config: Config) -> str:
    """Of the target's weights, as `target.path` holds them now; empty where they are random."""
    from dflash_ray.target.weights import WeightFiles

    return "" if config.target.weights == "random" else WeightFiles(config.target.path).fingerprint()
