"""The trainer: equal bits, one division per step, skipped steps, refused features, and that it learns."""

import math

import numpy as np
import pytest
import torch

from dflash_ray.config.loading import load_config
from dflash_ray.data.batches.batch import Batch
from dflash_ray.draft.blocks.mask import Blocks
from dflash_ray.draft.dflash.memory import memory_estimate
from dflash_ray.draft.dflash.shape import FULL, SLIDING
from dflash_ray.draft.trainer import Diverged, FeatureError, check_features, compute_dtype
from tests.support.draft_cases import QWEN, VOCAB, features_for, random, small_batch, small_shape, small_trainer

RECIPES = [
    {},
    {"optimizer": {"name": "muon"}, "noise": {"start": 0.1}},
    {"loss": {"ce": 1.0, "dpace": 1.0}, "train": {"ema": 0.9}},
    {"loss": {"kl": 1.0, "dpace": 0.0}, "train": {"precision": "bf16"}, "schedule": {"name": "wsd"}},
]


def batches(count=4):
    return [small_batch((9, 7), (0, 2, 3, 11), seed=n, number=n, sample_ids=(2 * n, 2 * n + 1)) for n in range(count)]


def teacher_for(batch, trainer):
    if not trainer.config.loss.needs_teacher:
        return None
    return np.arange(batch.tokens), random(batch.tokens, trainer.shape.hidden, seed=99, dtype=torch.float32)


def run(trainer, steps, per_step=2):
    """Reports of `steps` steps, each of `per_step` batches, going on from the trainer's step."""
    reports = []
    for step in range(trainer.step, trainer.step + steps):
        for batch in batches(per_step):
            sums = trainer.micro_step(batch, features_for(batch, trainer.shape, seed=step), teacher_for(batch, trainer))
            reports.append(sums)
        reports.append(trainer.optimizer_step(step))
    return reports


@pytest.mark.parametrize("recipe", RECIPES, ids=["adamw", "muon+noise", "mixture+ema", "kl+bf16"])
def test_resuming_gives_the_same_bits_as_not_stopping(recipe):
    unbroken = small_trainer(**recipe)
    expected = run(unbroken, 6)
    first = small_trainer(**recipe)
    run(first, 3)
    tensors, meta = first.state_dict()
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    second = small_trainer(**recipe)
    second.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, meta)
    assert run(second, 3) == expected[len(expected) // 2 :]
    ours, theirs = second.state_dict(), unbroken.state_dict()
    assert ours[1] == theirs[1] and ours[0].keys() == theirs[0].keys()
    assert all(torch.equal(ours[0][name], theirs[0][name]) for name in ours[0])
    batch = batches(1)[0]
    evaluated = [t.evaluate(batch, features_for(batch, t.shape), teacher_for(batch, t)) for t in (second, unbroken)]
    assert evaluated[0] == evaluated[1]


def joined(parts: list[Batch]) -> Batch:
    offsets = np.cumsum([0, *(part.tokens for part in parts)])
    return Batch(
        number=0,
        epoch=0,
        sample_ids=np.concatenate([part.sample_ids for part in parts]),
        input_ids=np.concatenate([part.input_ids for part in parts]),
        cu_seqlens=np.concatenate([[0], *(part.cu_seqlens[1:] + offset for part, offset in zip(parts, offsets, strict=False))]),
        loss_mask=np.concatenate([part.loss_mask for part in parts]),
        anchors=np.concatenate([part.anchors + offset for part, offset in zip(parts, offsets, strict=False)]),
    )


@pytest.mark.parametrize("loss", [{"ce": 1.0, "dpace": 0.0}, {"dpace": 1.0}, {"ce": 0.5, "dpace": 1.0}], ids=["ce", "dpace", "mixture"])
def test_how_a_step_is_cut_into_batches_does_not_matter(loss):
    """Unequal parts: a mean of means would differ."""
    parts = [small_batch((20,), (0, 5, 9, 12, 15), seed=1), small_batch((4, 3), (1, 4), seed=2), small_batch((5,), (0,), seed=3)]
    whole, cut = small_trainer(loss=loss, optimizer={"clip": 1e9}), small_trainer(loss=loss, optimizer={"clip": 1e9})
    features = features_for(joined(parts), whole.shape)
    whole.micro_step(joined(parts), features)
    for part, piece in zip(parts, features.split([part.tokens for part in parts]), strict=True):
        cut.micro_step(part, piece)
    assert cut.optimizer_step(0)["grad_norm"] == pytest.approx(whole.optimizer_step(0)["grad_norm"], rel=1e-5)
    for a, b in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6)


