"""Contract: `flash_attn_func` either launches one kernel that fits its tensors, or raises one clear error and launches
nothing. Masks are brought to the form the kernels know; empty problems are answered without a launch.

The tensors lie on the CPU and the driver is a stand-in, which the runtime is told explicitly; what reaches the driver
is what would reach a GPU.
"""

import math
import struct

import pytest

torch = pytest.importorskip("torch")

import fa4_kernels  # noqa: E402
import numpy as np  # noqa: E402
from fa4_kernels import CaptureError, InputError, NoKernelError, loader, packs  # noqa: E402
from fa4_kernels.plan import encode_plan  # noqa: E402
from fa4_kernels.windows import Offsets  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tests.runtime.fake import (  # noqa: E402
    FakeDriver,
    entry_axes,
    fake_cubin,
    forward_plan,
    param_bytes,
    read_map,
    write_pack,
    write_seal,
)

UNBOUNDED = 1 << 30
IDS = [
    "fwd-sm90a-bf16-hd64-causal",
    "fwd-sm90a-bf16-hd64-full",
    "fwd-sm90a-bf16-hd64-local",
    "fwd-sm90a-bf16-hd96x64-full",
    "fwd-sm90a-fp16-hd64-full",
]


_BLOB = packs.Blob(group=0, offset=0, size=1, sha256="")
ENTRY = packs.Entry(
    id="fwd-sm90a-bf16-hd64-full",
    op="fwd",
    target="sm_90a",
    axes=entry_axes("fwd-sm90a-bf16-hd64-full")[1],
    cubin=_BLOB,
    plan=_BLOB,
    symbols=("kernel",),
    evidence={},
)


class Capture:
    """Whether a CUDA graph is being captured, as the runtime is told."""

    active = False

    def __call__(self):
        return self.active


@pytest.fixture
def capture():
    return Capture()


@pytest.fixture
def runtime(launcher, fake, tmp_path, capture):
    """The runtime of this process: the stand-in driver, CPU tensors, a pack of five kernels."""
    pack = packs.open_pack("test", write_pack(tmp_path / "pack", IDS))
    options = {"driver_path": fake.path, "device_type": loader.CPU, "packs": [pack]}
    made = loader.Runtime(**options, stream_of=lambda ordinal: 0x77, is_capturing=capture)
    loader.use_runtime(made)
    yield made
    loader.use_runtime(None)


@pytest.fixture
def attention(runtime):
    return fa4_kernels.flash_attn_func


def qkv(batch=2, seqlen_q=130, seqlen_k=77, heads=4, heads_kv=2, head_dim=64, head_dim_v=None, dtype=torch.bfloat16):
    q = torch.zeros(batch, seqlen_q, heads, head_dim, dtype=dtype)
    k = torch.zeros(batch, seqlen_k, heads_kv, head_dim, dtype=dtype)
    v = torch.zeros(batch, seqlen_k, heads_kv, head_dim_v or head_dim, dtype=dtype)
    return q, k, v


def launched(fake):
    """The one launch: its kernel, q's map, and the numbers of `forward_plan` as a dict."""
    (launch,) = fake.launches
    data = param_bytes(launch)
    names = ("out", "lse", "softmax_scale", "window_left", "window_right", "num_sms", "seqlen_q", "seqlen_k")
    numbers = dict(zip(names, struct.unpack("<QQf5i", data[128:]), strict=True))
    return launch.kernel.decode(), read_map(data[:128]), numbers


def test_a_call_launches_its_kernel_with_its_tensors(attention, fake):
    """The kernel of dtype, head_dim and mask; pointers of q, out and lse; 1/sqrt(64) = 0.125; 132 SMs."""
    q, k, v = qkv()
    out, lse = attention(q, k, v, return_lse=True)

    kernel, tensor_map, numbers = launched(fake)
    assert kernel == "fwd_sm90a_bf16_hd64_full_0"
    assert tensor_map["address"] == q.data_ptr()
    expected = {"out": out.data_ptr(), "lse": lse.data_ptr(), "softmax_scale": 0.125, "num_sms": 132}
    expected |= {"window_left": UNBOUNDED, "window_right": UNBOUNDED, "seqlen_q": 130, "seqlen_k": 77}
    assert numbers == expected
    assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, torch.bfloat16, True)
    assert (lse.shape, lse.dtype) == ((2, 4, 130), torch.float32)


def test_lse_is_none_unless_asked_for(attention):
    """Always a pair."""
    out, lse = attention(*qkv())

    assert out.shape == (2, 130, 4, 64)
    assert lse is None


