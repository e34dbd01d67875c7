"""Tokenizers with chat templates of each habit: their folders, as we load them, and as transformers does."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from dflash_ray.data.prepare.tokenizer import ChatTokenizer
from tests.support.tiny_chat import TEMPLATES, save_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: save_tokenizer(root / name, template) for name, template in TEMPLATES.items()}


@pytest.fixture(scope="module")
def chats(folders):
    return {name: ChatTokenizer(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def references(folders):
    return {name: AutoTokenizer.from_pretrained(folder) for name, folder in folders.items()}
