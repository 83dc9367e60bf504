"""Contract of packed calls answered in C (answers.py, _calls.h): from the third of its kind on, a call launches what
the Python code beside it would launch, from memory of its own; whatever asks for more is left to Python.

Real kernels' plans on the stand-in driver, which records parameters. How it is told which way a call took: without
`packed.forward` only C can answer.
"""

import gc
import json
import math
import struct
import sys
import weakref

import pytest

pytestmark = pytest.mark.dsl
torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from fa4_kernels import allocation, answers, loader, packed, packs  # noqa: E402

from fa4build.plan.as_json import plan_to_json  # noqa: E402
from tests.runtime.fake import param_bytes  # noqa: E402
from tests.runtime.simulated import _pack, compile_variants  # noqa: E402

IDS = (
    "fwd-sm90a-bf16-hd64-causal-varlen",
    "fwd-sm90a-bf16-hd64-causal-varlen-split",
    "fwd-sm90a-bf16-hd64-local-varlen",
    "fwd-sm90a-bf16-hd64-full-varlen-sink",
    "fwd-sm90a-bf16-hd64-full-paged",
    "fwd-sm90a-bf16-hd64-full-paged-split-softcap",
    "fwd_combine-sm90a-bf16-hd64",
)
BF16 = torch.bfloat16
POINTER_BYTES = 8

if not allocation.CAN_ANSWER:
    pytest.skip("this torch has no exchange API: every call is served in Python", allow_module_level=True)


@pytest.fixture(scope="module")
def cubins(tmp_path_factory):
    return compile_variants(IDS)


class Capture:
    """Whether a CUDA graph is being captured."""

    active = False

    def __call__(self):
        return self.active


@pytest.fixture
def capture():
    return Capture()


@pytest.fixture
def runtime(launcher, fake, tmp_path, cubins, capture, monkeypatch):
    monkeypatch.setattr(allocation, "_scratches", {})
    opened = [packs.open_pack(name, _pack(tmp_path / name, name, cubin)) for name, cubin in cubins.items()]
    options = {"driver_path": fake.path, "device_type": loader.CPU, "packs": opened}
    made = loader.Runtime(**options, stream_of=lambda ordinal: 0x77, is_capturing=capture)
    loader.use_runtime(made)
    yield made
    loader.use_runtime(None)


