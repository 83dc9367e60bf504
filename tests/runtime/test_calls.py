"""Contract of calls answered in C (_calls.h): a call like an earlier one launches what the Python code beside it would
launch, from memory of its own, and decides nothing. Whatever asks for more than that is left to Python.

How it is told which way a call took: without what Python keeps (`api._bound`, `recipes._bind`), only C can answer.
"""

import gc
import inspect
import math
import struct
import sys
import weakref

import pytest

torch = pytest.importorskip("torch")

from fa4_kernels import InputError, NoKernelError, allocation, api, loader, packs, recipes  # noqa: E402
from fa4_kernels.plan import encode_plan  # noqa: E402
from fa4_kernels.windows import Offsets  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.runtime.fake import (  # noqa: E402
    Nodes,
    fake_cubin,
    forward_plan,
    launch_template,
    make_plan,
    param_bytes,
    read_map,
    write_pack,
)

MASKS = ("causal", "full", "local")
IDS = [f"fwd-sm90a-{dtype}-hd64-{mask}" for dtype in ("bf16", "fp16") for mask in MASKS]
IDS.append("fwd-sm90a-bf16-hd96x64-full")


class Capture:
    """Whether a CUDA graph is being captured."""

    active = False

    def __call__(self):
        return self.active


@pytest.fixture
def capture():
    return Capture()


@pytest.fixture
def runtime(launcher, fake, tmp_path, capture, monkeypatch):
    """The stand-in driver, CPU tensors, kernels of two dtypes and all masks; no scratch yet."""
    monkeypatch.setattr(allocation, "_scratches", {})
    pack = packs.open_pack("test", write_pack(tmp_path / "pack", IDS))
    options = {"driver_path": fake.path, "device_type": loader.CPU, "packs": [pack]}
    made = loader.Runtime(**options, stream_of=lambda ordinal: 0x77, is_capturing=capture)
    loader.use_runtime(made)
    yield made
    loader.use_runtime(None)


def qkv(batch=2, seqlen_q=130, seqlen_k=77, heads=4, heads_kv=2, head_dim=64, head_dim_v=None, dtype=torch.bfloat16):
    q = torch.zeros(batch, seqlen_q, heads, head_dim, dtype=dtype)
    k = torch.zeros(batch, seqlen_k, heads_kv, head_dim, dtype=dtype)
    v = torch.zeros(batch, seqlen_k, heads_kv, head_dim_v or head_dim, dtype=dtype)
    return q, k, v


def launched(launch):
    """Kernel, grid, stream, map and numbers of a launch; (out, lse) addresses apart."""
    data = param_bytes(launch)
    pointers = struct.unpack_from("<2Q", data, 128)
    return (launch.kernel, list(launch.grid), launch.stream, read_map(data[:128]), data[144:]), pointers


