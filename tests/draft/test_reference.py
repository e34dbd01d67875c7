"""The published `dflash` package loads our export and decodes the same tokens with the same acceptance lengths as we do.

Both read the same files and share no code. Its interpreter comes from DFLASH_REFERENCE_PYTHON; without it the one wheel is installed, by
pip and without its dependencies, beside our own torch and transformers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers

from dflash_ray.config.loading import load_config
from dflash_ray.config.schema import DraftConfig
from dflash_ray.data.batches.batch import Batch
from dflash_ray.draft.dflash.export import export_drafter, load_drafter
from dflash_ray.draft.dflash.shape import FULL, SLIDING, resolve_shape
from dflash_ray.draft.trainer import DraftTrainer
from dflash_ray.serve.drafter import ServedDrafter
from dflash_ray.serve.plain import plain_greedy
from dflash_ray.serve.speculative import served_tau, speculative
from dflash_ray.target.load import load_target
from dflash_ray.target.shape import read_target_shape
from tests.support.tiny_targets import VOCAB, save_target

TAPS, BLOCK, LENGTH = [0, 2], 6, 64


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, VOCAB - 1, length).tolist() for length in range(6, 6 + count)]


def one_batch(asked: list[list[int]], answers: list[list[int]]) -> Batch:
    """All conversations, an anchor at every second position of the answers."""
    documents = [np.array(prompt + answer, np.int32) for prompt, answer in zip(asked, answers, strict=True)]
    starts = np.cumsum([0, *map(len, documents)])
    mask = [np.r_[np.zeros(len(p)), np.ones(len(a))] for p, a in zip(asked, answers, strict=True)]
    anchors = [start + np.arange(len(p), len(p) + len(a) - 1, 2) for start, p, a in zip(starts, asked, answers, strict=False)]
    return Batch(
        number=0,
        epoch=0,
        sample_ids=np.arange(len(documents)),
        input_ids=np.concatenate(documents),
        cu_seqlens=starts.astype(np.int32),
        loss_mask=np.concatenate(mask).astype(np.uint8),
        anchors=np.concatenate(anchors).astype(np.int32),
    )


def learn_by_heart(target_folder: Path, out: Path, asked: list[list[int]], kinds: tuple[str, ...], *, steps: int, taps=TAPS, length=LENGTH):
    """Exports a drafter to `out` that has seen the target's greedy answers to `asked`. Returns (target, answers, tau over the blocks)."""
    target = load_target(target_folder, taps=taps, device="cpu", with_head=True)
    target_shape = target.shape
    answers = [plain_greedy(target, prompt, length, []) for prompt in asked]
    mask = next(token for token in range(target_shape.vocab_size - 1, 0, -1) if not any(token in text for text in asked + answers))
    small = target_shape.hidden_size < 64
    draft = DraftConfig(
        block_size=BLOCK,
        num_layers=len(kinds),
        layer_types=list(kinds),
        sliding_window=9,
        target_layer_ids=list(taps),
        mask_token_id=mask,
        num_attention_heads=4 if small else None,
        head_dim=16 if small else None,
        intermediate_size=96 if small else None,
    )
    shape = resolve_shape(draft, target_shape)
    trainer = DraftTrainer(load_config(overrides={"optimizer": {"name": "muon"}}), shape, target.embedding, target.head, "cpu", steps)
    batch = one_batch(asked, answers)
    features = target.features(batch)
    for step in range(steps):
        trainer.micro_step(batch, features)
        trainer.optimizer_step(step)
    export_drafter(trainer.serving_model.state_dict(), shape, out)
    return target, answers, trainer.step_metrics(trainer.evaluate(batch, features))["tau"]


def serve(drafter: Path, target, asked: list[list[int]], count: int):
    model, _ = load_drafter(drafter, target.embedding, target.head)
    return speculative(target, ServedDrafter(model, target.embedding, target.head), asked, max_new_tokens=count, stop_ids=[])