def test_the_gradient_is_clipped_after_the_division():
    free, clipped = small_trainer(optimizer={"clip": 1e9, "name": "muon"}), small_trainer(optimizer={"clip": 0.01, "name": "muon"})
    for trainer in (free, clipped):
        batch = small_batch((20,), tuple(range(0, 18)))
        trainer.micro_step(batch, features_for(batch, trainer.shape))
    norm = free.optimizer_step(0)["grad_norm"]
    assert clipped.optimizer_step(0)["grad_norm"] == pytest.approx(norm)  # reported before clipping
    ratio = [b.norm() / a.norm() for a, b in zip(momenta(free), momenta(clipped), strict=True)]
    assert ratio == pytest.approx([0.01 / norm] * len(ratio), rel=1e-4)


def momenta(trainer):
    return [tensor for name, tensor in trainer.state_dict()[0].items() if ".momentum." in name]


def test_a_step_without_any_label_changes_nothing_and_counts():
    trainer = small_trainer()
    before = {name: tensor.clone() for name, tensor in trainer.state_dict()[0].items()}
    batch = small_batch((8,), (1, 2), unsupervised=range(8))
    sums = trainer.micro_step(batch, features_for(batch, trainer.shape))
    report = trainer.optimizer_step(0)
    assert report["skipped"] == "no_label" and report["grad_norm"] == 0.0
    assert trainer.step_metrics(sums)["loss"] == 0.0
    after = trainer.state_dict()[0]
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert trainer.step == 1 and trainer.skipped == {"no_label": 1, "non_finite": 0}
    assert trainer.optimizer_step(1)["skipped"] == "no_label"  # no batch at all: every one was set aside


def test_an_anchor_without_any_context_trains():
    """At the first token of a document nothing of the target's features is visible; every parameter still has a gradient."""
    for kinds in ((FULL, FULL), (SLIDING, SLIDING)):
        trainer = small_trainer(small_shape(layer_types=kinds, sliding_window=3))
        batch = small_batch((5,), (0,))
        trainer.micro_step(batch, features_for(batch, trainer.shape))
        assert trainer.optimizer_step(0)["skipped"] is None


def test_a_step_with_a_non_finite_gradient_is_skipped_and_a_row_of_them_stops_the_run():
    trainer = small_trainer(train={"max_skipped_steps": 2})
    batch = small_batch()
    huge = features_for(batch, trainer.shape) * 1e30
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with torch.no_grad():
        trainer.head.mul_(1e30)
    for step in range(2):
        trainer.micro_step(batch, huge)
        assert trainer.optimizer_step(step)["skipped"] == "non_finite"
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    trainer.micro_step(batch, huge)
    with pytest.raises(Diverged, match="3 steps in a row.*lower optimizer.lr"):
        trainer.optimizer_step(2)


def test_received_features_are_never_written_to():
    trainer = small_trainer(noise={"start": 0.5, "end": 0.5})
    batch = small_batch()
    features = features_for(batch, trainer.shape)
    copy = features.clone()
    trainer.micro_step(batch, features)
    trainer.optimizer_step(0)
    trainer.evaluate(batch, features)
    assert torch.equal(features, copy)


def test_evaluation_sees_no_noise_and_leaves_training_alone():
    noisy, plain = small_trainer(noise={"start": 0.5, "end": 0.5}), small_trainer()
    batch = small_batch()
    features = features_for(batch, plain.shape)
    assert noisy.evaluate(batch, features) == plain.evaluate(batch, features)
    left_alone = small_trainer(noise={"start": 0.5, "end": 0.5})
    assert noisy.micro_step(batch, features) == left_alone.micro_step(batch, features)
    assert noisy.optimizer_step(0) == left_alone.optimizer_step(0)


