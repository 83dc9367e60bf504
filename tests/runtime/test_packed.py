"""Contract: attention over packed sequences, caches, pages and with features is what the definition says, whatever
shapes the caller has, with gradients and under torch.compile; bad input is one clear error before any launch.

The kernels are loops (reference_kernels.py), so what is tested is what they are given and what is made of their
results. Expected values: attention of each sequence alone, by torch in float64 with torch's own derivatives.
"""

import math

import pytest

torch = pytest.importorskip("torch")

import fa4_kernels  # noqa: E402
from fa4_kernels import InputError, NoKernelError, answers, api, gradients, loader  # noqa: E402
from fa4_kernels.windows import Offsets  # noqa: E402

from tests.runtime.reference_kernels import ReferenceRuntime  # noqa: E402

HEAD_DIM, HEAD_DIM_V = 64, 64
ONE_ROUNDING = 2.0**-8  # bf16, of values around 1


@pytest.fixture
def runtime(monkeypatch):
    monkeypatch.setattr(answers, "CAN_ANSWER", False)
    made = ReferenceRuntime()
    loader.use_runtime(made)
    yield made
    loader.use_runtime(None)


def drawn(*shape, dtype=torch.bfloat16, requires_grad=False, seed=0):
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(requires_grad)


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def attention(q, k, v, *, causal=False, window=(None, None), softcap=0.0, sink=None):
    """One sequence: (rows, heads, dim) in float64 -> out, lse (heads, rows). Differentiable."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    diagonal = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))[None]
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros(len(q), len(k), dtype=torch.bool)
    hidden |= key < diagonal - left if left is not None else hidden
    hidden |= key > diagonal + right if right is not None else hidden
    scores = scores.masked_fill(hidden, -math.inf)
    logits = scores if sink is None else torch.cat([scores, sink.double()[:, None, None].expand(-1, len(q), 1)], -1)
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(scores - torch.where(lse.isneginf(), 0, lse)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def close(found, expected, tolerance=ONE_ROUNDING):
    scale = max(1.0, float(expected.detach().abs().max())) if expected.numel() else 1.0
    assert (found.double() - expected).abs().max() <= tolerance * scale if expected.numel() else found.numel() == 0


LENGTHS_Q, LENGTHS_K = (5, 0, 130, 1), (7, 3, 40, 90)
CU_Q, CU_K = ints(0, 5, 5, 135, 136), ints(0, 7, 10, 50, 140)


def packed(requires_grad=False, heads=4, heads_kv=2):
    q = drawn(136, heads, HEAD_DIM, requires_grad=requires_grad)
    k = drawn(140, heads_kv, HEAD_DIM, requires_grad=requires_grad, seed=1)
    v = drawn(140, heads_kv, HEAD_DIM_V, requires_grad=requires_grad, seed=2)
    return q, k, v


def one_by_one(q, k, v, lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, **options):
    """Every sequence alone."""
    outs, lses = zip(
        *(
            attention(*(x.double() for x in rows), **options)
            for rows in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
        ),
        strict=True,
    )
    return torch.cat(outs), torch.cat(lses, 1)


OPTIONS = [
    pytest.param({}, id="full"),
    pytest.param({"causal": True}, id="causal"),
    pytest.param({"window": (3, 2)}, id="window"),
    pytest.param({"causal": True, "softcap": 1.5}, id="softcap"),
    pytest.param({"causal": True, "sink": True}, id="sink"),
    pytest.param({"window": (3, 0), "softcap": 2.0, "sink": True}, id="everything"),
]


def keywords(options, sink):
    """Options of `attention` as those of the function under test."""
    names = {"window": "window_size", "sink": "learnable_sink"}
    given = options | ({"sink": sink} if "sink" in options else {})
    return {names.get(name, name): value for name, value in given.items()}, given


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("options", OPTIONS)
def test_packed_sequences_are_attention_one_by_one(runtime, options, num_splits):
    """Also an empty one, and one that has fewer keys than queries; in one launch, or in parts and their merge."""
    q, k, v = packed()
    passed, given = keywords(options, drawn(4, dtype=torch.float32))
    out, lse = fa4_kernels.flash_attn_varlen_func(
        q, k, v, CU_Q, CU_K, 130, 90, num_splits=num_splits, return_lse=True, **passed
    )
    expected, expected_lse = one_by_one(q, k, v, **given)

    close(out, expected)
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    close(lse.nan_to_num(neginf=0), expected_lse.nan_to_num(neginf=0), 1e-5)
    features = [name for name in ("sink", "softcap") if name in given and (num_splits == 1 or name != "sink")]
    first = "/".join(("fwd/varlen", *features, *(["split"] if num_splits > 1 else [])))
    merge = ["fwd_combine/dense" + ("/sink" if "sink" in given else "")] if num_splits > 1 else []
    assert runtime.launched == [first, *merge]


def test_used_lengths_and_a_padded_batch(runtime):
    """q with a batch, keys with a batch and used lengths: as if each sequence were cut."""
    q, k, v = drawn(3, 4, 4, HEAD_DIM), drawn(3, 20, 2, HEAD_DIM), drawn(3, 20, 2, HEAD_DIM_V, seed=3)
    used = ints(20, 0, 7)
    out, lse = fa4_kernels.flash_attn_varlen_func(q, k, v, seqused_k=used, causal=True, return_lse=True)

    assert (out.shape, lse.shape) == ((3, 4, 4, HEAD_DIM_V), (3, 4, 4))
    for b, length in enumerate(used.tolist()):
        expected, expected_lse = attention(*(x.double() for x in (q[b], k[b, :length], v[b, :length])), causal=True)
        close(out[b], expected)
        assert torch.equal(lse[b].isneginf(), expected_lse.isneginf())


@pytest.mark.parametrize("num_splits", [1, 2, 0])
@pytest.mark.parametrize("page_size", [16, 64])
def test_decoding_with_pages_is_decoding_without(runtime, page_size, num_splits):
    """A shuffled table; pages and table entries behind the used ones are garbage."""
    lengths, pages_each = (70, 1, 128), 128 // page_size + 1
    order = torch.randperm(3 * pages_each, generator=torch.Generator().manual_seed(1)).int().view(3, pages_each)
    k_pages = torch.full((3 * pages_each, page_size, 2, HEAD_DIM), math.nan, dtype=torch.bfloat16)
    v_pages = torch.full((3 * pages_each, page_size, 2, HEAD_DIM_V), math.nan, dtype=torch.bfloat16)
    table = order.clone()
    q, rows = drawn(3, 2, 8, HEAD_DIM), []
    for b, length in enumerate(lengths):
        k, v = drawn(length, 2, HEAD_DIM, seed=b), drawn(length, 2, HEAD_DIM_V, seed=b + 9)
        rows.append((k, v))
        for j in range(length):
            k_pages[order[b, j // page_size], j % page_size] = k[j]
            v_pages[order[b, j // page_size], j % page_size] = v[j]
        table[b, -(-length // page_size) :] = 2**31 - 1
    out, _ = fa4_kernels.flash_attn_with_kvcache(
        q, k_pages, v_pages, ints(*lengths), table, causal=True, num_splits=num_splits
    )
    for b, (k, v) in enumerate(rows):
        close(out[b], attention(q[b].double(), k.double(), v.double(), causal=True)[0])
    assert runtime.launched[0] == "fwd/paged" + ("/split" if num_splits == 2 else "")


def test_one_number_may_stand_for_all_lengths_of_a_cache(runtime):
    """The same as a tensor that repeats it."""
    q, cache = drawn(2, 1, 4, HEAD_DIM), drawn(2, 30, 4, HEAD_DIM)
    whole, _ = fa4_kernels.flash_attn_with_kvcache(q, cache, cache, 17)
    listed, _ = fa4_kernels.flash_attn_with_kvcache(q, cache, cache, ints(17, 17))
    cut, _ = fa4_kernels.flash_attn_with_kvcache(q, cache[:, :17], cache[:, :17])

    assert torch.equal(whole, listed)
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("options", OPTIONS[3:])
def test_dense_calls_with_features(runtime, options, num_splits):
    """flash_attn_func with a cap, a sink, or split keys: every batch alone."""
    q, k, v = drawn(2, 30, 4, HEAD_DIM), drawn(2, 50, 2, HEAD_DIM), drawn(2, 50, 2, HEAD_DIM_V, seed=5)
    passed, given = keywords(options, drawn(4, dtype=torch.float32))
    out, lse = fa4_kernels.flash_attn_func(q, k, v, num_splits=num_splits, return_lse=True, **passed)

    assert lse.is_contiguous()
    for b in range(2):
        expected, expected_lse = attention(*(x[b].double() for x in (q, k, v)), **given)
        close(out[b], expected)
        close(lse[b], expected_lse, 1e-5)
    assert all(name.startswith("fwd/varlen/") for name in runtime.launched[:-1])


def test_fp8_tensors_have_factors(runtime):
    """One a sequence and key head; those not given are 1."""
    q, k, v = (
        drawn(2, n, h, HEAD_DIM, dtype=torch.float32).to(torch.float8_e4m3fn) for n, h in ((5, 4), (9, 2), (9, 2))
    )
    k_descale = torch.tensor([[0.5, 2.0], [1.5, 1.0]])
    out, _ = fa4_kernels.flash_attn_func(q, k, v, k_descale=k_descale)
    plain, _ = fa4_kernels.flash_attn_func(q, k, v)

    assert out.dtype == plain.dtype == torch.bfloat16
    for b in range(2):
        scaled = k[b].double() * k_descale[b].double()[None, :, None]
        close(out[b], attention(q[b].double(), scaled, v[b].double())[0])
        close(plain[b], attention(*(x[b].double() for x in (q, k, v)))[0])


def test_the_merge_alone(runtime):
    """Parts of packed rows and of a batch; a part without keys is skipped; a sink joins."""
    parts, lses = drawn(3, 11, 2, HEAD_DIM_V, dtype=torch.float32), drawn(3, 11, 2, dtype=torch.float32)
    lses[1, 4:], parts[1, 4:] = -math.inf, math.nan
    sink = torch.tensor([0.5, -1.0])
    weights = torch.softmax(torch.cat([lses, sink.expand(1, 11, 2)]).double(), 0)[:3]
    expected = (weights[..., None] * parts.double().nan_to_num()).sum(0)
    out, lse = fa4_kernels.flash_attn_combine(parts, lses, out_dtype=torch.float16, learnable_sink=sink)
    batched, _ = fa4_kernels.flash_attn_combine(
        parts[:, None], lses[:, None], out_dtype=torch.float16, learnable_sink=sink
    )
    target = torch.empty(11, 2, HEAD_DIM_V, dtype=torch.float16)
    into, _ = fa4_kernels.flash_attn_combine(parts, lses, target, learnable_sink=sink)

    close(out, expected, 2.0**-10)
    close(lse, torch.logsumexp(torch.cat([lses, sink.expand(1, 11, 2)]).double(), 0), 1e-5)
    assert torch.equal(batched[0], out)
    assert into is target
    assert torch.equal(target, out)
    with pytest.raises(InputError, match=r"pass out_dtype=torch.bfloat16 or torch.float16"):
        fa4_kernels.flash_attn_combine(parts, lses)


# --- gradients --------------------------------------------------------------------------------------------------------


def gradients_of(loss, tensors):
    return torch.autograd.grad(loss, tensors, allow_unused=True)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "out and lse"])
def test_packed_gradients_are_those_of_attention(runtime, options, with_lse):
    """dq, dk, dv and the sink's, of a weighted sum of out, and of lse where it is finite."""
    tensors = packed(requires_grad=True)
    sink = drawn(4, dtype=torch.float32, requires_grad=True)
    passed, given = keywords(options, sink)
    out, lse = fa4_kernels.flash_attn_varlen_func(*tensors, CU_Q, CU_K, return_lse=with_lse, **passed)
    expected, expected_lse = one_by_one(*tensors, **given)
    weights, lse_weights = drawn(*out.shape, seed=7), drawn(4, 136, dtype=torch.float32)
    lse_weights[expected_lse.isneginf()] = 0
    loss = (out * weights).sum() + ((lse * lse_weights).sum() if with_lse else 0)
    expected_loss = (expected * weights.double()).sum()
    if with_lse:
        finite = torch.where(expected_lse.isneginf(), 0, expected_lse)
        expected_loss = expected_loss + (finite * lse_weights).sum()
    inputs = (*tensors, *((sink,) if "sink" in options else ()))

    for found, reference in zip(gradients_of(loss, inputs), gradients_of(expected_loss, inputs), strict=True):
        assert found.dtype == reference.dtype
        close(found, reference.double(), 0.02)
    assert runtime.launched[1:] == [
        "bwd_preprocess/varlen", "bwd/varlen" + ("/softcap" if "softcap" in options else ""), "bwd_postprocess/varlen",
    ]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS[3:])
