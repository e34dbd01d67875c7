"""The target's own tokenizer: byte-level BPE trained on its own text, with a ChatML template.

The ids of the special tokens are fixed: 0 <|endoftext|> (padding), 1 <|im_start|>, 2 <|im_end|> (end of a turn), 3 <|mask|>. The last
is what a drafter fills its masked slots with: it has a row in the embedding, is neither padding nor an end, and no text holds it.
"""

from collections.abc import Iterable

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
PAD, START, END, MASK = range(4)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def train(texts: Iterable[str], vocab_size: int):
    """A `PreTrainedTokenizerFast` of exactly `vocab_size` tokens; digits stand alone, so that sums are learned digit by digit."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    if core.get_vocab_size() != vocab_size:
        raise ValueError(
            f"the text yields {core.get_vocab_size()} tokens, {vocab_size} were asked for. Use more text or a smaller --vocab."
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        mask_token=SPECIAL[MASK],
        additional_special_tokens=[SPECIAL[START]],
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def render(tokenizer, prompt: str) -> list[int]:
    """The ids that the target continues with its answer."""
    return tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False)
