"""Contract: with a module of flash-attention provided, its functions take what that package's take, by position and by
name, mean what they mean there, and return what they return; what is not served raises, or goes to the package.

FlashAttention-2 2.8.3, FlashAttention-3 and flash-attn-4 4.0.0b36. Kernels are loops (reference_kernels.py); expected
values are float64 attention from the packages' documentation (stack_reference.py).
"""

import inspect
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import fa4_kernels  # noqa: E402
from fa4_kernels import InputError, NoKernelError, answers, api, counts  # noqa: E402
from fa4_kernels.stacks import modules  # noqa: E402

from tests.runtime.stack_reference import (  # noqa: E402
    attention,
    close,
    close_lse,
    drawn,
    ints,
    reference_runtime,
    window_of,
)

STACKS = ("flash_attn", "flash_attn_interface", "flash_attn.cute")


@pytest.fixture
def runtime(monkeypatch):
    with reference_runtime(monkeypatch) as made:
        provided = [fa4_kernels.provide(stack) for stack in STACKS]
        yield made
        for each in provided:
            each.remove()


def fa2(name="flash_attn_func"):
    import flash_attn.flash_attn_interface as module

    return getattr(module, name)


def fa3(name="flash_attn_func"):
    import flash_attn_interface as module

    return getattr(module, name)


def fa4(name="flash_attn_func"):
    import flash_attn.cute.interface as module

    return getattr(module, name)


_AFTER_Q = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
_LISTS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
_FACTORS = "q_descale=None, k_descale=None, v_descale=None"
_CHUNK = f"{_FACTORS}, window_size=(-1, -1), attention_chunk=0, softcap=0.0"
_TUNED = "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
_MODS = "score_mod=None, score_mod_bwd=None, mask_mod=None"
_FEATURES = "learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False"
_CACHE = "q, k_cache, v_cache, k=None, v=None"
_NEW = "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None"
SIGNATURES = [
    (fa2, "flash_attn_func", f"q, k, v, {_AFTER_Q}"),
    (fa2, "flash_attn_qkvpacked_func", f"qkv, {_AFTER_Q}"),
    (fa2, "flash_attn_kvpacked_func", f"q, kv, {_AFTER_Q}"),
    (fa2, "flash_attn_varlen_func", f"q, k, v, {_LISTS}, {_AFTER_Q}, block_table=None"),
    (fa2, "flash_attn_varlen_qkvpacked_func", f"qkv, cu_seqlens, max_seqlen, {_AFTER_Q}"),
    (fa2, "flash_attn_varlen_kvpacked_func", f"q, kv, {_LISTS}, {_AFTER_Q}"),
    (
        fa2,
        "flash_attn_with_kvcache",
        f"{_CACHE}, rotary_cos=None, rotary_sin=None, {_NEW}, block_table=None, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False",
    ),
    (fa3, "flash_attn_func", f"q, k, v, softmax_scale=None, causal=False, qv=None, {_CHUNK}, {_TUNED}"),
    (
        fa3,
        "flash_attn_qkvpacked_func",
        f"qkv, softmax_scale=None, causal=False, {_CHUNK}, deterministic=False, num_heads_q=None, sm_margin=0, "
        "return_attn_probs=False",
    ),
    (
        fa3,
        "flash_attn_varlen_func",
        f"q, k, v, {_LISTS}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, {_CHUNK}, "
        f"{_TUNED}",
    ),
    (
        fa3,
        "flash_attn_with_kvcache",
        f"{_CACHE}, qv=None, rotary_cos=None, rotary_sin=None, {_NEW}, page_table=None, cu_seqlens_q=None, "
        f"cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {_FACTORS}, softmax_scale=None, causal=False, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
        "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
    ),
    (fa3, "flash_attn_combine", "out_partial, lse_partial, out=None, out_dtype=None"),
    (
        fa4,
        "flash_attn_func",
        f"q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None), "
        f"{_FEATURES}, {_MODS}, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
        "block_sparse_tensors_bwd=None, return_lse=False",
    ),
    (
        fa4,
        "flash_attn_varlen_func",
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
        f"softmax_scale=None, causal=False, window_size=(None, None), {_FEATURES}, {_MODS}, block_sparse_tensors=None, "
        "aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
        "disable_scheduler_metadata=False",
    ),
]