def test_head_dim_v_is_that_of_the_output(attention, fake):
    """(96, 64): out has 64 columns, the scale is 1/sqrt(96)."""
    out, _ = attention(*qkv(head_dim=96, head_dim_v=64))

    kernel, _, numbers = launched(fake)
    assert kernel == "fwd_sm90a_bf16_hd96x64_full_0"
    assert out.shape == (2, 130, 4, 64)
    assert numbers["softmax_scale"] == struct.unpack("<f", struct.pack("<f", 96**-0.5))[0]


@pytest.mark.parametrize(
    ("causal", "window", "mask", "left", "right"),
    [
        pytest.param(False, (None, None), "full", UNBOUNDED, UNBOUNDED, id="none"),
        pytest.param(True, (None, None), "causal", UNBOUNDED, 0, id="causal"),
        pytest.param(False, (None, 0), "causal", UNBOUNDED, 0, id="right 0 is causal"),
        pytest.param(True, (None, 5), "causal", UNBOUNDED, 0, id="causal overrides right"),
        pytest.param(False, (7, 3), "local", 7, 3, id="both sides"),
        pytest.param(False, (7, None), "local", 7, UNBOUNDED, id="left alone"),
        pytest.param(False, (None, 3), "local", UNBOUNDED, 3, id="right alone"),
        pytest.param(True, (7, None), "local", 7, 0, id="causal with left"),
        pytest.param(False, (-1, -1), "full", UNBOUNDED, UNBOUNDED, id="both negative: no window"),
        pytest.param(True, (-1, -1), "causal", UNBOUNDED, 0, id="both negative and causal"),
        pytest.param(False, (-3, -2), "full", UNBOUNDED, UNBOUNDED, id="any two negative ones: no window"),
        pytest.param(False, (-1, 0), "causal", UNBOUNDED, 0, id="-1 on the left is no bound"),
        pytest.param(False, (4, -1), "local", 4, UNBOUNDED, id="-1 on the right is no bound"),
        pytest.param(False, (-1, 4), "local", UNBOUNDED, 4, id="-1 on the left of a window"),
        pytest.param(False, (-1, None), "full", UNBOUNDED, UNBOUNDED, id="-1 beside None"),
        pytest.param(False, (None, -1), "full", UNBOUNDED, UNBOUNDED, id="None beside -1"),
        pytest.param(True, (-1, 0), "causal", UNBOUNDED, 0, id="causal and -1"),
        pytest.param(True, (-1, None), "causal", UNBOUNDED, 0, id="causal, -1 beside None"),
        pytest.param(True, (4, -1), "local", 4, 0, id="causal with left, and -1"),
        pytest.param(False, (np.int64(7), np.int32(-1)), "local", 7, UNBOUNDED, id="ints of numpy"),
        pytest.param(np.bool_(True), [7, 3], "local", 7, 0, id="a bool of numpy, a list"),
        pytest.param(1, Offsets(-2, 5), "local", -2, 5, id="offsets, from within the package"),
        pytest.param(False, (1 << 40, 3), "local", UNBOUNDED, 3, id="clipped to 2^30"),
    ],
)
def test_masks_are_brought_to_one_form(attention, fake, causal, window, mask, left, right):
    """fa4-kernels.md, section 1.2: which kernel a mask needs and which numbers it gets."""
    attention(*qkv(), causal=causal, window_size=window)

    kernel, _, numbers = launched(fake)
    assert kernel == f"fwd_sm90a_bf16_hd64_{mask}_0"
    assert (numbers["window_left"], numbers["window_right"]) == (left, right)


