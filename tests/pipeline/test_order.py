"""The line holds every training batch once and in order, and the validation batches after exactly the right steps."""

from hypothesis import given
from hypothesis import strategies as st

from dflash_ray.pipeline.order import BatchOrder, Item


def walk(batches, batches_per_step, validate_every, validation_batches):
    """The line written down one by one."""
    out, step = [], 0
    for number in range(batches):
        out.append(Item("train", number, step))
        if (number + 1) % batches_per_step == 0 or number + 1 == batches:
            step += 1
            if step % validate_every == 0 or number + 1 == batches:
                out += [Item("validation", v, step) for v in range(validation_batches)]
    return out


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 6), st.integers(0, 4))
def test_line_is_the_walk(batches, per_step, every, validation):
    line = BatchOrder(batches, per_step, every, validation)
    want = walk(batches, per_step, every, validation)
    assert line.total == len(want)
    assert [line.item(p) for p in range(line.total)] == want
    for position, item in enumerate(want):
        if item.kind == "train":
            assert line.position(item.number) == position
    assert line.position(batches) == len(want)