@pytest.mark.parametrize(
    ("of", "name", "expected"), SIGNATURES, ids=lambda x: getattr(x, "__name__", None) or str(x)[:30]
)
def test_order_and_defaults_are_the_packages(runtime, of, name, expected):
    """transformers looks at the signature to learn what a function takes; others call by position."""
    parameters = inspect.signature(of(name)).parameters.values()
    found = ", ".join(x.name if x.default is x.empty else f"{x.name}={x.default!r}" for x in parameters)

    assert found == expected


WINDOWS = [(-1, -1), (3, -1), (-1, 2), (3, 1), (-1, 0), (0, 0), (-5, 2)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", [(7, 12), (12, 7)])
def test_windows_of_2_and_3(runtime, causal, window, lengths):
    """A negative number is no bound on that side; the diagonal ends at the last key; rows that see no key are zero."""
    q, k, v = drawn(1, lengths[0], 4, 64), drawn(1, lengths[1], 2, 64, seed=1), drawn(1, lengths[1], 2, 64, seed=2)
    expected, lse = attention(q[0], k[0], v[0], window_of(*window, causal))
    out2, lse2, nothing = fa2()(q, k, v, 0.0, None, causal, window, 0.0, None, False, True)
    out3, lse3 = fa3()(q, k, v, None, causal, None, None, None, None, window, return_attn_probs=True)

    for out in (out2, out3):
        close(out[0], expected)
    close_lse(lse2[0], lse.masked_fill(torch.isneginf(lse), torch.inf))
    close_lse(lse3[0], lse)
    assert nothing.numel() == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(None, None), (-1, -1), (3, None), (4, -1), (-1, 4), (None, -2), (-1, 0), (-3, 2)])
def test_windows_of_4_are_offsets(runtime, causal, window):
    """A negative side lies beyond the diagonal; two sides with a sum below 0 are no window; causal sets the right."""
    left, right = window[0], 0 if causal else window[1]
    if left is not None and right is not None and left + right < 0:
        left, right = None, 0 if causal else None

    def sees(distance):
        return (left is None or distance >= -left) and (right is None or distance <= right)

    q, k = drawn(1, 6, 2, 64), drawn(1, 9, 2, 64, seed=1)
    out, none = fa4()(q, k, k, None, None, None, causal, window)
    raw, lse, *rest = fa4("_flash_attn_fwd")(
        q, k, k, causal=causal, window_size_left=window[0], window_size_right=window[1], return_lse=True
    )
    expected, expected_lse = attention(q[0], k[0], k[0], sees)

    assert none is None
    assert rest == [None, None]
    close(out[0], expected)
    close(raw[0], expected)
    close_lse(lse[0], expected_lse)


def test_scale_and_softcap_by_position(runtime):
    """FlashAttention-2 has them after dropout and after the window, FlashAttention-3 elsewhere."""
    q, k = drawn(1, 5, 2, 64), drawn(1, 8, 2, 64, seed=1)
    expected, _ = attention(q[0], k[0], k[0], scale=0.3, softcap=2.0)

    close(fa2()(q, k, k, 0.0, 0.3, False, (-1, -1), 2.0)[0], expected)
    close(fa3()(q, k, k, 0.3, False, None, None, None, None, (-1, -1), 0, 2.0)[0], expected)
    close(fa4()(q, k, k, None, None, 0.3, False, (None, None), None, 2.0)[0][0], expected)


