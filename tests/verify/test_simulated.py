"""Contract of fa4build.verify.simulated, apart from running kernels (tests/end_to_end/test_verify.py).

A proof holds as long as nothing it depends on has changed: kernel, plan, cases, schedules, seeds, simulator. Tensors
lie compact, where the simulator stops every stray access, or padded, where a changed byte outside an output shows;
their values are the variant's dtype exactly. What is wrong with outputs is said with the place.
"""

from dataclasses import replace

import numpy as np
import pytest

from fa4build.cases.forward import Case, draw_inputs, reference, round_to, window_of
from fa4build.cases.of_variant import has_cases
from fa4build.cases.schedules import RUNS, runs_of
from fa4build.matrix.variants import parse_variant
from fa4build.verify import simulated
from fa4build.verify.runs import POISON, Link, memory_faults, poisoned
from fa4build.verify.simulated import (
    _first_difference,
    _judge,
    _Outputs,
    covers,
    covers_kernel,
    from_bits,
    request_for,
    softmax_scale,
    summary_of,
    to_bits,
)

VARIANT = parse_variant("fwd-sm90a-bf16-hd64-causal")
SMALL = Case(name="small", seqlen_q=5, seqlen_k=7, num_heads_q=2, num_heads_kv=1)


def request(**changes: object):
    """A request of a made-up kernel."""
    given = {"ptx": "ptx", "plan": "plan", "registers": 168, "seeds": (1,), **changes}
    return request_for(given.pop("variant", VARIANT), **given)


def test_equal_requests_have_equal_digests():
    """So that an unchanged kernel is not simulated twice."""
    assert request().sha256 == request().sha256


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"ptx": "other"}, id="kernel"),
        pytest.param({"plan": "other"}, id="plan"),
        pytest.param({"registers": 128}, id="registers"),
        pytest.param({"variant": parse_variant("fwd-sm90a-bf16-hd64-local")}, id="cases"),
        pytest.param({"engine": "python"}, id="engine"),
    ],
)
def test_everything_the_outcome_depends_on_changes_the_digest(change):
    """One at a time."""
    assert request(**change).sha256 != request().sha256


def test_a_proof_with_more_seeds_covers_one_with_fewer():
    """Of the same kernel; not the other way round."""
    summary = {"proof_sha256": request().sha256, "seeds": [1, 2]}

    assert covers(summary, request(seeds=(1,)))
    assert covers(summary, request(seeds=(1, 2)))
    assert not covers(summary, request(seeds=(1, 2, 3)))
    assert not covers(summary, request(ptx="other"))
    assert not covers({}, request())


def test_kernels_that_differ_in_their_blackwell_target_alone_share_a_proof():
    """sm_103a and sm_100a in id, PTX and plan; any other difference tells them apart."""
    texts = {"variant": parse_variant("bwd-sm100a-bf16-hd64-full"), "ptx": ".target sm_100a", "plan": "k_sm100a"}
    other = {"variant": parse_variant("bwd-sm103a-bf16-hd64-full"), "ptx": ".target sm_103a", "plan": "k_sm103a"}

    assert request(**texts).sha256 == request(**other).sha256
    assert request(**texts).sha256 != request(**{**other, "ptx": ".target sm_103a add"}).sha256
    assert request(**texts).sha256 != request(**{**other, "ptx": ".target sm_90a"}).sha256


def test_a_chain_has_a_proof_of_its_own():
    """Other companions: the kernel alone is still proven, the whole gradient is not."""
    chain = (Link(op="fwd", ptx="ptx", plan="plan", registers=168),)
    asked, other = request(chain=chain), request(chain=(replace(chain[0], ptx="other"),))
    summary = {"proof_sha256": asked.sha256, "chain_sha256": asked.chain_sha256, "seeds": [1]}

    assert covers(summary, asked)
    assert covers(summary, request())
    assert covers_kernel(summary, other)
    assert not covers(summary, other)


def test_other_schedules_and_another_simulator_change_the_digest(monkeypatch):
    """An old proof does not vouch for a check that did not exist."""
    before = request().sha256
    monkeypatch.setattr("fa4build.verify.engines.runs_of", lambda engine: runs_of(engine)[:1])
    fewer = request().sha256
    monkeypatch.setattr(simulated, "code_sha256", lambda *_: "another")

    assert len({before, fewer, request().sha256}) == 3


@pytest.mark.parametrize(
    "variant_id",
    [
        "fwd-sm100a-e4m3-hd128-full",
        "fwd-sm90a-bf16-hd64-causal-paged-split-softcap",
        "fwd_combine-sm90a-bf16-hd64-sink",
        "bwd-sm90a-bf16-hd64-causal-softcap",
        "bwd_preprocess-sm90a-bf16-hd64-varlen",
    ],
)
def test_every_layout_and_feature_has_cases_of_its_own(variant_id):
    """A request is formed for each; one feature more is another request."""
    variant = parse_variant(variant_id)

    assert has_cases(variant)
    assert request(variant=variant).sha256 != request().sha256


def test_the_runs_differ_in_all_that_must_not_matter():
    """In order and compact first; then adversarial, padded, with few multiprocessors, warps apart."""
    assert (RUNS[0].schedule, RUNS[0].padded) == ("eager", False)
    assert {run.schedule for run in RUNS} == {"eager", "late", "random"}
    assert any(run.padded for run in RUNS)
    assert any(run.by_warp for run in RUNS)
    assert len({run.num_sms for run in RUNS}) == len(RUNS)