@pytest.fixture
def in_c(runtime, monkeypatch):
    """`flash_attn_func` that only C answers: what Python keeps of earlier calls is out of reach."""

    def call(*args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(api, "_bound", None)
            return api.flash_attn_func(*args, **kwargs)

    return call


@pytest.fixture
def in_python(runtime, monkeypatch):
    """`flash_attn_func` as if nothing were answered in C."""

    def call(*args, **kwargs):
        monkeypatch.setattr(api, "_answer", lambda *args: None)
        try:
            return api.flash_attn_func(*args, **kwargs)
        finally:
            monkeypatch.setattr(api, "_answer", loader.compiled_calls("ForwardCalls").run)

    return call


# --- forward ----------------------------------------------------------------------------------------------------------

SIDES = st.one_of(st.none(), st.integers(-1, 200), st.sampled_from((0, 1 << 30, (1 << 30) + 1, 1 << 62)))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_c_launches_what_python_launches(in_c, in_python, fake, data):
    """Any sizes, masks, scales and layouts: the same kernel, grid, map, scalars and stream; out and lse alike."""
    heads_kv = data.draw(st.integers(1, 3))
    sizes = {"batch": data.draw(st.integers(1, 3)), "heads_kv": heads_kv}
    sizes |= {"heads": heads_kv * data.draw(st.integers(1, 3))}
    sizes |= {"seqlen_q": data.draw(st.integers(1, 300)), "seqlen_k": data.draw(st.integers(1, 300))}
    q, k, v = qkv(**sizes, dtype=data.draw(st.sampled_from((torch.bfloat16, torch.float16))))
    if data.draw(st.booleans()):
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    if data.draw(st.booleans()):
        k = torch.cat((k, k), dim=2)[:, :, : sizes["heads_kv"]]
    window = (data.draw(SIDES), data.draw(SIDES))
    options = {"causal": data.draw(st.sampled_from((False, True, 0, 1))), "window_size": window}
    options |= {"softmax_scale": data.draw(st.sampled_from((None, 0.3, 1e-3))), "return_lse": data.draw(st.booleans())}
    fake.reset()
    loader.use_runtime(loader.runtime())  # forgets calls, and what the stand-in has forgotten is loaded again
    loader.runtime()._launches.clear(), loader.runtime()._libraries.clear()
    expected = in_python(q, k, v, **options)
    if fake.launches == []:  # a window that sees nothing
        return
    actual = in_c(q, k, v, **options)

    (first, _), (second, (out, lse)) = (launched(launch) for launch in fake.launches)
    assert first == second
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())
            assert a.data_ptr() != b.data_ptr()
    assert out == actual[0].data_ptr()
    assert actual[1] is None or lse == actual[1].data_ptr()


def test_head_dim_v_and_the_default_scale_are_those_of_the_call(in_c, in_python, fake):
    """(96, 64): out has 64 columns, the scale is 1/sqrt(96) in float32."""
    tensors = qkv(head_dim=96, head_dim_v=64)
    in_python(*tensors)
    out, _ = in_c(*tensors)

    assert out.shape == (2, 130, 4, 64)
    assert struct.unpack_from("<f", param_bytes(fake.launches[1]), 144)[0] == pytest.approx(96**-0.5, rel=1e-7)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_results_are_tensors_as_torch_makes_them(in_c, in_python, mode):
    """No gradient, an inference tensor where torch would make one, storage of exactly its elements."""
    with mode():
        expected, _ = in_python(*qkv())
        out, lse = in_c(*qkv(), return_lse=True)

    assert type(out) is torch.Tensor
    assert (out.requires_grad, out.is_inference(), out.is_leaf) == (False, expected.is_inference(), True)
    assert (out.untyped_storage().nbytes(), lse.untyped_storage().nbytes()) == (2 * 130 * 4 * 64 * 2, 2 * 4 * 130 * 4)


class Subclass(torch.Tensor):
    """A tensor that may mean something else."""


class Undecided:
    """An object whose truth raises, as that of a tensor with several elements."""

    def __bool__(self):
        raise RuntimeError("ambiguous")


def with_gradient(q, k, v):
    return q, k.clone().requires_grad_(), v