@pytest.mark.parametrize("of", [fa2, fa3])
def test_packed_tensors_are_the_same_call(runtime, of):
    """qkv in one tensor, whose gradient is one tensor."""
    qkv = drawn(2, 9, 3, 2, 64, requires_grad=True)
    out = of("flash_attn_qkvpacked_func")(qkv, causal=True)
    (found,) = torch.autograd.grad(out.float().sum(), qkv)
    wide = qkv.detach().double().requires_grad_()
    expected = torch.stack([attention(*x.unbind(1), window_of(-1, 0, True))[0] for x in wide])

    close(out, expected)
    close(found, torch.autograd.grad(expected.sum(), wide)[0], 8.0)


def test_heads_of_all_in_one_dimension(runtime):
    """FlashAttention-3's qkv for grouped heads."""
    qkv = drawn(1, 9, 8, 64)
    expected, _ = attention(qkv[0, :, :4], qkv[0, :, 4:6], qkv[0, :, 6:])

    close(fa3("flash_attn_qkvpacked_func")(qkv, num_heads_q=4)[0], expected)
    with pytest.raises(InputError, match="num_heads_q"):
        fa3("flash_attn_qkvpacked_func")(qkv)


def test_keys_and_values_in_one_tensor(runtime):
    """Dense, and packed."""
    q, kv, starts = drawn(1, 6, 4, 64), drawn(1, 9, 2, 2, 64), ints(0, 4, 9)
    expected, _ = attention(q[0], kv[0, :, 0], kv[0, :, 1])
    close(fa2("flash_attn_kvpacked_func")(q, kv)[0], expected)

    out, lse, _ = fa2("flash_attn_varlen_kvpacked_func")(
        q[0], kv[0], ints(0, 2, 6), starts, 4, 5, 0.0, None, True, return_attn_probs=True
    )
    parts = [((0, 2), (0, 4)), ((2, 6), (4, 9))]
    found = [attention(q[0, a:b], kv[0, c:d, 0], kv[0, c:d, 1], window_of(-1, 0, True)) for (a, b), (c, d) in parts]
    close(out, torch.cat([x[0] for x in found]))
    close_lse(lse, torch.cat([x[1] for x in found], 1))


@pytest.mark.parametrize("of", [fa2, fa3, fa4])
def test_packed_sequences_with_gradients(runtime, of):
    """Lists by position in 2 and 3, by name in 4."""
    q, k = drawn(9, 4, 64, requires_grad=True), drawn(13, 2, 64, seed=1)
    lists = {"cu_seqlens_q": ints(0, 3, 9), "cu_seqlens_k": ints(0, 8, 13), "max_seqlen_q": 6, "max_seqlen_k": 8}
    attend = of("flash_attn_varlen_func")
    found = attend(q, k, k, **lists, causal=True) if of is fa4 else attend(q, k, k, *lists.values(), causal=True)
    out = found[0] if of is fa4 else found
    wide = q.detach().double().requires_grad_()
    parts = [((0, 3), (0, 8)), ((3, 9), (8, 13))]
    expected = [attention(wide[a:b], k[c:d], k[c:d], window_of(-1, 0, True)) for (a, b), (c, d) in parts]
    rows = torch.cat([x[0] for x in expected])

    close(out, rows)
    close(torch.autograd.grad(out.float().sum(), q)[0], torch.autograd.grad(rows.sum(), wide)[0], 8.0)
    if of is fa4:  # an input requires gradients, so that lse is returned; none was asked for it
        close_lse(found[1], torch.cat([x[1] for x in expected], 1).detach())
        assert not found[1].requires_grad


def test_packed_qkv_of_packed_sequences(runtime):
    """(total, 3, heads, dim)."""
    qkv, starts = drawn(9, 3, 2, 64), ints(0, 4, 9)
    out = fa2("flash_attn_varlen_qkvpacked_func")(qkv, starts, 5, causal=True)

    close(out, torch.cat([attention(*qkv[a:b].unbind(1), window_of(-1, 0, True))[0] for a, b in ((0, 4), (4, 9))]))