@pytest.mark.parametrize(
    ("extents", "options"),
    [
        pytest.param({"seqlen_k": 0}, {}, id="no keys"),
        pytest.param({"seqlen_q": 0}, {}, id="no queries"),
        pytest.param({"batch": 0}, {}, id="no batch"),
        pytest.param({"heads": 0, "heads_kv": 0}, {}, id="no heads"),
        pytest.param({}, {"window_size": Offsets(-3, 2)}, id="window that sees nothing"),
    ],
)
def test_problems_without_a_visible_key_are_answered_without_a_launch(attention, fake, extents, options):
    """out = 0, lse = -inf; nothing reaches the driver."""
    q, k, v = qkv(**extents)
    out, lse = attention(q, k, v, return_lse=True, **options)

    assert fake.launches == []
    assert out.shape == q.shape
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize(
    ("view", "is_copied"),
    [
        pytest.param(lambda q: q, False, id="contiguous"),
        pytest.param(lambda q: q.transpose(1, 2).contiguous().transpose(1, 2), False, id="heads before seqlen"),
        pytest.param(lambda q: torch.cat((q, q), dim=2)[:, :, 4:], False, id="slice of packed heads"),
        pytest.param(lambda q: torch.cat((q, q), dim=3)[..., ::2], True, id="last stride 2"),
        pytest.param(lambda q: torch.cat((q, q), dim=3)[..., 1:65], True, id="pointer off by 2 bytes"),
        pytest.param(lambda q: q[:, :1].expand(-1, 130, -1, -1), True, id="expanded"),
    ],
)
def test_only_what_a_kernel_cannot_read_is_copied(attention, fake, view, is_copied):
    """The map's address tells: the caller's memory, or that of a dense copy with strides 512, 128 and 66560 bytes."""
    q, k, v = qkv()
    q = view(q)
    attention(q, k, v)

    _, tensor_map, _ = launched(fake)
    assert (tensor_map["address"] != q.data_ptr()) == is_copied
    if is_copied:
        assert tensor_map["strides"] == (512, 128, 130 * 512)


def test_all_three_inputs_can_need_a_copy(attention, fake):
    """q, k and v with last stride 2 at once: one launch."""
    attention(*(torch.cat((x, x), dim=3)[..., ::2] for x in qkv()))

    assert len(fake.launches) == 1


BAD_CALLS = [
    pytest.param(lambda q, k, v: (q.float(), k.float(), v.float()), {}, "q is torch.float32; kernels take", id="fp32"),
    pytest.param(lambda q, k, v: (q[0], k, v), {}, r"q has shape \(130, 4, 64\); \(batch, seqlen", id="rank 3"),
    pytest.param(lambda q, k, v: (q[:1], k, v), {}, "batch differs", id="batch"),
    pytest.param(lambda q, k, v: (q, k[:, :5], v), {}, "seqlen_k of k and v differs", id="seqlen_k"),
    pytest.param(lambda q, k, v: (q, k[:, :, :1], v), {}, "num_heads_kv of k and v differs", id="heads of k and v"),
    pytest.param(lambda q, k, v: (q[:, :, :3], k, v), {}, "num_heads_q = 3 is no multiple of num_heads_kv", id="GQA"),
    pytest.param(lambda q, k, v: (q[..., :32], k, v), {}, "head_dim of q and k differs", id="head_dim"),
    pytest.param(lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), {}, "num_heads_kv = 0", id="no key heads"),
    pytest.param(lambda q, k, v: (q.tolist(), k, v), {}, "q is a list, a torch tensor is expected", id="list"),
    pytest.param(lambda q, k, v: (q.float().numpy(), k, v), {}, "q is a ndarray, a torch tensor is", id="numpy q"),
    pytest.param(lambda q, k, v: (q, k, v.float().numpy()), {}, "v is a ndarray, a torch tensor is", id="numpy v"),
    pytest.param(lambda q, k, v: (q, k, v), {"softmax_scale": -1.0}, "softmax_scale must be a pos", id="scale < 0"),
    pytest.param(lambda q, k, v: (q, k, v), {"softmax_scale": math.nan}, "it is nan", id="scale nan"),
    pytest.param(
        lambda q, k, v: (q, k, v),
        {"softmax_scale": torch.ones(())},
        "it is a torch.float32 tensor",
        id="scale a tensor",
    ),
    pytest.param(lambda q, k, v: (q, k, v), {"softmax_scale": True}, "softmax_scale .* is True", id="scale True"),
    pytest.param(lambda q, k, v: (q, k, v), {"softmax_scale": 1e-60}, "that float32 holds", id="scale 1e-60"),
    pytest.param(lambda q, k, v: (q, k, v), {"softcap": True}, "softcap must be .* it is True", id="softcap True"),
    pytest.param(lambda q, k, v: (q, k, v), {"num_splits": True}, "num_splits must be an int", id="num_splits True"),
    pytest.param(lambda q, k, v: (q, k, v), {"causal": "no"}, "causal must be True or False", id="causal a text"),
    pytest.param(
        lambda q, k, v: (q, k, v), {"causal": torch.ones(())}, "it is a torch.float32 t", id="causal a tensor"
    ),
    pytest.param(lambda q, k, v: (q, k, v), {"causal": None}, "causal must be True or False", id="causal None"),
    pytest.param(lambda q, k, v: (q, k, v), {"return_lse": "no"}, "return_lse must be True or", id="return_lse a text"),
    pytest.param(lambda q, k, v: (q, k, v), {"window_size": (-5, 3)}, "a side is a number of keys", id="window -5"),
    pytest.param(lambda q, k, v: (q, k, v), {"window_size": (None, -2)}, "a side is a number of keys", id="window -2"),
    pytest.param(lambda q, k, v: (q, k, v), {"window_size": (True, 3)}, "window_size must be", id="window True"),
    pytest.param(lambda q, k, v: (q, k, v), {"window_size": (4.5, 3)}, "window_size must be", id="window 4.5"),
    pytest.param(
        lambda q, k, v: (q, k, v), {"window_size": (torch.tensor(4), 3)}, "window_size must be", id="window t"
    ),
    pytest.param(lambda q, k, v: (q, k, v, 0.1), {}, "q, k and v by position.* softmax_scale=", id="FA2's dropout"),
    pytest.param(lambda q, k, v: (q, k, v, 0.1, True), {}, "softmax_scale=.., causal=..", id="FA3's order"),
    pytest.param(lambda q, k, v: (q, k, v, None, None, 0.1), {}, "window_size=..", id="FA4's order"),
    pytest.param(lambda q, k, v: (q, k, v), {"window_size": 5}, "window_size must be .left, right.", id="window 5"),
    pytest.param(lambda q, k, v: (q, k, v), {"window_size": ("a", 5)}, "window_size must be", id="window text"),
]


