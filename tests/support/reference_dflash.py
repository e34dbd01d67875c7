"""Runs the published `dflash` package on a target and an exported drafter, in float32 on the CPU; its own process, its own interpreter.

Usage: python reference_dflash.py JOB.json, with {"target", "drafter", "prompts", "max_new_tokens", "stop_ids"}. Prints
[{"tokens", "lengths"}, ...]: new tokens, and tokens gained by each verification pass.
"""

import json
import sys
import time
import types

import dflash.model
import torch
import transformers


def main(path: str) -> None:
    with open(path) as file:
        job = json.load(file)
    dflash.model._cuda_time = time.perf_counter  # its statistics wait for a GPU
    if job["hybrid"]:
        _plain_kernels()
    target = transformers.AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32).eval()
    if job["hybrid"]:
        target, make = Recomputing(target), dflash.model._make_cache
        dflash.model._make_cache = lambda config: NoCache() if config is None else make(config)
    drafter = dflash.model.DFlashDraftModel.from_pretrained(job["drafter"], dtype=torch.float32).eval()
    answers = []
    for prompt in job["prompts"]:
        out = dflash.model.dflash_generate(
            drafter, target, torch.tensor([prompt]), job["max_new_tokens"], job["stop_ids"], temperature=0.0, return_stats=True
        )
        answers.append({"tokens": out.output_ids[0, len(prompt) :].tolist(), "lengths": out.acceptance_lengths})
    print(json.dumps(answers))


class NoCache:
    def get_seq_length(self):
        return 0

    def crop(self, _tokens):
        pass


class Recomputing(torch.nn.Module):
    """A hybrid target without a cache: transformers rolls back its convolutions and not its recurrent states, so every pass runs the whole
    sequence again. The drafter's side, which is what is compared, is the package's own."""

    config = None

    def __init__(self, model):
        super().__init__()
        self.model, self.lm_head, self.device = model, model.lm_head, model.device
        self.tokens = torch.zeros(1, 0, dtype=torch.long)

    def get_input_embeddings(self):
        return self.model.get_input_embeddings()

    def forward(self, input_ids, position_ids, output_hidden_states=False, logits_to_keep=0, **_):
        start = int(position_ids[0, 0])
        self.tokens = torch.cat([self.tokens[:, :start], input_ids], 1)
        out = self.model(self.tokens, use_cache=False, output_hidden_states=True)
        states = tuple(state[:, start:] for state in out.hidden_states)
        return types.SimpleNamespace(logits=out.logits[:, start:][:, -logits_to_keep:], hidden_states=states)


def _plain_kernels() -> None:
    """transformers binds GPU kernels at import where they are installed; their plain torch versions are wrapped inside."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update"):
        function = getattr(module, name, None)
        if function is not None:
            setattr(module, name, getattr(function, "__wrapped__", function))


main(sys.argv[1])
