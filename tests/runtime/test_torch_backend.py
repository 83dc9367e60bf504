"""Contract: once activated, torch's own attention runs on our kernels, with torch's values, layouts and gradients; what
no kernel of ours computes stays with torch and is counted; taking it off gives everything back.

The operators are put on the CPU's dispatch key here, where torch has no flash attention: in place of its
kernel is a recorder. Kernels are loops (reference_kernels.py); expected values are attention in float64.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.nn.attention.varlen")

import fa4_kernels  # noqa: E402
from fa4_kernels import InputError, answers, api, counts, loader, torch_backend  # noqa: E402
from torch.nn.attention import current_flash_attention_impl, list_flash_attention_impls, varlen  # noqa: E402

from tests.runtime.reference_kernels import ReferenceRuntime  # noqa: E402

ONE_ROUNDING = 2.0**-8
aten = torch.ops.aten


class Recorder:
    """Stands for the kernel that torch had."""

    def __init__(self):
        self.calls = []

    def call_boxed(self, keys, *arguments, **options):
        self.calls.append((arguments, options))
        q = arguments[0]
        nothing = q.new_empty(0)
        return q.clone(), q.new_empty(q.shape[:3]).float(), None, None, 0, 0, nothing, nothing, nothing


@pytest.fixture
def originals(monkeypatch):
    made = {}
    monkeypatch.setattr(torch.library, "get_kernel", lambda name, key: made.setdefault(name, Recorder()))
    return made


@pytest.fixture
def active(monkeypatch, originals):
    for module in (answers, api):
        monkeypatch.setattr(module, "CAN_ANSWER", False)
    monkeypatch.setattr(torch_backend, "_DISPATCH_KEY", "CPU")
    loader.use_runtime(ReferenceRuntime())
    counts.reset()
    provided = fa4_kernels.provide("torch")
    yield provided
    provided.remove()
    loader.use_runtime(None)


def drawn(*shape, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16).requires_grad_(requires_grad)


def attention(q, k, v, is_causal=False, scale=None):
    """(batch, heads, seqlen, head_dim) in float64, causal aligned bottom right."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, -1) @ v


def close(actual, expected, roundings=4.0):
    assert (actual.double() - expected).abs().max() <= roundings * ONE_ROUNDING * expected.abs().max()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_values_and_gradients_are_attention(active, is_causal, heads_kv):
    """Through the operator that scaled_dot_product_attention dispatches to, with torch's own derivative around it."""
    q = drawn(2, 4, 40, 64, requires_grad=True)
    k, v = (drawn(2, heads_kv, 40, 64, seed=i, requires_grad=True) for i in (1, 2))
    out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    dout = drawn(2, 4, 40, 64, seed=3)
    found = torch.autograd.grad(out, (q, k, v), dout)

    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = attention(*wide, is_causal)
    close(out, expected)
    for gradient, right in zip(found, torch.autograd.grad(expected, wide, dout.double()), strict=True):
        close(gradient, right, 8.0)
    assert counts.served().answered == {
        ("torch", "_scaled_dot_product_flash_attention"): 1,
        ("torch", "_scaled_dot_product_flash_attention_backward"): 1,
    }


def test_results_have_the_strides_that_torch_promises(active):
    """As the operator's own meta function, which torch.compile believes: those of q, in both orders of its modes."""
    for q in (drawn(2, 4, 40, 64), drawn(2, 40, 4, 64).transpose(1, 2)):
        results = aten._scaled_dot_product_flash_attention(q, q, q)
        promised = aten._scaled_dot_product_flash_attention(*(x.to("meta") for x in (q, q, q)))

        assert results[0].stride() == promised[0].stride()
        assert (results[1].shape, results[1].dtype) == (promised[1].shape, promised[1].dtype)
        assert results[4:6] == promised[4:6] == (40, 40)


@pytest.mark.parametrize("rows", [2, 16, 40])
def test_few_queries_have_them_too(active, rows):
    """Whose keys may be split: compiled programs read a result where the meta function says that it lies."""
    q, k = drawn(2, 4, rows, 64), drawn(2, 4, 1024, 64, seed=1)
    found = aten._scaled_dot_product_flash_attention(q, k, k)
    promised = aten._scaled_dot_product_flash_attention(*(x.to("meta") for x in (q, k, k)))

    assert found[0].stride() == promised[0].stride()
    close(found[0], attention(q, k, k))


