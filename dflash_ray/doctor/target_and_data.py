"""Checks of one run's target folder and data."""

from __future__ import annotations

from safetensors import SafetensorError, safe_open

from dflash_ray.doctor.finding import Finding
from dflash_ray.run.checks import check_data
from dflash_ray.run.spec import RunSpec
from dflash_ray.target.weights import WeightFiles


def target_folder(spec: RunSpec) -> Finding:
    """Every file that the index names is there and whole, with every layer up to the last tap, embedding, head and tokenizer."""
    name, path = "target folder", spec.config.target.path
    if path is None or spec.config.target.weights == "random":
        return Finding(name, "n/a", "no target.path: weights are random")
    again = "copy or download the folder again"
    try:
        checkpoint = WeightFiles(path)
    except ValueError as error:
        return Finding(name, "blocker", str(error).removeprefix("target.path: "), again)
    files = checkpoint.files
    for file, tensors in files.items():
        try:
            with safe_open(path / file, framework="pt") as opened:  # reads the header, and compares it with the file's size
                lost = tensors - set(opened.keys())
        except (SafetensorError, OSError) as error:
            return Finding(name, "blocker", f"{path / file} is not whole: {str(error).splitlines()[0]}", again)
        if lost:
            return Finding(name, "blocker", f"{path / file} lacks {min(lost)}, which the index puts there", again)
    layers = spec.target_shape.num_layers if spec.config.loss.needs_teacher else spec.shape.target_layer_ids[-1] + 1
    missing = [f"layers.{i}" for i in range(layers) if f"layers.{i}.input_layernorm.weight" not in checkpoint]
    if spec.target_shape.tie_word_embeddings is False and checkpoint.head_name is None:
        missing.append("lm_head")
    if missing:
        return Finding(name, "blocker", f"{path} holds no weights of {', '.join(missing[:4])}", again)
    if not any((path / one).exists() for one in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        what = f"{path} has no tokenizer: the data's cannot be compared, and jobs.evaluate will not run"
        return Finding(name, "warning", what, "copy the tokenizer's files beside the weights")
    size = sum((path / file).stat().st_size for file in files)
    return Finding(name, "ok", f"{len(files)} file{'s' if len(files) > 1 else ''}, {size / 1e9:.3g} GB, layers 0..{layers - 1}")


def data(spec: RunSpec) -> Finding:
    """Readable, supervised, within the budget, and made with the target's tokenizer."""
    name = "data and tokenizer"
    if spec.config.data.path is None:
        return Finding(name, "n/a", "no data.path")
    try:
        check_data(spec)
    except ValueError as error:
        return Finding(name, "blocker", str(error), "prepare the data with jobs.prepare_data and this target's tokenizer")
    from dflash_ray.run.build import open_data

    if "tokenizer" not in open_data(spec.config).manifest:
        what = "the data does not say which tokenizer made it, so it cannot be compared with the target's"
        return Finding(name, "warning", what, "make sure it was the target's, or prepare it with jobs.prepare_data, which writes it down")
    return Finding(name, "ok", "readable, made with the target's tokenizer")
