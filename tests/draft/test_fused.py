"""The pass with written-out gradients is the model's own forward and autograd, and a trainer that uses it is the same trainer."""

import pytest
import torch

from dflash_ray.draft.blocks.labels import Labels
from dflash_ray.draft.blocks.mask import Blocks
from dflash_ray.draft.dflash.fused import FusedPass, fused_covers
from dflash_ray.draft.dflash.memory import memory_estimate
from dflash_ray.draft.dflash.shape import FULL, SLIDING
from dflash_ray.draft.trainer import DraftTrainer
from tests.support.draft_cases import VOCAB, features_for, random, small_batch, small_model, small_shape, small_trainer

KINDS = [(FULL,), (SLIDING, FULL), (SLIDING, SLIDING, FULL)]


@pytest.mark.parametrize("kinds", KINDS, ids=len)
def test_output_and_gradients_are_those_of_autograd(kinds):
    """Summed over two batches, the second with one anchor; and kept activations serve two backward passes."""
    shape = small_shape(layer_types=kinds, num_layers=len(kinds), sliding_window=5)
    model, embed = small_model(shape), random(VOCAB, shape.hidden, seed=9)
    fused = FusedPass(model, torch.float64)
    sums, expected = fused.gradient_sums(), [torch.zeros_like(p) for p in model.parameters()]
    for seed, batch in enumerate((small_batch((12, 9), (0, 1, 5, 13, 18), unsupervised=(3, 14)), small_batch((7,), (2,), seed=3))):
        features, blocks = random(batch.tokens, shape.features, seed=seed), Blocks.of(batch, shape.block_size)
        slots = Labels.of(batch, shape.block_size, 3.0).slots
        exact = model(features, blocks, embed, slots)
        ours, kept = fused.forward(features, blocks, embed, slots)
        torch.testing.assert_close(ours, exact.detach(), rtol=1e-10, atol=1e-12)
        twice, grad = fused.gradient_sums(), random(*exact.shape, seed=5)
        fused.backward(kept, grad.clone(), twice, again=True)
        fused.backward(kept, grad.clone(), twice)
        _, kept = fused.forward(features, blocks, embed, slots)
        fused.backward(kept, grad.clone(), sums)
        gradients = torch.autograd.grad(exact, list(model.parameters()), grad)
        for total, doubled, gradient in zip(expected, twice.tensors, gradients, strict=True):
            total += gradient
            torch.testing.assert_close(doubled, 2 * gradient, rtol=1e-9, atol=1e-11)
    for (name, _), ours, total in zip(model.named_parameters(), sums.tensors, expected, strict=True):
        torch.testing.assert_close(ours, total, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def fused_twin(trainer: DraftTrainer) -> DraftTrainer:
    embed, head = trainer.embed.float(), trainer.head.float()
    return DraftTrainer(trainer.config, trainer.shape, embed, head, "cpu", trainer.total_steps, fused=True)


RECIPES = [
    {},
    {"optimizer": {"name": "muon"}, "noise": {"start": 0.1}},
    {"loss": {"ce": 1.0, "dpace": 1.0}, "train": {"ema": 0.9}},
    {"loss": {"kl": 1.0, "tv": 0.5, "dpace": 0.0}},
]


@pytest.mark.parametrize("recipe", RECIPES, ids=["adamw", "muon+noise", "mixture+ema", "kl+tv"])
def test_a_trainer_reports_and_learns_the_same(recipe):
    plain = small_trainer(small_shape(layer_types=(SLIDING, FULL), sliding_window=6), **recipe)
    fused = fused_twin(plain)
    for step in range(4):
        for number in range(2):
            batch = small_batch((9, 7), (0, 2, 3, 11), seed=2 * step + number, sample_ids=(4 * step + number, 50))
            features = features_for(batch, plain.shape, seed=step)
            teacher = (torch.arange(16).numpy(), random(16, 12, dtype=torch.float32)) if plain.config.loss.needs_teacher else None
            assert fused.micro_step(batch, features, teacher) == pytest.approx(plain.micro_step(batch, features, teacher), rel=1e-4)
        ours, theirs = fused.optimizer_step(step), plain.optimizer_step(step)
        assert ours.pop("grad_norm") == pytest.approx(theirs.pop("grad_norm"), rel=1e-4)
        assert ours == theirs
    for a, b in zip(plain.model.parameters(), fused.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_products_follow_the_weights():
    """After an update and after loading a state, what matmuls read is the new weight."""
    trainer = fused_twin(small_trainer())
    batch = small_batch()
    trainer.micro_step(batch, features_for(batch, trainer.shape))
    trainer.optimizer_step(0)
    other = fused_twin(small_trainer())
    other.load_state_dict(*trainer.state_dict())
    for one in (trainer, other):
        assert all(torch.equal(parameter.detach(), copy) for parameter, copy in one.fused.copies.items())
        assert {parameter.dim() for parameter in one.model.parameters() if parameter not in one.fused.copies} == {1}
    following = [one.micro_step(batch, features_for(batch, trainer.shape)) for one in (trainer, other)]
    assert following[0] == following[1]


def test_memory_arithmetic_on_a_gpu_is_what_the_pass_keeps():
    shape = small_shape(hidden=64, intermediate=160, head_dim=32, heads=2, kv_heads=1, layer_types=(SLIDING, FULL), sliding_window=9)
    trainer, batch = fused_twin(small_trainer(shape)), small_batch((60, 40), tuple(range(0, 90, 3)))
    blocks = Blocks.of(batch, shape.block_size)
    _, kept = trainer.fused.forward(features_for(batch, shape), blocks, trainer.embed, torch.arange(len(batch.anchors) * 4))
    tensors = [kept.raw_context, kept.context, kept.last, *(tensor for layer in kept.layers for tensor in vars(layer).values())]
    held = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor)}
    estimate = memory_estimate(shape, trainer.config, batch.tokens, len(batch.anchors), gpu=True)
    assert sum(held.values()) / 2 == pytest.approx(estimate["activations"].bytes, rel=0.1)  # float32 here, bf16 there


