"""Tokenizers of a few hundred tokens with chat templates of each habit, saved as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TEXT = [
    "the quick brown fox jumps over the lazy dog and counts one two three four five six seven",
    "user assistant system tool You are a helpful assistant. What is 12 + 30? It is 42.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n\n",
    "=" * 64,  # one token
] * 20

_CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {% set args = call.function.arguments %}'
    "{% raw %}{{% endraw %}{% for key, value in args.items() %}"
    '{% if not loop.first %}, {% endif %}"{{ key }}": {{ value | tojson }}{% endfor %}{% raw %}}{% endraw %}'
    "}\n</tool_call>{% endfor %}"
)

# History stays as it was written.
KEEPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Reasoning is dropped before the last user message; an answer without any gets an empty block, which the prompt supplies on request.
STRIPS = (
    "{% set seen = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set seen.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% if seen.last < 0 %}{{ raise_exception('A conversation needs a user.') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set thought = m.reasoning_content if m.reasoning_content is string else '' %}"
    "{% set words = m.content %}"
    "{% if not thought and '</think>' in words and m.reasoning_content is not string %}"
    "{% set thought = words.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{% set words = words.split('</think>')[-1] | trim %}{% endif %}"
    "{% if loop.index0 > seen.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ words }}"
    + _CALLS
    + "{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

# As STRIPS, but the prompt opens the block whenever thinking is on.
OPENS = STRIPS.replace("<think>\n\n</think>\n\n{% endif %}{% endif %}", "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}")

# No header round the answer, and a second token after the end of the last turn.
BARE = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}<|im_end|>"
    "{% else %}{{ raise_exception('Only user and assistant.') }}{% endif %}{% endfor %}{% if not add_generation_prompt %}</s>{% endif %}"
)

TEMPLATES = {"keeps": KEEPS, "strips": STRIPS, "opens": OPENS, "bare": BARE}


def save_tokenizer(folder: Path, template: str | None = KEEPS, *, vocabulary: int = 450, metaspace: bool = False) -> Path:
    """Byte-level BPE (or, with `metaspace`, one that writes the first word of a text with a blank before it)."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=metaspace, unk_token="<unk>" if metaspace else None))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>"] if metaspace else []
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()])
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        alphabet = list("abcdefghijklmnopqrstuvwxyz")
    else:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_TEXT, trainer)
    plain = [AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    tokenizer.add_tokens(plain)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|mask|>")]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="</s>", clean_up_tokenization_spaces=False)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


# Words, blanks at every edge, line ends, characters of four bytes, and everything that could be taken for a border.
_PIECES = ["fox", " counts", "12", "\n", "\n\n", " ", "é", "नमस्ते", "👩‍👩‍👧", "{% if %}", "[/INST]"]
_BORDERS = ["<|im_start|>assistant\n", "<|im_end|>", "<|im_end|>\n<|im_start|>user\n", "<tool_call>", "<s>", "</s>", "<|mask|>", "<|im_"]
texts = st.lists(st.sampled_from(_PIECES + _BORDERS), min_size=1, max_size=6).map("".join)
thoughts = st.lists(st.sampled_from(_PIECES), min_size=1, max_size=4).map("".join).map(str.strip)
