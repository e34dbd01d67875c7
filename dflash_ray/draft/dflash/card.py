"""The model card of an exported drafter: what it was made for, how, what it reached, and how to serve it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import yaml

from dflash_ray.config.schema import Config
from dflash_ray.draft.dflash.shape import SLIDING, DraftShape


def model_card(shape: DraftShape, config: Config, name: str, training: Mapping[str, Any], tau: Mapping[str, float]) -> str:
    """Markdown. `training`: lines about it (steps, tokens, data); `tau`: acceptance length by prompt set, empty if not measured."""
    target = config.target.path.name if config.target.path else "TARGET"
    recipe = {section: getattr(config, section).model_dump(mode="json", exclude_defaults=True) for section in _SECTIONS}
    recipe = {section: values for section, values in recipe.items() if values}
    sliding = SLIDING in shape.layer_types
    taps = ", ".join(map(str, shape.target_layer_ids))
    mixed = sliding and len(set(shape.layer_types)) > 1
    mask = f"causal in a sliding window of {shape.sliding_window} in sliding layers, " if sliding else ""
    card = f"""---
library_name: dflash
pipeline_tag: text-generation
tags: [dflash, speculative-decoding, draft-model]
---

# {name}: a DFlash drafter for {target}

Proposes {shape.block_size - 1} tokens in one forward pass; the target checks them in one pass of its own. It has
{shape.parameters / 1e6:,.1f} M parameters in {shape.num_layers} layers. The embedding and the head are the target's and not in these files.

- reads the outputs of target layers {taps} of {shape.num_target_layers}, counted from 0 (layer i is `hidden_states[i + 1]`)
- block of {shape.block_size}: the last accepted token, then mask token {shape.mask_token_id}; slot k proposes the token k places after it
- attention inside the block: {mask}both ways in full layers

{_SECTION}
Tokens gained per target pass, the bonus token included.

{_NOT_MEASURED}`python -m jobs.evaluate --drafter DIR --target DIR --prompts FILE.jsonl --card` fills this in.

## Recipe

{chr(10).join(f"- {key}: {value}" for key, value in training.items())}

Settings that differ from the defaults of dflash-ray:

```yaml
{yaml.safe_dump(recipe, sort_keys=False).strip()}
```

## Serve

`DIR` is this folder.

```bash
# vLLM{" (sliding and full layers together need its second model runner)" if mixed else ""}
{"VLLM_USE_V2_MODEL_RUNNER=1 " if mixed else ""}vllm serve {target} \\
  --speculative-config '{{"method": "dflash", "model": "DIR", "num_speculative_tokens": {shape.block_size - 1}}}'

# SGLang
python -m sglang.launch_server --model-path {target} \\
  --speculative-algorithm DFLASH --speculative-draft-model-path DIR

# transformers, through the dflash package (pip install "dflash[local]")
dflash generate transformers --model {target} --draft DIR "How many positive divisors does 196 have?"
```
"""
    return with_tau(card, tau)


def with_tau(card: str, tau: Mapping[str, float]) -> str:
    """The card with these acceptance lengths in its table, all else as it is; ValueError for a card without that section."""
    head, found, rest = card.partition(_SECTION)
    if not found:
        raise ValueError("no section 'Acceptance length'")
    if not tau:
        return card
    body, separator, after = rest.partition("\n## ")
    text, _, below = body.partition(_TABLE)
    if _TABLE not in body:
        text = "\n".join(line for line in text.split("\n") if not line.startswith(_NOT_MEASURED)).rstrip("\n") + "\n\n"
    lines = below.split("\n")
    rows = list(takewhile(lambda line: line.startswith("|"), lines))
    lines = lines[len(rows) :] or [""]
    for where, value in tau.items():
        start = f"| {' '.join(where.replace('|', '/').split())} | "
        place = next((i for i, row in enumerate(rows) if row.startswith(start)), len(rows))
        rows[place : place + 1] = [f"{start}{value:.2f} |"]
    return head + found + text + _TABLE + "\n".join([*rows, *lines]) + separator + after


_SECTION = "## Acceptance length\n"
_TABLE = "| prompts | tau |\n| --- | --- |\n"
_NOT_MEASURED = "Not measured yet: "

# settings of a machine (paths, flow, transport) are no part of a recipe
_SECTIONS = ("draft", "batching", "anchors", "loss", "noise", "optimizer", "schedule", "train")
