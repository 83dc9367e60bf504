"""Contract of `fwd_combine`: partial results of split keys merge to the result over all keys, on every target.

The oracle is the definition in float64: out = sum_s exp(lse_s - lse) out_s. Splits that saw no key hold NaN in
out_partial and are skipped; a row without any split gives 0 and -inf, with a sink 0 and the sink.
"""

import numpy as np
import pytest

pytestmark = pytest.mark.dsl
pytest.importorskip("cutlass")

from fa4build.cases.bits import from_bits  # noqa: E402
from fa4build.cases.schedules import RUNS  # noqa: E402
from fa4build.matrix.variants import parse_variant  # noqa: E402
from fa4build.verify.runs import Request, execute, filled, poisoned  # noqa: E402
from tests.built import cubin_of  # noqa: E402

VARIANTS = ("sm90a-bf16-hd64", "sm90a-fp16-hd96-sink", "sm100a-bf16-hd128-sink", "sm103a-fp16-hd256")
RELATIVE_ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # half a unit in the last place


@pytest.fixture(scope="module", params=VARIANTS)
def built(request):
    """(variant, cubin)."""
    variant = parse_variant(f"fwd_combine-{request.param}")
    return variant, cubin_of(variant.id)


def drawn(variant, num_splits: int, batch: int, seqlen_q: int, heads: int):
    """Partial results: about a third of the splits of a row saw nothing; the first rows none at all, or one."""
    rng = np.random.default_rng(num_splits)
    out = rng.standard_normal((num_splits, batch, seqlen_q, heads, variant.head_dim_v), dtype=np.float32)
    lse = (rng.standard_normal((num_splits, batch, heads, seqlen_q)) * 5).astype(np.float32)
    lse[rng.random(lse.shape) < 0.3] = -np.inf
    lse[:, 0, 0, 0] = -np.inf
    lse[:-1, 0, -1, -1], lse[-1, 0, -1, -1] = -np.inf, -700.0
    out[np.isneginf(lse).swapaxes(-1, -2)] = np.nan
    sink = np.linspace(-4, 4, heads).astype(np.float32)
    return out, lse, sink


def merged(out, lse, sink):
    """(out, lse) in float64 by the definition; sink: None or one logit a head."""
    lse = lse.astype(np.float64)
    logits = lse if sink is None else np.concatenate([lse, np.broadcast_to(sink[:, None], (1, *lse.shape[1:]))])
    largest = logits.max(axis=0)
    reference = np.where(np.isfinite(largest), largest, 0.0)
    total = np.exp(logits - reference).sum(axis=0)
    weights = np.exp(lse - reference) / np.where(total == 0, 1.0, total)
    terms = (
        np.where(weights[..., None] > 0, np.nan_to_num(out.astype(np.float64)).swapaxes(2, 3), 0) * weights[..., None]
    )
    with np.errstate(divide="ignore"):
        return terms.sum(axis=0).swapaxes(1, 2), np.log(total) + reference


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 2, 5, 3), (40, 1, 3, 2)], ids=["one", "three", "forty"])
def test_partial_results_merge_to_the_whole(built, shape):
    """Within rounding of the output type; the same bits under every schedule; nothing but the outputs is written."""
    variant, cubin = built
    out, lse, sink = drawn(variant, *shape)
    ref, ref_lse = merged(out, lse, sink if variant.sink else None)
    request = Request(variant_id=variant.id, ptx=cubin.ptx, plan="", registers=cubin.registers, seeds=(1,), sha256="")
    results = []
    for run in RUNS:
        buffers = {"out_partial": filled(out.view(np.uint32), run.padded)}
        buffers["lse_partial"] = filled(lse.view(np.uint32), run.padded)
        buffers["out"] = poisoned(ref.shape, np.uint16, run.padded)
        buffers["lse"] = poisoned(ref_lse.shape, np.uint32, run.padded)
        if variant.sink:
            buffers["sink"] = filled(sink.view(np.uint32), False)
        outputs = ("out", "lse")
        assert execute(request, cubin.plan, buffers, outputs, {}, run, 1, outputs).faults == ()
        results.append(tuple(buffers[name].view.copy() for name in outputs))
    for bits, lse_bits in results[1:]:
        np.testing.assert_array_equal(bits, results[0][0])
        np.testing.assert_array_equal(lse_bits, results[0][1])
    got, got_lse = from_bits(results[0][0], variant.dtype), results[0][1].view(np.float32)
    error = np.abs(got - ref)
    assert (error <= RELATIVE_ROUNDING[variant.dtype] * np.abs(ref) + 2e-6 * np.nanmax(np.abs(out), initial=0)).all()
    np.testing.assert_array_equal(np.isneginf(got_lse), np.isneginf(ref_lse))
    finite = np.isfinite(ref_lse)
    np.testing.assert_allclose(got_lse[finite], ref_lse[finite], rtol=1e-5, atol=1e-5)


def test_it_starts_before_the_kernel_in_front_ends_and_reads_nothing_until_then(built):
    """What it merges was written by that kernel."""
    _, cubin = built
    (launch,) = cubin.plan.launches
    assert launch.pdl
    assert cubin.ptx.index("griddepcontrol.wait;") < min(cubin.ptx.index(x) for x in ("ld.global", "st.global"))