def test_pages_take_their_lengths_from_the_starts(runtime):
    """FlashAttention-2's block_table: cu_seqlens_k says how many keys each sequence has, not where they lie."""
    q, pages, table = drawn(2, 2, 64), drawn(4, 16, 2, 64, seed=1), ints([2, 0], [3, 1])
    out = fa2("flash_attn_varlen_func")(q, pages, pages, ints(0, 1, 2), ints(0, 20, 25), 1, 20, block_table=table)

    for b, length in enumerate((20, 5)):
        keys = torch.cat([pages[i] for i in table[b]])[:length]
        close(out[b : b + 1], attention(q[b : b + 1], keys, keys)[0])


def test_sinks_of_4(runtime):
    """One more logit a head, without a value; its gradient too."""
    q, k, sink = drawn(1, 5, 2, 64), drawn(1, 8, 2, 64, seed=1), drawn(2, seed=3, requires_grad=True)
    out, lse = fa4()(q, k, k, learnable_sink=sink, return_lse=True)
    wide = sink.detach().double().requires_grad_()
    expected, expected_lse = attention(q[0], k[0], k[0], sink=wide)

    close(out[0], expected.detach())
    close_lse(lse[0].detach(), expected_lse.detach())
    close(torch.autograd.grad(out.float().sum(), sink)[0], torch.autograd.grad(expected.sum(), wide)[0], 8.0)


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_private_forward_of_4_writes_where_it_is_told(runtime, is_packed):
    """out= and lse=, also of strides that no kernel takes."""
    q, starts = drawn(9, 2, 64), ints(0, 4, 9)
    parts = ((0, 4), (4, 9)) if is_packed else ((0, 9),)
    found = [attention(q[a:b], q[a:b], q[a:b]) for a, b in parts]
    lists = {"cu_seqlens_q": starts, "cu_seqlens_k": starts} if is_packed else {}
    given = q if is_packed else q[None]
    for out in (torch.full_like(given, 9), torch.full((*given.shape, 2), 9, dtype=q.dtype)[..., 0]):
        lse = torch.full((2, 9) if is_packed else (1, 2, 9), 9.0)
        made = fa4("_flash_attn_fwd")(given, given, given, **lists, out=out, lse=lse)
        assert made[0] is out
        assert made[1] is lse
        close(out.view(9, 2, 64) if out.is_contiguous() else out.reshape(9, 2, 64), torch.cat([x[0] for x in found]))
        close_lse(lse.view(2, 9), torch.cat([x[1] for x in found], 1))


def test_results_of_another_shape_are_refused(runtime):
    """Before anything is written."""
    q = drawn(1, 9, 2, 64)
    out = torch.zeros(1, 8, 2, 64, dtype=q.dtype)
    with pytest.raises(InputError, match="out is"):
        fa4("_flash_attn_fwd")(q, q, q, out=out)
    with pytest.raises(InputError, match="lse is"):
        fa4("_flash_attn_fwd")(q, q, q, out=q.clone(), lse=torch.zeros(1, 9, 2))
    assert not out.any()


def gradients_of(q, k, v, dout, parts, sees):
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    out = torch.cat([attention(*(x[a:b] for x in wide), sees)[0] for a, b in parts])
    return torch.autograd.grad(out, wide, dout.double())


