"""Tensors of a checkpoint folder, read one at a time straight to the device that wants them.

Names are resolved from the files themselves, so the text part of a multimodal checkpoint (`model.language_model.*`) reads like any other.
Nothing is loaded that was not asked for: no vision tower, no layer past the last tap, no head.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dflash_ray.json_file import read_json_object
from dflash_ray.target.shape import TargetShape, read_target_shape

_EMBEDDING = "embed_tokens.weight"


class WeightFiles:
    """The safetensors files of a folder as one name -> tensor mapping. `prefix` stands before `embed_tokens` and `layers`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._file_of = _index(self.path)
        self.prefix = self._text_prefix()
        self.head_name = next((n for n in ("lm_head.weight", "language_model.lm_head.weight") if n in self._file_of), None)

    def _text_prefix(self) -> str:
        found = [name.removesuffix(_EMBEDDING) for name in self._file_of if name.endswith(_EMBEDDING)]
        found = [prefix for prefix in found if f"{prefix}layers.0.input_layernorm.weight" in self._file_of]
        if len(found) != 1:
            raise ValueError(f"target.path: {self.path} holds {len(found)} language models ({_EMBEDDING} beside layers); expected one")
        return found[0]

    @property
    def files(self) -> dict[str, set[str]]:
        """File name -> full names of the tensors it is to hold."""
        out: dict[str, set[str]] = {}
        for name, file in self._file_of.items():
            out.setdefault(file, set()).add(name)
        return out

    def __contains__(self, name: str) -> bool:
        """Whether the language model has a tensor of this name (without prefix)."""
        return self.prefix + name in self._file_of

    def read(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """The language model's tensor `name` (without prefix), in the dtype it is stored in."""
        return self._read(self.prefix + name, device)

    def head(self, device: torch.device | str = "cpu", *, tied: bool | None) -> torch.Tensor:
        """Output embedding [V, H]: the input embedding where the target ties them, or where the files hold no head and it does not say."""
        if tied or (tied is None and self.head_name is None):
            return self.read(_EMBEDDING, device)
        if self.head_name is None:
            raise ValueError(f"target.path: {self.path} does not tie its embeddings and holds no lm_head.weight")
        return self._read(self.head_name, device)

    def fingerprint(self) -> str:
        """Hex SHA-256 over name, dtype, shape and first row of every tensor of the language model.

        Whoever trains, merges or rounds a model changes those; where its tensors lie, and what a multimodal checkpoint holds beside them,
        does not count. Few bytes are read, however large the model is.
        """
        of_tensor: dict[str, bytes] = {}
        for file_name, names in self.files.items():
            try:
                with safe_open(self.path / file_name, framework="pt") as file:
                    for name in names:
                        if name.startswith(self.prefix) or name == self.head_name:
                            of_tensor[name.removeprefix(self.prefix)] = _digest_row(file.get_slice(name))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"target.path: {self.path / file_name}: {str(error).splitlines()[0]}") from None
        digest = hashlib.sha256()
        for name in sorted(of_tensor):
            digest.update(name.encode() + of_tensor[name])
        return digest.hexdigest()

    def _read(self, name: str, device: torch.device | str) -> torch.Tensor:
        if name not in self._file_of:
            raise ValueError(f"target.path: {self.path} holds no tensor {name}")
        try:
            with safe_open(self.path / self._file_of[name], framework="pt", device=str(device)) as file:
                tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"target.path: {self.path / self._file_of[name]}: {str(error).splitlines()[0]}") from None
        # a view into the file starts at any byte, and the last bits of a CPU matmul depend on where its operands start
        return tensor.clone() if tensor.device.type == "cpu" else tensor


def _digest_row(tensor: Any) -> bytes:
    """Of dtype, shape and first row of a safetensors slice."""
    shape = tensor.get_shape()
    row = tensor[(*[slice(0, 1)] * (len(shape) - 1), slice(None))] if shape else tensor[...]
    digest = hashlib.sha256(f"{tensor.get_dtype()} {shape}".encode())
    digest.update(row.reshape(-1).contiguous().view(torch.uint8).numpy())
    return digest.digest()


def _index(path: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index where there is one."""
    index = path / "model.safetensors.index.json"
    try:
        return _named_files(path, read_json_object(index).get("weight_map"))
    except FileNotFoundError:
        pass
    except ValueError as error:
        raise ValueError(f"target.path: weights of {path} cannot be read: {index.name}: {error}") from None
    single = path / "model.safetensors"
    if not single.is_file():
        raise ValueError(f"target.path: {path} holds no model.safetensors and no model.safetensors.index.json")
    try:
        with safe_open(single, framework="pt") as file:
            return {name: single.name for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise ValueError(f"target.path: weights of {path} cannot be read: {str(error).splitlines()[0]}") from None


def _named_files(path: Path, file_of: Any) -> dict[str, str]:
    if not isinstance(file_of, dict):
        raise ValueError("weight_map is no mapping of tensors to files")
    for name in file_of.values():
        if not isinstance(name, str) or name in ("", ".", "..") or len(name) > 200 or not name.isprintable() or "/" in name or "\\" in name:
            raise ValueError(f"{str(name)[:60]!r} is not the name of a file in this folder")
    for name in sorted(set(file_of.values())):
        if not (path / name).is_file():
            raise ValueError(f"{name} is missing; copy the whole checkpoint")
    return file_of


def embedding_and_head(path: Path | str) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Input embedding [V, H], output embedding [V, H] (the same tensor where tied) in their stored dtype, and their fingerprint.

    The fingerprint (hex SHA-256 over shapes, dtypes and every byte) goes into checkpoints and model cards in place of the matrices.
    """
    target_shape = read_target_shape(path)
    files = WeightFiles(path)
    embed = files.read(_EMBEDDING)
    tied = target_shape.tie_word_embeddings or (target_shape.tie_word_embeddings is None and files.head_name is None)
    head = embed if tied else files.head(tied=False)
    digest = hashlib.sha256()
    for tensor in (embed,) if tied else (embed, head):
        if tensor.shape != (target_shape.vocab_size, target_shape.hidden_size):
            raise ValueError(
                f"target.path: an embedding of {path} is {list(tensor.shape)}, "
                f"config.json says {[target_shape.vocab_size, target_shape.hidden_size]}"
            )
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return embed, head, digest.hexdigest()


def random_embedding(target_shape: TargetShape, seed: int, device: str) -> torch.Tensor:
    """bf16 [V, H] stand-in for both tables of a target with random weights (benchmarks), drawn on `device`."""
    generator = torch.Generator(device).manual_seed(seed)
    empty = torch.empty(target_shape.vocab_size, target_shape.hidden_size, dtype=torch.bfloat16, device=device)
    return empty.normal_(0, 0.02, generator=generator)
