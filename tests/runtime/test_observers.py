"""Contract: what of torch looks on sees a call as an operator, and what changes a computation changes this one: modes,
transforms, subclasses, tangents, autocast, compilation and export. A derivative that no kernel computes is an error.

The kernels are loops (reference_kernels.py). Expected values: torch's own attention in float64, or torch's own counts.
"""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import fa4_kernels  # noqa: E402
from fa4_kernels import InputError, NoKernelError, allocation, answers, api, loader, observers  # noqa: E402
from fa4_kernels.errors import LayoutError  # noqa: E402
from fa4_kernels.sdpa import scaled_dot_product_attention  # noqa: E402

from tests.runtime.reference_kernels import ReferenceRuntime  # noqa: E402

ROWS, HEADS, DIM = 12, 2, 64
STARTS = torch.tensor([0, 5, 12], dtype=torch.int32)


class Runtime(ReferenceRuntime):
    """Refuses what the launcher refuses, so that callers copy it."""

    def launch_for(self, problem, ordinal):
        launch = super().launch_for(problem, ordinal)

        def run(*arguments):
            for position, x in enumerate(arguments):
                if isinstance(x, torch.Tensor) and x.numel() and (x.stride(-1) != 1 or 0 in x.stride()):
                    raise LayoutError("to be copied", position)
            launch.run(*arguments)

        return SimpleNamespace(run=run)


@pytest.fixture
def runtime(monkeypatch):
    for module in (answers, api):
        monkeypatch.setattr(module, "CAN_ANSWER", False)
    made = Runtime()
    loader.use_runtime(made)
    yield made
    loader.use_runtime(None)


def drawn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense_tensors(dtype=torch.bfloat16, batch=2):
    return tuple(drawn(batch, ROWS, HEADS, DIM, dtype=dtype, seed=i) for i in range(3))


def packed_tensors(dtype=torch.bfloat16):
    return tuple(drawn(ROWS, HEADS, DIM, dtype=dtype, seed=i) for i in range(3))


def dense(q, k, v):
    return fa4_kernels.flash_attn_func(q, k, v, causal=True)[0]


def softcapped(q, k, v):
    return fa4_kernels.flash_attn_func(q, k, v, causal=True, softcap=30.0)[0]


def packed(q, k, v):
    return fa4_kernels.flash_attn_varlen_func(q, k, v, STARTS, STARTS, causal=True)[0]


def cached(q, k, v):
    return fa4_kernels.flash_attn_with_kvcache(q, k, v, 9, causal=True)[0]


WAYS = [
    pytest.param(dense, dense_tensors, id="dense"),
    pytest.param(softcapped, dense_tensors, id="softcap"),
    pytest.param(packed, packed_tensors, id="packed"),
    pytest.param(cached, dense_tensors, id="cache"),
]


def reference(q, k, v):
    """Causal, (batch, rows, heads, dim)."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


# --- derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize(("call", "tensors"), WAYS)
def test_a_tangent_is_never_lost(runtime, call, tensors, position):
    """As torch's attention, which has no forward-mode derivative either: NotImplementedError."""
    from torch.autograd import forward_ad

    q, k, v = tensors()
    with forward_ad.dual_level():
        inputs = [forward_ad.make_dual(x, x) if i == position else x for i, x in enumerate((q, k, v))]
        with pytest.raises(NoKernelError, match=r"has a tangent"):
            call(*inputs)
        assert call(q, k, v).shape == q.shape  # no tensor of this call has one
    with pytest.raises(NotImplementedError):
        torch.func.jvp(lambda x: call(x, k, v), (q,), (q,))


def test_merging_loses_no_derivative(runtime):
    """Neither a tangent nor a gradient."""
    from torch.autograd import forward_ad

    parts, lses = drawn(2, 3, 5, 2, DIM, dtype=torch.float32), drawn(2, 3, 5, 2, dtype=torch.float32)
    options = {"out_dtype": torch.bfloat16}
    with forward_ad.dual_level(), pytest.raises(NoKernelError, match="out_partial has a tangent"):
        fa4_kernels.flash_attn_combine(forward_ad.make_dual(parts, parts), lses, **options)
    with pytest.raises(InputError, match="lse_partial requires grad, and merging records no gradients"):
        fa4_kernels.flash_attn_combine(parts, lses.requires_grad_(), **options)
    with torch.no_grad():
        assert fa4_kernels.flash_attn_combine(parts, lses, **options)[0].shape == (3, 5, 2, DIM)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("call", "tensors"), WAYS[:3])