def test_evaluation_uses_averaged_weights():
    trainer = small_trainer(train={"ema": 0.9})
    run(trainer, 5)
    batch = small_batch()
    averaged = trainer.evaluate(batch, features_for(batch, trainer.shape))
    trainer.averaged.load_state_dict(trainer.model.state_dict())
    assert averaged["dpace"] != trainer.evaluate(batch, features_for(batch, trainer.shape))["dpace"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: f[:-1], "features are \\[15, 24\\], expected 16 tokens x 2 taps x 12"),
        (lambda f: f[:, :-12], "features are \\[16, 12\\]"),
        (lambda f: f.half(), "torch.float16; only bfloat16 and float32"),
        (lambda f: f.index_fill(0, torch.tensor([3]), math.nan), "NaN or infinity"),
        (lambda f: f.index_fill(0, torch.tensor([3]), math.inf), "NaN or infinity"),
        (lambda f: f.index_fill(0, torch.tensor([3, 5]), 0.0), "features of 2 tokens are all zero"),
    ],
)
def test_wrong_features_are_refused(spoil, says):
    shape, batch = small_shape(), small_batch()
    features = features_for(batch, shape)
    check_features(batch, features, shape)
    check_features(batch, features.bfloat16(), shape)
    with pytest.raises(FeatureError, match=says):
        check_features(batch, spoil(features), shape)


def test_a_token_with_a_zero_embedding_may_have_zero_features():
    shape, batch = small_shape(), small_batch()
    features = features_for(batch, shape).index_fill(0, torch.tensor([3]), 0.0)
    check_features(batch, features, shape, batch.input_ids[3:4])
    trainer = small_trainer()
    with pytest.raises(FeatureError, match="features of 1 tokens are all zero"):
        trainer.micro_step(batch, features)


def test_missing_teacher_rows_are_refused():
    trainer = small_trainer(loss={"kl": 1.0, "dpace": 0.0})
    batch = small_batch()
    features = features_for(batch, trainer.shape)
    with pytest.raises(FeatureError, match="need the target's teacher rows"):
        trainer.micro_step(batch, features)
    with pytest.raises(FeatureError, match="teacher row is missing"):
        trainer.micro_step(batch, features, (np.array([0, 1]), random(2, 12, dtype=torch.float32)))


def test_teacher_rows_belong_to_the_position_before_the_label():
    """Rows given for some positions in any larger set give the same numbers."""
    trainer = small_trainer(loss={"kl": 1.0, "dpace": 0.0})
    batch = small_batch()
    features, rows = features_for(batch, trainer.shape), random(batch.tokens, 12, seed=9, dtype=torch.float32)
    all_positions = trainer.evaluate(batch, features, (np.arange(16), rows))
    needed = np.array([1, 2, 3, 4, 5, 10, 11, 12])
    assert trainer.evaluate(batch, features, (needed, rows[needed])) == all_positions
    assert trainer.evaluate(batch, features, (np.arange(16), rows.roll(1, 0)))["kl"] != all_positions["kl"]


