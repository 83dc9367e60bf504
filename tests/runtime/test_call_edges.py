"""Contract: an argument at the edge of what a call takes means what it means to its peers, or is one clear error before
any launch; no gradient that a caller asks for is dropped, and nothing is read or written beyond what tensors hold.

Kernels are loops (reference_kernels.py), which would compute something for each of these calls.
"""

import math

import pytest

torch = pytest.importorskip("torch")

import fa4_kernels  # noqa: E402
from fa4_kernels import InputError, NoKernelError  # noqa: E402

from tests.runtime.stack_reference import attention, close, drawn, ints, reference_runtime, window_of  # noqa: E402

STARTS = ints(0, 5, 12)


@pytest.fixture
def runtime(monkeypatch):
    with reference_runtime(monkeypatch) as made:
        yield made


def dense(**options):
    q = drawn(2, 6, 4, 64)
    return fa4_kernels.flash_attn_func(q, q, q, **options)


def packed(**options):
    q = drawn(12, 4, 64)
    return fa4_kernels.flash_attn_varlen_func(q, q, q, STARTS, STARTS, **options)


def cached(used=None, **options):
    q, cache = drawn(2, 1, 4, 64), drawn(2, 30, 4, 64)
    return fa4_kernels.flash_attn_with_kvcache(q, cache, cache, used, **options)


WAYS = [pytest.param(call, id=call.__name__) for call in (dense, packed, cached)]

# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [1e-60, 1e60, math.inf, math.nan, -1.0], ids=str)
@pytest.mark.parametrize("call", WAYS)
def test_a_cap_that_float32_does_not_hold_is_refused(runtime, call, softcap):
    """Kernels divide scores by it in float32: 1e-60 is 0 there and 1e60 infinite, and every result would be nan."""
    with pytest.raises(InputError, match="softcap must be a finite number of at least 0 that float32 holds"):
        call(softcap=softcap)
    assert runtime.launched == []


@pytest.mark.parametrize("softcap", [None, 0, 0.0, -0.0], ids=str)
@pytest.mark.parametrize("call", WAYS)
def test_no_cap_has_several_spellings(runtime, call, softcap):
    """All of them ask for the kernel without."""
    assert torch.equal(call(softcap=softcap)[0], call()[0])
    assert not any("softcap" in name for name in runtime.launched)


@pytest.mark.parametrize("scale", [0, 0.0, math.inf, "0.1", torch.ones(())], ids=str)
@pytest.mark.parametrize("call", WAYS)
def test_a_scale_is_a_positive_number(runtime, call, scale):
    """0 is no default: None is."""
    with pytest.raises(InputError, match="softmax_scale must be a positive finite number"):
        call(softmax_scale=scale)
    assert runtime.launched == []


@pytest.mark.parametrize("used", [31, -1, 1 << 40])
@pytest.mark.parametrize("pages", [False, True], ids=["rows", "pages"])
def test_one_number_of_keys_in_use_is_within_the_cache(runtime, used, pages):
    """Beyond it lie the keys of the next sequence; what is known on the host is looked at there."""
    q, cache = drawn(2, 1, 4, 64), drawn(6, 10, 4, 64) if pages else drawn(2, 30, 4, 64)
    table = torch.arange(6, dtype=torch.int32).view(2, 3) if pages else None
    with pytest.raises(InputError, match=rf"cache_seqlens is {used}; a sequence's cache holds 0 to 30 keys"):
        fa4_kernels.flash_attn_with_kvcache(q, cache, cache, used, table)
    whole, _ = fa4_kernels.flash_attn_with_kvcache(q, cache, cache, 30, table)
    assert whole.shape == q.shape


@pytest.mark.parametrize("stack", ["flash_attn", "flash_attn_interface"])
def test_so_it_is_under_other_names(runtime, stack):
    """FlashAttention-2 and 3 take one number, too."""
    import importlib

    provided = fa4_kernels.provide(stack)
    try:
        attend = importlib.import_module(stack).flash_attn_with_kvcache
        with pytest.raises(InputError, match="cache_seqlens is 31; a sequence's cache holds 0 to 30 keys"):
            attend(drawn(2, 1, 4, 64), drawn(2, 30, 4, 64), drawn(2, 30, 4, 64), cache_seqlens=31)
    finally:
        provided.remove()


