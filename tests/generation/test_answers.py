"""Engines: our own answers as plain decoding does, another one is given ids and gives ids."""

from __future__ import annotations

import pytest
import torch

from dflash_ray.generation.answers import choose_engine, load_engine
from dflash_ray.serve.plain import plain_greedy
from dflash_ray.target.load import load_target


def test_our_engine_answers_as_plain_greedy_decoding_does(folder, answer_settings):
    target = load_target(folder, taps=None, device="cpu", with_head=True)
    prompts = [[2, 3, 7, 9], [2, 3, 40], [2, 3, 8, 8, 8, 61]]
    assert load_engine(answer_settings()).answer(prompts, [5, 6, 7]) == [plain_greedy(target, prompt, 12, (1,)) for prompt in prompts]


def test_a_sampled_answer_belongs_to_its_stream_and_not_to_its_neighbours(answer_settings):
    engine = load_engine(answer_settings(temperature=1.0))
    together = engine.answer([[2, 3, 7], [2, 3, 40]], [11, 12])
    assert engine.answer([[2, 3, 40]], [12]) == together[1:]
    assert engine.answer([[2, 3, 40]], [13]) != together[1:]


def test_the_engine_is_chosen_by_what_is_installed(tmp_path, monkeypatch):
    assert choose_engine("transformers", "cuda") == "own"
    if not _installed("vllm"):
        assert choose_engine("auto", "cuda") == "own"
        with pytest.raises(ValueError, match="vllm is not installed"):
            choose_engine("vllm", "cuda")
    (tmp_path / "vllm.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert choose_engine("auto", "cuda") == choose_engine("vllm", "cpu") == "vllm"
    assert choose_engine("auto", "cpu") == choose_engine("transformers", "cuda") == "own"


def _installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def test_vllm_is_given_ids_and_stop_tokens_and_gives_ids(tmp_path, answer_settings, monkeypatch):
    """Against a stand-in with vLLM's interface: it answers with the prompt reversed."""
    (tmp_path / "vllm.py").write_text(
        "from types import SimpleNamespace as N\n"
        "class SamplingParams(N): pass\n"
        "class LLM(N):\n"
        "    def generate(self, prompts, params, use_tqdm):\n"
        "        assert all(p.stop_token_ids == [1] and p.max_tokens == 12 for p in params)\n"
        "        return [N(outputs=[N(token_ids=tuple(prompt['prompt_token_ids'][::-1]))]) for prompt in prompts]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_engine(answer_settings(engine="vllm")).answer([[2, 3], [4]], [0, 1]) == [[3, 2], [4]]


def test_torch_sees_one_thread_per_engine(answer_settings):
    load_engine(answer_settings())
    assert torch.get_num_threads() == 1
