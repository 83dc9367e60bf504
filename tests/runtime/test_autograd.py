"""Contract: gradients through `flash_attn_func` are those of attention, in eager mode and under torch.compile.

Real kernels, compiled here; the launcher encodes their parameters for a stand-in driver, and the PTX simulator executes
what arrives there, on CPU tensors. Tolerances are those of the acceptance sets (bf16 yardstick).
"""

import numpy as np
import pytest

pytestmark = pytest.mark.dsl
torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import fa4_kernels  # noqa: E402
from fa4_kernels import NoKernelError, loader  # noqa: E402

from fa4build.cases.backward import (  # noqa: E402
    Gradients,
    gradient_bounds,
    gradient_errors,
    reference_gradients,
    same_dtype_gradients,
)
from tests.runtime.simulated import SimulatedRuntime, compile_variants  # noqa: E402

UNBOUNDED = 1 << 30
IDS = (
    "fwd-sm90a-bf16-hd128-causal",
    "fwd-sm90a-bf16-hd128-full",
    "bwd_preprocess-sm90a-bf16-hd128",
    "bwd-sm90a-bf16-hd128-causal",
    "bwd-sm90a-bf16-hd128-causal-deterministic",
    "bwd-sm90a-bf16-hd128-full",
    "bwd_postprocess-sm90a-bf16-hd128",
)
BACKWARD = ["bwd_preprocess_sm90a_bf16_hd128_0", "bwd_sm90a_bf16_hd128_causal_0", "bwd_postprocess_sm90a_bf16_hd128_0"]


@pytest.fixture(scope="module")
def cubins(tmp_path_factory):
    return compile_variants(IDS)


@pytest.fixture
def runtime(launcher, fake, tmp_path, cubins):
    made = SimulatedRuntime(cubins, tmp_path, fake)
    loader.use_runtime(made)
    yield made
    loader.use_runtime(None)


@pytest.fixture
def attention(runtime):
    return fa4_kernels.flash_attn_func


def qkv(batch=1, seqlen_q=70, seqlen_k=150, heads=2, heads_kv=1, requires_grad=True):
    """Fresh bf16 tensors of head_dim 128."""
    generator = torch.Generator().manual_seed(seqlen_q)
    shapes = ((batch, seqlen_q, heads, 128), (batch, seqlen_k, heads_kv, 128), (batch, seqlen_k, heads_kv, 128))
    tensors = (torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes)
    return tuple(x.requires_grad_(requires_grad) for x in tensors)


def as_numpy(*tensors):
    return tuple(x.detach().double().numpy() for x in tensors)


def assert_gradients(tensors, dout, window):
    """The .grad of q, k, v are within the acceptance rule of the float64 gradients for dout."""
    inputs, scale = as_numpy(*tensors, dout), tensors[0].shape[-1] ** -0.5
    found = Gradients(**dict(zip(("dq", "dk", "dv"), as_numpy(*(x.grad for x in tensors)), strict=True)))
    expected = reference_gradients(*inputs, scale, window)
    bounds = gradient_bounds(expected, same_dtype_gradients(*inputs, scale, window, "bf16"), "bf16")
    errors = gradient_errors(found, expected)
    assert all(errors[name] <= bounds[name] for name in bounds), (errors, bounds)


@pytest.mark.parametrize("shape", [{}, {"batch": 2, "heads": 4, "heads_kv": 4, "seqlen_q": 130}], ids=["odd", "tiles"])
def test_gradients_are_those_of_attention(attention, runtime, shape):
    """One launch forward and three backward; dq, dk, dv of causal attention."""
    q, k, v = tensors = qkv(**shape)
    out, lse = attention(q, k, v, causal=True)
    dout = torch.randn(out.shape).to(torch.bfloat16)
    out.backward(dout)

    assert lse is None
    assert runtime.launched == ["fwd_sm90a_bf16_hd128_causal_0", *BACKWARD]
    assert_gradients(tensors, dout, (UNBOUNDED, 0))


def test_a_gradient_that_is_expanded_is_copied(attention):
    """out.sum() gives a dout of stride 0."""
    q, k, v = tensors = qkv()
    out, _ = attention(q, k, v)
    out.sum().backward()

    assert_gradients(tensors, torch.ones_like(out), (UNBOUNDED, UNBOUNDED))


def test_lse_is_differentiable_when_returned(attention):
    """d lse[i] / d q = scale * sum_j p_ij k_j, and lse does not depend on v: dv is exactly 0."""
    q, k, v = qkv()
    _, lse = attention(q, k, v, return_lse=True)
    weights = torch.randn(lse.shape)
    (lse * weights).sum().backward()

    q64, k64 = (x.detach().double().transpose(1, 2).requires_grad_() for x in (q, k))
    expected = torch.logsumexp(q64 @ k64.transpose(2, 3) * 128**-0.5, dim=-1)
    (expected * weights).sum().backward()
    for found, reference in ((q.grad, q64.grad), (k.grad, None)):
        if reference is not None:
            assert (found.double() - reference.transpose(1, 2)).abs().max() < 0.02
    # Both query heads read the one key head.
    assert (k.grad.double() - k64.grad.transpose(1, 2)).abs().max() < 0.02
    assert not v.grad.any()