def test_a_second_derivative_is_an_error(runtime, call, tensors, is_compiled):
    """A gradient penalty: the first backward works, the second raises, and nothing is dropped with a warning."""
    leaves = [x.requires_grad_() for x in tensors()]
    function = torch.compile(call, backend="aot_eager", fullgraph=True) if is_compiled else call

    def penalty():
        out = function(*leaves)
        (gradient,) = torch.autograd.grad(out.float().square().sum(), leaves[:1], create_graph=True)
        gradient.float().square().sum().backward()

    with pytest.raises((NoKernelError, RuntimeError), match=r"second derivative|differentiate twice|double backward"):
        penalty()


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_backward", [False, True], ids=["forward", "backward"])
def test_the_flop_counter_counts_what_it_counts_for_torchs_attention(runtime, with_backward):
    """Dense: the very number that it has for sdpa of the same shapes."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    q, k, v = (x.requires_grad_(with_backward) for x in dense_tensors())
    shape = (2, HEADS, ROWS, DIM)
    expected = sdpa_flop_count(shape, shape, shape)
    with FlopCounterMode(display=False) as counter:
        out = dense(q, k, v)
        if with_backward:
            out.sum().backward()
            expected += sdpa_backward_flop_count(shape, shape, shape, shape)
    assert counter.get_total_flops() == expected


def test_the_flop_counter_counts_each_packed_sequence(runtime):
    """4 * heads * head_dim * (5 * 5 + 7 * 7)."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        packed(*packed_tensors())
    assert counter.get_total_flops() == 4 * HEADS * DIM * (5 * 5 + 7 * 7)


def test_a_backward_is_counted_where_the_forward_was_not(runtime):
    """The forward ran before the counter was there."""
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (x.requires_grad_() for x in dense_tensors())
    out = dense(q, k, v)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 2 * HEADS * ROWS * ROWS * 5 * DIM


@pytest.mark.parametrize(("call", "tensors"), WAYS[:3])
def test_selective_checkpointing_may_keep_attention(runtime, call, tensors):
    """A policy that saves our operators: attention runs once forward, and gradients are those without it."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context, operator, *args, **kwargs):
        is_ours = operator.namespace == "fa4_kernels"
        return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE

    leaves = [x.requires_grad_() for x in tensors()]
    call(*leaves).sum().backward()
    expected, forwards = [x.grad.clone() for x in leaves], [name for name in runtime.launched if name.startswith("fwd")]
    for x in leaves:
        x.grad = None
    runtime.launched.clear()
    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    checkpoint(call, *leaves, use_reentrant=False, context_fn=contexts).sum().backward()
    assert [name for name in runtime.launched if name.startswith("fwd")] == forwards
    assert all(torch.equal(x.grad, e) for x, e in zip(leaves, expected, strict=True))


@pytest.mark.parametrize(("call", "tensors"), WAYS[:3])
def test_modes_see_one_operator(runtime, call, tensors):
    """A dispatch mode and a function mode, in turn."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    expected = call(*tensors())
    for mode in (Dispatch, Function):
        seen.clear()
        with mode():
            assert torch.equal(call(*tensors()), expected)
        assert [name for name in seen if name.startswith("fa4_kernels")], (mode, seen)


def test_the_default_device_is_no_observer(runtime):
    """torch.set_default_device leaves a mode on for good."""
    from fa4_kernels import observers

    with torch.device("cpu"):
        assert not observers.is_observed(*dense_tensors())
        assert all(allows is not None and allows(None) for count, allows in observers.OBSERVERS[1:2] if count())


