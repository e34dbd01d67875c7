"""Tiny random targets of every family, saved as ordinary Hugging Face folders, and the untouched transformers model as reference.

Weights are larger than a fresh initialisation and gains differ from 1, so that greedy output varies and a wrong norm convention shows.
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file

from dflash_ray.target.known_shapes import SHAPES

VOCAB = 128
_DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}
_HYBRID = {
    **{key: value for key, value in SHAPES["tiny-hybrid"].items() if key != "model_type"},
    **_DENSE,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}
_MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_DENSE, **_ROPE, tie_word_embeddings=True),
    "llama3_rope": lambda: transformers.LlamaConfig(
        **_DENSE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 50000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        mlp_bias=True,
        attention_bias=True,
    ),
    "mistral": lambda: transformers.MistralConfig(**_DENSE, **_ROPE, sliding_window=9),
    "qwen2": lambda: transformers.Qwen2Config(**{k: v for k, v in _DENSE.items() if k != "head_dim"}, **_ROPE),
    "qwen3": lambda: transformers.Qwen3Config(**_DENSE, **_ROPE),
    "qwen3_sliding": lambda: transformers.Qwen3Config(**_DENSE, **_ROPE, use_sliding_window=True, sliding_window=9, max_window_layers=3),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_DENSE, **_ROPE, **_MOE, mlp_only_layers=[1], norm_topk_prob=True),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**_HYBRID),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(**_HYBRID, **_MOE, shared_expert_intermediate_size=24),
}
FAMILIES = tuple(CONFIGS)
# sizes that GPU kernels are made for
WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}


def plain_torch_kernels() -> None:
    """Let transformers' hybrid models run on a CPU although flash-linear-attention is installed (they bind it at import)."""
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

    for module in (modeling_qwen3_5, modeling_qwen3_5_moe):
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update"):
            function = getattr(module, name)
            setattr(module, name, getattr(function, "__wrapped__", function))


def reference_model(family: str, seed: int = 0, *, layers: int = 8, varied: bool = False, wide: bool = False) -> torch.nn.Module:
    """The family's causal language model in float32, as transformers makes and runs it.

    `varied` sharpens attention, so that greedy answers do not settle on one token; rounding errors grow faster then. `wide`: sizes of WIDE.
    """
    plain_torch_kernels()
    torch.manual_seed(seed)
    config = CONFIGS[family]()
    config.num_hidden_layers = layers
    if wide:
        config.initializer_range = 0.05
        for name in WIDE.keys() & vars(config).keys():
            setattr(config, name, WIDE[name])
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:layers]
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            if name.endswith("A_log"):
                parameter.copy_(torch.linspace(-4.0, 1.0, parameter.numel()))
            if name.endswith("embed_tokens.weight"):
                parameter[0].normal_(0.0, 0.15)  # transformers starts the pad token at zero, which no trained model keeps
            if varied and name.endswith("embed_tokens.weight"):
                parameter.mul_(0.5)
            if varied and name.endswith(("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")):
                parameter.mul_(3.0)
    return model


def save_target(family: str, folder: Path, seed: int = 0, **kind) -> torch.nn.Module:
    model = reference_model(family, seed, **kind)
    model.save_pretrained(folder)
    return model


def as_multimodal(folder: Path) -> None:
    """Rewrite a text checkpoint the way multimodal ones are laid out: text_config, `model.language_model.*`, a vision tensor, MTP."""
    text = json.loads((folder / "config.json").read_text())
    outer = text["model_type"].removesuffix("_text")
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": outer,
        "text_config": text,
        "vision_config": {"model_type": outer, "hidden_size": 48, "num_hidden_layers": 2},
        "image_token_id": 5,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    renamed["model.visual.patch_embed.proj.weight"] = torch.zeros(3, 3)
    renamed["mtp.layers.0.input_layernorm.weight"] = torch.zeros(32)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% if enable_thinking %}think {% endif %}{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """One token per word: `w7` is 7, and the target's special ids get the names of a chat format."""
    named = {0: "<|pad|>", 1: "<|im_end|>", 2: "<|im_start|>", 3: "user", 4: "assistant", 5: "think", VOCAB - 1: "<|mask|>"}
    words = {named.get(index, f"w{index}"): index for index in range(VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<|pad|>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([name for name in named.values() if name.startswith("<|")])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
