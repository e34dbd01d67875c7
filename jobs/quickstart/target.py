"""The quickstart's target: a Qwen3.5-hybrid language model of under 5 million parameters, trained from scratch on (prompt, answer) pairs.

Twelve layers deep and narrow on purpose: what decoding one token costs on a CPU grows with the depth, and a shallow drafter in front
of a deep target is what speculative decoding gains from. Weights are trained in float32 under bfloat16 autocast and saved as bfloat16,
so the folder stays under 12 MB.
"""

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from jobs.quickstart import kernels
from jobs.quickstart.tokenizer import END, PAD, render

PROMPT_WEIGHT = 0.1  # the prompts are templates: a little of their loss teaches the words, more would waste capacity
WIDTH_STEP = 16  # rows of one batch are padded to a multiple of this


def config(vocab_size: int, hidden: int = 192, layers: int = 12, mlp: int = 384):
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 48,
        num_key_value_heads=2,
        head_dim=48,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=hidden // 64,
        linear_num_value_heads=hidden // 32,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
    )


def load(folder: Path | str):
    """(tokenizer, model) in float32 on the CPU, as the conversations were made."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kernels.plain()
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def encode(tokenizer, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], int]]:
    """(ids up to the end of the answer, where the answer starts) of each (prompt, answer)."""
    answers = tokenizer([a for _, a in pairs], add_special_tokens=False)["input_ids"]
    prompts = [render(tokenizer, p) for p, _ in pairs]
    return [(p + a + [END], len(p)) for p, a in zip(prompts, answers, strict=True)]


def batches(rows: Sequence[tuple[list[int], int]], tokens: int, rng: random.Random) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One epoch: (ids [B, T], weight of predicting each id [B, T]) of rows of similar length, at most `tokens` with padding, shuffled.

    Padding stands on the right, where a causal model never looks, so no mask is needed; its weight is 0.
    """

    def width(i: int) -> int:
        return -(-len(rows[i][0]) // WIDTH_STEP) * WIDTH_STEP

    made = []
    order = sorted(range(len(rows)), key=lambda i: (width(i), rng.random()))
    for common, same in itertools.groupby(order, key=width):
        members = list(same)
        count = max(1, tokens // common)
        for group in (members[i : i + count] for i in range(0, len(members), count)):
            ids = torch.full((len(group), common), PAD)
            weight = torch.zeros(len(group), common)
            for r, i in enumerate(group):
                row, start = rows[i]
                ids[r, : len(row)] = torch.tensor(row)
                weight[r, 1:start] = PROMPT_WEIGHT
                weight[r, start : len(row)] = 1.0
            made.append((ids, weight))
    rng.shuffle(made)
    return made


def loss_sum(model, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    each = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (each * weight[:, 1:].flatten()).sum()


@torch.no_grad()
def held_out_loss(model, made: Sequence[tuple[torch.Tensor, torch.Tensor]], device: str) -> float:
    """Mean cross-entropy of the answers' tokens, in nats."""
    total = count = 0.0
    for ids, weight in made:
        answers = (weight == 1.0).float()
        with torch.autocast(device, torch.bfloat16):
            total += loss_sum(model, ids.to(device), answers.to(device)).item()
        count += answers.sum().item()
    return total / count


def muon_and_adamw(model, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embedding, vectors and convolutions."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    embedding = [p for n, p in model.named_parameters() if "embed" in n]
    vectors = [p for p in model.parameters() if p.ndim == 1 or p.ndim > 2]
    assert len(matrices) + len(embedding) + len(vectors) == len(list(model.parameters()))
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": embedding, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.95)
        ),
    ]


def train(
    tokenizer,
    model_config,
    pairs: Sequence[tuple[str, str]],
    held_out: Sequence[tuple[str, str]],
    *,
    device: str,
    seed: int = 0,
    epochs: int = 20,
    batch_tokens: int = 16384,
    lr: float = 3e-3,
    seconds: float | None = None,
    report: Callable[[str], None] = print,
):
    """The trained model (float32, on `device`) and its losses.

    Muon for the matrices, AdamW for the rest, both under one learning rate (Muon's update is scaled to the size of AdamW's); 2% warm-up,
    flat, and a linear fall to zero over the last half. `seconds` shortens the run to what the speed of its first steps allows.
    """
    from transformers import Qwen3_5ForCausalLM

    kernels.short_rows()
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(model_config).to(device).train()
    optimizers = muon_and_adamw(model, lr)
    rows, held_rows = encode(tokenizer, pairs), encode(tokenizer, held_out)
    held = batches(held_rows, batch_tokens, random.Random(seed))
    total = epochs * len(batches(rows, batch_tokens, random.Random(seed)))
    warmup = max(10, total // 50)
    speed_from, speed_to = 40, 100
    step, history = 0, []
    started = time.monotonic()
    speed_started = started
    parameters, tokens = sum(p.numel() for p in model.parameters()), sum(len(ids) for ids, _ in rows)
    report(f"{parameters:,} parameters, {len(rows):,} rows, {tokens:,} tokens, {total} steps")
    running = torch.zeros(2, device=device)
    epoch = 0
    while step < total:
        for ids, weight in batches(rows, batch_tokens, random.Random(f"{seed}-{epoch}")):
            if seconds is not None and step in (speed_from, speed_to):
                if device == "cuda":
                    torch.cuda.synchronize()
                if step == speed_to:
                    per_step = (time.monotonic() - speed_started) / (speed_to - speed_from)
                    fits = step + int((seconds - (time.monotonic() - started)) / per_step)
                    total = max(step + 1, min(total, fits))
                    report(f"{1000 * per_step:.1f} ms a step: {total} steps")
                speed_started = time.monotonic()
            factor = min(1.0, (step + 1) / warmup, 2 * (total - step) / total)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr * factor
            ids, weight = ids.to(device, non_blocking=True), weight.to(device, non_blocking=True)
            with torch.autocast(device, torch.bfloat16):
                loss = loss_sum(model, ids, weight) / weight.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            running += torch.stack((loss.detach(), torch.ones((), device=device)))
            step += 1
            if step % max(1, total // 12) == 0 or step == total:
                entry = {
                    "step": step,
                    "epoch": epoch,
                    "train_loss": round((running[0] / running[1]).item(), 4),
                    "held_out_answer_loss": round(held_out_loss(model, held, device), 4),
                    "seconds": round(time.monotonic() - started, 1),
                }
                running.zero_()
                history.append(entry)
                report(str(entry))
                if not math.isfinite(entry["train_loss"]):
                    raise RuntimeError(f"the loss is {entry['train_loss']} at step {step}: lower --lr")
            if step == total:
                break
        epoch += 1
    return model.eval(), history


def save(model, tokenizer, folder: Path) -> None:
    """A plain Hugging Face folder in bfloat16."""
    from transformers import GenerationConfig

    model = model.to("cpu", torch.bfloat16)
    model.config.architectures = ["Qwen3_5ForCausalLM"]
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=PAD, do_sample=False, max_new_tokens=160)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
