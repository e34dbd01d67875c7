"""The committed target and conversations of the quickstart are what they claim: small, loadable, consistent, and its own greedy answers."""

import json
from pathlib import Path

import pytest
import torch

from jobs.quickstart import kernels, target
from jobs.quickstart.tokenizer import END, MASK, PAD, render

FOLDER = Path(target.__file__).parent
FILES = {name: FOLDER / f"{name}.jsonl" for name in ("train", "heldout")}


@pytest.fixture(scope="module")
def loaded():
    """(tokenizer, model in float32), with transformers' own torch functions in place for as long as the module's tests run."""
    modeling = kernels.hybrid_module()
    before = {name: getattr(modeling, name) for name in kernels.NAMES}
    yield target.load(FOLDER / "target")
    for name, function in before.items():
        setattr(modeling, name, function)


@pytest.fixture(scope="module")
def conversations() -> dict[str, list[dict]]:
    return {name: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for name, path in FILES.items()}


def test_sizes():
    assert sum(f.stat().st_size for f in (FOLDER / "target").iterdir()) <= 12e6
    assert sum(f.stat().st_size for f in FILES.values()) <= 6e6


def test_the_target_is_a_small_hybrid_with_a_mask_token(loaded):
    tokenizer, model = loaded
    assert 2e6 < model.num_parameters() < 5e6
    assert model.config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 3
    assert model.config.vocab_size == len(tokenizer) == len(model.get_input_embeddings().weight)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (PAD, END, MASK)
    assert model.generation_config.eos_token_id == END


def test_counts_and_split(conversations):
    assert len(conversations["train"]) >= 2000 and len(conversations["heldout"]) >= 150
    asked = {name: {r["conversations"][0]["content"] for r in rows} for name, rows in conversations.items()}
    assert all(len(asked[name]) == len(rows) for name, rows in conversations.items())
    assert not asked["train"] & asked["heldout"]
    # what a held-out sheet asks stands on no line of a training prompt either
    lines = {
        name: {line.partition(". ")[2] if line[0].isdigit() else line for a in some for line in a.split("\n")[-4:]}
        for name, some in asked.items()
    }
    shared = lines["train"] & lines["heldout"]
    assert all(line.endswith(".") and "?" not in line and len(line.split()) <= 6 for line in shared), shared


def test_ids_are_the_rendered_prompt_and_the_answer(loaded, conversations):
    tokenizer, _ = loaded
    for row in (r for rows in conversations.values() for r in rows):
        user, assistant = row["conversations"]
        assert assistant["prompt_ids"] == render(tokenizer, user["content"])
        output = assistant["output_ids"]
        assert output[-1] == END and END not in output[:-1]
        assert MASK not in output and MASK not in assistant["prompt_ids"]
        assert tokenizer.decode(output[:-1]) == assistant["content"]
        assert tokenizer(assistant["content"], add_special_tokens=False)["input_ids"] == output[:-1]


def test_the_template_takes_a_system_turn_and_earlier_answers(loaded):
    tokenizer, _ = loaded
    turns = [("system", "Be brief."), ("user", "What is 2 + 3?"), ("assistant", "2 + 3 = 5."), ("user", "And 4 + 4?")]
    text = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in turns], tokenize=False, add_generation_prompt=True)
    assert text == "".join(f"<|im_start|>{r}\n{c}<|im_end|>\n" for r, c in turns) + "<|im_start|>assistant\n"


def test_answers_are_plain_greedy_decoding(loaded, conversations):
    _, model = loaded
    for rows in conversations.values():
        for row in rows[:3]:
            assistant = row["conversations"][1]
            ids = torch.tensor([assistant["prompt_ids"]])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=len(assistant["output_ids"]))
            assert out[0, ids.shape[1] :].tolist() == assistant["output_ids"]


def test_the_training_kernels_equal_the_reference():
    modeling = kernels.hybrid_module()
    before = {name: getattr(modeling, name) for name in kernels.NAMES}
    try:
        kernels.plain()
        torch.manual_seed(0)
        length = 37
        inputs = [torch.randn(2, length, h, 8, dtype=torch.float32) + 0.5 for h in (2, 2, 4)]
        inputs += [-torch.rand(2, length, 4), torch.rand(2, length, 4)]
        results = []
        for function in (modeling.torch_chunk_gated_delta_rule, kernels.delta_rule):
            q, k, v, g, b = (x.clone().requires_grad_() for x in inputs)
            out = function(q, k, v, g=g, beta=b, use_qk_l2norm_in_kernel=True)[0]
            results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, g, b))])
        for expected, got in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        x, weight = torch.randn(2, 6, 11), torch.randn(6, 4)
        expected = modeling.causal_conv1d_fn(x, weight, None, activation="silu")
        torch.testing.assert_close(kernels.causal_conv(x, weight, None, "silu"), expected, rtol=1e-5, atol=1e-6)
    finally:
        for name, function in before.items():
            setattr(modeling, name, function)