@pytest.mark.parametrize(("call", "tensors"), WAYS[:3])
def test_fake_tensors_have_the_shapes_of_the_result(runtime, call, tensors):
    """Under the mode, and afterwards without it; nothing runs, and later calls get real tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(x) for x in tensors()]
    with mode:
        assert call(*fakes).shape == fakes[0].shape
    assert runtime.launched == []
    assert type(call(*tensors())) is torch.Tensor


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize(("call", "tensors"), WAYS[:3])
def test_make_fx_traces_one_operator(runtime, call, tensors, tracing_mode):
    """And the graph computes the same."""
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(call, tracing_mode=tracing_mode, _allow_non_fake_inputs=True)(*tensors())
    assert sum("fa4_kernels" in str(node.target) for node in traced.graph.nodes) == 1
    assert torch.equal(traced(*tensors()), call(*tensors()))


@pytest.mark.parametrize(("call", "tensors"), WAYS)
def test_transforms_of_torch_func_are_refused_by_name(runtime, call, tensors):
    """vmap and grad of one of the tensors; what they do not concern is served."""
    q, k, v = tensors()
    with pytest.raises(NoKernelError, match=r"q is inside torch\.func\.vmap"):
        torch.func.vmap(call, in_dims=(0, None, None))(torch.stack([q, q]), k, v)
    with pytest.raises(NoKernelError, match=r"q is inside torch\.func\.vmap, grad"):
        torch.func.grad(lambda q: call(q, k, v).float().sum())(q)
    inside = torch.func.vmap(lambda x: x * call(q, k, v))(torch.ones(2))
    assert torch.equal(inside[1], call(q, k, v))


# --- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("call", [dense, scaled_dot_product_attention, cached])
def test_autocast_converts_as_torchs_attention(runtime, call, given):
    """The result has autocast's dtype, and gradients that of the inputs."""
    q, k, v = (x.requires_grad_(call is not cached) for x in dense_tensors(given))
    with torch.autocast("cpu", torch.bfloat16):
        out = call(q, k, v)
        theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    assert out.dtype == theirs.dtype == torch.bfloat16
    converted = call(*(x.detach().bfloat16() for x in (q, k, v)))
    assert torch.equal(out.detach(), converted)
    if call is not cached:
        out.sum().backward()
        assert q.grad.dtype == given


def test_autocast_holds_inside_a_compiled_function(runtime):
    """As eagerly, in one graph."""
    q, k, v = dense_tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = torch.compile(dense, backend="aot_eager", fullgraph=True)(q, k, v)
        assert torch.equal(out, dense(q, k, v))
    assert out.dtype == torch.bfloat16