@pytest.mark.parametrize("of", [fa2, fa3, fa4])
@pytest.mark.parametrize("is_packed", [False, True])
def test_private_backwards_write_where_they_are_told(runtime, of, is_packed):
    """dq=, dk= and dv=, from the out and lse of the private forward."""
    q, k, v, dout = (drawn(9, 2, 64, seed=i) for i in range(4))
    parts = ((0, 4), (4, 9)) if is_packed else ((0, 9),)
    starts = ints(0, 4, 9)
    x = [t if is_packed else t[None] for t in (q, k, v, dout)]
    given = [torch.full_like(t, 9) for t in x[:3]]
    if of is fa4:
        lists = {"cu_seqlens_q": starts, "cu_seqlens_k": starts} if is_packed else {}
        out, lse, *_ = fa4("_flash_attn_fwd")(*x[:3], causal=True, return_lse=True, **lists)
        into = dict(zip(("dq", "dk", "dv"), given, strict=True))
        fa4("_flash_attn_bwd")(*x[:3], out, x[3], lse, causal=True, **into, **lists)
    elif of is fa3:
        lists = {"cu_seqlens_q": starts, "cu_seqlens_k": starts} if is_packed else {}
        out, lse, *_ = fa3("_flash_attn_forward")(*x[:3], causal=True, **lists)
        places = (starts, starts, None, None, 5, 5) if is_packed else (None,) * 6
        fa3("_flash_attn_backward")(x[3], *x[:3], out, lse, *places, *given, None, True)
    else:
        name = "_flash_attn_varlen" if is_packed else "_flash_attn"
        lists = (starts, starts, 5, 5) if is_packed else ()
        rest = (0.0, 0.125, True, -1, -1, 0.0, None)
        out, lse, _, state = fa2(f"{name}_forward")(*x[:3], *lists, *rest, False)
        fa2(f"{name}_backward")(x[3], *x[:3], out, lse, *given, *lists, *rest, False, state)

    for found, expected in zip(given, gradients_of(q, k, v, dout, parts, window_of(-1, 0, True)), strict=True):
        close(found.view(9, 2, 64), expected, 8.0)


def test_the_private_functions_of_4_with_a_batch_of_used_lengths(runtime):
    """q and k with a batch, of which the first rows are in use; out, lse and gradients with a batch, too."""
    q, k, v, dout = (drawn(2, 9, 2, 64, seed=i) for i in range(4))
    used = {"seqused_q": ints(4, 9), "seqused_k": ints(4, 9)}
    out, lse, *_ = fa4("_flash_attn_fwd")(q, k, v, **used, return_lse=True)
    gradients = fa4("_flash_attn_bwd")(q, k, v, out, dout, lse, **used, dv=torch.empty_like(q))
    assert lse.shape == (2, 2, 9)
    for b, length in enumerate((4, 9)):
        inputs = [x[b, :length] for x in (q, k, v)]
        expected, expected_lse = attention(*inputs)
        close(out[b, :length], expected)
        close_lse(lse[b, :, :length], expected_lse)
        each = gradients_of(*inputs, dout[b, :length], ((0, length),), lambda distance: True)
        for found, wanted in zip(gradients, each, strict=True):
            close(found[b, :length], wanted, 8.0)
    with pytest.raises(InputError, match="lse is"):
        fa4("_flash_attn_bwd")(q, k, v, out, dout, lse.mT)


def test_the_private_backward_of_4_returns_the_gradient_of_a_sink(runtime):
    """After dq, dk and dv, in the sink's type."""
    q, sink = drawn(1, 9, 2, 64), drawn(2, seed=1)
    out, lse, *_ = fa4("_flash_attn_fwd")(q, q, q, learnable_sink=sink, return_lse=True)
    *_, dsink = fa4("_flash_attn_bwd")(q, q, q, out, torch.ones_like(out), lse, learnable_sink=sink)
    wide = sink.double().requires_grad_()
    expected, _ = attention(q[0], q[0], q[0], sink=wide)

    assert dsink.dtype == sink.dtype
    close(dsink, torch.autograd.grad(expected.sum(), wide)[0], 8.0)