def test_a_summary_names_its_engine_and_the_orders_it_was_run_in():
    """Those of the engine's own proofs."""
    for engine in ("native", "python"):
        found = summary_of("ab" * 32, (1,), [], engine)

        assert (found["engine"], found["schedules"]) == (engine, [run.schedule for run in runs_of(engine)])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_bits_are_the_rounded_values(dtype):
    """There and back is rounding, nothing more."""
    x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)

    assert to_bits(x, dtype).dtype == np.uint16
    assert np.array_equal(from_bits(to_bits(x, dtype), dtype), round_to(x, dtype))


def test_poison_is_a_nan_in_every_dtype():
    """An unwritten output cannot pass for a number."""
    bits = np.array([POISON], np.uint16)

    assert np.isnan(from_bits(bits, "bf16")).all()
    assert np.isnan(from_bits(bits, "fp16")).all()
    assert np.isnan(np.array([POISON << 16 | POISON], np.uint32).view(np.float32)).all()


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 5, 3, 64), np.uint16), ((2, 5, 3, 40), np.uint16), ((2, 3, 5), np.uint32)]
)
def test_padded_tensors_keep_the_contract_of_the_kernel(shape, dtype):
    """Last stride 1, other strides multiples of 16 bytes, a gap behind every row and every head."""
    buffer = poisoned(shape, dtype, True)

    assert buffer.view.shape == shape
    assert buffer.view.strides[-1] == buffer.view.itemsize
    assert all(stride % 16 == 0 for stride in buffer.view.strides[:-1])
    assert all(outer > inner for outer, inner in zip(buffer.whole.shape[1:], shape[1:], strict=True))


def test_compact_tensors_have_nothing_around_them():
    """So that the simulator's bounds are the tensor's."""
    buffer = poisoned((2, 3, 4, 64), np.uint16, False)

    assert buffer.whole.shape == buffer.view.shape
    assert buffer.view.base is buffer.whole


def test_a_write_outside_an_output_or_into_an_input_is_found_with_its_place():
    """One element in the gap behind a row of out; one of q."""
    buffers = {"q": poisoned((1, 2, 1, 8), np.uint16, True), "out": poisoned((1, 2, 1, 8), np.uint16, True)}
    before = {name: buffer.whole.copy() for name, buffer in buffers.items()}
    buffers["out"].view[0, 1, 0, 3] = 1  # its own element: what it is for
    assert list(memory_faults(buffers, before, ("out", "lse"))) == []

    buffers["out"].whole[0, 1, 0, 8] = 1
    buffers["q"].view[0, 0, 0, 2] = 1

    assert list(memory_faults(buffers, before, ("out", "lse"))) == [
        "wrote into q: 1 elements, first at index (0, 0, 0, 2) of (1, 3, 2, 16)",
        "wrote outside out: 1 elements, first at index (0, 1, 0, 8) of (1, 3, 2, 16)",
    ]


def right_outputs() -> tuple[tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """Inputs of SMALL, and the bits of out and lse that the float64 reference gives."""
    drawn = draw_inputs(SMALL, 64, 64, 1)
    rounded = [round_to(x, "bf16") for x in drawn]
    out, lse = reference(*rounded, softmax_scale(VARIANT), window_of(SMALL, "causal"))
    return drawn, to_bits(out.astype(np.float32), "bf16"), lse.astype(np.float32).view(np.uint32)


def outputs_of(out: np.ndarray, lse: np.ndarray) -> _Outputs:
    """Outputs of a run without faults in memory."""
    return _Outputs(out=out, lse=lse, warp_instructions=0, notes=(), faults=())


def test_right_outputs_pass():
    """The reference, rounded, is within its own bound."""
    drawn, out, lse = right_outputs()
    ratio, lse_error, wrong = _judge(VARIANT, SMALL, drawn, outputs_of(out, lse))

    assert wrong == []
    assert 0 < ratio <= 1
    assert lse_error < 1e-6


def test_wrong_outputs_are_told_with_the_place_of_the_worst():
    """One element replaced by 4, one lse off by 1e-3."""
    drawn, out, lse = right_outputs()
    out[0, 3, 1, 7] = 0x4080  # 4.0
    lse.view(np.float32)[0, 1, 2] *= 1.001
    _, _, wrong = _judge(VARIANT, SMALL, drawn, outputs_of(out, lse))

    assert "at (batch, query, head, column) (0, 3, 1, 7)" in wrong[0]
    assert "lse is off by" in wrong[1]


def test_an_unwritten_row_is_told_as_such():
    """NaN where the kernel did not write."""
    drawn, out, lse = right_outputs()
    out[0, 4] = POISON
    ratio, _, wrong = _judge(VARIANT, SMALL, drawn, outputs_of(out, lse))

    assert ratio == float("inf")
    assert wrong == ["NaN or unwritten in 2 rows of out, first at (batch, query, head) (0, 4, 0)"]


def test_the_first_different_bit_of_two_runs_is_named():
    """out before lse."""
    _, out, lse = right_outputs()
    other = out.copy()
    other[0, 2, 1, 5] ^= 1

    assert _first_difference(outputs_of(out, lse), outputs_of(other, lse)) == (
        "out (batch, query, head, column) (0, 2, 1, 5), 1 in all"
    )