# --- compilation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["batch", "length", "keys"])
def test_caches_of_any_size_share_two_graphs(runtime, what):
    """12 sizes: one graph for the first, one for all."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def step(q, k, v, used):
        return fa4_kernels.flash_attn_with_kvcache(q, k, v, used, causal=True)[0]

    for size in range(2, 14):
        batch, rows, keys = (size if what == name else 3 for name in ("batch", "length", "keys"))
        q = drawn(batch, rows, HEADS, DIM)
        cache = drawn(batch, keys + 13, HEADS, DIM)
        used = torch.full((batch,), 13, dtype=torch.int32)
        out = step(q, cache, cache, used)
        assert torch.equal(out, fa4_kernels.flash_attn_with_kvcache(q, cache, cache, used, causal=True)[0])
    assert counter.frame_count <= 2


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_any_batch_and_length(runtime, strict):
    """One program for all."""

    class Step(torch.nn.Module):
        def forward(self, q, k, v, used):
            return fa4_kernels.flash_attn_with_kvcache(q, k, v, used, causal=True)[0]

    def inputs(batch, rows, keys):
        cache = drawn(batch, keys, HEADS, DIM)
        return drawn(batch, rows, HEADS, DIM), cache, cache.clone(), torch.full((batch,), 9, dtype=torch.int32)

    batch, rows, keys = (torch.export.Dim(name, min=2, max=4096) for name in ("batch", "rows", "keys"))
    shapes = ({0: batch, 1: rows}, {0: batch, 1: keys}, {0: batch, 1: keys}, {0: batch})
    program = torch.export.export(Step(), inputs(3, 4, 20), dynamic_shapes=shapes, strict=strict).module()
    for sizes in ((3, 4, 20), (5, 2, 11), (2, 7, 40)):
        given = inputs(*sizes)
        assert torch.equal(program(*given), Step()(*given))


# --- kept tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made_first", ["inference_mode", "no_grad"])
def test_what_inference_keeps_serves_training(runtime, made_first, monkeypatch):
    """The same shapes in inference mode, then with gradients: those of attention."""
    monkeypatch.setattr(allocation, "_starts", {})
    q, k, v = dense_tensors()
    with getattr(torch, made_first)():
        fa4_kernels.flash_attn_varlen_func(q, k, v, seqused_k=torch.tensor([12, 12], dtype=torch.int32), causal=True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    used = torch.tensor([12, 12], dtype=torch.int32)
    fa4_kernels.flash_attn_varlen_func(*leaves, seqused_k=used, causal=True)[0].float().sum().backward()
    exact = [x.detach().double().requires_grad_() for x in leaves]
    reference(*exact).sum().backward()
    for x, e in zip(leaves, exact, strict=True):
        assert (x.grad.double() - e.grad).abs().max() < 0.05


def test_kept_starts_are_never_let_go_of(runtime, monkeypatch):
    """A graph may hold an address: after 600 other lengths the first is where it was."""
    monkeypatch.setattr(allocation, "_starts", {})
    device = torch.device("cpu")
    first = allocation.equal_starts(2, 7, device)
    address = first.data_ptr()
    for length in range(8, 608):
        allocation.equal_starts(2, length, device)
    assert allocation.equal_starts(2, 7, device).data_ptr() == address
    assert first.tolist() == [0, 7, 14]


def test_beyond_what_is_kept_starts_are_made_at_each_call(runtime, monkeypatch):
    """Memory has a bound, and nobody is told an address that will not last."""
    monkeypatch.setattr(allocation, "_starts", {})
    monkeypatch.setattr(allocation, "_MAX_KEPT", 1)
    kept, made = (allocation.equal_starts(2, length, torch.device("cpu")) for length in (7, 8))
    assert made.tolist() == [0, 8, 16]
    assert (allocation.is_kept(kept), allocation.is_kept(made)) == (True, False)


def test_kept_tensors_are_made_on_a_stream_of_their_own(monkeypatch):
    """Which is waited for before another stream can see them; no other is."""
    events = []

    class Stream:
        def __init__(self, device, priority):
            events.append("new")

        def synchronize(self):
            events.append("wait")

        def __enter__(self):
            events.append("enter")

        def __exit__(self, *exception):
            events.append("leave")

    fakes = {"Stream": Stream, "stream": lambda stream: stream, "is_current_stream_capturing": lambda: False}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(allocation, "_streams", {})
    made = allocation.tensor_for_all(lambda: events.append("make") or torch.zeros(1), torch.device("cuda", 0))
    assert type(made) is torch.Tensor
    assert events == ["new", "enter", "make", "leave", "wait"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert allocation.tensor_for_all(lambda: torch.zeros(1), torch.device("cuda", 0)) is None


# --- arguments of packed calls ----------------------------------------------------------------------------------------


class OnTheDevice(torch.Tensor):
    """A number that must not be read on the host."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("__index__", "__int__", "item", "__bool__", "tolist"):
            raise AssertionError("read on the host")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_longest_length_on_the_device_is_not_read(runtime):
    """Taken for unknown; results do not depend on it."""
    longest = torch.tensor(12).as_subclass(OnTheDevice)
    tensors = packed_tensors()
    out, _ = fa4_kernels.flash_attn_varlen_func(*tensors, STARTS, STARTS, longest, longest, causal=True, num_splits=0)
    assert torch.equal(out, packed(*tensors))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(
            lambda q, c, s: fa4_kernels.flash_attn_varlen_func(q, q, q, s, s, 12, 12, None, None, None, True),
            "by position.* page_table=.., softmax_scale=..", id="FA3's order",
        ),
        pytest.param(
            lambda q, c, s: fa4_kernels.flash_attn_varlen_func(q, q, q, s, s, 12, 12, 0.0, 0.5, True),
            "seqused_q=.., seqused_k=..", id="FA2's order",
        ),
        pytest.param(
            lambda q, c, s: fa4_kernels.flash_attn_varlen_func(c, c, c, None, None, s, s), "max_seqlen_q is a tor",
            id="FA4's order",
        ),
        pytest.param(
            lambda q, c, s: fa4_kernels.flash_attn_varlen_func(q, q, q, s, s, True), "_q must be made of ints",
            id="a bool as a length",
        ),
        pytest.param(
            lambda q, c, s: fa4_kernels.flash_attn_varlen_func(q, q, q, s, s, -3), "max_seqlen_q must be at least 0",
            id="a negative length",
        ),
        pytest.param(
            lambda q, c, s: fa4_kernels.flash_attn_with_kvcache(c, c, c, c, c), "torch.bfloat16.*appended",
            id="FA2's new keys",
        ),
        pytest.param(
            lambda q, c, s: fa4_kernels.flash_attn_with_kvcache(c, c, c, s.long()), "cache_seqlens is torch.int64",
            id="lengths in int64",
        ),
        pytest.param(
            lambda q, c, s: fa4_kernels.flash_attn_with_kvcache(c, c, c, True), "cache_seqlens must be an int",
            id="lengths True",
        ),
        pytest.param(
            lambda q, c, s: fa4_kernels.flash_attn_with_kvcache(c, c, c, None, None, None, None, 0.5),
            "cu_seqlens_q=.., max_seqlen_q=.., softmax_scale=..", id="FA2's order of a cache",
        ),
        pytest.param(
            lambda q, c, s: fa4_kernels.flash_attn_with_kvcache(c, c[..., :32], c, 3), "q and k_cache differs",
            id="names of a cache",
        ),
        pytest.param(
            lambda q, c, s: fa4_kernels.flash_attn_combine(c, c, None, None, s), "cu_seqlens=", id="the merge's order",
        ),
    ],
)  # fmt: skip
def test_what_lands_elsewhere_is_refused_by_the_callers_name(runtime, call, message):
    """Positional orders of other releases, and numbers that are none; before any launch."""
    with pytest.raises(InputError, match=message):
        call(packed_tensors()[0], dense_tensors()[0], STARTS)
    assert runtime.launched == []