@pytest.mark.parametrize(("change", "options", "message"), BAD_CALLS)
@pytest.mark.parametrize("is_warm", [False, True], ids=["first call", "after a good call"])
def test_a_bad_call_is_one_clear_error(attention, fake, change, options, message, is_warm):
    """Which argument, what it is, what is allowed; the same before and after the kernel is loaded; nothing launched."""
    if is_warm:
        attention(*qkv())
    before = len(fake.launches)

    with pytest.raises(InputError, match=message) as caught:
        attention(*change(*qkv()), **options)
    assert "\n" not in str(caught.value)
    assert len(fake.launches) == before


def test_dtypes_that_differ_are_found_before_and_after_the_first_call(attention, fake):
    """Once a kernel is bound, the launcher checks each dtype while it reads the tensor."""
    q, k, v = qkv()
    with pytest.raises(InputError, match=r"k is torch\.float16, q is torch\.bfloat16; q, k and v must have one dtype"):
        attention(q, k.half(), v)
    attention(q, k, v)

    with pytest.raises(InputError, match="v is a float16 tensor; this kernel takes bfloat16"):
        attention(q, k, v.half())
    assert len(fake.launches) == 1


def test_cpu_tensors_are_refused_by_a_cuda_runtime(launcher, fake):
    """The normal runtime, on a machine whose driver has devices: CPU tensors are one clear error."""
    loader.use_runtime(loader.Runtime(driver_path=fake.path, packs=[], stream_of=lambda ordinal: 0))
    try:
        with pytest.raises(InputError, match="q is on cpu; the kernels run on CUDA devices"):
            fa4_kernels.flash_attn_func(*qkv())
    finally:
        loader.use_runtime(None)


def test_cpu_tensors_are_refused_without_a_driver():
    """On a machine without GPU the same error comes, not one about the driver."""
    loader.use_runtime(None)

    with pytest.raises(InputError, match="q is on cpu; the kernels run on CUDA devices"):
        fa4_kernels.flash_attn_func(*qkv())


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"learnable_sink": torch.zeros(4)}, "sink"),
        ({"score_mod": lambda *a: a[0]}, "score_mod"),
        ({"mask_mod": lambda *a: True}, "mask_mod"),
        ({"qv": torch.zeros(1)}, "qv"),
        ({"block_sparse_tensors": ()}, "block_sparsity"),
        ({"gather_kv_indices": torch.zeros(1)}, "gather_kv_indices"),
    ],
)
def test_what_no_kernel_does_yet_raises_with_the_reason(attention, fake, options, feature):
    """Upstream's other arguments: accepted by name, refused with what was considered."""
    with pytest.raises(NoKernelError, match=f"fwd-sm90a-bf16-hd64-full .*: was built without {feature}"):
        attention(*qkv(), **options)
    assert fake.launches == []


@pytest.mark.parametrize("options", [{"pack_gqa": True}, {"num_splits": 1}, {"softcap": 0.0}, {"deterministic": True}])
def test_arguments_that_change_no_result_are_accepted(attention, fake, options):
    """Hints and neutral values launch as usual."""
    attention(*qkv(), **options)

    assert len(fake.launches) == 1


