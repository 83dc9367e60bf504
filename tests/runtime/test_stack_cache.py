"""Contract: flash_attn_with_kvcache of FlashAttention-2 and 3 appends, turns and attends as those packages say, in the
caller's cache; what is refused leaves the cache as it was. (That no number is read: test_observers.py.)

Kernels are loops (reference_kernels.py). Expected values: one sequence at a time, in float64, from the packages'
documentation: keys are turned by their place in the cache, queries by theirs under a causal mask or a window, else all
by that of the first new key; the mask is aligned to the last key.
"""

import pytest

torch = pytest.importorskip("torch")

import fa4_kernels  # noqa: E402
from fa4_kernels import InputError, NoKernelError  # noqa: E402

from tests.runtime.stack_reference import (  # noqa: E402
    attention,
    close,
    close_lse,
    drawn,
    ints,
    reference_runtime,
    window_of,
)

BATCH, CAPACITY, HEADS, DIM = 3, 24, 2, 64
USED = (5, 0, 9)


@pytest.fixture
def runtime(monkeypatch):
    with reference_runtime(monkeypatch) as made:
        provided = [fa4_kernels.provide(stack) for stack in ("flash_attn", "flash_attn_interface")]
        yield made
        for each in provided:
            each.remove()


def of(version):
    import flash_attn
    import flash_attn_interface

    return (flash_attn if version == 2 else flash_attn_interface).flash_attn_with_kvcache


def tables(columns=16):
    """cos and sin of CAPACITY places, (CAPACITY, columns), bf16."""
    angles = torch.outer(torch.arange(CAPACITY).double(), 0.1 ** (torch.arange(columns) / columns))
    return angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)


def turned(x, places, cos, sin, is_interleaved):
    """Complex numbers times cos + i sin; (rows, heads, dim), rounded to bf16 as a cache holds them."""
    half = cos.shape[1]
    head = x.double()[..., : 2 * half]
    pairs = head.unflatten(-1, (half, 2)) if is_interleaved else head.unflatten(-1, (2, half)).mT
    factor = torch.complex(cos.double()[places], sin.double()[places])[:, None]
    found = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * factor)
    found = found.flatten(-2) if is_interleaved else found.mT.flatten(-2)
    return torch.cat((found.to(torch.bfloat16), x[..., 2 * half :]), -1)


class Expected:
    """What a call gives for one sequence: its keys so far, new rows, and what the query is."""

    def __init__(
        self, keys, values, used, new, q, *, leftpad=0, window_size=(-1, -1), causal=False, rotary=None, first=None
    ):
        first = used if first is None else first
        k, v = new if new is not None else (keys[:0], values[:0])
        if rotary is not None:
            *table, is_interleaved = rotary
            k = turned(k, range(first, first + len(k)), *table, is_interleaved)
            moves = causal or window_size != (-1, -1)
            q = turned(q, [first + i * moves for i in range(len(q))], *table, is_interleaved)
        self.keys = torch.cat((keys[:used], k))
        self.values = torch.cat((values[:used], v))
        sees = window_of(*window_size, causal)
        self.out, self.lse = attention(q, self.keys[leftpad:], self.values[leftpad:], sees)


def cache_rows(count=BATCH):
    return drawn(count, CAPACITY, HEADS, DIM, seed=5), drawn(count, CAPACITY, HEADS, DIM, seed=6)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_size": (4, 0)}, {"window_size": (-1, 1)}])