def test_dense_gradients_with_features(runtime, options):
    """The same for tensors with a batch; the sink in bf16 gets its gradient in bf16."""
    shapes = ((2, 30, 4, HEAD_DIM), (2, 50, 2, HEAD_DIM), (2, 50, 2, HEAD_DIM_V))
    tensors = tuple(drawn(*shape, requires_grad=True, seed=i) for i, shape in enumerate(shapes))
    sink = drawn(4, requires_grad=True)
    passed, given = keywords(options, sink)
    out, lse = fa4_kernels.flash_attn_func(*tensors, return_lse=True, **passed)
    weights, lse_weights = drawn(*out.shape, seed=7), drawn(*lse.shape, dtype=torch.float32)
    each = [attention(*(x[b].double() for x in tensors), **given) for b in range(2)]
    expected_loss = sum((each[b][0] * weights[b]).sum() + (each[b][1] * lse_weights[b]).sum() for b in range(2))
    inputs = (*tensors, *((sink,) if "sink" in options else ()))
    found = gradients_of((out * weights).sum() + (lse * lse_weights).sum(), inputs)

    for one, reference in zip(found, gradients_of(expected_loss, inputs), strict=True):
        assert one.dtype == torch.bfloat16
        close(one, reference.double(), 0.02)


def test_gradients_beyond_used_lengths_are_zero(runtime):
    """Rows that do not exist add nothing, whatever their incoming gradient is, and get zero."""
    q, k, v = packed(requires_grad=True)
    used_q, used_k = ints(3, 0, 100, 1), ints(7, 3, 20, 50)
    sink = drawn(4, dtype=torch.float32, requires_grad=True)
    out, lse = fa4_kernels.flash_attn_varlen_func(
        q, k, v, CU_Q, CU_K, seqused_q=used_q, seqused_k=used_k, learnable_sink=sink, return_lse=True
    )
    rows = [slice(start, start + n) for start, n in zip(CU_Q.tolist(), used_q.tolist(), strict=False)]
    keys = [slice(start, start + n) for start, n in zip(CU_K.tolist(), used_k.tolist(), strict=False)]
    exists = torch.zeros(136, dtype=torch.bool)
    for place in rows:
        exists[place] = True
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    dlse[:, ~exists] = math.nan
    found = torch.autograd.grad((out, lse), (q, k, v, sink), (dout, dlse))
    expected_loss = 0
    for row, key in zip(rows, keys, strict=True):
        one, one_lse = attention(*(x.double() for x in (q[row], k[key], v[key])), sink=sink)
        expected_loss = expected_loss + one.sum() + one_lse.sum()

    for one, reference in zip(found, gradients_of(expected_loss, (q, k, v, sink)), strict=True):
        close(one, reference.double(), 0.02)
    assert not found[0][~exists].any()