@pytest.mark.parametrize(
    ("change", "options", "error"),
    [
        pytest.param(lambda q, k, v: (q.as_subclass(Subclass), k, v), {}, None, id="subclass"),
        pytest.param(lambda q, k, v: (q[..., ::2], k[..., ::2], v[..., ::2]), {}, NoKernelError, id="head_dim 32"),
        pytest.param(lambda q, k, v: (torch.cat((q, q), 3)[..., ::2], k, v), {}, None, id="needs a copy"),
        pytest.param(lambda q, k, v: (q[:, :0], k, v), {}, None, id="empty"),
        pytest.param(lambda q, k, v: (q, k, v), {"softmax_scale": 1}, None, id="an int as scale"),
        pytest.param(lambda q, k, v: (q, k, v), {"softmax_scale": -0.5}, InputError, id="scale < 0"),
        pytest.param(lambda q, k, v: (q, k, v), {"softmax_scale": 0.0}, InputError, id="scale 0"),
        pytest.param(lambda q, k, v: (q, k, v), {"softmax_scale": math.inf}, InputError, id="scale inf"),
        pytest.param(lambda q, k, v: (q, k, v), {"window_size": [3, 3]}, None, id="a list as window"),
        pytest.param(lambda q, k, v: (q, k, v), {"window_size": (-5, 3)}, InputError, id="a negative side"),
        pytest.param(lambda q, k, v: (q, k, v), {"window_size": Offsets(-5, 3)}, None, id="a window that sees nothing"),
        pytest.param(lambda q, k, v: (q, k, v), {"window_size": (True, 3)}, InputError, id="a bool as a side"),
        pytest.param(lambda q, k, v: (q, k, v), {"softmax_scale": True}, InputError, id="a bool as scale"),
        pytest.param(lambda q, k, v: (q, k, v), {"softmax_scale": 1e-60}, InputError, id="a scale that float32 lacks"),
        pytest.param(lambda q, k, v: (q, k, v), {"causal": Undecided()}, InputError, id="causal that cannot be told"),
        pytest.param(lambda q, k, v: (q, k, v), {"return_lse": Undecided()}, InputError, id="return_lse likewise"),
        pytest.param(with_gradient, {}, NoKernelError, id="gradient"),
        pytest.param(lambda q, k, v: (q, k[:, :, :1], v), {}, InputError, id="heads of k and v"),
        pytest.param(lambda q, k, v: (q, k.half(), v), {}, InputError, id="dtypes differ"),
        pytest.param(lambda q, k, v: (q, k.to("meta"), v), {}, RuntimeError, id="devices differ"),
    ],
)
def test_what_asks_for_more_is_left_to_python(runtime, in_c, in_python, fake, change, options, error):
    """C answers none of these; Python does what it does for a first call, and the next plain call is answered again."""
    api.flash_attn_func(*qkv())
    tensors = change(*qkv())
    # On the way through Python, which has nothing to look into, asks for other kernels, or refuses before it looks.
    with pytest.raises((AttributeError, InputError, NoKernelError)):
        in_c(*tensors, **options)
    if error is None:
        expected, got = in_python(*tensors, **options), api.flash_attn_func(*tensors, **options)
        assert (expected[0].shape, expected[0].dtype) == (got[0].shape, got[0].dtype)
    else:
        with pytest.raises(error) as caught:
            in_python(*tensors, **options)
        with pytest.raises(error) as again:
            api.flash_attn_func(*tensors, **options)
        assert str(caught.value).splitlines()[0] == str(again.value).splitlines()[0]
    before = len(fake.launches)
    in_c(*qkv())
    assert len(fake.launches) == before + 1


@pytest.mark.parametrize("options", [{"softcap": 0.0}, {"deterministic": True, "num_splits": 1}, {"pack_gqa": False}])
def test_options_that_ask_for_nothing_change_nothing(in_c, in_python, options):
    """Neutral values and hints, and what concerns the gradients alone."""
    in_python(*qkv())
    in_c(*qkv(), **options)


def test_the_function_keeps_its_signature():
    """Every argument is named, for readers and tools; an unknown one is refused by name."""
    parameters = inspect.signature(api.flash_attn_func).parameters
    assert {"softmax_scale", "return_lse", "softcap", "deterministic", "learnable_sink"} <= set(parameters)
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
    with pytest.raises(TypeError, match=r"flash_attn_func\(\) got an unexpected keyword argument 'softcup'"):
        api.flash_attn_func(*qkv(), softcup=1.0)


def test_gradients_are_asked_about_at_each_call(in_c, in_python):
    """k requires one: under no_grad C answers, otherwise not."""
    q, k, v = with_gradient(*qkv())
    with torch.no_grad():
        in_python(q, k, v)
        in_c(q, k, v)
    with pytest.raises((NoKernelError, AttributeError)):
        in_c(q, k, v)