@pytest.mark.parametrize(
    ("rotary", "leftpad"), [(None, None), (None, (2, 0, 3)), (True, None), (False, None), (True, (2, 0, 3))]
)
def test_rows_are_appended_turned_and_seen(runtime, version, mask, rotary, leftpad):
    """Three new rows behind 5, 0 and 9; the query has as many; keys before leftpad are not seen."""
    keys, values = cache_rows()
    k, v, q = (drawn(BATCH, 3, heads, DIM, seed=i) for i, heads in ((7, HEADS), (8, HEADS), (9, 2 * HEADS)))
    before = keys.clone(), values.clone()
    options = dict(mask)
    if rotary is not None:
        options |= {"rotary_cos": tables()[0], "rotary_sin": tables()[1], "rotary_interleaved": rotary}
    if leftpad is not None:
        options["cache_leftpad"] = ints(*leftpad)
    out, lse, *_ = of(version)(q, keys, values, k, v, cache_seqlens=ints(*USED), **options, return_softmax_lse=True)

    for b in range(BATCH):
        table = None if rotary is None else (*tables(), rotary)
        pad = 0 if leftpad is None else leftpad[b]
        found = Expected(before[0][b], before[1][b], USED[b], (k[b], v[b]), q[b], leftpad=pad, rotary=table, **mask)
        close(out[b], found.out)
        close_lse(lse[b], found.lse if version == 3 else found.lse.masked_fill(found.lse.isneginf(), torch.inf))
        length = USED[b] + 3
        assert torch.allclose(keys[b, :length].float(), found.keys.float(), atol=2**-7)
        assert torch.equal(values[b, :length], found.values)
        assert torch.equal(keys[b, length:], before[0][b, length:])


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("leftpad", [None, (2, 0, 3)])
@pytest.mark.parametrize("is_new", [False, True])
def test_sequences_have_rows_of_the_cache_by_their_index(runtime, version, leftpad, is_new):
    """cache_batch_idx, in a cache with more rows than sequences."""
    keys, values = cache_rows(5)
    before, rows, used = (keys.clone(), values.clone()), (4, 0, 2), (6, 4, 9)
    k, v, q = (drawn(BATCH, 1, HEADS, DIM, seed=i) for i in (7, 8, 9))
    options = {"cache_seqlens": ints(*used), "cache_batch_idx": ints(*rows)}
    options |= {} if leftpad is None else {"cache_leftpad": ints(*leftpad)}
    out = of(version)(q, keys, values, *((k, v) if is_new else ()), **options)

    for b, row in enumerate(rows):
        pad, new = 0 if leftpad is None else leftpad[b], (k[b], v[b]) if is_new else None
        found = Expected(before[0][row], before[1][row], used[b], new, q[b], leftpad=pad)
        close(out[b], found.out)
        assert torch.equal(keys[row, : used[b] + is_new], found.keys)
    assert torch.equal(keys[1], before[0][1])


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("leftpad", [None, (2, 0, 3)])
def test_pages(runtime, version, leftpad):
    """block_table in 2, page_table in 3; new rows cross the border of a page."""
    table = ints([3, 1, 0], [2, 6, 8], [7, 4, 5])
    keys, values = drawn(9, 8, HEADS, DIM, seed=5), drawn(9, 8, HEADS, DIM, seed=6)
    flat = [[x[page] for page in table.long()] for x in (keys.clone(), values.clone())]
    k, v, q = (drawn(BATCH, 4, HEADS, DIM, seed=i) for i in (7, 8, 9))
    options = {"cache_seqlens": ints(*USED), "causal": True, "block_table" if version == 2 else "page_table": table}
    options |= {} if leftpad is None else {"cache_leftpad": ints(*leftpad)}
    out = of(version)(q, keys, values, k, v, **options)

    for b in range(BATCH):
        rows = [x[b].flatten(0, 1) for x in flat]
        pad = 0 if leftpad is None else leftpad[b]
        found = Expected(*rows, USED[b], (k[b], v[b]), q[b], causal=True, leftpad=pad)
        close(out[b], found.out)
        assert torch.equal(keys[table[b].long()].flatten(0, 1)[: USED[b] + 4], found.keys)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_queries_and_packed_new_rows_of_3(runtime, causal):
    """Lengths differ; rows behind the last start belong to nobody, and change nothing."""
    keys, values = cache_rows()
    before = keys.clone(), values.clone()
    starts_q, starts_k = ints(0, 1, 4, 6), ints(0, 2, 2, 5)
    q, k, v = drawn(8, 4, DIM, seed=9), drawn(7, HEADS, DIM, seed=7), drawn(7, HEADS, DIM, seed=8)
    cos, sin = tables()
    first = (7, 1, 4)
    out, lse, *_ = of(3)(
        q, keys, values, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=ints(*USED), cu_seqlens_q=starts_q,
        cu_seqlens_k_new=starts_k, max_seqlen_q=3, rotary_seqlens=ints(*first), causal=causal, return_softmax_lse=True,
    )  # fmt: skip
    for b in range(BATCH):
        rows, new = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        options = {"causal": causal, "rotary": (cos, sin, True), "first": first[b]}
        found = Expected(before[0][b], before[1][b], USED[b], (k[new], v[new]), q[rows], **options)
        close(out[rows], found.out)
        length = len(found.keys)
        assert torch.allclose(keys[b, :length].float(), found.keys.float(), atol=2**-7)
        assert torch.equal(values[b, :length], found.values)
        assert torch.equal(keys[b, length:], before[0][b, length:])
    assert lse.shape == (4, 8)


