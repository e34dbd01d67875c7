"""What of the driver's environment reaches every actor."""

from __future__ import annotations

from pathlib import Path

from actors.placement import PASSED, actor_options
from dflash_ray.config.schema import Config
from dflash_ray.run.spec import RunSpec


def test_the_allow_list_reaches_every_actor_and_nothing_else_does(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.delenv("HF_HOME", raising=False)
    spec = RunSpec(Config(), "cpu", None, None, "packed", "", Path("unused"), "names")
    for role in ("coordinator", "batcher", "target", "drafter"):
        env = actor_options(role, role, spec)["runtime_env"]["env_vars"]
        assert env["TRITON_CACHE_DIR"] == "/somewhere" and env["OMP_NUM_THREADS"] == "1"
        assert "WANDB_API_KEY" not in env and "HF_HOME" not in env
        assert env.keys() <= {*PASSED, "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES"}
