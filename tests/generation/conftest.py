"""A target of a few words that answers, and settings to ask it with."""

from __future__ import annotations

import pytest

from dflash_ray.generation.answers import AnswerSettings
from tests.support.tiny_targets import save_target, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets") / "words"
    save_target("qwen3", folder, varied=True)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def answer_settings(folder):
    def make(**more) -> AnswerSettings:
        given = {
            "engine": "own",
            "device": "cpu",
            "precision": "auto",
            "max_new_tokens": 12,
            "temperature": 0.0,
            "seed": 0,
            "batch_size": 2,
        }
        return AnswerSettings(folder, threads=1, stop_ids=(1,), **(given | more))

    return make