def test_an_error_of_the_launch_comes_out(in_c, in_python, fake):
    """A guard of the plan, and the driver: as from Python; nothing is kept of the call."""
    from fa4_kernels import DriverError

    tensors = qkv()
    in_python(*tensors)
    long = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(InputError, match="seqlen_q must be at most 1048576"):
        in_c(torch.empty_strided((1, 1_048_577, 1, 64), (64, 64, 64, 1), dtype=torch.bfloat16), long, long)
    fake.fail("cuLaunchKernelEx", 1)
    with pytest.raises(DriverError, match="cuLaunchKernelEx of fwd_sm90a_bf16_hd64_full_0"):
        in_c(*tensors)


def test_forgetting_holds_for_c_too(runtime, in_c):
    """Another evidence level or runtime: the next call is decided anew."""
    api.flash_attn_func(*qkv())
    in_c(*qkv())
    api.require_evidence("silicon")

    with pytest.raises(NoKernelError, match="has no silicon evidence"):
        api.flash_attn_func(*qkv())


def test_many_kinds_of_calls_are_kept(table):
    """Sixty kinds, of 256 places: all are answered."""
    makers = allocation.tensor_maker(BF16, CPU), allocation.tensor_maker(F32, CPU)
    kinds = [(batch, seqlen, heads, 77, 1) for batch in (1, 2, 3) for seqlen in range(1, 6) for heads in (1, 2, 3, 4)]
    for extents in kinds:
        calls = table(*makers, extents=extents)
    names = ("batch", "seqlen_q", "heads", "seqlen_k", "heads_kv")

    assert all(run(calls, *qkv(**dict(zip(names, extents, strict=True)))) is not None for extents in kinds)


def test_calls_leave_nothing_behind(runtime, in_c):
    """Reference counts of everything a call touches do not move, and its results go when they are let go of."""
    tensors = qkv()
    api.flash_attn_func(*tensors, softmax_scale=0.5, return_lse=True)
    scale, window = 0.25, (5, 7)
    api.flash_attn_func(*tensors, softmax_scale=scale, window_size=window)
    (bound, *_) = loader.remembered("dense").values()
    watched = [*tensors, scale, window, torch.bfloat16, bound.new_out, bound.new_lse]
    results = [in_c(*tensors, softmax_scale=scale, window_size=window)]
    gc.collect()
    before = [sys.getrefcount(x) for x in watched]
    for seqlen in range(60):
        results[0] = in_c(*tensors, softmax_scale=scale, window_size=window, return_lse=seqlen % 2 == 0)
    gone = weakref.ref(results.pop()[0])
    gc.collect()

    assert [sys.getrefcount(x) for x in watched] == before
    assert gone() is None


class OldTensor(torch.Tensor):
    """As tensors of torch before 2.10: nothing to read them by but attributes."""

    __dlpack_c_exchange_api__ = None


def test_a_torch_whose_tensors_c_cannot_read_is_served_by_python(runtime, fake, monkeypatch, table):
    """Nothing is told to C, no scratch is made, and every call works."""
    monkeypatch.setattr(api, "CAN_ANSWER", False)
    monkeypatch.setattr(api, "_answer", api._answer_none)
    for _ in range(2):
        out, _ = api.flash_attn_func(*qkv())
    api.preload()

    assert launched(fake.launches[-1])[1][0] == out.data_ptr()
    assert api._answer is api._answer_none
    assert allocation._scratches == {}
    makers = allocation.tensor_maker(BF16, CPU), allocation.tensor_maker(F32, CPU)
    assert run(table(*makers, scratch=torch.zeros(8).as_subclass(OldTensor)), *qkv()) is None


# --- the log-sum-exp that nobody asked for ----------------------------------------------------------------------------


def lse_addresses(fake):
    return [launched(launch)[1][1] for launch in fake.launches]


