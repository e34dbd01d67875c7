"""Records with every key, of which a test sets those that matter to it."""

from __future__ import annotations

from typing import Any

from dflash_ray.run.checkpoint import CheckpointMeta
from dflash_ray.run.metric_records import StepRecord


def step_record(step: int = 1, **values: Any) -> StepRecord:
    usual = dict.fromkeys(("loss", "ce", "dpace", "accuracy", "tau", "tau_blocks", "supervised_tokens_covered", "loss_smooth"), 1.0)
    usual |= dict.fromkeys(("lr", "noise_std", "grad_norm", "real_tokens_per_second", "padded_tokens_per_second", "seconds", "time"), 0.0)
    usual |= dict.fromkeys(("supervised_tokens", "real_tokens", "padded_tokens", "ahead", "q_hs", "window_bytes", "parked"), 0)
    usual |= dict.fromkeys(("skipped", "watts", "tokens_per_joule", "spike", "eta_seconds"))
    usual |= {"drafter_wait": 0.0, "target_wait": 0.0, "mean_document_tokens": 1.0, "targets": 1}
    usual |= {"slot_accuracy": [], "buckets": [], "q_pre": []}
    return StepRecord(**{"step": step, **usual, **values})


def checkpoint_meta(step: int, **values: Any) -> CheckpointMeta:
    usual = {"next_batch": step, "set_aside": [], "best_tau": None, "best_by": "tau", "best_name": None, "plan": "", "dataset": ""}
    usual |= {"weights": "", "batches_per_step": 1, "seed": 0, "trainer": {}, "shape": {}, "state_bytes": 0, "state_digest": ""}
    return CheckpointMeta(**{"step": step, **usual, **values})
