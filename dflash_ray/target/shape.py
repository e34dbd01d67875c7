"""What a target folder says about itself, without torch and without weights.

Everything a plan, a dry run or a drafter's shape needs is read from `config.json`, `generation_config.json` and the tokenizer files. A
key that changes results and is missing (rope theta) is refused, never given a default. The text part of a multimodal checkpoint counts
as the target.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_ray.json_file import read_json_object
from dflash_ray.target.known_shapes import SHAPES

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
)
KINDS = ("full_attention", "sliding_attention", "linear_attention")
_MASK_NAME = re.compile(r"<\|mask\|>|<mask>|\[mask\]", re.IGNORECASE)


@dataclass(frozen=True)
class TargetShape:
    """Sizes are counts, `rope_theta` the rotary base, ids are token ids. `config` is the text part of config.json as it stands."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int  # rows of the embedding
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    layer_types: tuple[str, ...]  # full_attention | sliding_attention | linear_attention, one per layer
    eos_token_ids: tuple[int, ...]  # generation stops at any of them
    pad_token_id: int | None
    bos_token_id: int | None
    tie_word_embeddings: bool | None  # None: the file does not say; the weights do
    config: dict[str, Any]

    @property
    def has_linear_attention(self) -> bool:
        return "linear_attention" in self.layer_types

    def isolates_documents(self, device: str) -> bool:
        """Whether documents laid end to end cannot see each other on `device`.

        On a CPU each document is a call of its own. On a GPU it takes torch's variable-length attention, and for gated-delta-net layers
        the kernels of flash-linear-attention; a mask alone would leak conv and recurrent state.
        """
        if device.startswith("cpu"):
            return True
        torch = importlib.util.find_spec("torch")  # found, not loaded
        varlen = torch is not None and any(
            Path(place, "nn/attention/varlen.py").exists() for place in torch.submodule_search_locations or ()
        )
        return varlen and (not self.has_linear_attention or importlib.util.find_spec("fla") is not None)


def read_target_shape(path: Path | str) -> TargetShape:
    """Shape of the target in the Hugging Face folder `path`. ValueError when a file or key is missing or the family is unknown."""
    path = Path(path)
    config = _read_json(path / "config.json", required=True)
    generation = _read_json(path / "generation_config.json")
    return target_shape_of_config(config, generation, where=f"{path / 'config.json'}")


def known_target_shape(shape: str) -> TargetShape:
    """A known shape, for explaining or benchmarking a run without a folder."""
    if shape not in SHAPES:
        raise ValueError(f"target.shape: {shape!r} is not known; known shapes are {', '.join(sorted(SHAPES))}")
    return target_shape_of_config(SHAPES[shape], {}, where=f"shape {shape}")


