"""SmolLM2-135M-Instruct as the quickstart's target: its folder, made once, and its own greedy answers to the project's prompts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

HERE = Path(__file__).resolve().parent
COUNTS = {"train": 480, "heldout": 24}
MAX_NEW_TOKENS = 128
INSTRUCTION = "Answer in one short paragraph."


def target_folder() -> Path:
    """~/.cache/dflash_ray/smollm2-135m-instruct: an ordinary Hugging Face folder in bf16, made from the registry package on first use."""
    folder = Path.home() / ".cache" / "dflash_ray" / "smollm2-135m-instruct"
    if (folder / "config.json").exists():
        return folder
    from jobs.quickstart.teacher import gguf_file

    source = gguf_file(None)
    Console().print(f"converting SmolLM2-135M-Instruct into {folder}, once")
    convert(source, folder)
    return folder


def convert(source: Path, folder: Path) -> None:
    """The GGUF file `source` as an ordinary Hugging Face folder in bf16. Needs the package gguf."""
    from jobs.quickstart.teacher import load

    tokenizer, model = load(source, "cpu")
    part = folder / ".part"  # inside, so that nothing is left beside the folder if this is interrupted
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    for path in sorted(part.iterdir(), key=lambda path: path.name == "config.json"):  # the config last: it says that all is there
        os.replace(path, folder / path.name)
    part.rmdir()


def answers(target: Path, folder: Path) -> dict[str, Path]:
    """Files of conversations with the target's own answers and their token ids, made once per run folder."""
    out = {split: folder / "answers" / f"{split}.jsonl" for split in COUNTS}
    if all(path.exists() for path in out.values()):
        return out
    import torch

    from dflash_ray.data.prepare.tokenizer import ChatTokenizer
    from dflash_ray.serve.plain import generate_batch
    from dflash_ray.target.load import load_target
    from dflash_ray.target.shape import read_target_shape

    tokenizer, target_shape = ChatTokenizer(target), read_target_shape(target)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_target(target, taps=None, device=device, precision="float32", with_head=True)
    (folder / "answers").mkdir(parents=True, exist_ok=True)
    for split, path in out.items():
        prompts = list(_prompts(split))
        ids = [tokenizer.encode(tokenizer.render(messages, None, generation=True, thinking=False)) for messages in prompts]
        with Progress(transient=True) as bar:
            task = bar.add_task(f"SmolLM2 answers ({split})", total=len(ids))
            given = generate_batch(
                model,
                ids,
                max_new_tokens=MAX_NEW_TOKENS,
                stop_ids=target_shape.eos_token_ids,
                batch_size=48,
                on_answer=lambda *_, bar=bar, task=task: bar.advance(task),
            )
        lines = []
        for number, (messages, prompt, answer) in enumerate(zip(prompts, ids, given, strict=True)):
            if answer[-1] not in target_shape.eos_token_ids:
                continue  # cut by the limit: a drafter would learn an end that is none
            turn = {"role": "assistant", "content": tokenizer.decode(answer[:-1]), "prompt_ids": prompt, "output_ids": answer}
            lines.append(json.dumps({"id": f"{split}-{number}", "conversations": [*messages, turn]}))
        temporary = path.with_suffix(".part")
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
        temporary.replace(path)
    return out


def _prompts(split: str) -> Iterator[list[dict[str, str]]]:
    """Single questions of the project's own prompts; sheets of several are left to the small target."""
    with (HERE / f"{split}.jsonl").open(encoding="utf-8") as file:
        questions = [json.loads(line)["conversations"][0]["content"] for line in file]
    single = [question for question in questions if "\n" not in question]
    for question in single[: COUNTS[split]]:
        yield [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
