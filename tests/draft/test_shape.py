"""A drafter's shape follows from config and target by rule, and nonsense is refused with the key that must change."""

from types import SimpleNamespace

import pytest

from dflash_ray.config.schema import DraftConfig
from dflash_ray.draft.dflash.shape import FULL, SLIDING, DraftShape, resolve_shape
from tests.support.draft_cases import small_shape

QWEN = SimpleNamespace(
    hidden_size=5120,
    intermediate_size=17408,
    vocab_size=248320,
    num_layers=64,
    rope_theta=1e7,
    rms_norm_eps=1e-6,
    max_position_embeddings=262144,
)


def target(**changes):
    return SimpleNamespace(**(vars(QWEN) | changes))


def resolve(target_shape=QWEN, **draft):
    return resolve_shape(DraftConfig(**({"mask_token_id": 5} | draft)), target_shape)


def test_the_qwen_drafter_has_1_730_billion_parameters():
    shape = resolve(
        num_attention_heads=32, num_key_value_heads=8, layer_types=[SLIDING] * 4 + [FULL], sliding_window=2048, mask_token_id=248070
    )
    assert shape.parameters == 1_730_213_120
    assert len(shape.tensor_shapes()) == 58
    assert shape.target_layer_ids == (1, 16, 31, 46, 61)
    assert (shape.intermediate, shape.head_dim, shape.window(0), shape.window(4)) == (17408, 128, 2048, None)


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "head_dim"), [(5120, 40, 10, 128), (2048, 16, 4, 128), (576, 9, 3, 64), (192, 3, 1, 64), (32, 1, 1, 64)]
)
def test_default_heads(hidden, heads, kv_heads, head_dim):
    shape = resolve(target(hidden_size=hidden))
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (heads, kv_heads, head_dim)


@pytest.mark.parametrize(
    ("layers", "taps", "expected"), [(64, 5, (1, 16, 31, 46, 61)), (30, 5, (1, 8, 14, 20, 27)), (30, 1, (15,)), (8, 5, (1, 2, 3, 4, 5))]
)
def test_default_taps(layers, taps, expected):
    assert resolve(target(num_layers=layers), num_taps=taps).target_layer_ids == expected


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_layer_ids": [1, 63]}, "draft.target_layer_ids: 63 is the last layer of a 64-layer target.*Use ids 0..62"),
        ({"target_layer_ids": [1, 64]}, "draft.target_layer_ids: .*there is no layer 64"),
        ({"target_layer_ids": [-1, 3]}, "there is no layer -1"),
        ({"target_layer_ids": [3, 3]}, "rise without repeats"),
        ({"target_layer_ids": [9, 3]}, "rise without repeats"),
        ({"target_layer_ids": []}, "draft.target_layer_ids: empty"),
        ({"mask_token_id": 248320}, "draft.mask_token_id: 248320 has no embedding"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, r"draft.num_key_value_heads: 4 does not divide.*\[1, 2, 3, 6\]"),
        ({"head_dim": 33}, "draft.head_dim: 33 is odd"),
    ],
)
def test_bad_values_are_refused_by_key(changes, says):
    with pytest.raises(ValueError, match=says):
        resolve(**changes)


def test_too_many_taps_for_a_small_target_say_how_many_fit():
    with pytest.raises(ValueError, match="draft.num_taps: 5 taps by rule repeat layers of a 6-layer target.*at most 3"):
        resolve(target(num_layers=6))
    assert resolve(target(num_layers=6), num_taps=3).target_layer_ids == (1, 2, 3)


def test_the_mask_token_is_given_or_found_and_never_a_reserved_one():
    with pytest.raises(ValueError, match="draft.mask_token_id: not set"):
        resolve(mask_token_id=None)
    config = DraftConfig()
    assert resolve_shape(config, QWEN, tokenizer_mask_id=7).mask_token_id == 7
    with pytest.raises(ValueError, match="draft.mask_token_id: 7 is the target's eos token"):
        resolve_shape(config, QWEN, tokenizer_mask_id=7, reserved={"pad": 1, "eos": 7})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_theta": None}, "rope_theta is None"),
        ({"layer_types": (SLIDING, FULL), "sliding_window": None}, "draft.sliding_window: None"),
        ({"layer_types": (FULL,)}, "draft.layer_types: 1 entries for 2 layers"),
        ({"layer_types": (FULL, "linear_attention")}, "'linear_attention' is neither"),
        ({"block_size": 1}, "draft.block_size: 1"),
        ({"block_size": 513}, "draft.block_size: 513 is more than the target's 512 positions"),
    ],
)
def test_a_shape_that_no_server_runs_cannot_exist(changes, says):
    with pytest.raises(ValueError, match=says):
        small_shape(**changes)


def test_a_window_without_a_sliding_layer_is_none():
    assert small_shape(sliding_window=7).sliding_window is None


def test_a_shape_survives_json():
    shape = small_shape(layer_types=(SLIDING, FULL), sliding_window=3)
    assert DraftShape(**shape.as_dict()) == shape