def test_an_unwanted_lse_goes_to_the_scratch(runtime, in_c, fake):
    """One address for calls of any shape, which survives the runtime; a wanted one is memory of its own."""
    api.flash_attn_func(*qkv())
    in_c(*qkv())
    in_c(*qkv(seqlen_q=5))
    _, lse = in_c(*qkv(), return_lse=True)
    api.require_evidence(None)
    api.flash_attn_func(*qkv())
    in_c(*qkv())

    (scratch,) = allocation._scratches.values()
    assert scratch.numel() == allocation.SCRATCH_ROWS
    addresses = lse_addresses(fake)
    assert [addresses[i] == scratch.data_ptr() for i in range(6)] == [False, True, True, False, False, True]
    assert addresses[3] == lse.data_ptr()


def test_what_the_scratch_cannot_hold_is_allocated(runtime, in_c, fake, monkeypatch):
    """Rows are batch x heads x seqlen_q: 2 * 4 * 130 = 1040. A scratch of 1040 rows serves, one of 1039 does not."""
    for rows in (1040, 1039):
        monkeypatch.setattr(allocation, "SCRATCH_ROWS", rows)
        monkeypatch.setattr(allocation, "_scratches", {})
        loader.forget_calls()
        api.flash_attn_func(*qkv())
        in_c(*qkv())
        (scratch,) = allocation._scratches.values()
        assert (lse_addresses(fake)[-1] == scratch.data_ptr()) == (rows == 1040)


def test_a_capture_makes_no_scratch(runtime, in_c, fake, capture):
    """Its memory would belong to the graph. Calls allocate and are not remembered, so that the first one after the
    capture makes the scratch; if preload() has made it before, captured calls use it."""
    runtime.preload([0])
    capture.active = True
    api.flash_attn_func(*qkv())
    api.flash_attn_func(*qkv())
    assert allocation._scratches == {}
    capture.active = False
    api.preload()
    (scratch,) = allocation._scratches.values()
    capture.active = True
    api.flash_attn_func(*qkv())
    in_c(*qkv())

    assert [address == scratch.data_ptr() for address in lse_addresses(fake)] == [False, False, False, True]


# --- allocation -------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(launcher, fake):
    """A ForwardCalls and what `add` needs: a function of the makers of out and lse."""
    fake.reset()
    driver = launcher.Driver(fake.path)
    plan = launcher.Plan(encode_plan(forward_plan("kernel"), dict.fromkeys(("q", "k", "v", "out"), 16) | {"lse": 4}))
    launch = launcher.Launch(driver, plan, driver.load(fake_cubin(kernel=(128, 40))), 0, lambda ordinal: 0, loader.CPU)
    calls = launcher.ForwardCalls(torch.Tensor, torch.is_grad_enabled)

    def add(out, lse, *, extents=None, scratch=None):
        calls.add(launch, 0, 64, 64, extents, 0.125, 132, out, lse, scratch)
        return calls

    return add


def run(calls, *tensors):
    return calls.run(*tensors, None, False, (None, None), True)


CPU = torch.device("cpu")
BF16, F32 = torch.bfloat16, torch.float32


def elsewhere(sizes, strides, dtype):
    return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")


def failing(sizes, strides, dtype):
    raise RuntimeError("no")


@pytest.mark.parametrize("empty_strided", [None, elsewhere, failing, lambda *args: 5])
def test_the_documented_way_to_allocate_remains(table, fake, empty_strided):
    """torch without the fast function, or one that gives a tensor elsewhere, fails, or gives something else."""
    makers = [(empty_strided, *allocation.tensor_maker(dtype, CPU)[1:]) for dtype in (BF16, F32)]
    out, lse = run(table(*makers), *qkv())

    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 130, 4, 64), BF16, (2, 4, 130), F32)
    assert launched(fake.launches[0])[1] == (out.data_ptr(), lse.data_ptr())