def test_no_kernel_for_a_head_dim_says_what_to_do(attention):
    """No command builds one: the trace, the head dims that there are, and which one to pad to."""
    with pytest.raises(NoKernelError, match=r"there are 64, 96, .*Pad q, k and v with zeros to head_dim 64"):
        attention(*qkv(head_dim=32))


def test_inputs_that_require_grad_are_refused_without_a_backward_kernel(attention, fake):
    """The error says so, and how to go on; under no_grad the call works."""
    q, k, v = qkv()
    k.requires_grad_()

    with pytest.raises(NoKernelError, match=r"requires grad, and no backward.*torch\.no_grad\(\)(.|\n)*op is fwd"):
        attention(q, k, v)
    assert fake.launches == []
    with torch.no_grad():
        attention(q, k, v)
    assert len(fake.launches) == 1


def test_a_first_load_inside_a_graph_capture_is_refused(attention, fake, capture):
    """The message names preload; after it the same call is captured, and other calls of loaded kernels too."""
    capture.active = True
    with pytest.raises(CaptureError, match=r"fwd-sm90a-bf16-hd64-full is not loaded.*preload\(devices=\[0\]"):
        attention(*qkv())
    assert (fake.num_loads, fake.launches) == (0, [])

    capture.active = False
    assert fa4_kernels.preload([0], "*-hd64-full") == ("fwd-sm90a-bf16-hd64-full", "fwd-sm90a-fp16-hd64-full")
    capture.active = True
    attention(*qkv())
    assert len(fake.launches) == 1


def test_a_kernel_is_loaded_once(attention, fake, runtime):
    """Twenty calls of different extents: one library, one function."""
    for seqlen in range(1, 21):
        attention(*qkv(seqlen_q=seqlen))

    assert (fake.num_loads, fake.num_functions, len(fake.launches)) == (1, 1, 20)


def test_preload_of_nothing_is_an_error(runtime):
    """A glob that matches no kernel is a mistake, not an empty success."""
    with pytest.raises(InputError, match=r"preload: bwd-\* matches no kernel"):
        fa4_kernels.preload(select="bwd-*")


def test_explain_loads_nothing(runtime, fake):
    """The decision of a call, printed: the chosen entry first, then the others with their reasons."""
    decision = fa4_kernels.explain(*qkv(), causal=True, return_lse=True, softcap=0.0)

    assert decision.entry.id == "fwd-sm90a-bf16-hd64-causal"
    assert fa4_kernels.explain(*qkv(), softcap=20.0).entry is None
    assert "fwd-sm90a-bf16-hd64-full (fa4-kernels-test): mask is full" in str(decision)
    assert fake.num_loads == 0


def test_required_evidence_holds_for_later_calls(attention, fake):
    """The pack of this test has static evidence only."""
    attention(*qkv())
    fa4_kernels.require_evidence("silicon")

    with pytest.raises(NoKernelError, match="has no silicon evidence"):
        attention(*qkv())
    with pytest.raises(InputError, match=r"'gold' is unknown\. Allowed: static, simulated, silicon"):
        fa4_kernels.require_evidence("gold")


def test_decisions_are_reported_when_asked_for(launcher, fake, tmp_path):
    """One text a decision, not one a call."""
    pack = packs.open_pack("test", write_pack(tmp_path / "pack", IDS))
    texts = []
    options = {"driver_path": fake.path, "device_type": loader.CPU, "packs": [pack]}
    loader.use_runtime(loader.Runtime(**options, stream_of=lambda ordinal: 0, report=texts.append))
    try:
        fa4_kernels.flash_attn_func(*qkv())
        fa4_kernels.flash_attn_func(*qkv())
    finally:
        loader.use_runtime(None)

    (text,) = texts
    assert text.startswith("fwd, dense, bf16, head_dim 64, mask full on Fake GPU 0 (compute capability 9.0")
    assert "fwd-sm90a-bf16-hd64-full from fa4-kernels-test 0.1.0 (evidence: static)" in text