@pytest.mark.parametrize("call", WAYS[:2])
def test_deterministic_is_a_switch_without_gradients_too(runtime, call):
    """A text is not taken for True on the day that an input requires gradients."""
    with pytest.raises(InputError, match="deterministic must be True or False, it is 'no'"):
        call(deterministic="no")


# --- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(7, 12), (12, 7), (1, 5)], ids=str)
@pytest.mark.parametrize("window", [(None, None), (2, None), (2, 1), (-1, 0)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_every_way_in_aligns_at_the_bottom_right(runtime, lengths, window, causal):
    """The last query sees the last key, and rows before the first key see nothing: dense, with features, packed."""
    q, k = drawn(1, lengths[0], 2, 64), drawn(1, lengths[1], 2, 64, seed=1)
    sides = tuple(-1 if side is None else side for side in window)
    expected, _ = attention(q[0], k[0], k[0], window_of(*sides, causal))
    options = {"causal": causal, "window_size": window}
    starts = [ints(0, length) for length in lengths]

    close(fa4_kernels.flash_attn_func(q, k, k, **options)[0][0], expected)
    close(fa4_kernels.flash_attn_func(q, k, k, num_splits=2, **options)[0][0], expected)
    close(fa4_kernels.flash_attn_varlen_func(q[0], k[0], k[0], *starts, **options)[0], expected)
    close(fa4_kernels.flash_attn_with_kvcache(q, k, k, **options)[0][0], expected)


@pytest.mark.parametrize("side", [2.5, True, torch.tensor(2), "2"], ids=str)
@pytest.mark.parametrize("stack", ["flash_attn", "flash_attn_interface", "flash_attn.cute"])
def test_a_side_of_a_window_is_an_int_under_every_name(runtime, stack, side):
    """Also where the interface means offsets, and in the functions that others call beside the public ones."""
    import importlib

    provided = fa4_kernels.provide(stack)
    try:
        module = importlib.import_module(f"{stack}.interface" if stack == "flash_attn.cute" else stack)
        q = drawn(1, 6, 2, 64)
        calls = [lambda: module.flash_attn_func(q, q, q, window_size=(side, 2))]
        if stack == "flash_attn.cute":
            calls += [
                lambda: module.flash_attn_func(q, q, q, window_size=(side, -1)),
                lambda: module._flash_attn_fwd(q, q, q, window_size_left=side, window_size_right=2),
            ]
        for call in calls:
            with pytest.raises(InputError, match="window_size must be"):
                call()
    finally:
        provided.remove()
    assert runtime.launched == []


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("call", WAYS)
def test_the_logits_of_a_sink_are_floating_numbers(runtime, call, dtype):
    """A bool would say that there is a sink, and the imaginary part of a number would be dropped."""
    with pytest.raises(InputError, match=f"learnable_sink is {dtype}; logits of a floating type are expected"):
        call(learnable_sink=torch.ones(4, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("call", WAYS)
def test_a_sink_has_any_floating_type(runtime, call, dtype):
    """The kernels get float32; the gradient has the caller's type, any stride."""
    sink = torch.tensor([0.5, 9.0, -1.0, 9.0, 0.25, 9.0, 2.0, 9.0], dtype=dtype)[::2]
    plain = sink.float().contiguous()
    assert torch.equal(call(learnable_sink=sink)[0], call(learnable_sink=plain)[0])
    if call is not cached:
        leaf = sink.detach().requires_grad_()
        call(learnable_sink=leaf)[0].float().sum().backward()
        assert leaf.grad.dtype == dtype


FP8 = torch.float8_e4m3fn


def test_a_factor_that_wants_a_gradient_is_refused(runtime):
    """No kernel computes it, and without it training would go on with a parameter that never moves."""
    q, factor = drawn(1, 6, 2, 64).to(FP8), torch.ones(1, 2, requires_grad=True)
    for call in (
        lambda **options: fa4_kernels.flash_attn_func(q, q, q, **options),
        lambda **options: fa4_kernels.flash_attn_varlen_func(q[0], q[0], q[0], ints(0, 6), ints(0, 6), **options),
    ):
        with pytest.raises(InputError, match=r"k_descale requires grad, .* pass k_descale\.detach\(\)"):
            call(k_descale=factor)
        with torch.no_grad():
            assert call(k_descale=factor)[0].shape[-1] == 64
        assert call(k_descale=factor.detach())[0].shape[-1] == 64


def test_a_tangent_of_a_factor_is_not_lost(runtime):
    """As of the other inputs."""
    from torch.autograd import forward_ad

    q, factor = drawn(1, 6, 2, 64).to(FP8), torch.ones(1, 2)
    with forward_ad.dual_level(), pytest.raises(NoKernelError, match="v_descale has a tangent"):
        fa4_kernels.flash_attn_func(q, q, q, v_descale=forward_ad.make_dual(factor, factor))


def test_a_list_inside_vmap_is_refused_by_name(runtime):
    """Its numbers differ from one call to the next, and a kernel would read none of them."""
    q, cache = drawn(2, 1, 4, 64), drawn(2, 30, 4, 64)
    used = torch.tensor([[3, 4], [5, 6]], dtype=torch.int32)
    with pytest.raises(NoKernelError, match=r"seqused_k is inside torch\.func\.vmap"):
        torch.func.vmap(lambda x: fa4_kernels.flash_attn_with_kvcache(q, cache, cache, x)[0])(used)


@pytest.mark.parametrize("shape", [(3, 5, 2, 64), (1, 5, 2, 64), (5, 2, 1)], ids=str)
def test_the_merge_writes_into_its_own_shape_alone(runtime, shape):
    """Copying would repeat the rows over a larger tensor."""
    parts, lses = torch.zeros(2, 5, 2, 64), torch.zeros(2, 5, 2)
    out = torch.zeros(shape, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"out has shape .* that of a part, \(5, 2, 64\) on cpu, is expected"):
        fa4_kernels.flash_attn_combine(parts, lses, out)
    assert runtime.launched == []


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"])
def test_lists_are_int32_one_behind_the_other_and_on_the_device(runtime, name):
    """int64, as most code computes them, every second number of a longer list, and a list of Python."""
    q = drawn(12, 4, 64)
    lists = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "seqused_q": ints(5, 7), "seqused_k": ints(5, 7)}
    good = lists[name]
    for bad, message in (
        (good.long(), f"{name} is torch.int64; torch.int32 is expected"),
        (good.repeat_interleave(2)[::2], f"{name} has stride"),
        (good.tolist(), f"{name} is a list; an int32 tensor"),
        (good.to("meta"), f"{name} is on meta"),
    ):
        with pytest.raises(InputError, match=message):
            fa4_kernels.flash_attn_varlen_func(q, q, q, **(lists | {name: bad}))
    assert runtime.launched == []


@pytest.mark.parametrize("head_dim", [0, 64])
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("heads", [0, 4])
def test_nothing_in_nothing_out(runtime, head_dim, batch, heads):
    """No batch, no heads, no columns: an empty result or a clear error, whichever way in."""
    if head_dim and batch and heads:
        return
    q = torch.zeros(batch, 6, heads, head_dim, dtype=torch.bfloat16)
    for call in (
        lambda: fa4_kernels.flash_attn_func(q, q, q, causal=True),
        lambda: fa4_kernels.flash_attn_func(q, q, q, num_splits=3),
        lambda: fa4_kernels.flash_attn_with_kvcache(q, q, q),
        lambda: fa4_kernels.flash_attn_varlen_func(q, q, q, seqused_k=torch.zeros(batch, dtype=torch.int32)),
    ):
        if not head_dim:
            with pytest.raises(InputError, match="head_dim of q and k is 0"):
                call()
        else:
            assert call()[0].shape == q.shape
    assert runtime.launched == []
