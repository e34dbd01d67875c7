"""Training and serving agree: a drafter that has learnt four answers by heart is accepted almost whole when it is served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_ray.config.loading import validate
from dflash_ray.data.batches.batch import Batch
from dflash_ray.draft.dflash.export import export_drafter, load_drafter
from dflash_ray.draft.dflash.model import DraftModel
from dflash_ray.draft.dflash.shape import resolve_shape
from dflash_ray.draft.replay import replay
from dflash_ray.draft.trainer import DraftTrainer
from dflash_ray.serve.drafter import ServedDrafter
from dflash_ray.serve.plain import plain_greedy
from dflash_ray.serve.speculative import served_tau, speculative
from dflash_ray.target.load import load_target
from tests.serve.test_decode import prompts_of
from tests.support.tiny_targets import VOCAB, save_target

BLOCK = 6
ANSWER = 64


def batch_of(prompts: list[list[int]], answers: list[list[int]]) -> Batch:
    """One packed batch with an anchor at every position that has an answer token after it."""
    documents = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    bounds = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype(np.int32)
    mask = np.concatenate([[0] * len(prompt) + [1] * len(answer) for prompt, answer in zip(prompts, answers, strict=True)])
    anchors = np.flatnonzero(mask[:-1] & mask[1:])  # two answer tokens in a row; a prompt stands between answers
    return Batch(
        number=0,
        epoch=0,
        sample_ids=np.arange(len(prompts)),
        input_ids=np.concatenate(documents).astype(np.int32),
        cu_seqlens=bounds,
        loss_mask=mask.astype(np.uint8),
        anchors=anchors.astype(np.int32),
    )


def learnt(trainer: DraftTrainer, batch: Batch, features: torch.Tensor, steps: int, folder: Path) -> DraftModel:
    """The drafter after `steps` steps on one batch, exported and read back."""
    for step in range(steps):
        trainer.micro_step(batch, features)
        trainer.optimizer_step(step)
    export_drafter(trainer.model.state_dict(), trainer.shape, folder)
    return load_drafter(folder, trainer.embed, trainer.head)[0]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_answers_learnt_by_heart_are_accepted_when_served(family, tmp_path):
    save_target(family, tmp_path / "target", layers=4, varied=True)
    target = load_target(tmp_path / "target", taps=[0, 2], device="cpu", with_head=True)
    prompts = prompts_of(5, 9, 14, 20)
    answers = [plain_greedy(target, prompt, ANSWER, []) for prompt in prompts]
    assert all(len(set(answer)) >= 20 for answer in answers)
    steps = 110
    config = validate(
        {
            "draft": {
                "block_size": BLOCK,
                "num_layers": 2,
                "target_layer_ids": [0, 2],
                "mask_token_id": VOCAB - 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "intermediate_size": 96,
            },
            "optimizer": {"name": "muon", "lr": 3e-3},
        }
    )
    shape = resolve_shape(config.draft, target.shape)
    trainer = DraftTrainer(config, shape, target.embedding, target.head, "cpu", steps)
    batch = batch_of(prompts, answers)
    model = learnt(trainer, batch, target.features(batch), steps, tmp_path / "drafter")
    drafter = ServedDrafter(model, target.embedding, target.head)
    served = speculative(target, drafter, prompts, max_new_tokens=ANSWER, stop_ids=[])
    assert [answer.tokens for answer in served] == answers
    assert served_tau(served) >= 0.8 * BLOCK
    for stop in set(answers[0][BLOCK : 2 * BLOCK]):  # wherever in a block it stands, nothing after it belongs to the answer or to tau
        end = answers[0].index(stop) + 1
        [stopped] = speculative(target, drafter, prompts[:1], max_new_tokens=ANSWER, stop_ids=[stop])
        assert stopped.tokens == answers[0][:end] == plain_greedy(target, prompts[0], ANSWER, [stop])
        assert sum(len(one.produced) for one in stopped.passes) == end - 1
    strangers = prompts_of(8, 11, seed=99)
    with torch.inference_mode():
        unknown = speculative(target, drafter, strangers, max_new_tokens=ANSWER, stop_ids=[])
    assert [answer.tokens for answer in unknown] == [plain_greedy(target, prompt, ANSWER, []) for prompt in strangers]


@pytest.mark.parametrize("steps", [0, 25])
def test_replayed_answers_give_the_served_tau(steps, tmp_path):
    """Drafters that know nothing and something: the walk over blocks at every place is what a server does, a mean over them is not."""
    save_target("qwen3", tmp_path / "target", layers=4, varied=True)
    target = load_target(tmp_path / "target", taps=[0, 2], device="cpu", with_head=True)
    prompts = prompts_of(5, 9, 14, 20)
    answers = [plain_greedy(target, prompt, ANSWER - cut, []) for prompt, cut in zip(prompts, (0, 3, 40, 63), strict=True)]
    draft = {"block_size": BLOCK, "num_layers": 1, "target_layer_ids": [0, 2], "mask_token_id": VOCAB - 1, "num_attention_heads": 2}
    config = validate({"draft": draft | {"head_dim": 16}, "optimizer": {"name": "muon", "lr": 3e-3}})
    shape = resolve_shape(config.draft, target.shape)
    trainer = DraftTrainer(config, shape, target.embedding, target.head, "cpu", max(steps, 1))
    batch = batch_of(prompts, answers)
    features = target.features(batch)
    model = learnt(trainer, batch, features, steps, tmp_path / "drafter")
    trainer.model.load_state_dict(model.state_dict())  # as rounded by the export
    served = [
        answer
        for prompt, expected in zip(prompts, answers, strict=True)
        for answer in speculative(
            target, ServedDrafter(model, target.embedding, target.head), [prompt], max_new_tokens=len(expected), stop_ids=[]
        )
    ]
    metrics = trainer.step_metrics(trainer.evaluate(batch, features))
    assert metrics["replay_tau"] == served_tau(served)
    if steps:
        assert 1.2 < metrics["replay_tau"] < metrics["tau"] < BLOCK
    sparse = replace(batch, anchors=batch.anchors[1:])
    assert "replay_tau" not in trainer.step_metrics(trainer.evaluate(sparse, features))


def test_a_replay_walks_each_answer_by_itself():
    mask = np.array([0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], np.uint8)  # answers of 4 and 2 tokens; then of 3 and of 1
    bounds, anchors = np.array([0, 10, 16], np.int32), np.array([1, 2, 3, 7, 11, 12], np.int32)
    batch = Batch(0, 0, np.arange(2), np.zeros(16, np.int32), bounds, mask, anchors)
    assert replay(batch, np.zeros(6, int)) == {"replay_tokens": 6, "replay_passes": 6}
    assert replay(batch, np.array([1, 9, 0, 5, 2, 0])) == {"replay_tokens": 6, "replay_passes": 4}
    assert replay(replace(batch, anchors=anchors[:-1]), np.zeros(5, int)) == {"replay_tokens": 0, "replay_passes": 0}