def test_the_fast_way_is_taken_where_torch_has_it(table):
    """Sizes, dense strides (an extent of 1 too), dtype; `new_empty` is not called."""
    seen = []

    def empty_strided(sizes, strides, dtype):
        seen.append((sizes, strides, dtype))
        return torch.empty_strided(sizes, strides, dtype=dtype)

    calls = table((empty_strided, None, BF16), (empty_strided, None, F32))
    run(calls, *qkv())
    run(calls, *qkv())
    run(calls, *qkv(batch=1, seqlen_q=1))

    expected = [((2, 130, 4, 64), (33280, 256, 64, 1), BF16), ((2, 4, 130), (520, 130, 1), F32)]
    assert seen == [*expected, *expected, ((1, 1, 4, 64), (256, 256, 64, 1), BF16), ((1, 4, 1), (4, 1, 1), F32)]


def test_a_failure_to_allocate_comes_out(table, fake):
    """As an out-of-memory error of torch would; nothing is launched."""

    def full(sizes):
        raise MemoryError("full")

    with pytest.raises(MemoryError, match="full"):
        run(table((None, full, BF16), (None, full, F32)), *qkv())
    assert fake.launches == []


def test_forgetting_while_a_call_allocates_is_harmless(table, fake):
    """Python code that allocation runs, a finalizer for one, may clear the table of the call under way."""
    new_out = allocation.tensor_maker(BF16, CPU)[1]

    def forgetful(sizes):
        calls.clear()
        gc.collect()
        return new_out(sizes)

    calls = table((None, forgetful, BF16), allocation.tensor_maker(F32, CPU))
    out, lse = run(calls, *qkv())

    assert launched(fake.launches[0])[1] == (out.data_ptr(), lse.data_ptr())
    assert run(calls, *qkv()) is None


def test_a_call_bound_by_extents_answers_those_alone(table):
    """batch, seqlen_q, heads, seqlen_k, heads_kv must all be as they were."""
    calls = table(allocation.tensor_maker(BF16, CPU), allocation.tensor_maker(F32, CPU), extents=(2, 130, 4, 77, 2))

    assert run(calls, *qkv()) is not None
    for change in ({"batch": 1}, {"seqlen_q": 131}, {"heads": 2}, {"seqlen_k": 78}, {"heads_kv": 1}):
        assert run(calls, *qkv(**change)) is None


@pytest.mark.parametrize("extents", [(1, 2), (1,) * 8, 5])
def test_a_table_takes_five_extents(table, extents):
    """Anything else is a mistake of the caller, not a wild write."""
    makers = allocation.tensor_maker(BF16, CPU), allocation.tensor_maker(F32, CPU)
    with pytest.raises(ValueError, match="five extents"):
        table(*makers, extents=extents)


# --- tensor maps ------------------------------------------------------------------------------------------------------


def test_a_map_is_made_once_for_an_address_and_its_extents(runtime, in_c, fake):
    """The same query again: none. Other queries, another length, or an error on the way: never a wrong one."""
    from fa4_kernels import DriverError

    first = qkv()
    api.flash_attn_func(*first)
    made = fake.num_maps
    in_c(*first)
    in_c(*first)
    assert fake.num_maps == made == 1

    queries = [qkv()[0] for _ in range(20)]  # more than there are places
    for q in queries + queries:
        in_c(q, *first[1:])
    found = [launched(launch)[0][3]["address"] for launch in fake.launches[3:]]
    assert found == [q.data_ptr() for q in queries + queries]

    in_c(*first)
    made = fake.num_maps
    in_c(first[0][:, :7], *first[1:])
    assert fake.num_maps == made + 1
    assert launched(fake.launches[-1])[0][3]["dims"] == (64, 7, 4, 2)
    fake.fail("cuTensorMapEncodeTiled", 1)
    with pytest.raises(DriverError):
        in_c(first[0][:, :8], *first[1:])
    fake.fail("", 0)
    in_c(first[0][:, :8], *first[1:])
    assert launched(fake.launches[-1])[0][3]["dims"] == (64, 8, 4, 2)