@pytest.mark.parametrize("layout", ["varlen", "dense"])
def test_torch_compile_sees_one_operator(runtime, layout):
    """fullgraph: nothing in the function breaks the graph; results and gradients as in eager mode."""
    q, k, v = packed(requires_grad=True)
    sink = drawn(4, dtype=torch.float32, requires_grad=True)

    def function(q, k, v, sink):
        if layout == "dense":
            q, k, v = q[None], k[None], v[None]
            out, lse = fa4_kernels.flash_attn_func(
                q, k, v, causal=True, softcap=3.0, learnable_sink=sink, return_lse=True
            )
        else:
            out, lse = fa4_kernels.flash_attn_varlen_func(
                q, k, v, CU_Q, CU_K, causal=True, softcap=3.0, learnable_sink=sink, return_lse=True
            )
        return out.float().sin().sum() + lse.where(lse > -1e9, 0).cos().sum()

    eager = function(q, k, v, sink)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(q, k, v, sink)

    close(compiled, eager.double(), 1e-5)
    inputs = (q, k, v, sink)
    for found, expected in zip(gradients_of(compiled, inputs), gradients_of(eager, inputs), strict=True):
        close(found, expected.double(), 1e-5)


# --- nothing to do, and errors ----------------------------------------------------------------------------------------


