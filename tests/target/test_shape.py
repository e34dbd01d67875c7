"""Shape, mask token and embeddings are read from the target's files and refused with one helpful line where they cannot serve."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_ray.config.loading import validate
from dflash_ray.run.build import load_run_target, make_trainer
from dflash_ray.run.spec import resolve, with_weights
from dflash_ray.target.load import load_target
from dflash_ray.target.shape import known_target_shape, read_target_shape, resolve_mask_token
from dflash_ray.target.weights import WeightFiles, embedding_and_head
from tests.support.tiny_runs import tiny_config
from tests.support.tiny_targets import FAMILIES, VOCAB, as_multimodal, save_target


def edit(path, **changes):
    data = json.loads(path.read_text()) if path.exists() else {}
    data.update(changes)
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not ...}))


@pytest.fixture
def folder(tmp_path):
    save_target("qwen3_5", tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_agrees_with_transformers_config(family, tmp_path):
    model = save_target(family, tmp_path)
    target_shape, config = read_target_shape(tmp_path), model.config
    for name in ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"):
        assert getattr(target_shape, name) == getattr(config, name)
    assert target_shape.num_layers == config.num_hidden_layers
    assert target_shape.rope_theta == config.rope_parameters["rope_theta"]
    assert target_shape.head_dim == model.model.layers[-1].self_attn.head_dim
    windows = {getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers if hasattr(layer, "self_attn")}
    assert ("sliding_attention" in target_shape.layer_types) == (any(windows) or family == "mistral")
    assert target_shape.eos_token_ids == (1,) and target_shape.pad_token_id == 0


def test_the_shape_of_a_multimodal_config_is_that_of_its_text_part(folder):
    text = read_target_shape(folder)
    as_multimodal(folder)
    both = read_target_shape(folder)
    assert (both.hidden_size, both.num_layers, both.layer_types, both.rope_theta) == (
        text.hidden_size,
        text.num_layers,
        text.layer_types,
        text.rope_theta,
    )


def test_reading_a_shape_needs_neither_torch_nor_transformers(folder):
    code = (
        "import sys; from dflash_ray.target.shape import read_target_shape, resolve_mask_token; "
        f"read_target_shape({str(folder)!r}); assert not {{'torch', 'ray', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_missing_theta_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="rope_theta"):
        read_target_shape(folder)


def test_old_style_theta_at_the_top_is_read(folder):
    edit(folder / "config.json", rope_parameters=..., rope_theta=12345.0)
    assert read_target_shape(folder).rope_theta == 12345.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_a_config_that_cannot_serve_is_refused(folder, change, message):
    edit(folder / "config.json", **change)
    with pytest.raises(ValueError, match=message):
        read_target_shape(folder)


@pytest.mark.parametrize("text", ["", "[1]", '{"a":', "\x00\xff"])
def test_an_unreadable_config_is_one_value_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="config.json"):
        read_target_shape(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere"):
        read_target_shape(tmp_path / "nowhere")


def test_shape_of_the_real_target():
    target_shape = known_target_shape("qwen3.6-27b")
    assert (target_shape.num_layers, target_shape.hidden_size, target_shape.vocab_size) == (64, 5120, 248320)
    assert target_shape.layer_types.count("full_attention") == 16 and target_shape.layer_types[3] == "full_attention"
    assert target_shape.isolates_documents("cpu")
    with pytest.raises(ValueError, match="qwen3.6-27b"):
        known_target_shape("qwen9")


def test_configured_mask_id_is_checked(folder):
    assert resolve_mask_token(folder, 7) == 7
    for bad, message in ((VOCAB, "no row"), (-1, "no row"), (1, "eos"), (0, "pad")):
        with pytest.raises(ValueError, match=message):
            resolve_mask_token(folder, bad)
    edit(folder / "generation_config.json", eos_token_id=[1, 9])
    with pytest.raises(ValueError, match="eos"):
        resolve_mask_token(folder, 9)


def test_default_mask_id_comes_from_the_tokenizer(folder):
    with pytest.raises(ValueError, match="mask_token_id"):
        resolve_mask_token(folder, None)
    edit(folder / "tokenizer.json", added_tokens=[{"id": 100, "content": "<|MASK|>"}, {"id": 101, "content": "<|im_end|>"}])
    assert resolve_mask_token(folder, None) == 100
    edit(folder / "tokenizer_config.json", mask_token={"content": "<|im_end|>"})
    assert resolve_mask_token(folder, None) == 101
    edit(folder / "tokenizer_config.json", eos_token="<|im_end|>")
    with pytest.raises(ValueError, match="eos"):
        resolve_mask_token(folder, None)


def test_embedding_and_head_are_the_models_own(tmp_path):
    for family in ("llama", "qwen3_5"):
        model = save_target(family, tmp_path / family)
        embed, head, fingerprint = embedding_and_head(tmp_path / family)
        assert torch.equal(embed, model.get_input_embeddings().weight)
        assert torch.equal(head, model.lm_head.weight)
        assert (head is embed) == (family == "llama")
        assert len(fingerprint) == 64
    as_multimodal(tmp_path / "qwen3_5")
    assert embedding_and_head(tmp_path / "qwen3_5")[2] == fingerprint
    save_target("qwen3_5", tmp_path / "other", seed=1)
    assert embedding_and_head(tmp_path / "other")[2] != fingerprint


def test_a_fingerprint_tells_weights_apart_and_not_how_they_are_stored(tmp_path):
    def fingerprint(name):
        return WeightFiles(tmp_path / name).fingerprint()

    model = save_target("qwen3_5", tmp_path / "whole")
    own = fingerprint("whole")
    model.save_pretrained(tmp_path / "cut", max_shard_size="60KB")
    save_target("qwen3_5", tmp_path / "multimodal")
    as_multimodal(tmp_path / "multimodal")
    assert len(own) == 64 and fingerprint("cut") == fingerprint("multimodal") == own
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    tensors |= {"model.layers.0.one": torch.tensor(3.0), "model.layers.0.none": torch.zeros(0, 4), "model.layers.0.yes": torch.ones(3) > 0}
    save_file(tensors, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    seen = {own, fingerprint("whole")}
    for name in ("model.layers.3.mlp.down_proj.weight", "model.layers.0.linear_attn.A_log", "lm_head.weight", "model.norm.weight"):
        changed = tensors[name] * 1.01
        save_file(tensors | {name: changed}, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
        seen.add(fingerprint("whole"))
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "whole" / "model.safetensors")
    assert len(seen | {fingerprint("whole")}) == 7
    (tmp_path / "whole" / "model.safetensors").write_bytes((tmp_path / "whole" / "model.safetensors").read_bytes()[:-900])
    with pytest.raises(ValueError, match=r"target.path: .*model.safetensors|cannot be read"):
        fingerprint("whole")


def test_actors_refuse_a_folder_that_changed_since_the_run_began(tmp_path):
    """On another node, or after a restart."""
    config = validate(tiny_config(tmp_path, tmp_path / "run"))
    spec = with_weights(resolve(config, device="cpu", run_dir=tmp_path / "run"))
    load_run_target(spec)
    make_trainer(spec, 10)
    path = tmp_path / "target" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.mlp.up_proj.weight"] += 0.01
    save_file(tensors, path, metadata={"format": "pt"})
    for begin in (lambda: load_run_target(spec), lambda: make_trainer(spec, 10)):
        with pytest.raises(ValueError, match="does not hold the weights that this run began with"):
            begin()


def test_a_folder_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    from dflash_ray.target import load

    spec = with_weights(resolve(validate(tiny_config(tmp_path, tmp_path / "run")), device="cpu", run_dir=tmp_path / "run"))
    read = load.load_target

    def changed_first(*args, **options):
        save_target("qwen3_5", tmp_path / "target", seed=1)
        return read(*args, **options)

    monkeypatch.setattr(load, "load_target", changed_first)
    with pytest.raises(ValueError, match="does not hold the weights that this run began with"):
        load_run_target(spec)


def test_weights_that_cannot_be_read_are_one_value_error(folder):
    edit(folder / "config.json", vocab_size=VOCAB + 1)
    with pytest.raises(ValueError, match="config.json says"):
        embedding_and_head(folder)
    (folder / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="cannot be read"):
        embedding_and_head(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="model.safetensors"):
        embedding_and_head(folder)


def test_a_checkpoint_in_several_files_reads_like_one(folder, tmp_path):
    whole = load_target(folder, taps=None, device="cpu")
    model = save_target("qwen3_5", tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "cut", max_shard_size="60KB")
    shards = sorted((tmp_path / "cut").glob("model-*.safetensors"))
    assert len(shards) > 2
    parts = load_target(tmp_path / "cut", taps=None, device="cpu")
    assert torch.equal(parts.embedding, whole.embedding) and torch.equal(
        parts.layers[-1].mlp.out_proj.weight, whole.layers[-1].mlp.out_proj.weight
    )
    shards[1].unlink()
    with pytest.raises(ValueError, match=shards[1].name):
        load_target(tmp_path / "cut", taps=None, device="cpu")


def test_missing_and_misshapen_weights_are_named(folder):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name][1:].clone()}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers.2.mlp.up_proj.weight is \[47, 32\]"):
        load_target(folder, taps=[2], device="cpu")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"no tensor {name}"):
        load_target(folder, taps=[2], device="cpu")
    load_target(folder, taps=[1], device="cpu")  # what lies past the last tap is not looked at