# --- recipes ----------------------------------------------------------------------------------------------------------

SCALE = "scale-sm90a-bf16-hd1-full"
SYMBOL = SCALE.replace("-", "_") + "_0"


def scale_plan():
    """x (rows, columns), out (rows, columns), factor: pointers, rows, columns, the row stride of x, factor."""
    n = Nodes()
    rows = n("in", "i64", "x.shape[0]")
    one = n("const", "i32", 1)
    fields = [[0, n("in", "i64", "x.ptr")], [8, n("in", "i64", "out.ptr")], [16, rows]]
    fields += [[24, n("in", "i64", "x.shape[1]")], [32, n("in", "f32", "factor")]]
    args = [{"name": name, "kind": "tensor", "dtype": "bf16", "rank": 2} for name in ("x", "out")]
    args += [{"name": "factor", "kind": "scalar", "dtype": "f32"}]
    param = {"kind": "bytes", "size": 36, "align": 4, "fields": fields}
    return make_plan(n, args=args, launches=[launch_template(SYMBOL, [n("trunc", "i32", rows), one, one], [param])])


def scale_recipe(**changes):
    """x to a workspace of ones, then the workspace, or x transposed, to the result."""
    buffer = dict.fromkeys(("name", "dtype", "shape", "fill"))
    return {
        "id": "scale",
        "op": "scale",
        "target": "sm_90a",
        "axes": {},
        "when": "",
        "inputs": [{"name": "x", "dtype": "bf16", "shape": ["rows", "columns"]}],
        "scalars": [{"name": "factor", "default": "0.5"}],
        "let": [],
        "buffers": [
            buffer | {"name": "middle", "dtype": "bf16", "shape": ["rows", "columns"], "fill": 1.0},
            buffer | {"name": "out", "dtype": "bf16", "shape": ["rows", "columns"]},
        ],
        "steps": [
            {"kernel": SCALE, "arguments": ["x", "middle", "factor"]},
            {"kernel": SCALE, "arguments": ["middle", "out", "factor * 2"]},
        ],
        "results": ["out"],
    } | changes


@pytest.fixture
def use(launcher, fake, tmp_path):
    """A runtime for a pack with one recipe."""

    def start(recipe):
        def change(manifest):
            manifest["recipes"] = [recipe]

        options = {"plan": scale_plan(), "cubin": fake_cubin(**{SYMBOL: (36,)}), "change": change}
        pack = packs.open_pack("toy", write_pack(tmp_path / "toy", [SCALE], **options))
        options = {"driver_path": fake.path, "device_type": loader.CPU, "packs": [pack]}
        loader.use_runtime(loader.Runtime(**options, stream_of=lambda ordinal: 0))

    yield start
    loader.use_runtime(None)


@pytest.fixture
def call_in_c(monkeypatch):
    """`call` that only C answers."""

    def call(op, **arguments):
        with monkeypatch.context() as patch:
            patch.setattr(recipes, "_bound", None)
            return recipes.call(op, **arguments)

    return call


def numbers(fake):
    """(x, out, rows, columns, factor) of each launch since the last look."""
    found = [struct.unpack("<4qf", param_bytes(launch)) for launch in fake.launches]
    fake.reset_launches()
    return found


def x(rows=6, columns=8):
    return torch.zeros(rows, columns, dtype=torch.bfloat16)


def test_a_repeated_recipe_launches_the_same(use, call_in_c, fake):
    """Steps in order, the workspace filled, results the caller's own; another scalar is another call."""
    use(scale_recipe())
    given = x()
    out = recipes.call("scale", x=given)
    expected = numbers(fake)
    again = call_in_c("scale", x=given)
    first, second = numbers(fake)

    assert [row[2:] for row in (first, second)] == [row[2:] for row in expected] == [(6, 8, 0.5), (6, 8, 1.0)]
    assert (first[0], first[1], second[1]) == (given.data_ptr(), second[0], again.data_ptr())
    assert (again.shape, again.dtype) == (out.shape, out.dtype)
    assert out.data_ptr() != again.data_ptr()
    with pytest.raises(AttributeError):
        call_in_c("scale", x=given, factor=2.0)
    recipes.call("scale", x=given, factor=2.0)
    call_in_c("scale", x=given, factor=2.0)
    assert [row[4] for row in numbers(fake)] == [2.0, 4.0, 2.0, 4.0]