@pytest.fixture
def in_c(runtime, monkeypatch):
    """A call that only C answers."""

    def call(function, *args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(packed, "forward", None)
            return function(*args, **options)

    return call


@pytest.fixture
def in_python(runtime, monkeypatch):
    """A call as if nothing were answered in C, nor counted."""

    def call(function, *args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(answers, "answer", lambda arguments: None)
            patch.setattr(answers, "note", lambda arguments, call: None)
            return function(*args, **options)

    return call


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def zeros(*shape):
    return torch.zeros(shape, dtype=BF16)


def varlen(**options):
    """Three sequences, the second without queries."""
    q, k, v = zeros(25, 4, 64), zeros(40, 2, 64), zeros(40, 2, 64)
    return (q, k, v, ints(0, 5, 5, 25), ints(0, 9, 12, 40), 20, 28), {"causal": True, **options}


def cache(rows=1, **options):
    """Two sequences, a cache of 300 keys each."""
    q, keys, values = zeros(2, rows, 4, 64), zeros(2, 300, 2, 64), zeros(2, 300, 2, 64)
    return (q, keys, values, ints(300, 17)), options


def pages(rows=1, **options):
    q, keys, values = zeros(2, rows, 4, 64), zeros(9, 16, 2, 64), zeros(9, 16, 2, 64)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    return (q, keys, values, ints(60, 17), table), options


PACKED, CACHED = packed.flash_attn_varlen_func, packed.flash_attn_with_kvcache
SINK = torch.tensor([0.5, 2.0, -1.0, 0.0])
CALLS = {
    "varlen": (PACKED, *varlen()),
    "varlen, lse": (PACKED, *varlen(return_lse=True)),
    "varlen, used": (PACKED, *varlen(seqused_q=ints(3, 0, 20), seqused_k=ints(9, 0, 28))),
    "varlen, scale": (PACKED, *varlen(softmax_scale=0.25)),
    "varlen, parts": (PACKED, *varlen(num_splits=3)),
    "varlen, parts, lse": (PACKED, *varlen(num_splits=3, return_lse=True)),
    "varlen, sink": (PACKED, *varlen(causal=False, learnable_sink=SINK)),
    "cache": (CACHED, *cache(causal=True, num_splits=1)),
    "cache, three queries": (CACHED, *cache(3, causal=True, num_splits=1)),
    "cache, parts by choice": (CACHED, *cache(3, causal=True, max_seqlen_q=3)),
    "cache, parts": (CACHED, *cache(3, causal=True, num_splits=5)),
    "pages": (CACHED, *pages(num_splits=1)),
    "pages, parts, cap": (CACHED, *pages(2, num_splits=2, softcap=20.0)),
}


def params(cubins, launch):
    """(pointer or None, the rest) of each parameter of a recorded launch."""
    name = next(name for name in cubins if launch.kernel.decode().startswith(name.replace("-", "_") + "_0"))
    document = json.loads(plan_to_json(cubins[name].plan))
    (planned,) = document["launches"]
    data, offset, found = param_bytes(launch), 0, []
    for param in planned["params"]:
        size = 128 if param["kind"] == "tmap" else param["size"]
        chunk = data[offset : offset + size]
        has_pointer = param["kind"] == "tmap" or param["align"] == POINTER_BYTES
        head = POINTER_BYTES if has_pointer else 0
        found.append((struct.unpack("<Q", chunk[:head])[0] if head else None, chunk[head:]))
        offset += size
    return found


def recorded(fake, cubins):
    """Every launch since the last look: kernel, grid, stream, and its parameters."""
    found = [(x.kernel, list(x.grid), x.stream, params(cubins, x)) for x in fake.launches]
    fake.reset_launches()
    return found


def same_but_for_buffers(one, other, inputs):
    """Whether launches agree but for addresses of memory that each call made: a consistent renaming of pointers."""
    renamed = {}
    for a, b in zip(one, other, strict=True):
        assert a[:3] == b[:3]
        for (pointer, rest), (pointer_b, rest_b) in zip(a[3], b[3], strict=True):
            assert rest == rest_b
            assert renamed.setdefault(pointer, pointer_b) == pointer_b
    assert all(renamed[pointer] == pointer for pointer in inputs if pointer in renamed)
    assert len(set(renamed.values())) == len(renamed)
    return renamed


@pytest.mark.parametrize("kind", CALLS)
def test_c_launches_what_python_launches(in_c, in_python, fake, cubins, kind):
    """The same kernels, grids, stream and parameters, from memory of its own; results alike in shape, type, strides."""
    function, args, options = CALLS[kind]
    fake.reset_launches()
    expected = in_python(function, *args, **options)
    right = recorded(fake, cubins)
    function(*args, **options)
    function(*args, **options)
    recorded(fake, cubins)
    found = in_c(function, *args, **options)
    inputs = [x.data_ptr() for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]
    renamed = same_but_for_buffers(right, recorded(fake, cubins), inputs)

    assert renamed[expected[0].data_ptr()] == found[0].data_ptr()
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
            assert renamed[one.data_ptr()] == other.data_ptr()


@pytest.mark.parametrize("kind", CALLS)
def test_other_tensors_of_these_shapes_are_read(in_c, fake, cubins, kind):
    """Told with a tensor given twice, where that is possible, then called with others: each is read from its place."""
    function, args, options = CALLS[kind]
    args = list(args)
    if kind.startswith("varlen"):
        args[3] = args[4]
    args[1] = args[2]
    for _ in range(2):
        function(*args, **options)
    fresh = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
    named = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    fake.reset_launches()
    in_c(function, *fresh, **named)

    pointers = {pointer for launch in recorded(fake, cubins) for pointer, _ in launch[3]}
    assert {x.data_ptr() for x in (*fresh, *named.values()) if isinstance(x, torch.Tensor)} <= pointers


def told(function, *args, **options):
    for _ in range(2):
        function(*args, **options)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"causal": False, "window_size": (None, 0)}, id="the same mask by another name"),
        pytest.param({"window_size": (5, 0)}, id="window"),
        pytest.param({"softmax_scale": 0.5}, id="scale"),
        pytest.param({"num_splits": 2}, id="parts"),
        pytest.param({"return_lse": True}, id="lse"),
        pytest.param({"deterministic": True}, id="a rare argument"),
        pytest.param({"seqused_k": ints(9, 0, 28)}, id="a list more"),
    ],
)
def test_a_call_that_differs_is_left_to_python(in_c, change):
    """By anything but pointers."""
    args, options = varlen()
    told(PACKED, *args, **options)
    in_c(PACKED, *args, **options)

    with pytest.raises(TypeError, match="NoneType"):
        in_c(PACKED, *args, **(options | change))


def test_other_shapes_are_left_to_python(in_c):
    """A row more."""
    (q, *args), options = varlen()
    told(PACKED, q, *args, **options)
    with pytest.raises(TypeError, match="NoneType"):
        in_c(PACKED, zeros(26, 4, 64), *args, **options)


@pytest.mark.parametrize("converted", ["q", "keys and values"])
def test_what_autocast_converts_is_converted_at_each_call(runtime, fake, converted):
    """Where the rest has its dtype already, too: nothing is told of tensors that no kernel was given."""
    (q, keys, values, used), options = cache(1, causal=True, num_splits=1)
    if converted == "q":
        q = q.float()
    else:
        keys, values = keys.float(), values.float()
    with torch.autocast("cpu", BF16), torch.no_grad():
        for _ in range(4):
            out, _ = packed.flash_attn_with_kvcache(q, keys, values, used, **options)
            assert out.dtype == BF16
    assert len(fake.launches) == 4