def test_no_new_row_at_all_changes_nothing(runtime):
    """All starts are 0, as in a padded batch of a graph."""
    keys, values = cache_rows()
    before = keys.clone(), values.clone()
    k, nothing = drawn(4, HEADS, DIM, seed=7), ints(0, 0, 0, 0)
    of(3)(drawn(3, HEADS, DIM), keys, values, k, k, cache_seqlens=ints(*USED), cu_seqlens_q=ints(0, 1, 2, 3),
          cu_seqlens_k_new=nothing, max_seqlen_q=1)  # fmt: skip
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])


@pytest.mark.parametrize("version", [2, 3])
def test_one_number_for_all_and_none(runtime, version):
    """cache_seqlens as an int; without it the whole cache, and all pages, are in use."""
    keys, values = cache_rows()
    q, table = drawn(BATCH, 1, HEADS, DIM), ints([0, 1], [1, 2], [2, 0])
    place = "block_table" if version == 2 else "page_table"
    close(of(version)(q, keys, values, cache_seqlens=7)[1], attention(q[1], keys[1, :7], values[1, :7])[0])
    close(of(version)(q, keys, values)[1], attention(q[1], keys[1], values[1])[0])
    both = [torch.cat([x[1], x[2]]) for x in (keys, values)]
    close(of(version)(q, keys, values, **{place: table})[1], attention(q[1], *both)[0])


def test_scale_softcap_and_order_of_2(runtime):
    """By position, as its documentation lists them."""
    keys, values = cache_rows()
    q = drawn(BATCH, 2, HEADS, DIM)
    out = of(2)(q, keys, values, None, None, None, None, ints(*USED), None, None, None, 0.3, True, (-1, -1), 5.0)
    sees = window_of(-1, 0, True)
    for b in range(BATCH):
        expected, _ = attention(q[b], keys[b, : USED[b]], values[b, : USED[b]], sees, scale=0.3, softcap=5.0)
        close(out[b], expected)


def test_a_slice_of_a_longer_cache_gets_the_rows(runtime):
    """In place, though what the kernels read is a copy."""
    longer, values = drawn(BATCH, 2 * CAPACITY, HEADS, DIM, seed=5), drawn(BATCH, 2 * CAPACITY, HEADS, DIM, seed=6)
    k, q = drawn(BATCH, 1, HEADS, DIM, seed=7), drawn(BATCH, 1, HEADS, DIM, seed=9)
    of(2)(q, longer[:, :CAPACITY], values[:, :CAPACITY], k, k, cache_seqlens=ints(*USED))
    assert all(torch.equal(longer[b, USED[b]], k[b, 0]) for b in range(BATCH))


