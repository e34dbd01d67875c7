"""The drafter once more, slowly: one block at a time, one slot at a time, the way a server runs it, in float64.

Independent of the library: visibility is a list of keys that each slot walks through, rotations are complex numbers, every sum is a
loop. Autograd through these loops gives the gradients to compare with.
"""

import math

import torch


def norm(x, weight, eps):
    return x / torch.sqrt((x * x).sum() / len(x) + eps) * weight


def turned(x, position, theta):
    half = len(x) // 2
    pairs = torch.complex(x[:half], x[half:])
    angles = torch.tensor([position / theta ** (2 * i / len(x)) for i in range(half)], dtype=torch.float64)
    out = pairs * torch.polar(torch.ones(half, dtype=torch.float64), angles)
    return torch.cat([out.real, out.imag])


def heads_of(vector, size):
    return [vector[i : i + size] for i in range(0, len(vector), size)]


def serve_block(weights, shape, features, anchor, anchor_token, embed):
    """features: list of [L*H] vectors of the document's tokens; anchor: position in it -> list of K output vectors [H]."""
    eps, size, theta = shape.rms_norm_eps, shape.head_dim, shape.rope_theta
    context = [norm(weights["fc.weight"] @ f, weights["hidden_norm.weight"], eps) for f in features[:anchor]]
    stream = [embed[anchor_token if k == 0 else shape.mask_token_id] for k in range(shape.block_size)]
    for index, kind in enumerate(shape.layer_types):
        name = f"layers.{index}."
        w = {key.removeprefix(name).removesuffix(".weight"): value for key, value in weights.items() if key.startswith(name)}

        def key_value(x, position, w=w):
            keys = heads_of(w["self_attn.k_proj"] @ x, size)
            values = heads_of(w["self_attn.v_proj"] @ x, size)
            return position, [turned(norm(k, w["self_attn.k_norm"], eps), position, theta) for k in keys], values

        normed = [norm(x, w["input_layernorm"], eps) for x in stream]
        cache = [key_value(x, position) for position, x in enumerate(context)]
        own = [key_value(x, anchor + k) for k, x in enumerate(normed)]
        after = []
        for k, x in enumerate(stream):
            position = anchor + k
            if kind == "sliding_attention":
                # as servers append one slot after another to a windowed cache
                seen = [entry for entry in cache + own[: k + 1] if position - entry[0] < shape.sliding_window]
            else:
                seen = cache + own
            mixed = []
            for head, query in enumerate(heads_of(w["self_attn.q_proj"] @ normed[k], size)):
                query = turned(norm(query, w["self_attn.q_norm"], eps), position, theta)
                shared = head // (shape.heads // shape.kv_heads)
                scores = [torch.exp((query * keys[shared]).sum() / math.sqrt(size)) for _, keys, _ in seen]
                mixed.append(sum(score * values[shared] for score, (_, _, values) in zip(scores, seen, strict=True)) / sum(scores))
            x = x + w["self_attn.o_proj"] @ torch.cat(mixed)
            inner = norm(x, w["post_attention_layernorm"], eps)
            gate = w["mlp.gate_proj"] @ inner
            after.append(x + w["mlp.down_proj"] @ (gate / (1 + torch.exp(-gate)) * (w["mlp.up_proj"] @ inner)))
        stream = after
    return [norm(x, weights["norm.weight"], eps) for x in stream]


def document_of(batch, position):
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
        if start <= position < end:
            return start, end
    raise AssertionError


def blocks_of(batch, block_size):
    """Per anchor: (start of its document, anchor, [(slot, label) ...]) by walking forward token by token."""
    out = []
    for anchor in batch.anchors.tolist():
        start, end = document_of(batch, anchor)
        labels = []
        for slot in range(1, block_size):
            place = anchor + slot
            if place < end and batch.loss_mask[place]:
                labels.append((slot, int(batch.input_ids[place])))
        out.append((start, anchor, labels))
    return out


def all_outputs(weights, shape, batch, features, embed):
    """[A][K] output vectors."""
    rows = list(features)
    return [
        serve_block(weights, shape, rows[start:], anchor - start, int(batch.input_ids[anchor]), embed)
        for start, anchor, _ in blocks_of(batch, shape.block_size)
    ]


def distribution(vector, head):
    logits = [(row * vector).sum() for row in head]
    largest = max(value.item() for value in logits)
    powers = [torch.exp(value - largest) for value in logits]
    total = sum(powers)
    return [power / total for power in powers]


def losses(outputs, batch, block_size, head, gamma, alpha, teacher=None):
    """Unnormalised sums of the objectives (tensors) and the divisors weight and anchors, by loops. `teacher`: position -> vector [H]."""
    sums = {"ce": 0.0, "dpace": 0.0, "kl": 0.0, "tv": 0.0, "dpace_kl": 0.0, "weight": 0.0, "anchors": 0}
    for (_, anchor, labels), block in zip(blocks_of(batch, block_size), outputs, strict=True):
        if not labels:
            continue
        sums["anchors"] += 1
        present = dict(labels)
        expected, reach = {}, 1.0
        for slot in range(1, block_size):
            if slot in present:
                reach = reach * (alpha * distribution(block[slot], head)[present[slot]].item() + 1 - alpha)
                expected[slot] = reach
        for slot, label in labels:
            p = distribution(block[slot], head)
            decay = math.exp(-(slot - 1) / gamma)
            sums["weight"] += decay
            sums["ce"] = sums["ce"] - decay * torch.log(p[label])
            pace = sum(value for m, value in expected.items() if m >= slot)
            sums["dpace"] = sums["dpace"] - pace * torch.log(p[label])
            if teacher is not None:
                q = [float(value) for value in distribution(teacher[anchor + slot - 1], head)]
                kl = sum(b * (math.log(b) - torch.log(a)) for a, b in zip(p, q, strict=True))
                sums["kl"] = sums["kl"] + decay * kl
                sums["dpace_kl"] = sums["dpace_kl"] + pace * kl
                sums["tv"] = sums["tv"] + decay * sum(torch.abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    return sums