def test_kernels_are_for_bf16_on_a_gpu_and_usual_sizes():
    gpu = torch.device("cuda")
    assert fused_covers(small_shape(head_dim=64), torch.bfloat16, gpu)
    assert not fused_covers(small_shape(head_dim=64), torch.bfloat16, torch.device("cpu"))
    assert not fused_covers(small_shape(head_dim=64), torch.float32, gpu)
    for too_much in (dict(head_dim=80), dict(head_dim=256), dict(head_dim=64, block_size=65)):
        assert not fused_covers(small_shape(**too_much), torch.bfloat16, gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("loss", [{}, {"ce": 1.0, "dpace": 0.0}, {"ce": 0.5, "dpace": 1.0}], ids=["dpace", "ce", "mixture"])
def test_a_bf16_micro_step_on_a_gpu_is_near_float64(loss):
    """Loss within 1e-3, every gradient within a few bf16 roundings, updates included, against autograd in float64 on a CPU."""
    shape = small_shape(
        hidden=256, intermediate=512, heads=8, kv_heads=2, head_dim=64, num_layers=3, layer_types=(SLIDING, SLIDING, FULL),
        sliding_window=100, block_size=16, vocab=3000, mask_token_id=2999,
    )  # fmt: skip
    config = small_trainer(shape, loss=loss, train={"head_chunk": 300}).config
    embed, head = random(shape.vocab, shape.hidden, seed=7).bfloat16(), (random(shape.vocab, shape.hidden, seed=8) / 8).bfloat16()
    gpu = DraftTrainer(config, shape, embed, head, "cuda", 20)
    assert gpu.fused is not None
    exact = DraftTrainer(config, shape, embed, head, "cpu", 20)
    exact.model.double()
    exact.embed, exact.head, exact.dtype = embed.double(), head.double(), torch.float64
    with torch.no_grad():
        for parameter in exact.model.parameters():
            parameter.copy_(parameter.bfloat16())
        for ours, theirs in zip(gpu.model.parameters(), exact.model.parameters(), strict=True):
            ours.copy_(theirs)
    gpu.fused.refresh()
    for seed in (0, 1):
        batch = small_batch((300, 90, 250), tuple(range(2, 640, 7)), seed=seed)
        features = random(batch.tokens, shape.features, seed=20 + seed).bfloat16()
        ours, theirs = gpu.micro_step(batch, features.cuda()), exact.micro_step(batch, features)
        for name in ("ce", "dpace"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3), name
    for kind, gradients in exact._gradients.items():
        for (name, _), a, b in zip(exact.model.named_parameters(), gpu._gradients[kind], gradients, strict=True):
            assert (a.cpu().double() - b).norm() < 0.03 * b.norm(), f"{kind} {name}"
    before = [parameter.clone() for parameter in gpu.model.parameters()]
    assert gpu.optimizer_step(0)["grad_norm"] == pytest.approx(exact.optimizer_step(0)["grad_norm"], rel=0.01)
    assert all((old != new).any() for old, new in zip(before, gpu.model.parameters(), strict=True))
    with torch.no_grad():
        # AdamW's first update is the gradient's sign, which noise may turn: the updated weights are taken over, then serving is compared
        for theirs, ours in zip(exact.model.parameters(), gpu.model.parameters(), strict=True):
            theirs.copy_(ours.bfloat16())
    staged = gpu.stage(batch, features)  # from the host, on its own stream
    held_out = gpu.evaluate_staged(staged), exact.evaluate(batch, features)
    assert held_out[0]["ce"] == pytest.approx(held_out[1]["ce"], rel=1e-3)
