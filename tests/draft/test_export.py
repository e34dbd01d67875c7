"""What is exported is exactly what servers read, and what is loaded is exactly what was exported."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from dflash_ray.config.loading import load_config
from dflash_ray.draft.dflash.card import model_card, with_tau
from dflash_ray.draft.dflash.export import export_config, export_drafter, load_drafter, read_shape
from dflash_ray.draft.dflash.shape import FULL, SLIDING
from tests.support.draft_cases import QWEN, features_for, random, small_batch, small_model, small_shape, small_trainer


@pytest.fixture
def exported(tmp_path):
    shape = small_shape(layer_types=(SLIDING, FULL), sliding_window=3)
    model = small_model(shape).float()
    export_drafter(model.state_dict(), shape, tmp_path)
    return shape, model, tmp_path


def tables(shape, dtype=torch.float32):
    return random(shape.vocab, shape.hidden, seed=1, dtype=dtype), random(shape.vocab, shape.hidden, seed=2, dtype=dtype)


def test_config_of_the_qwen_drafter():
    config = export_config(QWEN)
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_target_layers": 64,
        "block_size": 16,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "use_sliding_window": True,
        "sliding_window": 2048,
        "max_window_layers": 5,
        "vocab_size": 248320,
        "rope_theta": 1e7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    assert config["dflash_config"] == {
        "block_size": 16,
        "mask_token_id": 248070,
        "target_layer_ids": [1, 16, 31, 46, 61],
        "sample_from_anchor": False,
    }
    # the rest are Qwen3's own constants; nothing of a hybrid, multimodal or MoE target
    assert set(config) - set(expected) == {"dflash_config", "hidden_act", "attention_bias", "attention_dropout"}


def test_transformers_keeps_window_and_theta():
    config = Qwen3Config(**export_config(QWEN))
    assert config.sliding_window == 2048 and config.layer_types == ["sliding_attention"] * 4 + ["full_attention"]
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e7}
    assert (config.block_size, config.head_dim, config.num_target_layers) == (16, 128, 64)
    assert Qwen3Config(**export_config(small_shape())).sliding_window is None


def test_servers_find_what_they_look_for():
    """A written schema, because neither server installs here; both read the file through transformers' Qwen3Config.

    vLLM 0.33.0 (config/speculative.py, transformers_utils/configs/eagle.py, model_executor/models/qwen3_dflash.py,
    v1/worker/gpu/spec_decode/dflash/speculator.py and eagle/eagle3_utils.py): the class goes by an architecture that starts with DFlash; a
    layer is causal if `is_causal`, else `dflash_config.causal`, else if it is sliding; its window is `dflash_config.swa_window_size` or
    `sliding_window`, counted with the slot itself; aux layers are `eagle_aux_hidden_state_layer_ids`, else `dflash_config.target_layer_ids`
    + 1, and the width of `fc` follows from their number; `rope_parameters` is needed; `dflash_config` and `eagle_config` are merged;
    `sample_from_anchor` true is refused; the number of proposals is never read from `block_size`.
    SGLang 0.5.23 (srt/speculative/dflash_utils.py, srt/models/dflash.py, srt/utils/hf_transformers/common.py): `num_target_layers`,
    `block_size`, `target_layer_ids` and an int `mask_token_id` in dflash_config, else at the top; layers as in vLLM; the base from
    `rope_parameters`, else 10,000 without a word; keys of other families (convolution, selector, projector) change the model.
    """
    raw = export_config(QWEN)
    inner, read = raw["dflash_config"], Qwen3Config(**raw)
    assert all(name.startswith("DFlash") for name in read.architectures)
    assert read.layer_types == [SLIDING] * 4 + [FULL] and read.sliding_window == 2048
    assert read.rope_parameters == {"rope_type": "default", "rope_theta": 1e7}
    assert read.dflash_config == inner and (read.num_target_layers, read.block_size) == (64, inner["block_size"])
    assert set(inner) == {"block_size", "mask_token_id", "target_layer_ids", "sample_from_anchor"}
    assert inner["sample_from_anchor"] is False
    assert all(type(value) is int for value in (inner["mask_token_id"], inner["block_size"], *inner["target_layer_ids"]))
    assert all(0 <= layer < raw["num_target_layers"] - 1 for layer in inner["target_layer_ids"])
    for key in (
        "is_causal",
        "eagle_config",
        "eagle_aux_hidden_state_layer_ids",
        "is_neox_style",
        "rope_is_neox_style",
        "use_aux_hidden_state",
        "use_gemma_norm",
        "target_hidden_size",
        "draft_vocab_size",
        "has_own_lm_head",
        "has_embed_tokens",
        "attention_sink_bias",
        "logit_scale",
        "n_predict",
        "text_config",
        "quantization_config",
    ):
        assert getattr(read, key, None) is None, key  # none written, and none that transformers adds
    assert "partial_rotary_factor" not in json.dumps(raw) and "mrope" not in json.dumps(raw)


def test_tensors_on_disk_are_the_contract(exported):
    shape, model, folder = exported
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in tensors.items()} == shape.tensor_shapes()
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    for name, value in model.state_dict().items():
        assert torch.equal(tensors[name], value.bfloat16())


def test_a_reloaded_drafter_proposes_the_same(exported):
    shape, model, folder = exported
    embed, head = tables(shape)
    loaded, again = load_drafter(folder, embed, head)
    assert again == shape and next(loaded.parameters()).dtype == torch.float32
    rounded = model.bfloat16().float()
    features = random(6, shape.features, dtype=torch.float32)
    block = model.block_embeddings(torch.tensor(3), embed)

    def logits(which):
        cache = which.context_kv(which.context(features), torch.arange(6))
        return which.forward_block(block, 6 + torch.arange(shape.block_size), cache) @ head.T

    assert torch.equal(logits(loaded), logits(rounded))
    half, _ = load_drafter(folder, embed.bfloat16(), head.bfloat16())
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in half.parameters())


def spoiled(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("key", ["mask_token_id", "target_layer_ids"])
def test_a_missing_dflash_key_is_refused_by_name(exported, key):
    shape, _, folder = exported
    spoiled(folder, lambda config: config["dflash_config"].pop(key))
    with pytest.raises(ValueError, match=f"{key} is missing"):
        load_drafter(folder, *tables(shape))


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "num_target_layers",
        "layer_types",
        "sliding_window",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
        "architectures",
        "model_type",
    ],
)
def test_a_missing_key_is_refused_by_name(exported, key):
    _, _, folder = exported
    spoiled(folder, lambda config: config.pop(key))
    with pytest.raises(ValueError, match=f"{key} is missing"):
        read_shape(folder)


def change_inner(**values):
    return lambda config: config["dflash_config"].update(values)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: [c.pop("rope_theta"), c.pop("rope_parameters")], "rope_theta is missing"),
        (lambda c: c.update(rope_theta=10000.5), "rope_theta stands there as"),
        (lambda c: c.update(block_size=9), "block_size stands there as 4 and as 9"),
        (lambda c: c.update(use_sliding_window=False), "use_sliding_window must be true"),
        (lambda c: c.update(num_key_value_heads=3), "num_key_value_heads: 3 does not divide"),
        (lambda c: c.update(hidden_size="12"), "hidden_size"),
        (change_inner(target_layer_ids=[1, 5]), "5 is the last layer"),
        (change_inner(target_layer_ids=[1, 2, 3]), r"fc.weight is \[12, 24\] instead of \[12, 36\]"),
        (change_inner(target_layer_ids="1,3"), "target_layer_ids"),
        (change_inner(mask_token_id=99), "99 has no embedding"),
        (lambda c: c.update(dflash_config=None), "block_size|mask_token_id is missing"),
        (lambda c: c.update(architectures=["DFlash2DraftModel"]), r"architectures is \['DFlash2DraftModel'\]"),
        (lambda c: c.update(rms_norm_eps=0), "rms_norm_eps is 0"),
        (lambda c: c["rope_parameters"].update(rope_type="yarn", factor=4.0), "rope_type is yarn; supported is default"),
        (lambda c: c.update(rope_scaling={"type": "linear", "factor": 2.0}), "type is linear"),
        (lambda c: c.update(partial_rotary_factor=0.25), "partial_rotary_factor is 0.25; supported is 1.0"),
        (lambda c: c["rope_parameters"].update(partial_rotary_factor=0.25), "partial_rotary_factor is 0.25"),
        (lambda c: c["rope_parameters"].update(mrope_section=[1, 1, 1]), "mrope_section"),
        (lambda c: c.update(is_neox_style=False), "is_neox_style is False"),
        (lambda c: c.update(is_causal=True), "is_causal is True; it is not supported"),  # one sliding and one full layer
        (change_inner(causal=False), "causal is False"),
        (change_inner(sample_from_anchor=True), "sample_from_anchor is True; supported is False"),
        (change_inner(use_swa=True), "use_swa is True"),
        (change_inner(swa_window_size=9), "swa_window_size is 9; supported is 3"),
        (
            lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 3]),
            r"eagle_aux_hidden_state_layer_ids is \[1, 3\]; supported is \[2, 4\]",
        ),
        (lambda c: c.update(hidden_act="gelu"), "hidden_act is gelu; supported is silu"),
        (lambda c: c.update(attention_bias=True), "attention_bias is True"),
        (change_inner(projector_type="domino"), "projector_type is domino"),
        (change_inner(conv_kernel_size=4), "conv_kernel_size is 4"),
        (lambda c: c.update(use_gemma_norm=True), "use_gemma_norm is True"),
        (lambda c: c.update(intermediate_size=24), r"mlp.gate_proj.weight is \[20, 12\] instead of \[24, 12\]"),
    ],
)
def test_a_wrong_config_is_refused_by_name(exported, change, says):
    shape, _, folder = exported
    spoiled(folder, change)
    with pytest.raises(ValueError, match=says):
        load_drafter(folder, *tables(shape))


def test_missing_and_unknown_tensors_are_refused_by_name(exported):
    shape, _, folder = exported
    tensors = load_file(folder / "model.safetensors")
    gone = dict(tensors)
    gone.pop("layers.1.mlp.up_proj.weight")
    save_file(gone, folder / "model.safetensors")
    with pytest.raises(ValueError, match="layers.1.mlp.up_proj.weight is missing"):
        load_drafter(folder, *tables(shape))
    save_file(tensors | {"model.norm.weight": tensors["norm.weight"].clone()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="model.norm.weight is unknown"):
        load_drafter(folder, *tables(shape))
    (folder / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match="cannot be read"):
        load_drafter(folder, *tables(shape))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no model.safetensors"):
        load_drafter(folder, *tables(shape))


def test_a_drafter_of_another_target_is_refused(exported):
    shape, _, folder = exported
    embed, head = tables(shape)
    with pytest.raises(ValueError, match="made for a target with vocabulary 23 and hidden size 12; this target's lm_head is \\[23, 10\\]"):
        load_drafter(folder, embed, head[:, :10])


def test_exporting_the_wrong_set_is_refused(tmp_path):
    shape = small_shape()
    weights = small_model(shape).state_dict()
    weights.pop("fc.weight")
    with pytest.raises(ValueError, match="fc.weight is missing"):
        export_drafter(weights, shape, tmp_path)
    assert not list(tmp_path.iterdir())


def test_training_goes_on_from_an_exported_folder(tmp_path):
    trainer = small_trainer(optimizer={"name": "muon"})
    batch = small_batch()
    for step in range(5):
        trainer.micro_step(batch, features_for(batch, trainer.shape))
        trainer.optimizer_step(step)
    export_drafter(trainer.serving_model.state_dict(), trainer.shape, tmp_path)
    warm = small_trainer(draft={"init": str(tmp_path)})
    for name, parameter in warm.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter.bfloat16(), dict(trainer.model.named_parameters())[name].bfloat16()), name
    wider = small_trainer(small_shape(block_size=6), draft={"init": str(tmp_path)})  # another block size is a deliberate choice
    assert wider.model.fc.weight.equal(warm.model.fc.weight)
    with pytest.raises(ValueError, match=r"draft.init .*: its target_layer_ids is \(1, 3\), this run's is \(1, 2\)"):
        small_trainer(small_shape(target_layer_ids=(1, 2)), draft={"init": str(tmp_path)})


def test_a_published_folder_with_older_keys_is_read(exported):
    """Older published configs: block size only inside dflash_config or only at the top, rope theta in one place."""
    shape, _, folder = exported
    spoiled(
        folder, lambda config: [config.pop("block_size"), config.pop("rope_parameters"), config.update(rope_scaling=None, is_decoder=True)]
    )
    assert read_shape(folder) == shape
    spoiled(folder, lambda config: [config["dflash_config"].pop("block_size"), config.update(block_size=4)])
    assert read_shape(folder) == shape


@pytest.mark.parametrize(("kinds", "causal"), [((SLIDING, SLIDING), True), ((FULL, FULL), False)])
def test_a_mask_that_is_written_out_may_say_what_the_layers_say(tmp_path, kinds, causal):
    shape = small_shape(layer_types=kinds, sliding_window=3)
    export_drafter(small_model(shape).state_dict(), shape, tmp_path)
    spoiled(tmp_path, lambda config: [config.update(is_causal=causal), config["dflash_config"].update(causal=causal)])
    assert read_shape(tmp_path) == shape
    spoiled(tmp_path, lambda config: config.update(is_causal=not causal))
    with pytest.raises(ValueError, match=f"is_causal is {not causal}; supported is {causal}"):
        read_shape(tmp_path)


def test_the_card_says_how_to_serve():
    config = load_config(overrides={"optimizer": {"name": "muon"}, "data": {"path": "/secret/place"}})
    card = model_card(QWEN, config, "demo", {"steps": 300, "data": "gsm8k answers"}, {"gsm8k": 3.214})
    for part in (
        '"num_speculative_tokens": 15',
        "--speculative-algorithm DFLASH",
        "dflash generate transformers",
        "| gsm8k | 3.21 |",
        "name: muon",
        "- steps: 300",
        "1, 16, 31, 46, 61",
    ):
        assert part in card
    assert "/secret" not in card
    empty = model_card(QWEN, config, "demo", {"steps": 300, "data": "gsm8k answers"}, {})
    assert "Not measured yet" in empty and with_tau(empty, {"gsm8k": 3.214}) == card
    both = with_tau(with_tau(card, {"chat | x": 1.5}), {"gsm8k": 4.0})
    assert "| gsm8k | 4.00 |\n| chat / x | 1.50 |\n" in both and "3.21" not in both
    assert with_tau(both, {}) == both and both.endswith(card[card.index("## Recipe") :])
    with pytest.raises(ValueError, match="no section 'Acceptance length'"):
        with_tau("# another card", {"gsm8k": 1.0})


def test_what_a_hand_wrote_into_the_card_stays():
    card = model_card(QWEN, load_config(overrides={}), "demo", {}, {"gsm8k": 3.214})
    own = card.replace("Tokens gained", "In *our* words: tokens gained").replace(
        "| gsm8k | 3.21 |\n", "| gsm8k | 3.21 |\n| chat | about 2 |\n\nMeasured on a laptop.\n\n| gpu | tau |\n| --- | --- |\n| a | 1 |\n"
    )
    assert with_tau(own, {}) == own
    more = with_tau(own, {"gsm8k": 3.5, "code": 2.0})
    assert more == own.replace("| gsm8k | 3.21 |", "| gsm8k | 3.50 |").replace("about 2 |\n", "about 2 |\n| code | 2.00 |\n")
    bare = card.replace("| prompts | tau |\n| --- | --- |\n| gsm8k | 3.21 |\n", "To do.\n")
    assert with_tau(bare, {"gsm8k": 3.214}) == card.replace("| prompts |", "To do.\n\n| prompts |")
    last = card[: card.index("\n## Recipe")]
    assert with_tau(last, {"code": 2.0}) == last + "| code | 2.00 |\n"