def test_out_and_lse_together(attention):
    """The gradient of a sum of both is the sum of the gradients."""
    gradients = []
    for weights in ((1, 0), (0, 1), (1, 1)):
        q, k, v = qkv()
        out, lse = attention(q, k, v, return_lse=True)
        (weights[0] * (out.float() ** 2).sum() + weights[1] * lse.sum()).backward()
        gradients.append(as_numpy(q.grad, k.grad, v.grad))

    for alone, lse_alone, both in zip(*gradients, strict=True):
        assert np.abs(alone + lse_alone - both).max() <= 0.02 * np.abs(both).max()


@pytest.mark.parametrize("how", ["argument", "torch"])
def test_deterministic_on_request_or_as_torch_is_set(attention, runtime, how):
    """The kernel that sums in a fixed order; the same bits twice."""
    torch.use_deterministic_algorithms(how == "torch")
    try:
        found = []
        for _ in range(2):
            q, k, v = qkv(seqlen_q=300, seqlen_k=300, heads=1)
            attention(q, k, v, causal=True, deterministic=True if how == "argument" else None)[0].sum().backward()
            found.append(q.grad)
    finally:
        torch.use_deterministic_algorithms(False)

    assert runtime.launched[2] == "bwd_sm90a_bf16_hd128_causal_deterministic_0"
    assert torch.equal(*found)


def test_without_a_deterministic_kernel_nothing_is_launched(attention, runtime):
    """The full mask has only the other kernel here."""
    with pytest.raises(NoKernelError, match=r"requires grad, and no backward(.|\n)*is not deterministic"):
        attention(*qkv(), deterministic=True)
    assert runtime.launched == []


@pytest.mark.parametrize("shape", [{"seqlen_k": 0}, {"seqlen_q": 0}, {"batch": 0}], ids=["keys", "queries", "batch"])
def test_empty_inputs_have_zero_gradients(attention, runtime, shape):
    """Nothing is launched."""
    tensors = qkv(**shape)
    attention(*tensors)[0].sum().backward()

    assert runtime.launched == []
    assert all(x.grad is not None and x.grad.shape == x.shape and not x.grad.any() for x in tensors)


def test_only_some_inputs_may_require_gradients(attention):
    """The others get none."""
    q, k, v = qkv(requires_grad=False)
    k.requires_grad_()
    attention(q, k, v)[0].sum().backward()

    assert (q.grad, v.grad) == (None, None)
    assert k.grad.shape == k.shape


def test_no_gradients_are_recorded_when_none_are_wanted(attention, runtime):
    """Under no_grad, and for inputs that do not require them: one launch, no graph."""
    with torch.no_grad():
        assert attention(*qkv())[0].grad_fn is None
    assert attention(*qkv(requires_grad=False))[0].grad_fn is None
    assert runtime.launched == 2 * ["fwd_sm90a_bf16_hd128_full_0"]


# --- torch.compile and torch.library ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph_with_the_same_gradients(attention, dynamic):
    """fullgraph=True: no graph break; forward and backward give eager's bits (nothing here sums in a varying order)."""

    def loss(q, k, v):
        out, lse = attention(q * 2, k, v, causal=True, return_lse=True)
        return (out.float() ** 2).sum() + lse.sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)):
        tensors = qkv()
        function(*tensors).backward()
        results.append([x.grad for x in tensors])

    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_operators_keep_the_rules_of_torch_library(runtime):
    """torch's own checks: schema, fake tensors, autograd registration, and tracing with static and dynamic shapes."""
    arguments = (*qkv(), 128**-0.5, UNBOUNDED, 0, False)

    torch.library.opcheck(torch.ops.fa4_kernels.attention.default, arguments)


def test_fake_tensors_give_shapes_without_a_launch(runtime):
    """What compiling for another machine needs: shapes and dtypes alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(2, n, 4, 128, dtype=torch.bfloat16, device="cuda") for n in (30, 50, 50))
        out, lse = torch.ops.fa4_kernels.attention(q, k, v, 0.1, UNBOUNDED, UNBOUNDED, False)
        gradients = torch.ops.fa4_kernels.attention_backward(out, None, q, k, v, out, lse, 0.1, UNBOUNDED, 0, False)

    assert ((2, 30, 4, 128), torch.bfloat16, "cuda") == (tuple(out.shape), out.dtype, out.device.type)
    assert ((2, 4, 30), torch.float32) == (tuple(lse.shape), lse.dtype)
    assert [tuple(x.shape) for x in gradients] == [(2, 30, 4, 128), (2, 50, 4, 128), (2, 50, 4, 128)]
    assert runtime.launched == []
