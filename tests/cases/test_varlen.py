"""Contract of the acceptance cases of packed sequences, pages, splits and features.

A kernel that reads its arguments as docs/formats.md says, row by row, passes; one that is wrong in what a case is for
does not. Nothing beyond a sequence's end is a number.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from fa4build.cases.bits import to_bits
from fa4build.cases.forward import reference, round_to
from fa4build.cases.varlen import PackedCase, draw_problem, merge, packed_cases_for
from fa4build.cases.varlen_backward import draw_backward_problem, packed_backward_cases_for
from fa4build.matrix.variants import parse_variant, valid_variants

KEYS_A_BLOCK = 64


def keys_of(inputs, b):
    """Keys and values of a sequence, as a kernel finds them."""
    length = int(inputs["seqused_k"][b]) if len(inputs.get("seqused_k", ())) else None
    if "page_table" in inputs:
        size = inputs["k"].shape[1]
        places = [(inputs["page_table"][b, j // size], j % size) for j in range(length)]
        return tuple(np.array([inputs[name][page, row] for page, row in places]) for name in "kv")
    if "cu_seqlens_k" not in inputs:
        return inputs["k"][b], inputs["v"][b]
    start, end = inputs["cu_seqlens_k"][b : b + 2]
    end = end if length is None else start + length
    return inputs["k"][start:end], inputs["v"][start:end]


def queries_of(inputs, b):
    """(rows of q, index of the first one)."""
    if "cu_seqlens_q" not in inputs:
        return inputs["q"][b], None
    start, end = inputs["cu_seqlens_q"][b : b + 2]
    used = inputs["seqused_q"]
    return inputs["q"][start : start + used[b] if len(used) else end], start


def row_by_row(variant, problem):
    """Whole results of the forward from the problem's inputs; NaN where nothing is written."""
    inputs, scalars = problem.inputs, problem.scalars
    batch = len(inputs["q"]) if variant.layout == "dense" else len(inputs["cu_seqlens_q"]) - 1
    heads = inputs["q"].shape[-2]
    out = np.full((*inputs["q"].shape[:-1], variant.head_dim_v), np.nan)
    lse = np.full((*inputs["q"].shape[:-1],), np.nan)
    for b in range(batch):
        (q, start), (k, v) = queries_of(inputs, b), keys_of(inputs, b)
        for i, h in np.ndindex(len(q), heads):
            group = h // (heads // inputs["k"].shape[-2])
            diagonal = i + len(k) - len(q)
            left, right = diagonal - scalars["window_left"], diagonal + scalars["window_right"]
            seen = [j for j in range(len(k)) if left <= j <= right]
            factor = 1.0
            if "q_descale" in inputs:
                factor = inputs["q_descale"][b, group] * inputs["k_descale"][b, group]
            scores = np.array([scalars["softmax_scale"] * factor * (q[i, h] @ k[j, group]) for j in seen])
            if "softcap" in scalars:
                scores = scalars["softcap"] * np.tanh(scores / scalars["softcap"])
            values = np.array([v[j, group] for j in seen]).reshape(len(seen), variant.head_dim_v)
            place = (b, i, h) if start is None else (start + i, h)
            out[place], lse[place] = one_row(scores, values, inputs["sink"][h] if "sink" in inputs else None)
            if "v_descale" in inputs:
                out[place] *= inputs["v_descale"][b, group]
    return out, lse.swapaxes(-1, -2)


def one_row(scores, values, sink):
    """Softmax of one row with plain sums."""
    every = [*scores, *([] if sink is None else [sink])]
    unit = max(every, default=-math.inf)
    if unit == -math.inf:
        return np.zeros(values.shape[1]), -math.inf
    total = sum(math.exp(score - unit) for score in every)
    weights = np.exp(scores - unit) / total
    return weights @ values if len(scores) else np.zeros(values.shape[1]), math.log(total) + unit


def is_small(case):
    return sum(a * b for a, b in zip(case.lengths_q, case.lengths_k, strict=True)) * case.num_heads_q < 20_000


