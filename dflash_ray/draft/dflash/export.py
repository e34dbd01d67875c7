"""A drafter on disk, as servers read it: `model.safetensors` (bf16, no prefix, no embedding, no head), `config.json`, `README.md`.

Loaders skip unknown names silently and fill missing ones with noise, so both directions are strict here: exactly the names and shapes of
`DraftShape.tensor_shapes` are written, and reading refuses a missing, unknown or misshapen tensor and a missing config key by its name.
The config is an allow-list: no field of the target's own config passes through.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_ray.draft.dflash.model import DraftModel
from dflash_ray.draft.dflash.shape import SLIDING, DraftShape
from dflash_ray.json_file import read_json_object

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
_TARGET = "target_weights"  # in the metadata of WEIGHTS, which no server reads


def export_config(shape: DraftShape) -> dict[str, Any]:
    """`config.json`: what servers ask of a drafter, and nothing else."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_target_layers": shape.num_target_layers,
        "block_size": shape.block_size,
        "dflash_config": {
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            # slot 0 is the anchor and proposes nothing; other families propose from it
            "sample_from_anchor": False,
        },
        "layer_types": list(shape.layer_types),
        # Qwen3Config nulls the window unless this is true
        "use_sliding_window": SLIDING in shape.layer_types,
        "sliding_window": shape.sliding_window if SLIDING in shape.layer_types else None,
        "max_window_layers": shape.num_layers,
        "vocab_size": shape.vocab,
        # transformers 5 reads the second form, servers and older versions the first
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def read_shape(folder: Path) -> DraftShape:
    """The shape of an exported folder, ours or a published z-lab one. ValueError names the missing, wrong or contradicting key."""
    path = folder / CONFIG
    try:
        config = read_json_object(path)
    except FileNotFoundError:
        raise ValueError(f"{folder}: no {CONFIG}; this is not an exported drafter") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None

    def need(name: str, kind: str, *places: Any) -> Any:
        """The value of a key that must stand in at least one place and agree wherever it stands."""
        found = [place[name] for place in places or (config,) if isinstance(place, dict) and place.get(name) is not None]
        if not found:
            raise ValueError(f"{path}: {name} is missing; it is never guessed, export the drafter again")
        if any(value != found[0] for value in found[1:]):
            raise ValueError(f"{path}: {name} stands there as {found[0]} and as {found[1]}; servers read either")
        if not _KINDS[kind](found[0]):
            raise ValueError(f"{path}: {name} is {repr(found[0])[:60]}; it must be a {kind}")
        return found[0]

    dflash = config.get("dflash_config")
    layer_types = need("layer_types", "list of names")
    sliding = SLIDING in layer_types
    if sliding and not config.get("use_sliding_window"):
        raise ValueError(f"{path}: use_sliding_window must be true for {SLIDING} layers; Qwen3Config drops the window otherwise")
    need("model_type", "name")
    if "DFlashDraftModel" not in need("architectures", "list of names"):
        raise ValueError(f"{path}: architectures is {config['architectures']}; a DFlashDraftModel is read")
    shape = DraftShape(
        hidden=need("hidden_size", "whole number"),
        vocab=need("vocab_size", "whole number"),
        intermediate=need("intermediate_size", "whole number"),
        num_layers=need("num_hidden_layers", "whole number"),
        heads=need("num_attention_heads", "whole number"),
        kv_heads=need("num_key_value_heads", "whole number"),
        head_dim=need("head_dim", "whole number"),
        layer_types=tuple(layer_types),
        sliding_window=need("sliding_window", "whole number") if sliding else None,
        block_size=need("block_size", "whole number", dflash, config),
        mask_token_id=need("mask_token_id", "whole number", dflash, config),
        target_layer_ids=tuple(need("target_layer_ids", "list of whole numbers", dflash, config)),
        num_target_layers=need("num_target_layers", "whole number", config, dflash),
        rope_theta=float(need("rope_theta", "number", config, config.get("rope_parameters"), config.get("rope_scaling"))),
        rms_norm_eps=need("rms_norm_eps", "number"),
        max_position_embeddings=need("max_position_embeddings", "whole number"),
    )
    if wrong := _another_model(config, shape):
        raise ValueError(f"{path}: {wrong}")
    return shape


# what servers and the reference read beside the shape (vLLM 0.33.0, SGLang 0.5.23), and the one value that is computed here; None: no value
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "partial_rotary_factor": 1.0,
    "mrope_section": None,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "sample_from_anchor": False,
    "use_swa": False,
    "use_aux_hidden_state": True,
    "use_gemma_norm": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "output_multiplier": 1.0,
    "logit_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "projector_type": None,
    "conv_kernel_size": 0,
    "selector_rank": 0,
}


def _another_model(config: dict[str, Any], shape: DraftShape) -> str | None:
    """The key that asks for other arithmetic than `DraftModel`'s: a drafter read without it would propose nonsense and say nothing."""
    parts = [config.get(key) for key in ("dflash_config", "rope_parameters", "rope_scaling")]
    inner, *ropes = (part if isinstance(part, dict) else {} for part in parts)
    kinds = {kind == SLIDING for kind in shape.layer_types}
    causal = kinds == {True} if len(kinds) == 1 else None  # inside the block: sliding layers are, full ones are not
    wanted = [(key, place, value) for place in (config, inner, *ropes) for key, value in _FIXED.items()]
    wanted += [(key, rope, "default") for rope in ropes for key in ("rope_type", "type")]
    wanted += [
        ("is_causal", config, causal),
        ("causal", inner, causal),
        ("swa_window_size", inner, shape.sliding_window),
        ("eagle_aux_hidden_state_layer_ids", config, [tap + 1 for tap in shape.target_layer_ids]),
    ]
    for key, place, value in wanted:
        if place.get(key) is not None and place[key] != value:
            return f"{key} is {str(place[key])[:60]}; {'it is not supported' if value is None else f'supported is {value}'}"
    return None