def target_shape_of_config(config: dict[str, Any], generation: dict[str, Any], *, where: str) -> TargetShape:
    """Shape that a parsed `config.json` (multimodal or text) and `generation_config.json` describe; `where` names them in errors."""
    text = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    model_type = text.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"target.path: {where} has model_type {model_type!r}; supported are {', '.join(FAMILIES)}")

    def given(key: str, most: int = 2**31) -> int | None:
        value = text.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            raise ValueError(f"target.path: {where} has {key} {_short(value)}; a whole number of 1 to {most:,} is expected")
        return value

    def need(key: str, most: int = 2**31) -> int:
        value = given(key, most)
        if value is None:
            raise ValueError(f"target.path: {where} has no {key}; it is needed and never guessed")
        return value

    heads = need("num_attention_heads", 65_536)
    layers = need("num_hidden_layers", 10_000)
    given("full_attention_interval")
    given("max_window_layers", 10_000) if text.get("max_window_layers") != 0 else None
    layer_types = _layer_types(text, layers, where)
    eos = generation.get("eos_token_id", text.get("eos_token_id"))
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if type(tied) not in (bool, type(None)):
        raise ValueError(f"target.path: {where} has tie_word_embeddings {_short(tied)}; true or false is expected")
    return TargetShape(
        model_type=model_type,
        num_layers=layers,
        hidden_size=need("hidden_size"),
        vocab_size=need("vocab_size"),
        intermediate_size=given("intermediate_size") or need("moe_intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=given("num_key_value_heads", 65_536) or heads,
        head_dim=given("head_dim") or need("hidden_size") // heads,
        rope_theta=_rope_theta(text, where),
        rms_norm_eps=_positive(text.get("rms_norm_eps"), "rms_norm_eps", where),
        max_position_embeddings=need("max_position_embeddings"),
        layer_types=layer_types,
        eos_token_ids=_ids(eos, "eos_token_id", where),
        pad_token_id=next(iter(_ids(text.get("pad_token_id"), "pad_token_id", where)), None),
        bos_token_id=next(iter(_ids(text.get("bos_token_id"), "bos_token_id", where)), None),
        tie_word_embeddings=tied,
        config=text,
    )


def _layer_types(text: dict[str, Any], layers: int, where: str) -> tuple[str, ...]:
    types = text.get("layer_types")
    if types is None:
        if text["model_type"].startswith("qwen3_5"):
            interval = text.get("full_attention_interval", 4)
            types = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
        elif text["model_type"] in ("qwen2", "qwen3", "qwen3_moe"):
            # these families read a window only when asked to, and then from max_window_layers on
            windowed = text.get("use_sliding_window") and text.get("sliding_window")
            first = text.get("max_window_layers", layers) if text["model_type"] != "qwen3_moe" else 0
            types = ["sliding_attention" if windowed and i >= first else "full_attention" for i in range(layers)]
        else:
            windowed = text["model_type"] == "mistral" and text.get("sliding_window")
            types = ["sliding_attention" if windowed else "full_attention"] * layers
    if not isinstance(types, list) or not all(kind in KINDS for kind in map(str, types)):
        raise ValueError(f"target.path: {where} has layer_types {_short(types)}; a list of {', '.join(KINDS)} is expected")
    if len(types) != layers:
        raise ValueError(f"target.path: {where} has {len(types)} layer_types for {layers} layers")
    return tuple(types)


def _rope_theta(text: dict[str, Any], where: str) -> float:
    rope = text.get("rope_parameters")
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    theta = text.get("rope_theta") if theta is None else theta
    return _positive(theta, "rope_theta (at the top or in rope_parameters)", where)


def _positive(value: Any, key: str, where: str) -> float:
    if value is None:
        raise ValueError(f"target.path: {where} has no {key}; add the value the target was trained with")
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise ValueError(f"target.path: {where} has {key} {_short(value)}; a positive number is expected")
    return float(value)


def _ids(value: Any, key: str, where: str) -> tuple[int, ...]:
    """One id, a list of ids, or none."""
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(one) is int and -(2**31) <= one < 2**31 for one in found):
        raise ValueError(f"target.path: {where} has {key} {_short(value)}; a token id or a list of them is expected")
    return tuple(found)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def resolve_mask_token(path: Path | str, configured_id: int | None) -> int:
    """Id that fills slots 1..K-1: the configured one, else the tokenizer's mask token or one named like `<|mask|>`.

    ValueError when there is none, when it has no embedding row, or when it is the target's pad or eos token.
    """
    path = Path(path)
    key = "draft.mask_token_id"
    target_shape = read_target_shape(path)
    mask = configured_id
    if mask is None:
        mask = _tokenizer_mask(path)
        if mask is None:
            raise ValueError(f"{key}: the tokenizer of {path} names no mask token; give the id of a token that never occurs in text")
    if not 0 <= mask < target_shape.vocab_size:
        raise ValueError(f"{key}: {mask} has no row in the target's embedding; use an id of 0..{target_shape.vocab_size - 1}")
    for name, ids in _reserved_ids(path, target_shape).items():
        if mask in ids:
            raise ValueError(f"{key}: {mask} is the target's {name} token; use an id that never occurs in text")
    return mask


def _reserved_ids(path: Path, target_shape: TargetShape) -> dict[str, set[int]]:
    names = _token_names(path)
    settings = _read_json(path / "tokenizer_config.json")
    config = _read_json(path / "config.json")
    reserved: dict[str, set[int]] = {}
    for kind in ("pad", "eos"):
        ids = {names[t] for t in [_content(settings.get(f"{kind}_token"))] if isinstance(t, str) and t in names}
        for source in (config, target_shape.config, _read_json(path / "generation_config.json")):
            ids |= set(_ids(source.get(f"{kind}_token_id"), f"{kind}_token_id", str(path)))
        reserved[kind] = ids
    return reserved


def _tokenizer_mask(path: Path) -> int | None:
    names = _token_names(path)
    for source in ("tokenizer_config.json", "special_tokens_map.json"):
        content = _content(_read_json(path / source).get("mask_token"))
        if isinstance(content, str) and content in names:
            return names[content]
    found = sorted(token_id for name, token_id in names.items() if _MASK_NAME.fullmatch(name))
    return found[0] if found else None


def _token_names(path: Path) -> dict[str, int]:
    """Every token of the tokenizer files and its id; empty when the folder has none."""
    tokenizer = _read_json(path / "tokenizer.json")
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    pairs = list(vocabulary.items()) if isinstance(vocabulary, dict) else []
    pairs += [(token.get("content"), token.get("id")) for token in (added if isinstance(added, list) else []) if isinstance(token, dict)]
    decoder = _read_json(path / "tokenizer_config.json").get("added_tokens_decoder")
    for token_id, token in (decoder if isinstance(decoder, dict) else {}).items():
        if isinstance(token, dict) and token_id.isascii() and token_id.isdigit() and len(token_id) < 10:
            pairs.append((token.get("content"), int(token_id)))
    return {name: token_id for name, token_id in pairs if isinstance(name, str) and type(token_id) is int}


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except FileNotFoundError:
        if required:
            raise ValueError(f"target.path: {path} does not exist; give a Hugging Face folder with config.json and weights") from None
        return {}
    except ValueError as error:
        raise ValueError(f"target.path: {path} {error}") from None