K = {"k": drawn(BATCH, 1, HEADS, DIM), "v": drawn(BATCH, 1, HEADS, DIM)}
COS, SIN = tables()
WRONG = {
    "half of what is new": ({"k": K["k"]}, "one of them is None"),
    "no lengths": (K, "without cache_seqlens"),
    "a full cache": (K | {"cache_seqlens": CAPACITY}, "holds 24"),
    "another batch": ({"k": K["k"][:2], "v": K["v"][:2], "cache_seqlens": 1}, "the batch of q, 3"),
    "other heads": ({"k": K["k"][:, :, :1], "v": K["v"], "cache_seqlens": 1}, "k has shape"),
    "another type": ({"k": K["k"].half(), "v": K["v"], "cache_seqlens": 1}, "the cache's dtype"),
    "tables without rows": ({"rotary_cos": COS, "rotary_sin": SIN}, "without k and v"),
    "half of the tables": (K | {"rotary_cos": COS, "cache_seqlens": 1}, "belong together"),
    "short tables": (K | {"rotary_cos": COS[:9], "rotary_sin": SIN[:9], "cache_seqlens": 1}, "at least 24 rows"),
    "wide tables": (
        K | {"rotary_cos": COS.repeat(1, 3), "rotary_sin": SIN.repeat(1, 3), "cache_seqlens": 1},
        "at most 32 columns",
    ),
    "lengths in int64": (K | {"cache_seqlens": ints(*USED).long()}, "cache_seqlens is torch.int64"),
    "an index of another batch": ({"cache_batch_idx": ints(0, 1)}, "cache_batch_idx has shape"),
    "pages and an index": ({"cache_batch_idx": ints(0, 1, 2), "block_table": ints([0], [1], [2])}, "both given"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_before_anything_is_written(runtime, case):
    """One error, by the argument's name."""
    options, message = WRONG[case]
    keys, values = cache_rows()
    before = keys.clone()
    with pytest.raises(InputError, match=message):
        of(2)(drawn(BATCH, 1, HEADS, DIM), keys, values, **options)
    assert torch.equal(keys, before)
    assert runtime.launched == []


def test_without_a_kernel_the_cache_stays_as_it_was(runtime):
    """The decision comes before the writing, so that a fallback can append."""
    keys, values = cache_rows()
    before = keys.clone()
    runtime.lacks = lambda problem: "softcap" in problem.features
    with pytest.raises(NoKernelError):
        of(2)(drawn(BATCH, 1, HEADS, DIM), keys, values, **K, cache_seqlens=ints(*USED), softcap=3.0)
    assert torch.equal(keys, before)


@pytest.mark.parametrize(("version", "window"), [(2, (CAPACITY, -1)), (3, (CAPACITY - 1, -1)), (3, (-1, 2))])
def test_a_window_that_bounds_nothing_is_none(runtime, version, window):
    """As wide as the cache, or in 3 as the queries to the right: then queries stand at the first new key."""
    keys, values = cache_rows()
    before = keys.clone(), values.clone()
    k, v, q = (drawn(BATCH, 3, HEADS, DIM, seed=i) for i in (7, 8, 9))
    options = {"rotary_cos": tables()[0], "rotary_sin": tables()[1], "window_size": window}
    out = of(version)(q, keys, values, k, v, cache_seqlens=ints(*USED), **options)
    for b in range(BATCH):
        expected = Expected(before[0][b], before[1][b], USED[b], (k[b], v[b]), q[b], rotary=(*tables(), True))
        close(out[b], expected.out)


# --- the modules beside attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 2, "a sequence"])
def test_rotary_embeddings_and_their_derivative(runtime, is_interleaved, offsets):
    """flash_attn.layers.rotary: offsets of all, or of each sequence; rows beyond the tables are not turned."""
    from flash_attn.layers.rotary import apply_rotary_emb

    cos, sin = tables()
    shifts = (3, CAPACITY - 2) if offsets == "a sequence" else (offsets, offsets)
    x = drawn(2, 5, HEADS, DIM, requires_grad=True)
    given = ints(*shifts) if offsets == "a sequence" else offsets
    out = apply_rotary_emb(x, cos, sin, is_interleaved, seqlen_offsets=given)
    for b, shift in enumerate(shifts):
        inside = min(5, CAPACITY - shift)
        expected = turned(x[b, :inside].detach(), range(shift, shift + inside), cos, sin, is_interleaved)
        assert torch.allclose(out[b, :inside].float(), expected.float(), atol=2**-6)
        assert torch.equal(out[b, inside:], x[b, inside:])
    (back,) = torch.autograd.grad(out, x, out.detach())
    assert torch.allclose(back.float(), x.detach().float(), atol=2**-4)  # turned back: the rows themselves


def test_rotary_embeddings_in_place_and_of_packed_sequences(runtime):
    """The same tensor comes back; positions begin at each sequence's start."""
    from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_

    cos, sin = tables()
    x = drawn(9, HEADS, DIM)
    before = x.clone()
    assert apply_rotary_emb(x, cos, sin, inplace=True, cu_seqlens=ints(0, 4, 9), max_seqlen=5) is x
    places = [*range(4), *range(5)]
    assert torch.allclose(x.float(), turned(before, places, cos, sin, False).float(), atol=2**-6)

    qkv = before[None].unsqueeze(2).repeat(1, 1, 3, 1, 1)
    assert apply_rotary_emb_qkv_(qkv, cos, sin) is qkv
    expected = turned(before, range(9), cos, sin, False).float()
    assert torch.allclose(qkv[0, :, 0].float(), expected, atol=2**-6)
    assert torch.allclose(qkv[0, :, 1].float(), expected, atol=2**-6)
    assert torch.equal(qkv[0, :, 2], before)
    kv = before[None].unsqueeze(2).repeat(1, 1, 2, 1, 1)
    apply_rotary_emb_kv_(kv, cos, sin)
    assert torch.allclose(kv[0, :, 0].float(), expected, atol=2**-6)


def test_a_rotary_module(runtime):
    """Frequencies base ** (-2 i / dim)."""
    from flash_attn.layers.rotary import RotaryEmbedding

    q = drawn(1, 5, HEADS, DIM)
    angles = torch.outer(torch.arange(5).double(), 100.0 ** (-torch.arange(0, 32, 2) / 32))
    expected = turned(q[0], range(5), angles.cos(), angles.sin(), False).float()
    found, _ = RotaryEmbedding(32, base=100.0)(q.clone(), q[:, :, None].repeat(1, 1, 2, 1, 1))

    assert torch.allclose(found[0].float(), expected, atol=2**-4)
    with pytest.raises(NotImplementedError, match="scale_base"):
        RotaryEmbedding(32, scale_base=512)


def test_padding_is_taken_off_and_put_back(runtime):
    """flash_attn.bert_padding: rows in use, their places, starts, and the longest; zeros in the gaps."""
    from flash_attn.bert_padding import pad_input, unpad_input, unpad_input_for_concatenated_sequences

    x, mask = drawn(2, 4, 3, requires_grad=True), torch.tensor([[0, 1, 1, 0], [1, 1, 1, 0]])
    rows, places, starts, longest, used = unpad_input(x, mask)
    assert places.tolist() == [1, 2, 4, 5, 6]
    assert (starts.tolist(), starts.dtype, longest, used.tolist()) == ([0, 2, 5], torch.int32, 3, [2, 3])
    back = pad_input(rows, places, 2, 4)
    assert torch.equal(back, x * mask[..., None])
    assert torch.equal(torch.autograd.grad(back.sum(), x)[0], mask[..., None].expand_as(x).to(x.dtype))

    unused = torch.tensor([[1, 0, 0, 0], [0, 0, 0, 0]])
    _, places, starts, longest, used = unpad_input(x, mask, unused)
    assert (places.tolist()[:3], starts.tolist(), longest, used.tolist()) == ([0, 1, 2], [0, 3, 6], 3, [2, 3])

    _, places, starts, longest = unpad_input_for_concatenated_sequences(x, torch.tensor([[1, 2, 0, 0], [4, 0, 0, 0]]))
    assert (places.tolist(), starts.tolist(), longest) == ([0, 1, 2, 4, 5, 6, 7], [0, 1, 3, 7], 4)
