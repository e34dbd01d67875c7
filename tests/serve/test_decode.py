"""Cached decoding: the tokens of the untouched model, exact rollback, and speculation that changes speed and nothing else."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from dflash_ray.draft.dflash.model import DraftModel, initialise
from dflash_ray.draft.dflash.shape import DraftShape
from dflash_ray.serve.drafter import DraftState, ServedDrafter
from dflash_ray.serve.plain import generate_batch, plain_greedy
from dflash_ray.serve.speculative import speculative
from dflash_ray.serve.state import TargetState
from dflash_ray.target.load import load_target
from tests.support.tiny_targets import FAMILIES, VOCAB, save_target

TAPS = [0, 2]
BLOCK = 6


# one family per way of mixing tokens: full attention, a window, and the recurrent state with dense and with routed layers
MIXING = ("llama", "qwen3_sliding", "qwen3_5", "qwen3_5_moe")


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """(untouched model, target) of a family, made once."""
    made = {}

    def get(name: str, varied: bool = True):
        if (name, varied) not in made:
            folder = tmp_path_factory.mktemp(name)
            model = save_target(name, folder, layers=4, varied=varied)
            made[name, varied] = model, load_target(folder, taps=TAPS, device="cpu", with_head=True)
        return made[name, varied]

    return get


@pytest.fixture(params=MIXING)
def target(request, families):
    return families(request.param)[1]


@pytest.fixture(params=MIXING)
def calm_target(request, families):
    """One in which rounding errors do not grow, for comparing numbers."""
    return families(request.param, varied=False)[1]


def random_drafter(target, *, sliding: bool = False, seed: int = 0) -> ServedDrafter:
    target_shape = target.shape
    shape = DraftShape(
        hidden=target_shape.hidden_size,
        vocab=target_shape.vocab_size,
        intermediate=40,
        num_layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        layer_types=("sliding_attention", "full_attention") if sliding else ("full_attention",) * 2,
        sliding_window=7 if sliding else None,
        block_size=BLOCK,
        mask_token_id=VOCAB - 1,
        target_layer_ids=tuple(TAPS),
        num_target_layers=target_shape.num_layers,
        rope_theta=target_shape.rope_theta,
        rms_norm_eps=target_shape.rms_norm_eps,
        max_position_embeddings=target_shape.max_position_embeddings,
    )
    model = DraftModel(shape)
    initialise(model, seed, std=0.3)
    return ServedDrafter(model.requires_grad_(False), target.embedding, target.head)


def prompts_of(*lengths: int, seed: int = 3) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB - 1, length).tolist() for length in lengths]


def hugging_face_greedy(model, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_decoding_gives_what_transformers_generates(name, families):
    model, target = families(name)
    for prompt in prompts_of(1, 70):
        tokens = plain_greedy(target, prompt, 30, [])
        assert tokens == hugging_face_greedy(model, prompt, 30)
        assert len(set(tokens)) > 8


@pytest.mark.parametrize("sliding", [False, True])
def test_speculative_tokens_are_the_plain_ones(target, sliding):
    drafter = random_drafter(target, sliding=sliding)
    for prompt in prompts_of(1, 30):
        [answer] = speculative(target, drafter, [prompt], max_new_tokens=48, stop_ids=[])
        assert answer.tokens == plain_greedy(target, prompt, 48, [])


@torch.inference_mode()
def test_a_long_run_of_rollbacks_of_every_length_stays_on_the_plain_answer(target):
    [prompt] = prompts_of(17)
    answer = plain_greedy(target, prompt, 130, [])
    rng = np.random.default_rng(0)
    state = TargetState(target, 1, len(prompt) + 130 + BLOCK)
    state.prefill([prompt])
    done, seen = 1, set()
    while done + BLOCK < len(answer):
        block = answer[done - 1 : done - 1 + BLOCK]
        wrong = int(rng.integers(1, BLOCK + 1))  # BLOCK: all proposals right
        if wrong < BLOCK:
            block = [*block[:wrong], *rng.integers(3, VOCAB, BLOCK - wrong).tolist()]
        logits, _ = state.append(torch.tensor(block), BLOCK)
        chosen = logits.argmax(-1).tolist()
        accepted = next((slot for slot in range(BLOCK - 1) if block[slot + 1] != chosen[slot]), BLOCK - 1)
        state.keep([accepted + 1])
        assert chosen[: accepted + 1] == answer[done : done + accepted + 1]
        done += accepted + 1
        seen.add(accepted)
    assert seen == set(range(BLOCK))


@torch.inference_mode()
@pytest.mark.parametrize("sliding", [False, True])
def test_a_served_block_is_the_draft_models_own(calm_target, sliding):
    """Context read in several pieces, some of it rejected, rows of different length: logits of the model's plain serving interface."""
    drafter = random_drafter(calm_target, sliding=sliding)
    model, width = drafter.model, drafter.shape.features
    torch.manual_seed(0)
    first, second = torch.randn(3, 20, width), torch.randn(3, BLOCK, width)
    lengths, counts, last = [20, 4, 11], [2, BLOCK, 1], torch.tensor([5, 6, 7])
    for rows in ([0], [1], [0, 1, 2]):
        state = DraftState(drafter, len(rows), 64)
        longest = max(lengths[row] for row in rows)
        state.prefill(first[rows, :longest], [lengths[row] for row in rows], list(range(len(rows))))
        state.propose(last[rows])  # leaves its own keys behind, which nobody may see afterwards
        state.append(second[rows].flatten(0, 1), BLOCK, [counts[row] for row in rows])
        logits = state.propose(last[rows])
        for index, row in enumerate(rows):
            features = torch.cat((first[row, : lengths[row]], second[row, : counts[row]]))
            anchor = len(features)
            cache = model.context_kv(model.context(features), torch.arange(anchor))
            block = model.block_embeddings(last[row], drafter.embedding)
            hidden = model.forward_block(block, torch.arange(anchor, anchor + BLOCK), cache)
            expected = hidden[1:] @ drafter.head.weight.t()
            assert (logits[index] - expected).norm() < 1e-5 * expected.norm()


