"""A real model on real text (stories260K, a Llama of 260 thousand parameters): its own logits, its own continuation, sensible words."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers

from dflash_ray.data.batches.batch import Batch
from dflash_ray.serve.plain import generate_batch
from dflash_ray.target.load import load_target

OPENINGS = ("Once upon a time, there was a little girl named", "The dog ran", "Tom and his mom went to the park. They saw a big")


@pytest.fixture(scope="module")
def stories(shared):
    folder = shared / "models" / "stories260K-hf"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return (
        model,
        load_target(folder, taps=[1, 3], device="cpu", with_head=True),
        [tokenizer(text)["input_ids"] for text in OPENINGS],
        tokenizer,
    )


def test_continuation_is_transformers_own(stories):
    model, target, prompts, tokenizer = stories
    answers = generate_batch(target, prompts, max_new_tokens=60, stop_ids=target.shape.eos_token_ids, batch_size=2)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)
        assert answer == out[0, len(prompt) :].tolist()
    assert "Tom wanted to play" in tokenizer.decode(answers[2])


def test_teacher_rows_through_the_head_are_the_targets_own_logits(stories):
    model, target, prompts, _ = stories
    answers = generate_batch(target, prompts, max_new_tokens=40, stop_ids=[])
    documents = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    bounds = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype(np.int32)
    batch = Batch(
        number=0,
        epoch=0,
        sample_ids=np.arange(len(documents)),
        input_ids=np.concatenate(documents).astype(np.int32),
        cu_seqlens=bounds,
        loss_mask=np.ones(bounds[-1], np.uint8),
        anchors=np.arange(0, bounds[-1], 3, dtype=np.int32),
    )
    _, positions, rows = target.features_and_teacher(batch, 8)
    logits = torch.cat([model(torch.tensor([document]), use_cache=False).logits[0] for document in documents])[positions]
    assert len(positions) > 64
    assert (rows @ target.head.t() - logits).abs().max() < 1e-3
    assert torch.equal((rows @ target.head.t()).argmax(-1), logits.argmax(-1))