def check_warm_start(folder: Path, shape: DraftShape) -> DraftShape:
    """The shape of an exported drafter from which one of `shape` can start: block size and windows may differ, nothing else."""
    try:
        there = read_shape(folder)
    except ValueError as error:
        raise ValueError(f"draft.init {error}") from None
    free = ("block_size", "layer_types", "sliding_window", "max_position_embeddings")
    for field in fields(shape):
        if field.name not in free and getattr(there, field.name) != getattr(shape, field.name):
            raise ValueError(
                f"draft.init {folder}: its {field.name} is {getattr(there, field.name)}, this run's is {getattr(shape, field.name)}; "
                "change the draft section or start from another drafter"
            )
    return there


_KINDS = {
    "name": lambda value: isinstance(value, str),
    "whole number": lambda value: type(value) is int and abs(value) < 2**31,
    "number": lambda value: type(value) in (int, float) and abs(value) < 1e30,
    "list of whole numbers": lambda value: isinstance(value, list) and all(type(item) is int and abs(item) < 2**31 for item in value),
    "list of names": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
}


def read_tensors(folder: Path, shape: DraftShape) -> dict[str, Tensor]:
    """The weights of an exported folder; ValueError names every tensor that is missing, unknown or of another shape."""
    with _weights_of(folder) as path:
        tensors = load_file(path)
    check_tensors(tensors, shape, str(path))
    return tensors


def trained_for(folder: Path) -> str | None:
    """Fingerprint of the target that the drafter was trained for, where the folder tells it. ValueError for weights that cannot be read."""
    with _weights_of(folder) as path, safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get(_TARGET)


@contextmanager
def _weights_of(folder: Path) -> Iterator[Path]:
    """The file to read inside; ValueError where that does not work."""
    path = folder / WEIGHTS
    try:
        yield path
    except FileNotFoundError:
        raise ValueError(f"{folder}: no {WEIGHTS}; this is not an exported drafter") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None


def check_tensors(tensors: Mapping[str, Tensor], shape: DraftShape, where: str) -> None:
    expected = shape.tensor_shapes()
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is unknown" for name in tensors if name not in expected]
    problems += [
        f"{name} is {list(tensors[name].shape)} instead of {list(size)}"
        for name, size in expected.items()
        if name in tensors and tuple(tensors[name].shape) != size
    ]
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems[:5])}{f' and {len(problems) - 5} more' if len(problems) > 5 else ''}")


def load_drafter(folder: Path | str, embed: Tensor, head: Tensor) -> tuple[DraftModel, DraftShape]:
    """A drafter ready to serve for the target whose embedding and head [V, H] are given, on their device and in their dtype."""
    folder = Path(folder)
    shape = read_shape(folder)
    for name, table in (("embed_tokens", embed), ("lm_head", head)):
        if table.shape[-1] != shape.hidden or table.shape[0] < shape.vocab:
            raise ValueError(
                f"{folder}: made for a target with vocabulary {shape.vocab} and hidden size {shape.hidden}; "
                f"this target's {name} is {list(table.shape)}"
            )
    with torch.device("meta"):
        model = DraftModel(shape)
    tensors = {name: tensor.to(embed.device, embed.dtype) for name, tensor in read_tensors(folder, shape).items()}
    model.load_state_dict(tensors, assign=True)
    return model.eval().requires_grad_(False), shape


def export_drafter(weights: Mapping[str, Tensor], shape: DraftShape, folder: Path | str, card: str = "", target: str = "") -> float:
    """Writes weights of any float dtype as an export and reads them back. `target`: fingerprint of the target's weights.

    Returns the largest difference between the outputs of the given weights and of what was read back, relative to the largest output:
    the rounding to bf16, about 1e-2. What was read back must equal the rounded weights bit by bit.
    """
    folder = Path(folder)
    check_tensors(weights, shape, "export")
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"} | ({_TARGET: target} if target else {}))
    (folder / CONFIG).write_text(json.dumps(export_config(shape), indent=2) + "\n", encoding="utf-8")
    if card:
        (folder / CARD).write_text(card, encoding="utf-8")
    assert read_shape(folder) == shape, f"{folder}: {CONFIG} does not give back the shape it was written from"
    again = read_tensors(folder, shape)
    for name, tensor in tensors.items():
        assert again[name].dtype == torch.bfloat16 and torch.equal(again[name], tensor), f"{folder}: {name} is not what was written"
    before, after = (_sample_output(given, shape) for given in (weights, again))
    difference = float((before - after).abs().max() / before.abs().max())
    assert difference < 0.1, f"{folder}: outputs differ by {difference:.3f} from the weights that were exported"
    return difference


@torch.no_grad()
def _sample_output(weights: Mapping[str, Tensor], shape: DraftShape) -> Tensor:
    """float32 [K, H]: the output for one fixed random block after a context of eight tokens."""
    with torch.device("meta"):
        model = DraftModel(shape)
    model.load_state_dict({name: tensor.detach().to("cpu", torch.float32) for name, tensor in weights.items()}, assign=True)
    generator = torch.Generator().manual_seed(0)
    context = model.context(torch.randn(8, shape.features, generator=generator))
    block = torch.randn(shape.block_size, shape.hidden, generator=generator)
    return model.forward_block(block, 8 + torch.arange(shape.block_size), model.context_kv(context, torch.arange(8)))
