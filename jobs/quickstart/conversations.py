"""The target's own greedy answers with their token ids: what a drafter is trained and judged on.

Answers are computed in float32 on the CPU, in padded batches, and equal plain greedy decoding of one prompt at a time: an answer is
left out if at some step the two largest logits are less than `MARGIN` apart, thousands of times what another batch size or another
build of torch moves them. What is left is also what the target is sure of, so its text reads better and a drafter can follow it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from jobs.quickstart import filters
from jobs.quickstart.prompts.prompt import Prompt
from jobs.quickstart.tokenizer import END, PAD, render

MARGIN = 0.25


@torch.inference_mode()
def decode(
    tokenizer, model, prompts: Sequence[Prompt], max_new_tokens: int, batch: int = 128
) -> Iterator[tuple[Prompt, list[int], list[int] | None]]:
    """Yields (prompt, prompt ids, answer ids up to and with <|im_end|>; None if unfinished or too close to call)."""
    asked = sorted(((p, render(tokenizer, p.text)) for p in prompts), key=lambda pair: len(pair[1]))
    for start in range(0, len(asked), batch):
        part = asked[start : start + batch]
        width = len(part[-1][1])
        # On the left, where the model's own mask keeps padding out of every layer's state.
        ids = torch.tensor([[PAD] * (width - len(i)) + i for _, i in part])
        mask = torch.tensor([[0] * (width - len(i)) + [1] * len(i) for _, i in part])
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
        top = torch.stack([step.topk(2, -1).values for step in out.logits], 1)  # [B, steps, 2]
        gaps = top[..., 0] - top[..., 1]
        for (p, prompt_ids), row, gap in zip(part, out.sequences[:, width:].tolist(), gaps, strict=True):
            length = row.index(END) + 1 if END in row else 0
            yield p, prompt_ids, row[:length] if length and gap[:length].min() > MARGIN else None


def make(tokenizer, model, prompts: Sequence[Prompt], count: int, max_new_tokens: int) -> tuple[list[dict], Counter]:
    """At most `count` conversations in the order of `prompts`, and how many prompts were left out for which reason."""
    made: dict[str, dict] = {}
    left_out: Counter = Counter()
    for p, prompt_ids, output_ids in decode(tokenizer, model, prompts, max_new_tokens):
        if output_ids is None:
            left_out["unfinished or unsure"] += 1
            continue
        text = tokenizer.decode(output_ids[:-1])
        reason = filters.fault(p, text)
        if reason is None and tokenizer(text, add_special_tokens=False)["input_ids"] != output_ids[:-1]:
            reason = "ids are not the text's own"  # a reader that tokenizes the text again must get the same ids
        if reason is not None:
            left_out[reason] += 1
            continue
        made[p.id] = {
            "id": p.id,
            "conversations": [
                {"role": "user", "content": p.text},
                {"role": "assistant", "content": text, "prompt_ids": prompt_ids, "output_ids": output_ids},
            ],
        }
    return [made[p.id] for p in prompts if p.id in made][:count], left_out
