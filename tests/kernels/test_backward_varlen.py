"""Contract: the steps around the backward's main kernel on packed sequences: each row is treated as that of a sequence
alone, whatever lies beyond a sequence's end, and every tile of the workspaces is written.
"""

import numpy as np
import pytest

pytestmark = pytest.mark.dsl
pytest.importorskip("cutlass")

from fa4build.cases.bits import from_bits, to_bits  # noqa: E402
from fa4build.cases.forward import Case, round_to  # noqa: E402
from fa4build.cases.schedules import RUNS  # noqa: E402
from fa4build.matrix.variants import parse_variant  # noqa: E402
from fa4build.verify.runs import Request, execute, filled, poisoned, scalars_for  # noqa: E402
from tests.built import cubin_of  # noqa: E402

ROWS = 128
# Lengths around whole tiles, none at all, several of none in a row; the used ones of the second case leave NaN behind.
LENGTHS = (113, 0, 128, 7, 0, 0, 257, 1)
CASES = (
    pytest.param(LENGTHS, None, id="whole"),
    pytest.param(LENGTHS, (100, 0, 128, 0, 0, 0, 130, 1), id="used"),
    pytest.param((1,) * 40 + (0,) * 33 + (130,), None, id="many"),
)
HEADS = 2


@pytest.fixture(scope="module")
def built():
    """op -> (variant, request, plan); sm90a, fp16, head_dim 64."""
    kernels = {}
    for op in ("bwd_preprocess", "bwd_postprocess"):
        variant = parse_variant(f"{op}-sm90a-fp16-hd64-varlen")
        cubin = cubin_of(variant.id)
        request = Request(
            variant_id=variant.id, ptx=cubin.ptx, plan="", registers=cubin.registers, seeds=(1,), sha256=""
        )
        kernels[op] = variant, request, cubin.plan
    return kernels


def run(kernel, inputs, outputs, how, **scalars):
    """Bits of the outputs; everything that is not an input starts as NaN."""
    variant, request, plan = kernel
    buffers = {name: filled(bits, how.padded) for name, bits in inputs.items()}
    buffers |= {name: poisoned(shape, dtype, how.padded) for name, (shape, dtype) in outputs.items()}
    scalars = scalars_for(variant, Case(name="packed", seqlen_q=1, seqlen_k=1), how) | scalars
    ran = execute(request, plan, buffers, tuple(outputs), scalars, how, 1, unwritten=tuple(outputs))
    assert [] == list(ran.faults)
    return {name: buffers[name].view.copy() for name in outputs}


def packed(lengths, used):
    """cu_seqlens, seqused, (first row, length, first row of the workspace) of every sequence, rows of the workspace."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    padded = [(int(start) + ROWS * b) // ROWS * ROWS for b, start in enumerate(starts)]
    lengths = used or lengths
    sequences = [(int(starts[b]), lengths[b], padded[b]) for b in range(len(lengths))]
    return starts, np.array(used or (), np.int32), sequences, padded[-1]


def rows_of(sequences, total):
    """Which rows exist."""
    exists = np.zeros(total, bool)
    for first, length, _ in sequences:
        exists[first : first + length] = True
    return exists


@pytest.mark.parametrize("how", RUNS[:2], ids=["eager", "late"])
@pytest.mark.parametrize(("lengths", "used"), CASES)
def test_preprocess_writes_whole_tiles_of_every_sequence(built, lengths, used, how):
    """dpsum is the sum of out * dout, lse_log2 the LSE in powers of two, +inf for -inf; 0 and +inf where there is no
    row; the accumulator and the counters are 0."""
    starts, seqused, sequences, padded_rows = packed(lengths, used)
    total = int(starts[-1])
    rng = np.random.default_rng(0)
    out, dout = (round_to(rng.standard_normal((total, HEADS, 64)), "fp16") for _ in range(2))
    lse = rng.standard_normal((HEADS, total)).astype(np.float32)
    lse[:, 5] = -np.inf
    exists = rows_of(sequences, total)
    inputs = {name: to_bits(x, "fp16") for name, x in (("out", out), ("dout", dout))}
    for bits in inputs.values():
        bits[~exists] = 0x7E00
    hidden = lse.copy()
    hidden[:, ~exists] = np.nan
    inputs |= {
        "lse": hidden.view(np.uint32),
        "cu_seqlens_q": starts.view(np.uint32),
        "seqused_q": seqused.view(np.uint32),
    }
    rows = (HEADS, padded_rows)
    outputs = {"dpsum": (rows, np.uint32), "lse_log2": (rows, np.uint32), "dq_accum": ((*rows, 64), np.uint32)}
    outputs["dq_semaphore"] = ((HEADS, padded_rows // ROWS), np.uint32)
    found = run(built["bwd_preprocess"], inputs, outputs, how)

    expected, log2 = np.zeros(rows), np.full(rows, np.inf)
    sums = np.einsum("rhd,rhd->hr", out, dout)
    for first, length, place in sequences:
        expected[:, place : place + length] = sums[:, first : first + length]
        natural = lse[:, first : first + length].astype(np.float64)
        log2[:, place : place + length] = np.where(np.isneginf(natural), np.inf, natural / np.log(2))
    np.testing.assert_allclose(found["dpsum"].view(np.float32), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["lse_log2"].view(np.float32), log2, rtol=1e-6)
    assert not found["dq_accum"].any()
    assert not found["dq_semaphore"].any()


@pytest.mark.parametrize("how", RUNS[:2], ids=["eager", "late"])
@pytest.mark.parametrize(("lengths", "used"), CASES)
def test_postprocess_converts_the_rows_that_exist(built, lengths, used, how):
    """gradient = accumulator * scale, rounded once; rows of no sequence stay as they were."""
    starts, seqused, sequences, padded_rows = packed(lengths, used)
    total = int(starts[-1])
    accumulator = np.random.default_rng(1).standard_normal((HEADS, padded_rows, 64)).astype(np.float32)
    inputs = {"accumulator": accumulator.view(np.uint32), "cu_seqlens": starts.view(np.uint32)}
    inputs["seqused"] = seqused.view(np.uint32)
    outputs = {"gradient": ((total, HEADS, 64), np.uint16)}
    found = run(built["bwd_postprocess"], inputs, outputs, how, scale=0.125)["gradient"]

    exists = rows_of(sequences, total)
    for first, length, place in sequences:
        rows = accumulator[:, place : place + length].transpose(1, 0, 2) * np.float32(0.125)
        np.testing.assert_array_equal(to_bits(rows, "fp16"), found[first : first + length])
    assert np.isnan(from_bits(found[~exists], "fp16")).all()