def test_empty_problems_launch_nothing(runtime):
    """No rows, no keys, no sequences, or a window that no key is in: out = 0; lse = -inf, or the sink."""
    q, k, v = packed()
    none = k[:0]
    sink = torch.tensor([0.5, 1.0, 2.0, -3.0])
    for arguments, options in (
        ((q, none, none, CU_Q, ints(0, 0, 0, 0, 0)), {}),
        ((q, k, v, CU_Q, CU_K), {"window_size": Offsets(-5, 2)}),
        ((q[:0], k, v, ints(0, 0), ints(0, 140)), {}),
    ):
        out, lse = fa4_kernels.flash_attn_varlen_func(*arguments, return_lse=True, **options)
        with_sink = fa4_kernels.flash_attn_varlen_func(*arguments, return_lse=True, learnable_sink=sink, **options)

        assert not out.any()
        assert lse.isneginf().all()
        assert torch.equal(with_sink[1], sink[:, None].expand_as(lse))
    assert runtime.launched == []


def test_empty_problems_have_gradients(runtime):
    """Zeros, and the sink's own where lse is the sink."""
    q, k, v = packed(requires_grad=True)
    sink = drawn(4, dtype=torch.float32, requires_grad=True)
    out, lse = fa4_kernels.flash_attn_varlen_func(
        q, k, v, CU_Q, CU_K, window_size=Offsets(-5, 2), learnable_sink=sink, return_lse=True
    )
    dq, dk, dv, dsink = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, sink))

    assert not any(x.any() for x in (dq, dk, dv))
    assert torch.equal(dsink, torch.full((4,), 136.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": CU_Q.long()}, r"cu_seqlens_q is torch.int64; torch.int32 is expected: cu_seqlens_q.int\(\)"),
        ({"cu_seqlens_k": ints(0, 140)}, r"cu_seqlens_k has shape \(2,\); \(5,\) is expected"),
        ({"seqused_q": ints(1, 1)}, r"seqused_q has shape \(2,\); \(4,\) is expected"),
        ({"seqused_k": [1, 1, 1, 1]}, "seqused_k is a list"),
        ({"cu_seqlens_q": None}, r"q has shape \(136, 4, 64\) and there is no cu_seqlens_q"),
        ({"cu_seqlens_k": None}, r"k has shape \(140, 2, 64\) and there is no cu_seqlens_k"),
        ({"page_table": torch.zeros(4, 9, dtype=torch.int32)}, r"k has shape \(140, 2, 64\); \(num_pages"),
        ({"softcap": -1.0}, "softcap must be a finite number of at least 0"),
        ({"softmax_scale": 0.0}, "softmax_scale must be a positive finite number"),
        ({"num_splits": 257}, "num_splits must be an int up to 256"),
        ({"learnable_sink": torch.zeros(3)}, r"learnable_sink has shape \(3,\)"),
        ({"q_descale": torch.ones(4, 2)}, "q_descale is given for torch.bfloat16"),
        ({"k": drawn(140, 3, HEAD_DIM), "v": drawn(140, 3, HEAD_DIM)}, "num_heads_q = 4 is no multiple of"),
        ({"v": drawn(139, 2, HEAD_DIM)}, "k and v differ in more than the last extent"),
        ({"k": drawn(140, 2, 32), "v": drawn(140, 2, 64)}, "head_dim of q and k differs"),
        ({"v": drawn(140, 2, HEAD_DIM, dtype=torch.float16)}, "v is torch.float16, q is torch.bfloat16"),
    ],
)
def test_bad_input_is_one_error_before_any_launch(runtime, changes, message):
    """What is wrong, what it is, what is expected."""
    q, k, v = packed()
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K} | changes
    with pytest.raises(InputError, match=message):
        fa4_kernels.flash_attn_varlen_func(**arguments)

    assert runtime.launched == []