@pytest.mark.parametrize(("family", "kinds"), [("qwen3", (FULL, FULL)), ("qwen3_5", (SLIDING, FULL))])
def test_what_is_learnt_by_heart_is_served_in_whole_blocks(tmp_path, family, kinds):
    """Through the exported files; in float32 the output is plain greedy decoding, token for token."""
    save_target(family, tmp_path / "target", layers=4, varied=True)
    asked, drafter = prompts(4), tmp_path / "drafter"
    target, answers, trained_tau = learn_by_heart(tmp_path / "target", drafter, asked, kinds, steps=120)
    assert min(len(answer) for answer in answers) >= 64 and min(len(set(answer)) for answer in answers) >= 20
    served = serve(drafter, target, asked, LENGTH)
    assert [answer.tokens for answer in served] == answers
    assert served_tau(served) >= 0.8 * BLOCK
    assert served_tau(served) == pytest.approx(trained_tau, rel=0.15)  # anchors at every second position against one per pass


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """(interpreter, extra PYTHONPATH) of something that has `dflash`."""
    if given := os.environ.get("DFLASH_REFERENCE_PYTHON"):
        return given, ""
    folder = tmp_path_factory.mktemp("reference")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), "dflash==0.1.0"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"the dflash package cannot be installed here: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    return sys.executable, str(folder)


def decode_with_reference(reference, folder: Path, target: Path, asked: list[list[int]], count: int, hybrid: bool):
    python, path = reference
    job = folder / "job.json"
    places = {"target": str(target), "drafter": str(folder / "drafter"), "hybrid": hybrid}
    job.write_text(json.dumps({**places, "prompts": asked, "max_new_tokens": count, "stop_ids": []}))
    command = [python, str(Path(__file__).parents[1] / "support" / "reference_dflash.py"), str(job)]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def assert_same(served, theirs, count: int) -> set[int]:
    """Equal tokens and equal gains of every pass. Returns the gains that occurred."""
    gains = set()
    for ours, reference_answer in zip(served, theirs, strict=True):
        assert ours.tokens == reference_answer["tokens"]
        lengths = [len(one.produced) for one in ours.passes]
        # at the answer's end the reference drafts a shorter block, we a whole one whose tail is cut
        whole = next((i for i in range(len(lengths)) if count - 1 - sum(lengths[:i]) < BLOCK), len(lengths))
        assert lengths[:whole] == reference_answer["lengths"][:whole]
        gains |= set(lengths[:whole])
    return gains


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
@pytest.mark.parametrize("kinds", [(FULL, FULL), (SLIDING, FULL)], ids=["full", "sliding"])
def test_the_reference_decodes_the_same(tmp_path, reference, family, kinds):
    """A half-learnt drafter, so that passes accept anything from nothing to a whole block; prompts it never saw among them."""
    save_target(family, tmp_path / "target", layers=4, varied=True)
    target, *_ = learn_by_heart(tmp_path / "target", tmp_path / "drafter", prompts(4), kinds, steps=40)
    asked = prompts(6)
    served = serve(tmp_path / "drafter", target, asked, LENGTH)
    theirs = decode_with_reference(reference, tmp_path, tmp_path / "target", asked, LENGTH, hybrid=family == "qwen3_5")
    assert {1, BLOCK} <= assert_same(served, theirs, LENGTH)


REAL = {
    "quickstart": Path(__file__).resolve().parents[2] / "jobs" / "quickstart" / "target",
    "smollm2": Path.home() / ".cache" / "dflash_ray" / "smollm2-135m-instruct",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REAL)
def test_the_reference_decodes_the_same_on_real_text(tmp_path, reference, name):
    folder = REAL[name]
    if not (folder / "config.json").is_file():
        pytest.skip(f"no {name} target here: {folder.name} is made by the quickstart")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    questions = ["What is 12 plus 30?", "Name three colours.", "Why is the sky blue?"]
    asked = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
        for text in questions
    ]
    layers, count = read_target_shape(folder).num_layers, 24
    taps = sorted({1, layers // 2, layers - 3})
    target, *_ = learn_by_heart(folder, tmp_path / "drafter", asked[:2], (FULL,), steps=15, taps=taps, length=count)
    served = serve(tmp_path / "drafter", target, asked, count)
    hybrid = target.shape.has_linear_attention
    assert_same(served, decode_with_reference(reference, tmp_path, folder, asked, count, hybrid), count)
    assert served_tau(served) > 1