def test_gradients_are_left_to_python(in_c, monkeypatch):
    """Of q or of the sink, unless none are recorded."""
    args, options = CALLS["varlen, sink"][1:]
    told(PACKED, *args, **options)
    wanted = (args[0].clone().requires_grad_(), *args[1:])
    monkeypatch.setattr(packed, "run_operator", lambda call: ("operator", None))

    assert in_c(PACKED, *wanted, **options) == ("operator", None)
    assert in_c(PACKED, *args, **options | {"learnable_sink": SINK.clone().requires_grad_()}) == ("operator", None)
    with torch.no_grad():
        assert in_c(PACKED, *wanted, **options)[0].shape == (25, 4, 64)


def test_caches_that_must_be_copied_are_left_to_python(in_c, fake):
    """A slice of a longer cache; a q whose elements are apart: told as dense ones, then served by a copy."""
    (q, keys, values, used), options = cache(3, causal=True, num_splits=1)
    told(CACHED, q, keys, values, used, **options)
    long = zeros(2, 400, 2, 64)
    apart = zeros(2, 3, 64, 4).transpose(2, 3)
    for args in ((q, long[:, :300], values, used), (apart, keys, values, used)):
        with pytest.raises(TypeError, match="NoneType"):
            in_c(CACHED, *args, **options)
        fake.reset_launches()
        CACHED(*args, **options)
        assert len(fake.launches) == 1
    in_c(CACHED, q, keys, values, used, **options)
    one = zeros(1, 400, 2, 64)[:, :300]  # of one sequence a slice is no copy
    told(CACHED, q[:1], keys[:1], values[:1], used[:1], **options)
    in_c(CACHED, q[:1], one, one, used[:1], **options)


def test_a_converted_sink_is_never_told(in_c):
    """bf16 is brought to float32 at each call: what was converted once may have changed."""
    args, options = CALLS["varlen, sink"][1:]
    options = options | {"learnable_sink": SINK.bfloat16()}
    for _ in range(4):
        PACKED(*args, **options)
    with pytest.raises(TypeError, match="NoneType"):
        in_c(PACKED, *args, **options)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"window_size": [5, 0]}, id="a list"),
        pytest.param({"max_seqlen_q": torch.tensor(20)}, id="a tensor for a bound"),
    ],
)
def test_what_is_no_plain_number_is_served_and_never_told(in_c, given):
    """Its value is not in what the launcher compares."""
    (*args, _, _), options = varlen()
    for _ in range(4):
        assert PACKED(*args, **(options | given))[0].shape == (25, 4, 64)
    with pytest.raises(TypeError, match="NoneType"):
        in_c(PACKED, *args, **(options | given))


def test_nothing_is_told_during_a_capture(in_c, capture):
    """Lists that are made then belong to the graph. Calls told before are answered."""
    told(CACHED, *CALLS["cache"][1], **CALLS["cache"][2])
    capture.active = True
    in_c(CACHED, *CALLS["cache"][1], **CALLS["cache"][2])
    args, options = CALLS["cache, three queries"][1:]
    capture.active = False
    CACHED(*args, **options)
    capture.active = True
    CACHED(*args, **options)
    with pytest.raises(TypeError, match="NoneType"):
        in_c(CACHED, *args, **options)


def test_a_call_is_told_at_its_second_time(in_c):
    """Shapes that do not come again are only counted; a new runtime counts from the start."""
    args, options = varlen()
    PACKED(*args, **options)
    with pytest.raises(TypeError, match="NoneType"):
        in_c(PACKED, *args, **options)
    PACKED(*args, **options)
    in_c(PACKED, *args, **options)
    loader.forget_calls()
    with pytest.raises(TypeError, match="NoneType"):
        in_c(PACKED, *args, **options)


def test_wrong_calls_get_the_error_they_had(runtime):
    """Nothing that C was told makes a wrong call right."""
    args, options = varlen()
    told(PACKED, *args, **options)
    with pytest.raises(packed.InputError, match=r"cu_seqlens_k has shape \(4,\); \(5,\) is expected"):
        PACKED(*args[:3], ints(0, 5, 5, 25, 25), *args[4:], seqused_q=ints(1, 1, 1), **options)
    with pytest.raises(packed.InputError, match="window_size"):
        PACKED(*args, window_size=[1], **options)
    with pytest.raises(packed.InputError, match="softcap"):
        PACKED(*args, softcap=math.nan, **options)


def test_answers_leave_nothing_behind(in_c):
    """Reference counts of arguments do not move, and results go."""
    function, args, options = CALLS["varlen, parts, lse"]
    told(function, *args, **options)
    held = [*args[:5], BF16, torch.float32]
    out = in_c(function, *args, **options)
    gc.collect()
    before = [sys.getrefcount(x) for x in held]
    for _ in range(25):
        out = in_c(function, *args, **options)
    gone = [weakref.ref(x) for x in out]
    del out
    gc.collect()

    assert [sys.getrefcount(x) for x in held] == before
    assert [x() for x in gone] == [None, None]