def test_pages_need_lengths_and_no_starts(runtime):
    """Two ways to say where keys are, or none, are errors."""
    q, pages, table = drawn(2, 1, 4, HEAD_DIM), drawn(6, 16, 2, HEAD_DIM), torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(InputError, match="page_table is given and seqused_k is not"):
        fa4_kernels.flash_attn_varlen_func(q, pages, pages, page_table=table)
    with pytest.raises(InputError, match="cu_seqlens_k and page_table are both given"):
        fa4_kernels.flash_attn_varlen_func(
            q, pages, pages, page_table=table, cu_seqlens_k=ints(0, 1, 2), seqused_k=ints(1, 1)
        )


def test_features_without_kernels_are_refused_before_any_launch(runtime):
    """A missing merge refuses the parts too; a missing backward refuses inputs that require gradients."""
    q, k, v = packed()
    runtime.lacks = lambda problem: problem.op == "fwd_combine"
    with pytest.raises(NoKernelError, match="fwd_combine"):
        fa4_kernels.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, num_splits=2)
    with pytest.raises(NoKernelError, match="score_mod"):
        fa4_kernels.flash_attn_varlen_func(q, k, v, CU_Q, CU_K, score_mod=lambda *_: None)
    runtime.lacks = lambda problem: problem.op == "bwd"
    with pytest.raises(NoKernelError, match=r"an input requires grad.*\n.*bwd, varlen"):
        fa4_kernels.flash_attn_varlen_func(q.requires_grad_(), k, v, CU_Q, CU_K)

    assert runtime.launched == []


