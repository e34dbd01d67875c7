"""The published `dflash` package loads our export and decodes the same tokens with the same acceptance lengths as we do.

Both read the same files and share no code. Its interpreter comes from DFLASH_REFERENCE_PYTHON; without it the one wheel is installed, by
pip and without its dependencies, beside our own torch and transformers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_ray.batch import Batch
from dflash_ray.config import load_config
from dflash_ray.decode.drafter import ServedDrafter
from dflash_ray.decode.plain import plain_greedy
from dflash_ray.decode.speculative import served_tau, speculative
from dflash_ray.draft.export import export_drafter, load_drafter
from dflash_ray.draft.shape import FULL, SLIDING, DraftShape
from dflash_ray.draft.trainer import DraftTrainer
from dflash_ray.target.load import load_target
from tests.tiny_targets import VOCAB, save_target

TAPS, BLOCK, LENGTH = [0, 2], 6, 64


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, VOCAB - 1, length).tolist() for length in range(6, 6 + count)]


def one_batch(asked: list[list[int]], answers: list[list[int]]) -> Batch:
    """All conversations, an anchor at every second position of the answers."""
    documents = [np.array(prompt + answer, np.int32) for prompt, answer in zip(asked, answers, strict=True)]
    starts = np.cumsum([0, *map(len, documents)])
    mask = [np.r_[np.zeros(len(p)), np.ones(len(a))] for p, a in zip(asked, answers, strict=True)]
    anchors = [start + np.arange(len(p), len(p) + len(a) - 1, 2) for start, p, a in zip(starts, asked, answers, strict=False)]
    return Batch(
        number=0,
        epoch=0,
        sample_ids=np.arange(len(documents)),
        input_ids=np.concatenate(documents),
        cu_seqlens=starts.astype(np.int32),
        loss_mask=np.concatenate(mask).astype(np.uint8),
        anchors=np.concatenate(anchors).astype(np.int32),
    )


def learn_by_heart(folder: Path, family: str, kinds: tuple[str, ...], steps: int):
    """A target, and a drafter exported after learning the target's greedy answers to four prompts by heart."""
    save_target(family, folder / "target", layers=4, varied=True)
    target = load_target(folder / "target", taps=TAPS, device="cpu", with_head=True)
    asked = prompts(4)
    answers = [plain_greedy(target, prompt, LENGTH, []) for prompt in asked]
    assert all(len(answer) == LENGTH for answer in answers)
    mask = next(token for token in range(VOCAB - 1, 0, -1) if not any(token in text for text in asked + answers))
    shape = DraftShape(
        hidden=target.facts.hidden_size,
        vocab=target.facts.vocab_size,
        intermediate=96,
        num_layers=len(kinds),
        heads=4,
        kv_heads=2,
        head_dim=16,
        layer_types=kinds,
        sliding_window=9 if SLIDING in kinds else None,
        block_size=BLOCK,
        mask_token_id=mask,
        target_layer_ids=tuple(TAPS),
        num_target_layers=target.facts.num_layers,
        rope_theta=target.facts.rope_theta,
        rms_norm_eps=target.facts.rms_norm_eps,
        max_position_embeddings=target.facts.max_position_embeddings,
    )
    config = load_config(overrides={"optimizer": {"name": "muon"}})
    trainer = DraftTrainer(config, shape, target.embedding, target.head, "cpu", steps)
    batch = one_batch(asked, answers)
    features = target.features(batch)
    for step in range(steps):
        trainer.micro_step(batch, features)
        trainer.optimizer_step(step)
    export_drafter(trainer.serving_model.state_dict(), shape, folder / "drafter")
    return target, asked, answers, trainer.step_metrics(trainer.evaluate(batch, features))["tau"]


def serve(folder: Path, target, asked: list[list[int]], count: int):
    model, _ = load_drafter(folder / "drafter", target.embedding, target.head)
    return speculative(target, ServedDrafter(model, target.embedding, target.head), asked, max_new_tokens=count, stop_ids=[])


@pytest.mark.parametrize(("family", "kinds"), [("qwen3", (FULL, FULL)), ("qwen3_5", (SLIDING, FULL))])
def test_what_is_learnt_by_heart_is_served_in_whole_blocks(tmp_path, family, kinds):
    """Through the exported files; in float32 the output is plain greedy decoding, token for token."""
    target, asked, answers, trained_tau = learn_by_heart(tmp_path, family, kinds, steps=120)
    assert min(len(set(answer)) for answer in answers) >= 20
    served = serve(tmp_path, target, asked, LENGTH)
    assert [answer.tokens for answer in served] == answers
    assert served_tau(served) >= 0.8 * BLOCK
    assert served_tau(served) == pytest.approx(trained_tau, rel=0.15)  # anchors at every second position against one per pass


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """(interpreter, extra PYTHONPATH) of something that has `dflash`."""
    if given := os.environ.get("DFLASH_REFERENCE_PYTHON"):
        return given, ""
    folder = tmp_path_factory.mktemp("reference")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), "dflash==0.1.0"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"the dflash package cannot be installed here: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    return sys.executable, str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
@pytest.mark.parametrize("kinds", [(FULL, FULL), (SLIDING, FULL)], ids=["full", "sliding"])
def test_the_reference_decodes_the_same(tmp_path, reference, family, kinds):
    """A half-learnt drafter, so that passes accept anything from nothing to a whole block; prompts it never saw among them."""
    target, *_ = learn_by_heart(tmp_path, family, kinds, steps=30)
    asked = prompts(6)
    served = serve(tmp_path, target, asked, LENGTH)
    job = tmp_path / "job.json"
    places = {"target": str(tmp_path / "target"), "drafter": str(tmp_path / "drafter"), "hybrid": family == "qwen3_5"}
    job.write_text(json.dumps({**places, "prompts": asked, "max_new_tokens": LENGTH, "stop_ids": []}))
    python, path = reference
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, str(Path(__file__).with_name("reference_dflash.py")), str(job)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.strip().splitlines()[-1])
    gains = set()
    for ours, reference_answer in zip(served, theirs, strict=True):
        assert ours.tokens == reference_answer["tokens"]
        lengths = [len(one.produced) for one in ours.passes]
        # at the answer's end the reference drafts a shorter block, we a whole one whose tail is cut
        whole = next((i for i in range(len(lengths)) if LENGTH - 1 - sum(lengths[:i]) < BLOCK), len(lengths))
        assert lengths[:whole] == reference_answer["lengths"][:whole]
        gains |= set(lengths[:whole])
    assert {1, BLOCK} <= gains, gains
    assert torch.get_default_dtype() == torch.float32