def test_another_gpu_gets_another_answer(attention, fake):
    """On compute capability 10.0 the sm_90a pack has nothing to offer."""
    fake.set_capability(10, 0)

    with pytest.raises(NoKernelError, match=r"pip install 'fa4-kernels\[sm100\]'"):
        attention(*qkv())


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        pytest.param(
            lambda q, k, v: fa4_kernels.flash_attn_with_kvcache(q, k, v, 3),
            "fwd, varlen, bf16.* layout is dense",
            id="varlen",
        ),
        pytest.param(
            lambda q, k, v: fa4_kernels.flash_attn_with_kvcache(q, k, v, 3, torch.zeros(len(q), 1, dtype=torch.int32)),
            "fwd, paged, bf16",
            id="paged",
        ),
        pytest.param(
            lambda q, k, v: fa4_kernels.flash_attn_func(q, k, v, num_splits=3),
            "fwd, varlen, bf16.*, split.* layout is dense; was built without split",
            id="split",
        ),
        pytest.param(
            lambda q, k, v: fa4_kernels.flash_attn_combine(q[None], q[None, ..., 0], out_dtype=q.dtype),
            "fwd_combine, dense, bf16",
            id="combine",
        ),
    ],
)
def test_functions_without_kernels_answer_through_dispatch(runtime, call, reason):
    """The same trace as for a missing dense kernel."""
    with pytest.raises(NoKernelError, match=f"(?s){reason}"):
        call(*qkv())


def test_explain_names_the_first_kernel_of_a_call_that_is_missing(runtime):
    """Split keys need two kernels: the parts come first; a sink belongs to the merge."""
    q, k, v = qkv()
    decision = fa4_kernels.explain(q, k, v, num_splits=3, learnable_sink=torch.zeros(4))

    assert decision.entry is None
    assert str(decision.problem) == "fwd, varlen, bf16, head_dim 64, mask full, split"
    assert "--select 'fwd-sm90a-bf16-hd64-full-varlen-split'" in str(decision)


def test_a_plan_that_contradicts_the_signature_is_refused(launcher, fake, tmp_path):
    """A pack whose plan takes q as fp16 under an entry that says bf16."""
    directory = write_pack(tmp_path / "pack", ["fwd-sm90a-fp16-hd64-full"])
    manifest = (directory / "manifest.json").read_text()
    (directory / "manifest.json").write_text(manifest.replace('"dtype":"fp16"', '"dtype":"bf16"'))
    write_seal(directory)
    options = {"driver_path": fake.path, "device_type": loader.CPU, "packs": [packs.open_pack("test", directory)]}
    loader.use_runtime(loader.Runtime(**options, stream_of=lambda ordinal: 0))
    try:
        with pytest.raises(fa4_kernels.PackError, match=r"its plan takes .*'name': 'q'.*no such argument"):
            fa4_kernels.flash_attn_func(*qkv())
    finally:
        loader.use_runtime(None)
    assert fake.num_loads == 0


class AttributeTensor(torch.Tensor):
    """A torch tensor whose type has no exchange API, as in torch before 2.10."""

    __dlpack_c_exchange_api__ = None


@pytest.fixture(scope="module")
def leaves(launcher, fake_driver_path):
    """What a launch on CPU tensors would be evaluated on."""
    FakeDriver(fake_driver_path).reset()
    driver = launcher.Driver(str(fake_driver_path))
    plan = launcher.Plan(encode_plan(*loader.bound_plan(forward_plan("kernel"), ENTRY)))
    cubin = driver.load(fake_cubin(kernel=(128, 40)))
    return launcher.Launch(driver, plan, cubin, 0, lambda ordinal: 0, loader.CPU).leaves


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_torch_tensors_are_read_alike_in_both_ways(leaves, data):
    """Any shape, permutation and slice: attribute calls and the exchange API see the same pointer, extents, strides."""
    extents = [data.draw(st.integers(1, 5)) for _ in range(3)]
    order = data.draw(st.permutations((0, 1, 2)))
    base = torch.zeros([extents[i] for i in order] + [64], dtype=torch.bfloat16)
    tensor = base.permute([order.index(i) for i in range(3)] + [3])[data.draw(st.integers(0, extents[0] - 1)) :]
    rest = (torch.zeros(1, 2, 3, 64, dtype=torch.bfloat16),) * 3 + (torch.zeros(1, 2, 3),)
    scalars = (0.5, 1, 2, 3)

    expected = leaves(tensor, *rest, *scalars)
    actual = leaves(tensor.as_subclass(AttributeTensor), *rest, *scalars)

    assert actual == expected
    assert actual["q.ptr"] == tensor.data_ptr()
    assert [actual[f"q.shape[{i}]"] for i in range(4)] == list(tensor.shape)
    for i in range(4):
        assert tensor.shape[i] == 1 or actual[f"q.stride[{i}]"] == tensor.stride(i)
