"""The run's numbers as Ray metrics, for the Prometheus and Grafana of Ray's dashboard.

Every series is labelled with the run and with the actor it speaks of, so several runs on one cluster stay apart. In Prometheus a name
has the prefix `ray_`. `dflash_ray/watch/grafana/dflash_ray.json` shows them.
"""

from __future__ import annotations

from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from dflash_ray.run.metric_records import StepRecord

LABELS = ("run", "actor")
# gauge -> (where its value stands in an actor's line of the status, description)
ACTOR_GAUGES = {
    "dflash_up": ("up", "1 while the actor works"),
    "dflash_q_pre": ("q_pre", "token batches handed to a target and not started"),
    "dflash_memory_bytes": ("rss_bytes", "resident host memory"),
    "dflash_device_memory_bytes": ("gpu_bytes", "most device memory allocated so far"),
    "dflash_watts": ("watts", "power of the actor's device"),
    "dflash_restarts": ("restarts", "restarts since the run began"),
    "dflash_silent_seconds": ("silent_seconds", "time since the actor last answered"),
}
# gauge -> (key of a step's record, the actor it speaks of, description)
STEP_GAUGES = {
    "dflash_step": ("step", "drafter", "optimizer steps done"),
    "dflash_loss": ("loss", "drafter", "training loss of the last step"),
    "dflash_loss_smooth": ("loss_smooth", "drafter", "training loss, smoothed by supervised tokens"),
    "dflash_tau": ("tau", "drafter", "training tau of the last step"),
    "dflash_accuracy": ("accuracy", "drafter", "share of supervised slots predicted right"),
    "dflash_learning_rate": ("lr", "drafter", "learning rate of the last step"),
    "dflash_drafter_wait": ("drafter_wait", "drafter", "share of time the drafter had no staged batch"),
    "dflash_target_wait": ("target_wait", "targets", "share of time the targets had no batch for want of credit"),
    "dflash_tokens_per_second": ("real_tokens_per_second", "coordinator", "real tokens trained per second"),
    "dflash_run_watts": ("watts", "coordinator", "power of all devices of the run"),
    "dflash_tokens_per_joule": ("tokens_per_joule", "coordinator", "real tokens trained per joule"),
    "dflash_mean_document_tokens": ("mean_document_tokens", "batcher", "mean document length of the last step"),
    "dflash_targets": ("targets", "coordinator", "targets at work"),
    "dflash_targets_parked": ("parked", "coordinator", "targets parked by the power budget"),
}
QUEUE_GAUGES = {
    "dflash_ahead": ("ahead", "token batches ready or handed"),
    "dflash_q_hs": ("q_hs", "batches of features that wait for the drafter"),
    "dflash_window_bytes": ("window_bytes", "bytes of features in flight"),
    "dflash_window_bytes_limit": ("window_bytes_limit", "most bytes of features in flight"),
}
TOKENS, STEPS, SECONDS = "dflash_tokens", "dflash_steps", "dflash_step_seconds"
SECONDS_BOUNDS = [0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300]


class RayMetrics:
    def __init__(self, run: str):
        self._run = run
        self._gauges: dict[str, Gauge] = {}
        self._actors: set[str] = set()
        self._tokens = Counter(TOKENS, "tokens trained; kind is real or padded", (*LABELS, "kind"))
        self._steps = Counter(STEPS, "optimizer steps", LABELS)
        self._seconds = Histogram(SECONDS, "time of one optimizer step, waiting included", SECONDS_BOUNDS, LABELS)

    def step(self, record: StepRecord) -> None:
        """Counts one optimizer step."""
        labels = {"run": self._run, "actor": "drafter"}
        self._steps.inc(1, labels)
        self._seconds.observe(record.seconds, labels)
        for kind, tokens in (("real", record.real_tokens), ("padded", record.padded_tokens)):
            if tokens > 0:
                self._tokens.inc(tokens, labels | {"kind": kind})

    def update(self, status: dict[str, Any]) -> None:
        """Sets the gauges from what the coordinator's `status` tells."""
        actors = {line["name"]: line | {"up": float(line["state"] == "working")} for line in status["actors"]}
        for gone in self._actors - actors.keys():
            for name, (_, description) in ACTOR_GAUGES.items():
                self._set(name, description, gone, 0.0)
        self._actors = set(actors)
        for actor, line in actors.items():
            for name, (key, description) in ACTOR_GAUGES.items():
                self._set(name, description, actor, line.get(key))
        for name, (key, description) in QUEUE_GAUGES.items():
            self._set(name, description, "coordinator", status["queues"][key])
        for name, (key, actor, description) in STEP_GAUGES.items():
            self._set(name, description, actor, status["last_step"].get(key))

    def _set(self, name: str, description: str, actor: str, value: float | None) -> None:
        if value is None:
            return
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description, LABELS)
        self._gauges[name].set(value, {"run": self._run, "actor": actor})