def test_torch_finds_what_it_asks_flash_attention_4_for(runtime):
    """torch.nn.attention's own adapter, which passes pages together with starts of keys."""
    adapter = pytest.importorskip("torch.nn.attention._fa4")
    adapter._fa4_import_module.cache_clear()
    path, adapter._FA4_MODULE_PATH = adapter._FA4_MODULE_PATH, "flash_attn.cute.interface"
    try:
        q, pages, table = drawn(2, 2, 64), drawn(4, 16, 2, 64, seed=1), ints([2, 0], [3, 1])
        starts, used = ints(0, 1, 2), ints(20, 5)
        rest = (None, False, -1, -1, used, None, table, None)
        out, lse = adapter._fa4_run_forward(q, pages, pages, starts, starts, 1, 32, *rest)
    finally:
        adapter._FA4_MODULE_PATH = path
        adapter._fa4_import_module.cache_clear()
    for b, length in enumerate((20, 5)):
        keys = torch.cat([pages[i] for i in table[b]])[:length]
        expected, expected_lse = attention(q[b : b + 1], keys, keys)
        close(out[b : b + 1], expected)
        close_lse(lse[:, b : b + 1], expected_lse)


def test_parts_are_merged(runtime):
    """flash_attn_combine of 3 and 4: (splits, batch, rows, heads, dim)."""
    q, k = drawn(1, 5, 2, 64), drawn(1, 8, 2, 64, seed=1)
    parts = [attention(q[0], k[0, a:b], k[0, a:b]) for a, b in ((0, 3), (3, 8))]
    outs = torch.stack([x[0] for x in parts])[:, None].float()
    lses = torch.stack([x[1].T for x in parts])[:, None].float()
    expected, lse = attention(q[0], k[0], k[0])
    for of in (fa3, fa4):
        out, found = of("flash_attn_combine")(outs, lses, None, torch.bfloat16)
        close(out[0], expected)
        close_lse(found[0].T.contiguous(), lse)


def test_metadata_of_tiles_is_a_hint(runtime):
    """Callers make it, slice it, and hand it on."""
    used = ints(3, 4, 5, 6, 7)
    made = fa3("get_scheduler_metadata")(5, 1, 32, 2, 2, 64, used)
    assert (made.dtype, made.shape) == (torch.int32, (33,))
    assert not made.any()
    assert fa4("get_scheduler_metadata")(1, 32, 2, 2, 64, 1).cu_total_m_blocks is None


REFUSED = [
    (fa2, {"dropout_p": 0.1}, r"dropout_p = 0.1: no kernel"),
    (fa2, {"alibi_slopes": torch.ones(2)}, "alibi_slopes: no kernel"),
    (fa3, {"qv": torch.ones(1)}, "qv: no kernel"),
    (fa3, {"attention_chunk": 4}, "attention_chunk = 4"),
    (fa4, {"mask_mod": lambda *x: None}, "mask_mod: no kernel"),
    (fa4, {"score_mod": lambda *x: None}, "score_mod: no kernel"),
    (fa4, {"gather_kv_indices": torch.ones(1)}, "gather_kv_indices"),
]


@pytest.mark.parametrize(("of", "options", "message"), REFUSED, ids=[next(iter(row[1])) for row in REFUSED])
def test_what_no_kernel_knows_is_refused(runtime, of, options, message):
    """By name, with its value."""
    q = drawn(1, 5, 2, 64)
    with pytest.raises(NoKernelError, match=message):
        of()(q, q, q, **options)
    assert runtime.launched == []


def test_calls_are_counted_by_the_name_they_came_in_by(runtime):
    """A call that raises is none."""
    q = drawn(1, 5, 2, 64)
    fa2()(q, q, q)
    fa2()(q, q, q)
    fa3()(q, q, q)
    with pytest.raises(NoKernelError):
        fa2()(q, q, q, 0.5)

    assert fa4_kernels.served().answered == {
        ("flash_attn", "flash_attn_func"): 2,
        ("flash_attn_interface", "flash_attn_func"): 1,
    }