@pytest.mark.parametrize("window", [(None, None), (3, 0)], ids=str)
def test_so_have_windows_and_packed_rows_of_any_order(active, window):
    """q with heads before rows: dense with a window, packed; and their gradients."""
    options = {"window_size_left": window[0], "window_size_right": window[1]}
    starts = torch.tensor([0, 10, 30], dtype=torch.int32)
    for q, lists in (
        (drawn(2, 4, 30, 64).transpose(1, 2), (None, None, 30, 30)),
        (drawn(4, 30, 64).transpose(0, 1), (starts, starts, 20, 20)),
    ):
        assert not q.is_contiguous()
        out, lse, state, unused, _ = aten._flash_attention_forward(q, q, q, *lists, 0.0, False, False, **options)
        rest = (out, lse, *lists, 0.0, False, state, unused)
        gradients = aten._flash_attention_backward(out, q, q, q, *rest, **options)

        assert [x.stride() for x in (out, *gradients)] == [torch.empty_like(q).stride()] * 4


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda q, k, v: (q[:1], k, v), id="batch"),
        pytest.param(lambda q, k, v: (q[:, :3], k, v), id="heads"),
        pytest.param(lambda q, k, v: (q, k[:, :, :5], v), id="keys"),
        pytest.param(lambda q, k, v: (q[..., :32], k, v), id="head_dim"),
    ],
)
def test_tensors_that_do_not_go_together_are_torchs_to_refuse(active, originals, change):
    """Whoever calls the operator itself: nothing is launched on them, also where there is no key to launch for."""
    q, k = drawn(2, 4, 16, 64), drawn(2, 2, 16, 64, seed=1)
    loader.runtime().launched.clear()
    aten._scaled_dot_product_flash_attention(*change(q, k, k))

    assert len(originals["aten::_scaled_dot_product_flash_attention"].calls) == 1
    assert loader.runtime().launched == []


def test_a_level_of_forward_derivatives_changes_nothing_for_tensors_without(active):
    """torch refuses tangents before our kernels are asked."""
    from torch.autograd import forward_ad

    q = drawn(1, 2, 16, 64)
    with forward_ad.dual_level():
        out = aten._scaled_dot_product_flash_attention(q, q, q)[0]
    close(out, attention(q, q, q))
    assert list(counts.served().answered.values()) == [1]


def test_gradients_have_the_strides_that_torch_promises(active):
    """Those of q, k and v."""
    q = drawn(2, 40, 4, 64).transpose(1, 2)
    out, lse, *_, state, unused, _ = aten._scaled_dot_product_flash_attention(q, q, q)
    rest = (out, lse, None, None, 40, 40, 0.0, False, state, unused)
    found = aten._scaled_dot_product_flash_attention_backward(out, q, q, q, *rest)

    assert [x.stride() for x in found] == [q.stride()] * 3


def test_packed_sequences_and_windows(active):
    """Two sequences; a window of two keys to the left, -1 meaning no bound, as torch.nn.attention.varlen has it."""
    q, starts = drawn(30, 2, 64), torch.tensor([0, 10, 30], dtype=torch.int32)
    for window, seen in (
        ((-1, -1), lambda i, j: True),
        ((2, 0), lambda i, j: i - 2 <= j <= i),
        ((-1, 1), lambda i, j: j <= i + 1),
    ):
        options = {"window_size_left": window[0], "window_size_right": window[1]}
        out, lse, *_ = aten._flash_attention_forward(q, q, q, starts, starts, 20, 20, 0.0, False, False, **options)
        for begin, end in ((0, 10), (10, 30)):
            x = q[begin:end].transpose(0, 1).double()
            scores = x @ x.mT * 64**-0.5
            mask = torch.tensor([[seen(i, j) for j in range(end - begin)] for i in range(end - begin)])
            scores = scores.masked_fill(~mask, -torch.inf)
            close(out[begin:end].transpose(0, 1), torch.softmax(scores, -1) @ x)
            assert (lse[:, begin:end].double() - torch.logsumexp(scores, -1)).abs().max() < 1e-3


def test_varlen_attention_of_torch_with_gradients(active):
    """torch.nn.attention.varlen.varlen_attn, unedited, causal."""
    q, starts = drawn(24, 2, 64, requires_grad=True), torch.tensor([0, 8, 24], dtype=torch.int32)
    out = varlen.varlen_attn(q, q, q, starts, starts, 16, 16, window_size=(-1, 0))
    (found,) = torch.autograd.grad(out.float().sum(), q)

    wide = q.detach().double().requires_grad_()
    parts = [wide[a:b].transpose(0, 1)[None] for a, b in ((0, 8), (8, 24))]
    expected = torch.cat([attention(x, x, x, True)[0].transpose(0, 1) for x in parts])
    close(out, expected)
    close(found, torch.autograd.grad(expected.sum(), wide)[0], 8.0)


