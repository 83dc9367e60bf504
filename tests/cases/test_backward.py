"""Contract of fa4build.cases.backward: the reference is the derivative of the forward's reference, by finite
differences; hidden queries get and give nothing; the tolerance passes one rounding and refuses a wrong mask.
"""

import numpy as np
import pytest

from fa4build.cases.backward import (
    Gradients,
    backward_cases_for,
    draw_gradient,
    gradient_bounds,
    gradient_errors,
    reference_gradients,
    same_dtype_gradients,
)
from fa4build.cases.forward import UNBOUNDED_WINDOW, Case, draw_inputs, reference, round_to
from fa4build.matrix.variants import parse_variant

CASE = Case(name="small", seqlen_q=5, seqlen_k=7, num_heads_q=4, num_heads_kv=2)
WINDOWS = [(UNBOUNDED_WINDOW, UNBOUNDED_WINDOW), (UNBOUNDED_WINDOW, 0), (2, 1)]
SCALE = 0.3


def problem(seed=3):
    """q, k, v, dout in float64 with head dims 3 and 2."""
    return (*(x.astype(np.float64) for x in draw_inputs(CASE, 3, 2, seed)), draw_gradient(CASE, 2, seed).astype(float))


@pytest.mark.parametrize("window", WINDOWS)
def test_the_reference_is_the_derivative_of_the_forward(window):
    """Central differences of sum(out * dout) with step 1e-5: error 1e-10 of the third derivative, 1e-11 of rounding."""
    q, k, v, dout = problem()
    gradients = reference_gradients(q, k, v, dout, SCALE, window)
    for x, gradient in ((q, gradients.dq), (k, gradients.dk), (v, gradients.dv)):
        for place in np.ndindex(x.shape):
            value, sums = x[place], []
            for step in (1e-5, -1e-5):
                x[place] = value + step
                sums.append((reference(q, k, v, SCALE, window)[0] * dout).sum())
            x[place] = value
            assert abs((sums[0] - sums[1]) / 2e-5 - gradient[place]) < 1e-8


def test_queries_that_see_no_key_get_and_give_nothing():
    """7 queries, 3 keys, causal: the first 4 queries see none, so dq is 0 there, and their dout does not matter."""
    case = Case(name="hidden", seqlen_q=7, seqlen_k=3)
    q, k, v = draw_inputs(case, 4, 4, 1)
    dout = draw_gradient(case, 4, 1)
    first = reference_gradients(q, k, v, dout, SCALE, (UNBOUNDED_WINDOW, 0))
    dout[:, :4] = 100
    second = reference_gradients(q, k, v, dout, SCALE, (UNBOUNDED_WINDOW, 0))

    assert not first.dq[:, :4].any()
    assert first.dq[:, 4:].any()
    assert np.array_equal(first.dk, second.dk)
    assert np.array_equal(first.dv, second.dv)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_bound_takes_a_rounding_and_refuses_a_mask_that_is_off_by_one(dtype):
    """Causal against a window that ends one key later."""
    q, k, v, dout = (round_to(x, dtype) for x in problem())
    args = (q, k, v, dout, SCALE)
    ref = reference_gradients(*args, WINDOWS[1])
    bounds = gradient_bounds(ref, same_dtype_gradients(*args, WINDOWS[1], dtype), dtype)
    rounded = Gradients(**{name: round_to(getattr(ref, name), dtype) for name in ("dq", "dk", "dv")})
    wrong = gradient_errors(reference_gradients(*args, (UNBOUNDED_WINDOW, 1)), ref)

    assert all(error <= bounds[name] for name, error in gradient_errors(rounded, ref).items())
    assert all(error > bounds[name] for name, error in wrong.items())


def test_an_unwritten_gradient_is_infinitely_wrong():
    """NaN does not compare, so it must not slip through."""
    ref = reference_gradients(*problem(), SCALE, WINDOWS[0])
    found = Gradients(dq=ref.dq, dk=np.full_like(ref.dk, np.nan), dv=ref.dv)

    assert {"dq": 0.0, "dk": float("inf"), "dv": 0.0} == gradient_errors(found, ref)


def test_windows_are_tried_on_local_kernels_alone():
    """The others have no such argument."""
    for mask, has_windows in (("full", False), ("causal", False), ("local", True)):
        cases = backward_cases_for(parse_variant(f"bwd-sm100a-bf16-hd128-{mask}"))
        assert has_windows == any(case.window for case in cases)