@pytest.mark.parametrize(
    "options",
    [
        {"score_mod_bwd": lambda *_: None},
        {"block_sparse_tensors_bwd": object()},
        {"gather_bwd_recompute_p": True},
        {"gather_bwd_token_chunk": 64},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("packed_call", [False, True], ids=["dense", "packed"])
def test_what_is_for_the_backward_alone_is_refused_too(runtime, options, packed_call):
    """Not ignored: the caller means another gradient."""
    arguments = (*packed_tensors(), STARTS, STARTS) if packed_call else dense_tensors()
    function = fa4_kernels.flash_attn_varlen_func if packed_call else fa4_kernels.flash_attn_func
    with pytest.raises(NoKernelError, match=next(iter(options))):
        function(*arguments, **options)


# --- modules of flash-attention ---------------------------------------------------------------------------------------


def test_a_program_of_flash_attention_compiles_to_one_graph(runtime):
    """Its functions under torch.compile with fullgraph, as transformers compiles them."""
    provided = fa4_kernels.provide("flash_attn")
    from flash_attn import flash_attn_func

    torch._dynamo.reset()
    compiled = torch.compile(lambda q: flash_attn_func(q, q, q, causal=True) + 1, fullgraph=True, backend="eager")
    q = dense_tensors()[0]
    with torch.no_grad():
        found = compiled(q)
    provided.remove()

    assert torch.equal(found, dense(q, q, q) + 1)


class NoReading(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses what makes the host wait for the device."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item")

    def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
        name = function._schema.name.split("::")[1]
        assert name not in self.READS, name
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("is_packed", [False, True])
def test_appending_to_a_cache_reads_no_number(runtime, monkeypatch, is_packed):
    """New rows, rotary embeddings, lists of single keys: all may be captured in a CUDA graph."""
    provided = fa4_kernels.provide("flash_attn_interface")
    from flash_attn_interface import flash_attn_with_kvcache

    starts = torch.arange(4, dtype=torch.int32)
    rows, used = ((3,) if is_packed else (3, 1)), starts[:3] + 2
    options = {
        "cache_seqlens": used,
        "cache_batch_idx": starts[:3].flip(0),
        "cache_leftpad": starts[:3],
        "causal": True,
    }
    options |= {"rotary_cos": drawn(16, 8), "rotary_sin": drawn(16, 8)}
    if is_packed:
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k_new": starts, "max_seqlen_q": 1}
    cache, q, k = drawn(3, 16, HEADS, DIM), drawn(*rows, HEADS, DIM), drawn(*rows, HEADS, DIM, seed=1)
    expected = flash_attn_with_kvcache(q, cache.clone(), cache.clone(), k, k, **options)
    monkeypatch.setattr(observers, "_num_dispatch_modes", lambda: 0)  # the way of a call that nobody looks at
    with NoReading():
        found = flash_attn_with_kvcache(q, cache.clone(), cache.clone(), k, k, **options)
    provided.remove()

    assert torch.equal(found, expected)