@pytest.fixture
def installed(monkeypatch):
    """A package that a program has imported already, with its own functions."""
    calls = []
    module = types.ModuleType("flash_attn_interface")
    module.__spec__ = types.SimpleNamespace(loader=object())

    def flash_attn_func(*arguments, **options):
        calls.append((arguments, options))
        return "theirs"

    module.flash_attn_func, module.calls = flash_attn_func, calls
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(modules, "is_installed", lambda stack: True)
    return module


def test_an_installed_package_answers_what_is_not_served(monkeypatch, installed):
    """With its own function and the caller's own arguments, counted, and told once; removal gives it back."""
    theirs, q = installed.flash_attn_func, drawn(1, 5, 2, 64)
    with reference_runtime(monkeypatch):
        provided = fa4_kernels.provide("flash_attn_interface", fallback=True)
        monkeypatch.setattr(modules._state, "told", set())
        assert torch.is_tensor(installed.flash_attn_func(q, q, q))
        with pytest.warns(RuntimeWarning, match="served by the installed package"):
            assert installed.flash_attn_func(q, q, q, attention_chunk=4) == "theirs"
        assert installed.flash_attn_func(q, q, q, attention_chunk=4) == "theirs"
        provided.remove()
    reason = "attention_chunk = 4: no kernel of fa4-kernels takes it. Leave it out, or provide(.., fallback=True)"

    assert [options for _, options in installed.calls] == [{"attention_chunk": 4}] * 2
    assert counts.served().kept == {("flash_attn_interface", "flash_attn_func", reason): 2}
    assert installed.flash_attn_func is theirs


def test_without_a_fallback_an_installed_package_is_not_asked(monkeypatch, installed):
    """The error is ours."""
    q = drawn(1, 5, 2, 64)
    with reference_runtime(monkeypatch):
        provided = fa4_kernels.provide("flash_attn_interface")
        with pytest.raises(NoKernelError):
            installed.flash_attn_func(q, q, q, attention_chunk=4)
        provided.remove()
    assert installed.calls == []


@pytest.mark.parametrize("of", [fa2, fa3, fa4])
def test_calls_without_rare_arguments_go_to_the_launcher_first(runtime, monkeypatch, of):
    """With the window that it knows; what it answers is the result."""
    q, asked = drawn(6, 2, 64), []

    def answer(*arguments):
        asked.append(arguments)
        return "out", None

    monkeypatch.setattr(api, "_answer", answer)
    monkeypatch.setattr(answers, "answer", lambda arguments: answer(*arguments))
    lists = {"cu_seqlens_q": ints(0, 6), "cu_seqlens_k": ints(0, 6), "max_seqlen_q": 6, "max_seqlen_k": 6}
    found = [of()(q[None], q[None], q[None], causal=True), of("flash_attn_varlen_func")(q, q, q, **lists)]
    if of is not fa4:
        found.append(of("flash_attn_with_kvcache")(q[:, None], q[:, None], q[:, None]))
        assert found == ["out"] * 3
    assert len(asked) == len(found)
    assert all((None, None) in arguments for arguments in asked)
    assert all(arguments[-1] is False for arguments in asked)  # no lse, which the launcher has nowhere to put


def test_factors_of_fp8_reach_the_kernels(runtime):
    """One a sequence and key head; for each its own."""
    q, k, v = (drawn(2, 5, 2, 64, seed=i).to(torch.float8_e4m3fn) for i in range(3))
    factors = [torch.tensor([[0.5, 2.0], [1.5, 0.25]]) * (i + 1) for i in range(3)]
    named = dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))
    results = [fa3()(q, k, v, **named), fa4("_flash_attn_fwd")(q, k, v, **named)[0]]
    results.append(fa3("flash_attn_with_kvcache")(q, k, v, **named))
    for b in range(2):
        wide = [x[b].float() * factor[b][:, None] for x, factor in zip((q, k, v), factors, strict=True)]
        for found in results:
            assert found.dtype == torch.bfloat16
            close(found[b], attention(*wide)[0])