def test_workspaces_are_filled_at_each_call(use, call_in_c, monkeypatch):
    """The recipe's number, in memory that the result shows: 1 everywhere, as the stand-in computes nothing."""
    use(scale_recipe(results=["middle", "x"]))
    given = x()
    recipes.call("scale", x=given)
    middle, same = call_in_c("scale", x=given)

    assert bool((middle == 1).all())
    assert same is given


def test_a_transposed_argument_is_read_transposed(use, call_in_c, fake):
    """x is (6, 8) with strides (1, 6): its transpose is a dense (8, 6) at the same address."""
    recipe = scale_recipe(
        buffers=[{"name": "out", "dtype": "bf16", "shape": ["columns", "rows"], "fill": None}],
        steps=[{"kernel": SCALE, "arguments": ["x.transpose", "out", "factor"]}],
    )
    use(recipe)
    given = x(8, 6).T
    recipes.call("scale", x=given)
    out = call_in_c("scale", x=given)

    first, second = numbers(fake)
    assert first[2:] == second[2:] == (8, 6, 0.5)
    assert (second[0], second[1]) == (given.data_ptr(), out.data_ptr())


def test_hundreds_of_shapes_keep_apart(use, fake):
    """More than the table has places for: every call launches its own rows, twice over."""
    use(scale_recipe())
    for _ in range(2):
        for rows in range(1, 400):
            recipes.call("scale", x=x(rows, 1))
            assert [row[2] for row in numbers(fake)] == [rows, rows]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"x": x(), "factor": 1}, id="an int"),
        pytest.param({"x": x(), "factor": True}, id="a bool"),
        pytest.param({"factor": 1.0, "x": x()}, id="another order"),
        pytest.param({"x": x(7)}, id="another extent"),
        pytest.param({"x": x().as_subclass(Subclass), "factor": 1.0}, id="subclass"),
    ],
)
def test_only_an_equal_call_is_equal(use, call_in_c, arguments):
    """Types of scalars, order of names and types of tensors count."""
    use(scale_recipe())
    recipes.call("scale", x=x(), factor=1.0)
    call_in_c("scale", x=x(), factor=1.0)

    with pytest.raises(AttributeError):
        call_in_c("scale", **arguments)
    recipes.call("scale", **arguments)


def test_a_text_is_not_taken_for_a_name(launcher):
    """(x="y", y=tensor) and (x=tensor, y="y") have the same objects in the same order, but are two calls."""
    calls = launcher.RecipeCalls(torch.Tensor, torch.is_grad_enabled)
    with pytest.raises(ValueError, match="no step"):
        calls.add("op", {"x": "y", "y": x()}, (), (), (0,))
    assert calls.run("op", {"x": x(), "y": "y"}) is None
    assert calls.run("op", {"x": [], "y": x()}) is None
    assert calls.run("op", {}) is None


def test_recipe_calls_leave_nothing_behind(use, call_in_c):
    """Reference counts of arguments do not move, and results go."""
    use(scale_recipe())
    given, factor = x(), 0.75
    recipes.call("scale", x=given, factor=factor)
    out = call_in_c("scale", x=given, factor=factor)
    gc.collect()
    before = [sys.getrefcount(item) for item in (given, factor, torch.bfloat16)]
    for _ in range(25):
        out = call_in_c("scale", x=given, factor=factor)
    gone = weakref.ref(out)
    del out
    gc.collect()

    assert [sys.getrefcount(item) for item in (given, factor, torch.bfloat16)] == before
    assert gone() is None