VARIANTS = (
    "fwd-sm90a-bf16-hd64-causal-varlen",
    "fwd-sm90a-fp16-hd64-local-varlen-softcap-sink",
    "fwd-sm90a-bf16-hd64-full-paged",
    "fwd-sm90a-bf16-hd64-causal-softcap-sink",
    "fwd-sm100a-e4m3-hd64-full",
    "fwd-sm100a-e5m2-hd64-causal-paged",
)


@pytest.mark.parametrize("variant_id", VARIANTS)
def test_a_kernel_that_reads_its_arguments_as_published_passes(variant_id):
    """Found row by row in float64 and rounded once: far inside the bound, wherever sequences start and pages lie."""
    variant = parse_variant(variant_id)
    for case in filter(is_small, packed_cases_for(variant)):
        problem = draw_problem(variant, case, 1)
        out, lse = row_by_row(variant, problem)
        rounded = round_to(out, "bf16" if variant.dtype.startswith("e") else variant.dtype)
        verdict = problem.judge({"out": rounded, "lse": lse})

        assert () == verdict.wrong, case.name
        assert verdict.ratio < 0.6
        assert verdict.lse_error < 1e-9


def split_results(variant, problem, case):
    """Parts of KEYS_A_BLOCK keys dealt out in order, found by masking all others."""
    parts = []
    for number in range(case.num_splits):
        inputs = dict(problem.inputs)
        outs, lses = [], []
        for b in range(case.batch):
            (q, _), (k, v) = queries_of(inputs, b), keys_of(inputs, b)
            blocks = -(-len(k) // KEYS_A_BLOCK)
            share = -(-blocks // case.num_splits) * KEYS_A_BLOCK
            window = (problem.scalars["window_left"], problem.scalars["window_right"])
            outside = np.ones(len(k), bool)
            outside[number * share : (number + 1) * share] = False
            hidden = np.where(outside[:, None, None], 0, k)
            out, lse = masked_reference(q, hidden, v, problem.scalars["softmax_scale"], window, outside)
            outs.append(out)
            lses.append(lse)
        parts.append((np.concatenate(outs), np.concatenate(lses)))
    return np.stack([out for out, _ in parts]), np.stack([lse for _, lse in parts]).swapaxes(-1, -2)


def masked_reference(q, k, v, scale, window, outside):
    out, lse = np.zeros((*q.shape[:2], v.shape[-1])), np.full(q.shape[:2], -np.inf)
    group = q.shape[1] // k.shape[1]
    for i, h in np.ndindex(*q.shape[:2]):
        diagonal = i + len(k) - len(q)
        seen = [j for j in range(len(k)) if not outside[j] and diagonal - window[0] <= j <= diagonal + window[1]]
        if seen:
            scores = scale * (k[seen, h // group] @ q[i, h])
            out[i, h], lse[i, h] = one_row(scores, v[seen, h // group], None)
        else:
            out[i, h] = np.nan
    return out, lse


def test_parts_of_a_split_are_judged_by_what_they_merge_to():
    """Parts without a key may hold NaN; a part that lost its weight does not pass."""
    variant = parse_variant("fwd-sm90a-bf16-hd64-causal-varlen-split")
    case = next(case for case in packed_cases_for(variant) if case.name == "one-query-each")
    problem = draw_problem(variant, case, 1)
    out, lse = split_results(variant, problem, case)

    assert np.isnan(out).any()
    assert () == problem.judge({"out_partial": out, "lse_partial": lse}).wrong
    assert problem.judge({"out_partial": out, "lse_partial": lse + np.array([0, 0.5, 0])[:, None, None]}).wrong
    lost = np.where(np.isneginf(lse), np.nan, lse)
    assert "NaN or unwritten" in problem.judge({"out_partial": out, "lse_partial": lost}).wrong[0]


def test_the_merge_of_parts_is_the_whole():
    """Keys cut in two anywhere, with and without a sink: the same as attention over all of them."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 2, 8)) for n in (3, 11, 11))
    sink = np.array([0.3, -2.0])
    window = (2**30, 2**30)
    parts = [reference(q, k[:, part], v[:, part], 0.3, window) for part in (slice(4), slice(4, None))]
    parts.append((np.full((1, 3, 2, 8), np.nan), np.full((1, 2, 3), -np.inf)))
    outs, lses = np.stack([out for out, _ in parts]), np.stack([lse.swapaxes(1, 2) for _, lse in parts])
    for given in (None, sink):
        out, lse = merge(outs, lses, given)
        expected_out, expected_lse = reference(q, k, v, 0.3, window, sink=given)

        np.testing.assert_allclose(out, expected_out, atol=1e-13)
        np.testing.assert_allclose(lse.swapaxes(1, 2), expected_lse, atol=1e-13)


def perfect(variant, case):
    problem = draw_problem(variant, case, 1)
    out, lse = row_by_row(variant, problem)
    return problem, round_to(out, variant.dtype), lse


SMALL = PackedCase(
    name="small", seqlens_q=(3, 5), seqlens_k=(9, 6), used_q=(3, 4), tail=1, num_heads_q=2, num_heads_kv=1
)


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        pytest.param(lambda out, lse: out.__setitem__((1, 0), out[2, 0]), "out is off", id="a row of another"),
        pytest.param(lambda out, lse: lse.__setitem__((0, 1), lse[0, 1] + 1e-2), "lse is off", id="lse"),
        pytest.param(lambda out, lse: out.__setitem__((0, 0), np.nan), "NaN or unwritten in 64", id="not written"),
        pytest.param(lambda out, lse: out.__setitem__((7, 0), 0), "written beyond the sequences", id="beyond used"),
        pytest.param(lambda out, lse: lse.__setitem__((0, 8), 0), "written beyond the sequences", id="of no sequence"),
    ],
)
def test_a_wrong_result_is_told(break_it, sentence):
    """One fault at a time."""
    problem, out, lse = perfect(parse_variant("fwd-sm90a-bf16-hd64-full-varlen"), SMALL)
    assert () == problem.judge({"out": out, "lse": lse}).wrong
    break_it(out, lse)

    assert sentence in problem.judge({"out": out, "lse": lse}).wrong[0]


@pytest.mark.parametrize(
    ("variant_id", "without"),
    [
        ("fwd-sm90a-bf16-hd64-full-varlen-softcap", {"softcap": 1e6}),
        ("fwd-sm90a-bf16-hd64-full-varlen-sink", {"sink": -np.inf}),
        ("fwd-sm100a-e4m3-hd64-full-varlen", {"v_descale": 1.0}),
        ("fwd-sm100a-e4m3-hd64-full-varlen", {"k_descale": 1.0}),
    ],
)
def test_a_kernel_that_ignores_a_feature_fails(variant_id, without):
    """The cap, the sink or a factor is visible in the result of a small case."""
    variant = parse_variant(variant_id)
    case = replace(SMALL, softcap=0.5)
    problem = draw_problem(variant, case, 1)
    changed = {name: np.full_like(x, without[name]) if name in without else x for name, x in problem.inputs.items()}
    scalars = {**problem.scalars, **{name: x for name, x in without.items() if name == "softcap"}}
    out, lse = row_by_row(variant, replace(problem, inputs=changed, scalars=scalars))

    assert problem.judge({"out": out, "lse": lse}).wrong


def test_keys_too_light_for_fp8_must_not_get_lost():
    """1099 keys of weight e^-10 each: together 5 % of the mass, which rounding each to the type would take away."""
    variant = parse_variant("fwd-sm100a-e4m3-hd64-full")
    case = next(case for case in packed_cases_for(variant) if case.name == "tail-mass")
    problem = draw_problem(variant, case, 1)
    out, lse = row_by_row(variant, problem)

    assert 0.04 < out.min() < 0.06
    assert () == problem.judge({"out": round_to(out, "bf16"), "lse": lse}).wrong
    assert any("light keys got lost" in text for text in problem.judge({"out": out * 0, "lse": lse}).wrong)


def test_what_no_result_may_depend_on_is_no_number():
    """Rows behind used lengths, and whole pages; garbage in the table where no page is used."""
    variant = parse_variant("fwd-sm90a-bf16-hd64-full-paged")
    case = next(case for case in packed_cases_for(variant) if case.name == "used-queries")
    inputs = draw_problem(variant, case, 1).inputs
    used = {int(page) for b, n in enumerate(case.lengths_k) for page in inputs["page_table"][b, : -(-n // 16)]}

    assert np.isnan(inputs["q"]).all(axis=(1, 2)).sum() == sum(case.seqlens_q) - sum(case.lengths_q) + case.tail
    assert np.isnan(inputs["k"]).all(axis=(2, 3)).sum() == inputs["k"].shape[0] * 16 - sum(case.lengths_k)
    assert len(used) == sum(-(-n // 16) for n in case.lengths_k)
    assert (np.abs(inputs["page_table"][:, -1].astype(np.int64) + 1) >= 0).all()
    assert not set(inputs["page_table"][:, -1].tolist()) & set(range(len(inputs["k"])))


def test_every_variant_has_cases_with_what_makes_it_hard():
    """Empty sequences, more than 256 of them, several page sizes, split counts and sinks; pages always with lengths."""
    for variant in valid_variants():
        if variant.op != "fwd":
            continue
        cases = packed_cases_for(variant)
        assert len({case.name for case in cases}) == len(cases)
        if variant.layout != "dense":
            assert max(case.batch for case in cases) > 256
            assert any(0 in case.lengths_k for case in cases)
            assert any(case.used_q for case in cases)
        if variant.layout == "paged":
            assert {16, 64, 128} <= {case.page_size for case in cases}
            assert all(case.used_k is not None for case in cases)
        if variant.split:
            assert {1, 2, 3, 5} <= {case.num_splits for case in cases}
        if variant.sink:
            assert {0.0, -1e4, 100.0} <= {case.sink for case in cases}


# --- combine ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant_id", ["fwd_combine-sm90a-bf16-hd64", "fwd_combine-sm90a-fp16-hd64-sink"])
def test_a_plain_merge_passes_and_one_that_multiplies_empty_parts_does_not(variant_id):
    """0 * NaN is NaN: parts without a key are skipped."""
    variant = parse_variant(variant_id)
    for case in packed_cases_for(variant):
        problem = draw_problem(variant, case, 1)
        parts, lses = problem.inputs["out_partial"], problem.inputs["lse_partial"].swapaxes(-1, -2)
        sink = problem.inputs.get("sink")
        out, lse = merge(parts, lses, sink)
        right = {"out": round_to(out, variant.dtype), "lse": lse.swapaxes(-1, -2)}
        careless = (np.where(np.isneginf(lses), 0, 1)[..., None] * parts).sum(axis=0)

        assert () == problem.judge(right).wrong
        if np.isnan(parts).any():
            assert problem.judge(right | {"out": careless}).wrong
        if variant.sink and case.num_heads_q > 1:
            without = merge(parts, lses, None)
            assert problem.judge({"out": without[0], "lse": without[1].swapaxes(-1, -2)}).wrong


# --- fp8 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "mantissa", "bias"), [("e4m3", 3, 7), ("e5m2", 2, 15)])
def test_fp8_values_round_and_encode_as_defined(dtype, mantissa, bias):
    """Every finite code: (1 + m / 2^mantissa) 2^(e - bias), or m / 2^mantissa 2^(1 - bias) for e = 0. Ties to even."""
    codes = np.arange(0x7F if dtype == "e4m3" else 0x7C)
    field, fraction = codes >> mantissa, codes % 2**mantissa
    values = np.where(field > 0, (1 + fraction / 2**mantissa), fraction / 2**mantissa) * 2.0 ** (
        np.maximum(field, 1) - bias
    )

    assert np.array_equal(round_to(values, dtype), values)
    assert np.array_equal(to_bits(values, dtype), codes)
    assert np.array_equal(to_bits(-values[1:], dtype), codes[1:] | 0x80)
    middle = (values[:-1] + values[1:]) / 2
    assert np.array_equal(to_bits(middle, dtype), np.where(codes[:-1] % 2 == 0, codes[:-1], codes[1:]))
    assert to_bits(np.array([np.nan, 1e9]), dtype).tolist() == [0x7F, codes[-1]]


# --- backward ---------------------------------------------------------------------------------------------------------


def numeric_gradients(q, k, v, dout, scale, window, softcap):
    """Central differences of sum(out * dout), element by element."""
    found = []
    for x in (q, k, v):
        gradient = np.zeros_like(x)
        for place in np.ndindex(*x.shape):
            kept, values = x[place], []
            for step in (1e-5, -1e-5):
                x[place] = kept + step
                values.append((reference(q, k, v, scale, window, softcap=softcap)[0] * dout).sum())
            x[place] = kept
            gradient[place] = (values[0] - values[1]) / 2e-5
        found.append(gradient)
    return found


@pytest.mark.parametrize("window", [(2**30, 2**30), (1, 0)])
def test_the_gradient_through_the_cap_is_its_numeric_derivative(window):
    """A cap of the size of the scores, grouped heads, a masked corner."""
    from fa4build.cases.backward import reference_gradients

    rng = np.random.default_rng(2)
    q, k, v, dout = (rng.standard_normal(shape) for shape in ((1, 3, 2, 4), (1, 4, 1, 4), (1, 4, 1, 3), (1, 3, 2, 3)))
    expected = numeric_gradients(q, k, v, dout, 0.7, window, 0.8)
    found = reference_gradients(q, k, v, dout, 0.7, window, softcap=0.8)

    for name, gradient in zip(("dq", "dk", "dv"), expected, strict=True):
        np.testing.assert_allclose(getattr(found, name), gradient, atol=1e-8)


def right_answer(variant, problem):
    """Gradients of one packed problem, found sequence by sequence from its inputs."""
    from fa4build.cases.backward import reference_gradients

    inputs, scalars = problem.inputs, problem.scalars
    found = {"dk": np.zeros_like(inputs["k"]), "dv": np.zeros_like(inputs["v"])}
    found["dq_accum"] = np.full(problem.outputs["dq_accum"], np.nan)
    window = (scalars["window_left"], scalars["window_right"])
    for b in range(len(inputs["cu_seqlens_q"]) - 1):
        (q, start), (k, v) = queries_of(inputs, b), keys_of(inputs, b)
        dout = inputs["dout"][start : start + len(q)]
        arguments = (q[None], k[None], v[None], dout[None], scalars["softmax_scale"], window)
        gradients = reference_gradients(*arguments, softcap=scalars.get("softcap", 0.0))
        key = inputs["cu_seqlens_k"][b]
        found["dk"][key : key + len(k)], found["dv"][key : key + len(k)] = gradients.dk[0], gradients.dv[0]
        tile = (start + 128 * b) // 128 * 128
        found["dq_accum"][:, tile : tile + len(q)] = gradients.dq[0].swapaxes(0, 1) / scalars["softmax_scale"]
    return found | {"dq_semaphore": np.zeros(problem.outputs["dq_semaphore"])}


@pytest.mark.parametrize(
    "variant_id", ["bwd-sm90a-bf16-hd64-causal-varlen", "bwd-sm90a-bf16-hd64-local-varlen-softcap"]
)
def test_right_gradients_of_packed_sequences_pass_and_wrong_ones_do_not(variant_id):
    """Tiles lie where docs/formats.md says; a row of another sequence, or a number beyond the last, is told."""
    variant = parse_variant(variant_id)
    for case in filter(is_small, packed_backward_cases_for(variant)):
        problem = draw_backward_problem(variant, case, 1)
        found = right_answer(variant, problem)
        rounded = found | {name: np.nan_to_num(round_to(found[name], "bf16")) for name in ("dk", "dv")}
        verdict = problem.judge(rounded)

        assert () == verdict.wrong, case.name
        assert verdict.ratio < 0.6
        if case.name == "used-lengths":
            for name in ("dk", "dv"):
                beyond = {**rounded, name: rounded[name].copy()}
                beyond[name][-1] = 1
                assert "beyond the sequences" in problem.judge(beyond).wrong[0]
            shifted = {**rounded, "dq_accum": np.roll(rounded["dq_accum"], 128, axis=1)}
            assert "dq is off" in problem.judge(shifted).wrong[0]
