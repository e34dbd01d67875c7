"""Parameters counted by arithmetic are those of the family's own modules."""

from __future__ import annotations

import pytest
import torch
import transformers

from dflash_ray.target.known_shapes import SHAPES
from dflash_ray.target.parameters import count_parameters
from dflash_ray.target.shape import target_shape_of_config
from tests.support.tiny_targets import CONFIGS, FAMILIES

OPTIONAL = ("linear_", "num_experts", "moe_intermediate_size", "shared_expert", "mlp_only", "decoder_sparse", "mlp_bias", "attention_bias")


def counted_by_transformers(config: dict, layers: int) -> int:
    values = {**config, "num_hidden_layers": layers, "layer_types": config.get("layer_types") and config["layer_types"][:layers]}
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**values))
    return sum(parameter.numel() for name, parameter in model.named_parameters() if not name.startswith("norm."))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family):
    config = CONFIGS[family]().to_dict()
    target_shape = target_shape_of_config(config, {}, where="test")
    for layers in (1, 3, 8):
        assert count_parameters(target_shape, layers) == counted_by_transformers(config, layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_the_config_leaves_out(family):
    config = CONFIGS[family]().to_dict()
    for key in (key for key in config if key.startswith(OPTIONAL) and key != "num_experts_per_tok"):
        less = {name: value for name, value in config.items() if name != key}
        assert count_parameters(target_shape_of_config(less, {}, where="test"), 4) == counted_by_transformers(less, 4), key


def test_biases():
    for family, switches in (("llama", ("attention_bias", "mlp_bias")), ("qwen3", ("attention_bias",)), ("qwen3_5", ("attention_bias",))):
        for switch in switches:
            config = CONFIGS[family]().to_dict() | {switch: True}
            assert count_parameters(target_shape_of_config(config, {}, where="test"), 4) == counted_by_transformers(config, 4)


def test_the_published_target():
    config = SHAPES["qwen3.6-27b"]
    assert count_parameters(target_shape_of_config(config, {}, where="test"), 64) == counted_by_transformers(config, 64)


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}])
def test_layers_that_cannot_be_computed_are_refused(change):
    config = CONFIGS["llama"]().to_dict() | change
    with pytest.raises(ValueError, match="is not supported; supported "):
        count_parameters(target_shape_of_config(config, {}, where="test"), 4)