def test_pages_with_both_lists(active):
    """torch passes cu_seq_k beside block_table; the pages count."""
    q, pages = drawn(2, 2, 64), drawn(4, 16, 2, 64, seed=1)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    table, used = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), torch.tensor([20, 5], dtype=torch.int32)
    options = {"seqused_k": used, "block_table": table}
    out, *_ = aten._flash_attention_forward(q, pages, pages, starts, starts, 1, 32, 0.0, False, False, **options)

    for b, length in enumerate((20, 5)):
        keys = torch.cat([pages[i] for i in table[b]])[:length].transpose(0, 1)[None]
        close(out[b], attention(q[b][None, :, None], keys, keys)[0, :, 0])


def test_the_in_place_form_writes_what_the_other_returns(active):
    """varlen_attn_out."""
    q, starts = drawn(24, 2, 64), torch.tensor([0, 8, 24], dtype=torch.int32)
    expected, lse, *_ = aten._flash_attention_forward(q, q, q, starts, starts, 16, 16, 0.0, True, False)
    out = torch.full_like(q, torch.nan)
    found = aten._flash_attention_forward_no_dropout_inplace(out, q, q, q, starts, starts, 16, 16, 0.0, True, False)

    assert torch.equal(out, expected)
    assert torch.equal(found, lse)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dropout_p": 0.1}, "dropout"),
        ({"return_debug_mask": True}, "return_debug_mask"),
        ({"dtype": torch.float32}, "dtype torch.float32"),
    ],
)
def test_what_is_not_ours_goes_to_torch_and_is_counted(active, originals, change, reason):
    """The arguments arrive as they were given."""
    q = drawn(1, 2, 16, 64).to(change.pop("dtype", torch.bfloat16))
    aten._scaled_dot_product_flash_attention(q, q, q, **change)

    assert len(originals["aten::_scaled_dot_product_flash_attention"].calls) == 1
    assert counts.served().kept == {("torch", "_scaled_dot_product_flash_attention", reason): 1}
    assert counts.served().answered == {}


def test_packed_queries_without_starts_of_the_keys_go_to_torch(active, originals):
    """Where the keys of a sequence begin is not said."""
    q, starts = drawn(24, 2, 64), torch.tensor([0, 8, 24], dtype=torch.int32)
    used = torch.tensor([4, 4], dtype=torch.int32)
    with pytest.raises(RuntimeError):  # the recorder returns what the other operator does
        aten._flash_attention_forward(q, q, q, starts, None, 16, 16, 0.0, False, False, seqused_k=used)

    assert len(originals["aten::_flash_attention_forward"].calls) == 1


def test_a_head_dim_without_a_kernel_goes_to_torch(active, originals):
    """The dispatcher's answer decides."""
    loader.runtime().lacks = lambda problem: problem.head_dim == 48
    q = drawn(1, 2, 16, 48)
    aten._scaled_dot_product_flash_attention(q, q, q)

    assert len(originals["aten::_scaled_dot_product_flash_attention"].calls) == 1


def test_activation_puts_flash_attention_first_and_removal_gives_it_back(monkeypatch, originals):
    """Order of backends, cuDNN for packed sequences, and the registry."""
    monkeypatch.setattr(torch_backend, "_DISPATCH_KEY", "CPU")
    before, cudnn = list(torch._C._get_sdp_priority_order()), varlen._should_use_cudnn
    torch._C._set_sdp_priority_order([3, 1, 2, 0, 4])
    try:
        provided = fa4_kernels.provide("torch")
        assert list(torch._C._get_sdp_priority_order()) == [1, 3, 2, 0, 4]
        assert varlen._should_use_cudnn(0) is False
        assert current_flash_attention_impl() == "fa4_kernels"
        assert "fa4_kernels" in list_flash_attention_impls()
        provided.remove()
        provided.remove()
        assert list(torch._C._get_sdp_priority_order()) == [3, 1, 2, 0, 4]
        assert varlen._should_use_cudnn is cudnn
        assert current_flash_attention_impl() is None
    finally:
        torch._C._set_sdp_priority_order(before)


def test_another_activation_takes_ours_off(active):
    """torch keeps one implementation at a time; ours notices and gives its own things back."""
    from torch.nn.attention import _registry, activate_flash_attention_impl, register_flash_attention_impl

    register_flash_attention_impl("nothing", register_fn=lambda: None)
    try:
        activate_flash_attention_impl("nothing")
        assert current_flash_attention_impl() is None
    finally:
        del _registry._FLASH_ATTENTION_IMPLS["nothing"]


def test_an_unknown_stack_is_refused():
    """With what is allowed."""
    with pytest.raises(InputError, match=r"stack 'tourch' is unknown\. Allowed: torch, transformers"):
        fa4_kernels.provide("tourch")


def test_transformers_learns_the_name():
    """`attn_implementation="fa4_kernels"` is known from then on; taking it off changes no model."""
    transformers = pytest.importorskip("transformers")
    fa4_kernels.provide("transformers").remove()

    assert "fa4_kernels" in transformers.AttentionInterface().valid_keys()