def test_a_number_of_splits_chosen_here_is_one_where_no_kernel_splits(runtime):
    """A choice is no demand."""
    q, cache = drawn(1, 1, 1, HEAD_DIM), drawn(1, 2000, 1, HEAD_DIM)
    runtime.lacks = lambda problem: "split" in problem.features
    out, _ = fa4_kernels.flash_attn_with_kvcache(q, cache, cache)

    close(out[0], attention(q[0].double(), cache[0].double(), cache[0].double())[0])
    assert runtime.launched == ["fwd/dense"]


def test_few_queries_over_many_keys_are_split(runtime):
    """16 multiprocessors, one tile of queries, 2000 keys = 16 blocks: 16 parts, one launch and a merge."""
    q, cache = drawn(1, 1, 1, HEAD_DIM), drawn(1, 2000, 1, HEAD_DIM)
    out, _ = fa4_kernels.flash_attn_with_kvcache(q, cache, cache)

    close(out[0], attention(q[0].double(), cache[0].double(), cache[0].double())[0])
    assert runtime.launched == ["fwd/varlen/split", "fwd_combine/dense"]


def test_keys_outside_a_window_are_no_reason_to_split(runtime):
    """100 keys of 2000 are seen: one block, one launch."""
    q, cache = drawn(1, 1, 1, HEAD_DIM), drawn(1, 2000, 1, HEAD_DIM)
    out, _ = fa4_kernels.flash_attn_with_kvcache(q, cache, cache, causal=True, window_size=(99, None))

    close(out[0], attention(q[0].double(), cache[0].double(), cache[0].double(), causal=True, window=(99, 0))[0])
    assert runtime.launched == ["fwd/dense"]


def test_gradients_of_more_sequences_than_a_grid_has(runtime, monkeypatch):
    """The helpers of a dense backward run on a part of the batch at a time; here 3, on a GPU 65,535."""
    assert gradients._MOST_SEQUENCES == 65535
    monkeypatch.setattr(api, "CAN_ANSWER", False)
    q = torch.randn((7, 9, 2, 64), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16).requires_grad_()
    (expected,) = torch.autograd.grad(fa4_kernels.flash_attn_func(q, q, q)[0].float().square().sum(), q)
    monkeypatch.setattr(gradients, "_MOST_SEQUENCES", 3)
    runtime.launched.clear()
    (found,) = torch.autograd.grad(fa4_kernels.flash_attn_func(q, q, q)[0].float().square().sum(), q)

    assert torch.equal(found, expected)
    assert [runtime.launched.count(f"bwd_{step}/dense") for step in ("preprocess", "postprocess")] == [3, 3]