def test_a_batch_of_prompts_gives_each_its_own_answer(target):
    drafter = random_drafter(target)
    prompts = prompts_of(5, 33, 1, 12, 20)
    alone = [plain_greedy(target, prompt, 24, [7]) for prompt in prompts]
    assert generate_batch(target, prompts, max_new_tokens=24, stop_ids=[7], batch_size=3) == alone
    batched = speculative(target, drafter, prompts, max_new_tokens=24, stop_ids=[7], batch_size=3)
    assert [answer.tokens for answer in batched] == alone


def test_an_answer_that_ended_with_a_whole_block_leaves_room_for_the_others(target, monkeypatch):
    """The longest prompt's drafter is always right and overshoots the end; its row then idles while another one goes on."""
    prompts = prompts_of(33, 5)
    answers = {len(prompt): plain_greedy(target, prompt, 24, []) for prompt in prompts}

    class Knowing(DraftState):
        def prefill(self, features, lengths, rows):
            super().prefill(features, lengths, rows)
            self.done = {row: (length, 1) for row, length in zip(rows, lengths, strict=True)} | getattr(self, "done", {})

        def propose(self, last):
            logits = super().propose(last)
            for row, (length, done) in self.done.items():
                following = torch.tensor([*answers[length][done : done + BLOCK - 1], *[3] * BLOCK])[: BLOCK - 1]
                logits[row] = torch.nn.functional.one_hot(following if length == 33 else (following + 1) % VOCAB, VOCAB).to(logits)
            return logits

        def append(self, features, new, counts):
            super().append(features, new, counts)
            self.done = {row: (length, done + counts[row]) for row, (length, done) in self.done.items()}

    monkeypatch.setattr("dflash_ray.serve.speculative.DraftState", Knowing)
    for new in range(24 - BLOCK, 25):  # ends anywhere in its last block
        known, slow = speculative(target, random_drafter(target), prompts, max_new_tokens=new, stop_ids=[], batch_size=2)
        assert [known.tokens, slow.tokens] == [answers[33][:new], answers[5][:new]]
        assert len(known.passes) == -(-(new - 1) // BLOCK) < len(slow.passes)


def state_tensors(state: TargetState) -> list[torch.Tensor]:
    """Everything a state remembers about its valid tokens."""
    found = []
    for cache in state._caches:
        if hasattr(cache, "keys"):
            for row, length in enumerate(state.lengths):
                found += [cache.keys[row, :, :length], cache.values[row, :, :length]]
        else:
            found += [cache.conv, cache.state]
    return found


@torch.inference_mode()
@pytest.mark.parametrize("kept", [1, 2, BLOCK - 1, BLOCK])
def test_rollback_leaves_the_state_of_a_fresh_run_over_the_kept_tokens(calm_target, kept):
    [prompt], [block] = prompts_of(11), prompts_of(BLOCK, seed=5)
    rolled = TargetState(calm_target, 1, 64)
    rolled.prefill([prompt])
    rolled.append(torch.tensor(block), BLOCK)
    rolled.keep([kept])
    fresh = TargetState(calm_target, 1, 64)
    fresh.prefill([prompt + block[:kept]])
    assert rolled.lengths == fresh.lengths
    for ours, theirs in zip(state_tensors(rolled), state_tensors(fresh), strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


@torch.inference_mode()
def test_rollback_of_rows_that_keep_different_counts(calm_target):
    prompts, blocks = prompts_of(11, 3, 20), prompts_of(BLOCK, BLOCK, BLOCK, seed=5)
    rolled = TargetState(calm_target, 3, 64)
    rolled.prefill(prompts)
    rolled.append(torch.tensor(blocks).flatten(), BLOCK)
    rolled.keep([2, BLOCK, 1])
    fresh = TargetState(calm_target, 3, 64)
    fresh.prefill([prompt + block[:kept] for prompt, block, kept in zip(prompts, blocks, [2, BLOCK, 1], strict=True)])
    for ours, theirs in zip(state_tensors(rolled), state_tensors(fresh), strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_a_hybrid_target_runs_on_a_cpu_where_transformers_has_bound_fla(tmp_path):
    """In a fresh process, in which nobody has put transformers' plain functions back."""
    save_target("qwen3_5", tmp_path, layers=4)
    code = (
        "import sys; from dflash_ray.target.load import load_target; from dflash_ray.serve.plain import plain_greedy\n"
        f"target = load_target({str(tmp_path)!r}, taps=None, device='cpu', with_head=True)\n"
        "assert 'fla' in sys.modules, 'transformers no longer binds it'\n"
        "print(plain_greedy(target, [5, 6, 7], 4, []))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 4
    assert "Triton" not in done.stderr
