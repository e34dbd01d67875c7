"""The drafter's kernels compile for a Hopper GPU at the published shape, on a machine without one, and fit its shared memory."""

import pytest

triton = pytest.importorskip("triton")

SHARED = 232_448  # bytes a block of threads may use on compute capability 9.0
POINTERS = {
    "anchor": "*i64", "start": "*i64", "label": "*i64", "guess": "*i64", "span": "*i32",
    "log": "*fp32", "delta": "*fp32", "weight": "*fp32", "q_weight": "*fp32", "k_weight": "*fp32", "cos": "*fp32", "sin": "*fp32",
    "partial": "*fp32", "log_q": "*fp32", "kl": "*fp32", "tv": "*fp32", "total": "*fp32", "norm": "*fp32",
    "value": "*fp32", "mean": "*fp32", "square": "*fp32",
}  # fmt: skip
FLOATS = set("scale ce_scale kl_scale tv_scale dpace_scale dpace_kl_scale natural eps clip lr decay beta1 beta2".split())
FLOATS |= {"correction1", "correction2"}
BLOCK = dict(K=16, G=4, D=128)
TILE = BLOCK | dict(AT_ONCE=2, ROWS=128, OWN=32)
HEADS = dict(QUERIES=32, KEYS=8, HALF=64, HEADS=8)


def cases():
    from dflash_ray.draft.kernels import adamw, attention, rows, softmax

    for sliding in (True, False):
        keys, warps, stages = attention.FORWARD
        yield attention._forward, TILE | dict(SLIDING=sliding, KEYS=keys), warps, stages
        keys, warps, stages = attention.QUERY_GRADIENTS
        yield attention._backward_queries, TILE | dict(SLIDING=sliding, KEYS=keys), warps, stages
        keys, step, warps, stages = attention.KEY_GRADIENTS
        yield attention._backward_keys, BLOCK | dict(SLIDING=sliding, KEYS=keys, STEP=step, PARTS=2), warps, stages
    yield rows._norm, dict(ADD=True, BLOCK=8192), 8, 3
    yield rows._norm_backward, dict(RESIDUAL=True, NORMED=True, BLOCK=8192), 16, 3
    yield rows._swiglu, dict(BLOCK=1024), 4, 3
    yield rows._swiglu_backward, dict(BLOCK=1024), 4, 3
    yield rows._norm_rope, HEADS, 1, 3
    yield rows._norm_rope_backward, HEADS, 1, 3
    yield softmax._softmax_rows, dict(GRADIENT=True, BLOCK=8192), 16, 3
    for slope in (True, False):
        yield softmax._teacher_rows, dict(WEIGHT=True, ANCHORS=True, SLOPE=slope, BLOCK=4096), 16, 3
    yield adamw._adamw, dict(COPY=True, BLOCK=4096), 8, 3


def kind(name: str, master: bool) -> str:
    if name.endswith("_ptr"):
        name = name.removesuffix("_ptr")
        return POINTERS.get(name, "*fp32" if master and name == "grad" else "*bf16")
    return "fp32" if name in FLOATS else "i32"


@pytest.mark.slow
def test_kernels_compile_for_hopper():
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    seen = set()
    for kernel, constants, warps, stages in cases():
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else kind(name, kernel.__name__ == "_adamw") for name in names}
        # as at run time: pointers and strides are multiples of 16
        aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith(("_ptr", "stride"))}
        source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": stages})
        assert compiled.metadata.shared <= SHARED, (kernel.__name__, constants)
        if "tl.dot" in kernel.src:
            assert "wgmma" in compiled.asm["ptx"], f"{kernel.__name__} does not use the tensor cores of its generation"
        seen.add(kernel.__name__)
    assert len(seen) == 12