def test_a_perfect_teacher_match_has_no_divergence():
    trainer = small_trainer(loss={"kl": 1.0, "tv": 1.0, "dpace": 0.0})
    batch = small_batch((9,), (1,))
    features = features_for(batch, trainer.shape)
    own = trainer.model(features, Blocks.of(batch, 4), trainer.embed)[0, 1:].detach()
    sums = trainer.evaluate(batch, features, (np.array([1, 2, 3]), own))
    assert sums["kl"] == pytest.approx(0, abs=1e-5) and sums["tv"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda meta: meta | {"total_steps": 7}, "total_steps is 7, this run's is 20"),
        (lambda meta: meta | {"optimizer": "muon"}, "optimizer is muon"),
        (lambda meta: meta | {"shape": meta["shape"] | {"heads": 2}}, "shape is .*draft section"),
        (lambda meta: meta | {"tables": "ffff"}, "fingerprint ffff, those of target.path have 0f1e2d; resume with the same target"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(change, says):
    trainer = small_trainer()
    tensors, meta = trainer.state_dict()
    with pytest.raises(ValueError, match=says):
        trainer.load_state_dict(tensors, change(meta))


def test_norm_weights_move_within_50_steps():
    trainer = small_trainer(total_steps=50)
    batch = small_batch((9, 7), tuple(range(15)))
    for step in range(50):
        trainer.micro_step(batch, features_for(batch, trainer.shape))
        trainer.optimizer_step(step)
    tensors, _ = trainer.state_dict()
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    for name, tensor in tensors.items():
        if name.startswith("model.") and tensor.dim() == 1:
            assert (tensor != 1.0).all(), name


def test_half_precision_is_refused():
    with pytest.raises(ValueError, match="train.precision"):
        load_config(overrides={"train": {"precision": "float16"}})


def test_precision():
    assert compute_dtype("auto", torch.device("cpu")) == torch.float32
    assert compute_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert compute_dtype("bf16", torch.device("cpu")) == torch.bfloat16
    trainer = small_trainer(train={"precision": "bf16"})
    assert trainer.embed.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
    batch = small_batch()
    exact = small_trainer().micro_step(batch, features_for(batch, trainer.shape))
    assert trainer.micro_step(batch, features_for(batch, trainer.shape))["dpace"] == pytest.approx(exact["dpace"], rel=0.01)


@pytest.mark.parametrize("kinds", [(FULL, FULL), (SLIDING, FULL)])
def test_a_drafter_learns_a_few_documents_by_heart(kinds):
    shape = small_shape(hidden=32, intermediate=64, head_dim=16, layer_types=kinds, sliding_window=6, block_size=4)
    trainer = small_trainer(shape, total_steps=120, optimizer={"name": "muon"}, train={"head_chunk": 512})
    batch = small_batch((24, 24), (*range(22), *range(24, 46)))
    features = features_for(batch, shape)
    first = trainer.step_metrics(trainer.evaluate(batch, features))
    for step in range(120):
        trainer.micro_step(batch, features)
        trainer.optimizer_step(step)
    last = trainer.step_metrics(trainer.evaluate(batch, features))
    assert first["tau"] < 1.5 and last["tau"] > 0.9 * shape.block_size
    assert last["ce"] < first["ce"] / 5


def test_memory_arithmetic_equals_what_the_trainer_holds():
    for recipe in ({}, {"optimizer": {"name": "muon"}}, {"train": {"ema": 0.9}, "loss": {"ce": 1.0, "dpace": 1.0}}):
        trainer = small_trainer(**recipe)
        batch = small_batch()
        trainer.micro_step(batch, features_for(batch, trainer.shape))
        sums = sum(tensor.nbytes for kind in trainer._gradients.values() for tensor in kind)
        trainer.optimizer_step(0)
        estimate = memory_estimate(trainer.shape, trainer.config, batch.tokens, len(batch.anchors), gpu=False)
        held = {"model": 0, "optimizer": 0, "averaged": 0}
        for name, tensor in trainer.state_dict()[0].items():
            held[name.split(".")[0]] += tensor.nbytes if tensor.dim() else 0
        assert estimate["master weights"].bytes == held["model"]
        assert estimate["gradient sums"].bytes == sums
        assert estimate["optimizer"].bytes == held["optimizer"]
        assert estimate["embedding and head"].bytes == trainer.embed.nbytes + trainer.head.nbytes
        if trainer.averaged is not None:
            assert estimate["averaged weights"].bytes == held["averaged"]


def test_memory_of_the_qwen_drafter():
    """Float32 masters and two moments: 1.730 B x 12 B = 20.8 GB."""
    config = load_config()
    estimate = memory_estimate(QWEN, config, 16384, 381)
    assert estimate["master weights"].bytes + estimate["optimizer"].bytes == 12 * 1_730_213_120
    assert estimate["features"].bytes == 2 * 838_860_800
    assert estimate["master weights"].arithmetic == "1.730 B parameters x 4 B"


def test_memory_arithmetic_of_activations_is_near_what_autograd_keeps():
    shape = small_shape(hidden=64, intermediate=160, head_dim=32, heads=2, kv_heads=1, vocab=VOCAB)
    trainer = small_trainer(shape)
    batch = small_batch((60, 40), tuple(range(0, 90, 3)))
    kept: dict[int, int] = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    features = features_for(batch, shape)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trainer.model(features, Blocks.of(batch, shape.block_size), trainer.embed)
    own = {t.untyped_storage().data_ptr() for t in [features, *trainer.model.parameters()]}
    measured = sum(size for place, size in kept.items() if place not in own)
    estimate = memory_estimate(shape, trainer.config, batch.tokens, len(batch.anchors), gpu=False)
    assert 0.7 < measured / (estimate["activations"].bytes + estimate["attention scores"].bytes) < 1.1
