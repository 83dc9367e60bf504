"""Contract: `Launch.run` checks its tensors, evaluates the plan, and hands the driver exactly what the plan says.

The driver here is a stand-in that records launches and refuses what the real one refuses (fake_driver.c). Tensors are
read in two ways, which must give the same launch: the DLPack C exchange API, and attribute calls.
"""

import gc
import hashlib
import json
import struct
import sys
import threading

import pytest
from fa4_kernels import plan as encoding
from fa4_kernels.errors import DriverError, InputError, LayoutError

from fa4build.plan import evaluation
from fa4build.plan.as_json import plan_from_json
from tests.runtime.fake import Nodes, fake_cubin, forward_plan, launch_template, make_plan, param_bytes, read_map
from tests.runtime.tensors import (
    BOOL,
    DLPACK_INT,
    FLOAT32,
    INT32,
    AttributeTensor,
    ExchangeTensor,
    NewerExchangeTensor,
)

ALIGN = {"q": 16, "k": 16, "v": 16, "out": 16, "lse": 4}
POINTERS = {"q": 0x1000, "k": 0x2000, "v": 0x3000, "out": 0x4000, "lse": 0x5004}


def attribute_tensors(batch=2, seqlen_q=300, seqlen_k=77, heads=4, heads_kv=2, head_dim=64, **changes):
    shapes = forward_shapes(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim)
    tensors = {name: AttributeTensor(shape, pointer=POINTERS[name]) for name, shape in shapes.items()}
    tensors["lse"].dtype = FLOAT32
    return list((tensors | changes).values())


def exchange_tensors(batch=2, seqlen_q=300, seqlen_k=77, heads=4, heads_kv=2, head_dim=64, kind=ExchangeTensor):
    shapes = forward_shapes(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim)
    kinds = {name: {} for name in shapes} | {"lse": {"code": 2, "bits": 32}}
    return [kind(shape, pointer=POINTERS[name], **kinds[name]) for name, shape in shapes.items()]


def forward_shapes(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim):
    shapes = {"q": (batch, seqlen_q, heads, head_dim), "k": (batch, seqlen_k, heads_kv, head_dim)}
    shapes |= {"v": shapes["k"], "out": shapes["q"], "lse": (batch, heads, seqlen_q)}
    return shapes


SCALARS = [0.125, 1 << 30, 0, 132]


@pytest.fixture
def bind(launcher, fake):
    """Makes a Launch on device 0 of the stand-in driver from a plan document."""
    driver = launcher.Driver(fake.path)

    def make(document, cubin, *, device=0, align=ALIGN, stream=0x77, device_type=2):
        plan = launcher.Plan(encoding.encode_plan(document, align))
        library = driver.load(cubin)
        return launcher.Launch(driver, plan, library, device, lambda ordinal: stream + ordinal, device_type)

    return make


@pytest.fixture
def forward(bind):
    return bind(forward_plan("kernel"), fake_cubin(kernel=(128, 40)))


def test_a_launch_is_what_the_plan_says(forward, fake):
    """Grid ceil(300 / 128) = 3 by 4 heads by 2 batches; one map, then pointers and scalars; nothing else."""
    forward.run(*attribute_tensors(), *SCALARS)

    (launch,) = fake.launches
    assert launch.kernel == b"kernel"
    assert (list(launch.grid), list(launch.block), list(launch.cluster)) == ([3, 4, 2], [384, 1, 1], [1, 1, 1])
    assert (launch.smem, launch.pdl, launch.cooperative) == (200000, 0, 0)
    assert (launch.stream, launch.context) == (0x77, 0xC000)
    assert launch.maps_aligned == 1
    data = param_bytes(launch)
    # Strides of (2, 300, 4, 64) bf16 in bytes: seqlen 4*64*2 = 512, head 64*2 = 128, batch 300*512 = 153600.
    expected_map = {"address": 0x1000, "dims": (64, 300, 4, 2), "strides": (512, 128, 153600)}
    expected_map |= {"box": (64, 128, 1, 1), "elem_strides": (1, 1, 1, 1), "rank": 4}
    expected_map |= {"dtype": 9, "interleave": 0, "swizzle": 3, "promotion": 2, "fill": 0}
    assert read_map(data[:128]) == expected_map
    assert data[128:] == struct.pack("<QQf5i", 0x4000, 0x5004, 0.125, 1 << 30, 0, 132, 300, 77)
    assert fake.depth == 0


@pytest.mark.parametrize("kind", [ExchangeTensor, NewerExchangeTensor])
def test_both_ways_of_reading_tensors_give_one_launch(forward, fake, kind):
    """Exchange API (also one found behind a newer major version) and attribute calls: the same parameter bytes."""
    forward.run(*attribute_tensors(), *SCALARS)
    forward.run(*exchange_tensors(kind=kind), *SCALARS)

    first, second = fake.launches
    assert param_bytes(first) == param_bytes(second)
    assert list(first.grid) == list(second.grid)


def test_the_stream_comes_from_where_the_tensors_come_from(forward, fake):
    """The exchange API knows the current stream; without it the callable is asked."""
    forward.run(*attribute_tensors(), *SCALARS)
    forward.run(*exchange_tensors(), *SCALARS)

    assert [launch.stream for launch in fake.launches] == [0x77, 0x5000]


def test_a_launch_happens_in_the_context_of_its_device(forward, bind, fake):
    """A foreign current context is put back; the right one is not pushed again."""
    fake.push_context(0xC001)
    forward.run(*attribute_tensors(), *SCALARS)
    assert (fake.launches[0].context, fake.depth) == (0xC000, 1)

    second = bind(forward_plan("kernel"), fake_cubin(kernel=(128, 40)), device=1)
    tensors = attribute_tensors()
    for tensor in tensors:
        tensor._device = 1
    second.run(*tensors, *SCALARS)
    assert (fake.launches[1].context, fake.depth) == (0xC001, 1)


def test_repeated_problems_give_what_fresh_ones_give(forward, bind, fake):
    """Pointers change, then extents, then scalars, then back: each launch equals that of a Launch never used before."""
    calls = [(attribute_tensors(), SCALARS), (attribute_tensors(), SCALARS), (attribute_tensors(seqlen_q=5), SCALARS)]
    calls += [(attribute_tensors(), SCALARS), (attribute_tensors(), [0.5, *SCALARS[1:]])]
    calls[1][0][0]._pointer, calls[1][0][3]._pointer = 0x9000, 0xA000
    for tensors, scalars in calls:
        forward.run(*tensors, *scalars)
        bind(forward_plan("kernel"), fake_cubin(kernel=(128, 40))).run(*tensors, *scalars)

    recorded = [(param_bytes(launch), list(launch.grid)) for launch in fake.launches]
    assert recorded[::2] == recorded[1::2]
    assert len({data for data, _ in recorded}) == 4


def test_a_guard_holds_for_every_call(forward, fake):
    """A problem that was refused is refused again, and does not change what the next one gets."""
    good, bad = attribute_tensors(), attribute_tensors(seqlen_q=1_048_577)
    for _ in range(2):
        with pytest.raises(InputError, match="seqlen_q must be at most"):
            forward.run(*bad, *SCALARS)
        forward.run(*good, *SCALARS)

    assert [list(launch.grid) for launch in fake.launches] == [[3, 4, 2]] * 2


def test_leaves_show_what_the_plan_is_evaluated_on(forward):
    """`leaves` names what `run` would read, so that a launch can be replayed by another evaluator."""
    leaves = forward.leaves(*attribute_tensors(), *SCALARS)

    assert leaves["q.ptr"] == 0x1000
    assert [leaves[f"q.shape[{i}]"] for i in range(4)] == [2, 300, 4, 64]
    assert [leaves[f"q.stride[{i}]"] for i in range(4)] == [76800, 256, 64, 1]
    assert leaves["softmax_scale"] == 0.125
    assert leaves["num_sms"] == 132


def test_device_facts_are_filled_in_by_the_launcher(bind, fake):
    """dev.* arguments are no call arguments: 132 SMs, 232448 bytes of shared memory, 50 MiB of L2 of the stand-in."""
    n = Nodes()
    fields = [[8 * i, n("in", "i64", name)] for i, name in enumerate(encoding.DEVICE_LEAVES)]
    one = n("const", "i32", 1)
    args = [{"name": name, "kind": "device", "dtype": "i64"} for name in encoding.DEVICE_LEAVES]
    params = [{"kind": "bytes", "size": 24, "align": 8, "fields": fields}]
    launch = bind(make_plan(n, args=args, launches=[launch_template("k", [one] * 3, params)]), fake_cubin(k=(24,)))

    launch.run()

    assert struct.unpack("<3Q", param_bytes(fake.launches[0])) == (132, 232448, 50 << 20)


def test_attributes_reach_the_driver(bind, fake):
    """Cluster, programmatic dependent launch and cooperative launch; a cluster over 8 is allowed first."""
    n = Nodes()
    sixteen = n("const", "i32", 16)
    one = n("const", "i32", 1)
    options = {"cluster": [16, 1, 1], "pdl": True, "cooperative": True, "smem": 1024}
    launch = bind(
        make_plan(n, args=[], launches=[launch_template("k", [sixteen, one, one], **options)]), fake_cubin(k=())
    )

    launch.run()

    (recorded,) = fake.launches
    assert (list(recorded.cluster), recorded.pdl, recorded.cooperative) == ([16, 1, 1], 1, 1)
    assert (fake.kernel(0).max_dynamic_smem, fake.kernel(0).non_portable_cluster) == (1024, 1)


def two_launch_plan(extent):
    """Two kernels; the grid of the second is `extent` blocks."""
    n = Nodes()
    one, blocks = n("const", "i32", 1), n("const", "i32", extent)
    fields = [{"kind": "bytes", "size": 4, "align": 4, "fields": [[0, node]]} for node in (one, blocks)]
    launches = [
        launch_template("first", [one] * 3, fields[:1]),
        launch_template("second", [blocks, one, one], fields[1:]),
    ]
    return make_plan(n, args=[], launches=launches), fake_cubin(first=(4,), second=(4,))


def test_launches_run_in_order_and_empty_grids_are_skipped(bind, fake):
    """A grid with a zero launches nothing; the others do."""
    bind(*two_launch_plan(5)).run()
    bind(*two_launch_plan(0)).run()

    assert [launch.kernel for launch in fake.launches] == [b"first", b"second", b"first"]
    assert param_bytes(fake.launches[1]) == struct.pack("<i", 5)


def test_a_grid_over_the_limit_is_an_error(bind, fake):
    """A negative or too large extent is refused with the numbers; the launch before it is not made either."""
    with pytest.raises(InputError, match=r"second: a grid of \(-1, 1, 1\) blocks is over the limit"):
        bind(*two_launch_plan(-1)).run()

    assert fake.launches == []


def test_a_false_guard_names_the_values_it_depends_on(forward, fake):
    """The guard's own words, then the input leaves that its expression reads, and no others."""
    tensors = attribute_tensors(seqlen_q=1_048_577)

    with pytest.raises(InputError, match=r"^seqlen_q must be at most 1048576 \(here: q\.shape\[1\] = 1048577\)$"):
        forward.run(*tensors, *SCALARS)
    assert fake.launches == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"k": {"dtype": FLOAT32}}, r"k is a float32 tensor; this kernel takes bfloat16", id="dtype"),
        pytest.param({"k": {"dtype": BOOL}}, r"k is a \(unsupported dtype\) tensor", id="unknown dtype"),
        pytest.param({"v": {"device": 1}}, r"v is on cuda:1; this kernel was chosen for cuda:0", id="device"),
        pytest.param({"q": {"device": -1}}, r"q is on cpu:0; this kernel was chosen for cuda:0", id="cpu"),
        pytest.param({"q": {"shape": (2, 300, 256)}}, r"q has 3 dimensions, 4 expected", id="rank"),
        pytest.param({"q": {"shape": (1,) * 12}}, r"q has 12 dimensions, 4 expected", id="rank over 8"),
        pytest.param({"k": {"shape": (2, 0, 2, 64)}}, r"k\.shape\[1\] = 0: an empty tensor", id="empty"),
        pytest.param({"q": {"pointer": 0}}, r"q has no memory", id="fake tensor"),
    ],
)
def test_a_wrong_tensor_is_named(forward, fake, change, message):
    """One sentence: which tensor, what it is, what is expected. Nothing is launched."""
    shapes = forward_shapes(2, 300, 77, 4, 2, 64)
    (name, options), tensors = *change.items(), {}
    tensors[name] = AttributeTensor(**({"shape": shapes[name], "pointer": POINTERS[name]} | options))

    with pytest.raises(InputError, match=message):
        forward.run(*attribute_tensors(**tensors), *SCALARS)
    assert fake.launches == []


@pytest.mark.parametrize(
    ("position", "name", "options"),
    [
        pytest.param(0, "q", {"pointer": 0x1008}, id="pointer off by 8 bytes"),
        pytest.param(0, "q", {"strides": (76804, 256, 64, 1)}, id="stride of 153608 bytes"),
        pytest.param(1, "k", {"strides": (9856, 64, 0, 1)}, id="expanded heads"),
        pytest.param(2, "v", {"strides": (9856, 128, 1, 2)}, id="last stride 2"),
    ],
)
def test_a_layout_no_kernel_reads_asks_for_a_copy(forward, fake, position, name, options):
    """LayoutError carries the position of the argument, so that the caller can copy it."""
    shape = forward_shapes(2, 300, 77, 4, 2, 64)[name]
    tensor = AttributeTensor(shape, **({"pointer": POINTERS[name]} | options))

    with pytest.raises(LayoutError, match=f"{name}: the last stride must be 1") as caught:
        forward.run(*attribute_tensors(**{name: tensor}), *SCALARS)
    assert caught.value.position == position
    assert fake.launches == []


def test_the_stride_of_an_extent_of_1_is_free(forward, fake):
    """batch 1 with any batch stride: the leaf becomes the dense one, so no guard and no driver check sees the other."""
    tensors = attribute_tensors(batch=1)
    tensors[0] = AttributeTensor((1, 300, 4, 64), strides=(3, 256, 64, 1), pointer=0x1000)
    forward.run(*tensors, *SCALARS)

    assert forward.leaves(*tensors, *SCALARS)["q.stride[0]"] == 300 * 256
    assert read_map(param_bytes(fake.launches[0])[:128])["strides"] == (512, 128, 300 * 256 * 2)


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        pytest.param(["a", 0, 0, 132], r"softmax_scale: 'a' is no number", id="text"),
        pytest.param([0.5, 0.5, 0, 132], r"window_left: 0\.5 is no number that fits; an int", id="float for an int"),
        pytest.param([0.5, 1 << 40, 0, 132], r"window_left: 1099511627776 does not fit in 32 bits", id="too large"),
        pytest.param([0.5, 0, 0], r"8 arguments, the plan takes 9", id="one missing"),
    ],
)
def test_a_wrong_scalar_is_named(forward, scalars, message):
    """Numbers are checked against the type the plan gives them."""
    with pytest.raises(InputError, match=message):
        forward.run(*attribute_tensors(), *scalars)


def lengths_plan():
    """x (rows, 8) in bf16, lengths (n) in int32: pointers of both, n and its stride; what a kernel of packed sequences
    is told about a list that may be left out."""
    n = Nodes()
    one = n("const", "i32", 1)
    names = ("x.ptr", "lengths.ptr", "lengths.shape[0]", "lengths.stride[0]")
    fields = [[8 * i, n("in", "i64", name)] for i, name in enumerate(names)]
    guards = [(n("eq", "i64", fields[3][1], n("const", "i64", 1)), "lengths.stride[0] must be 1")]
    misaligned = n("urem", "i64", fields[1][1], n("const", "i64", 4))
    guards.append((n("eq", "i64", misaligned, n("const", "i64", 0)), "lengths.ptr must be a multiple of 4"))
    args = [{"name": "x", "kind": "tensor", "dtype": "bf16", "rank": 2}]
    args += [{"name": "lengths", "kind": "tensor", "dtype": "i32", "rank": 1}]
    launches = [launch_template("k", [one] * 3, [{"kind": "bytes", "size": 32, "align": 8, "fields": fields}])]
    rows = [{"expr": node, "message": text, "source": "spec"} for node, text in guards]
    return make_plan(n, args=args, launches=launches, guards=rows)


@pytest.mark.parametrize("kind", ["attributes", "exchange"])
def test_a_list_of_integers_may_be_empty(launcher, bind, fake, kind):
    """No element and no memory, stride 1, as torch has it: pointer 0 and extent 0 reach the kernel. The same holds for
    both evaluators. A tensor of data may not be empty."""
    document = lengths_plan()
    launch = bind(document, fake_cubin(k=(32,)), align={"x": 16, "lengths": 4})
    if kind == "attributes":
        x, empty = AttributeTensor((2, 8), pointer=0x1000), AttributeTensor((0,), dtype=INT32, pointer=0)
        no_rows = AttributeTensor((0, 8), pointer=0)
    else:
        x, empty = ExchangeTensor((2, 8), pointer=0x1000), ExchangeTensor((0,), code=DLPACK_INT, bits=32, pointer=0)
        no_rows = ExchangeTensor((0, 8), pointer=0)
    launch.run(x, empty)

    assert struct.unpack("<4q", param_bytes(fake.launches[0])) == (0x1000, 0, 0, 1)
    leaves = launch.leaves(x, empty)
    reference = plan_from_json(json.dumps(document))
    assert evaluation.failed_guard(reference, leaves) is None
    (evaluated,) = evaluation.evaluate(reference, leaves)
    in_c = launcher.Plan(encoding.encode_plan(document)).evaluate(leaves)
    assert hashlib.sha256(in_c).hexdigest() == evaluation.canonical_digest((evaluated,))
    assert in_c[-32:] == param_bytes(fake.launches[0])
    with pytest.raises(InputError, match=r"x\.shape\[0\] = 0: an empty tensor has nothing to launch"):
        launch.run(no_rows, empty)


def test_what_is_no_tensor_is_named(forward):
    """An object without a tensor's attributes."""
    with pytest.raises(InputError, match=r"q: <class 'list'> is no tensor"):
        forward.run([], *attribute_tensors()[1:], *SCALARS)


def test_an_exchange_failure_is_an_error(forward, fake):
    """A producer that fails without an exception still stops the call."""
    tensors = exchange_tensors()
    tensors[0].broken = True

    with pytest.raises(BufferError, match="cannot be read through DLPack"):
        forward.run(*tensors, *SCALARS)
    assert fake.launches == []


@pytest.mark.parametrize(
    ("call", "where"),
    [
        ("cuLaunchKernelEx", "cuLaunchKernelEx of kernel"),
        ("cuTensorMapEncodeTiled", "cuTensorMapEncodeTiled for kernel"),
    ],
)
def test_a_driver_error_names_call_and_kernel(forward, fake, call, where):
    """Name, number and text of the driver's error; the context stack is as before."""
    fake.fail(call, 1)

    with pytest.raises(DriverError, match=f"^{where}.*CUDA_ERROR_INVALID_VALUE .1.: asked for by the test$"):
        forward.run(*attribute_tensors(), *SCALARS)
    assert fake.depth == 0


@pytest.mark.parametrize(
    "call",
    [
        "cuLibraryLoadData",
        "cuLibraryGetKernel",
        "cuKernelGetFunction",
        "cuFuncSetAttribute",
        "cuDevicePrimaryCtxRetain",
    ],
)
def test_a_driver_error_while_loading_names_the_call(bind, fake, call):
    """Loading fails as a whole."""
    fake.fail(call, 2)

    with pytest.raises(DriverError, match=call):
        bind(forward_plan("kernel"), fake_cubin(kernel=(128, 40)))
    assert fake.depth == 0


def test_a_kernel_that_the_cubin_lacks_is_an_error(bind):
    """The plan's kernel name must be a symbol of the cubin."""
    with pytest.raises(DriverError, match="cuLibraryGetKernel"):
        bind(forward_plan("other"), fake_cubin(kernel=(128, 40)))


def test_bytes_that_are_no_elf_never_reach_the_driver(launcher, fake):
    """A cubin starts with the ELF magic number."""
    with pytest.raises(DriverError, match="5 bytes that are no cubin"):
        launcher.Driver(fake.path).load(b"hello")
    assert fake.num_loads == 0


def test_more_shared_memory_than_the_device_has_is_an_error(bind):
    """The stand-in device offers 232448 bytes a block."""
    document = forward_plan("kernel")
    document["launches"][0]["smem"] = 232449

    with pytest.raises(DriverError, match="kernel needs 232449 bytes of shared memory, the device has 232448"):
        bind(document, fake_cubin(kernel=(128, 40)))


def test_a_missing_driver_is_one_clear_error(launcher):
    """No driver library: the path, and what is needed."""
    with pytest.raises(DriverError, match=r"cannot open the CUDA driver libmissing\.so\.9.*driver for CUDA 12\.0"):
        launcher.Driver("libmissing.so.9")


def test_an_old_driver_is_one_clear_error(launcher):
    """A library without the functions of CUDA 12: the C library stands for it."""
    with pytest.raises(DriverError, match=r"has no cuInit\. An NVIDIA driver for CUDA 12\.0 or later"):
        launcher.Driver("libc.so.6")


def test_calls_leave_no_references_behind(forward):
    """100 calls that work and 100 that fail: reference counts of the arguments do not move."""
    tensors, wrong = attribute_tensors(), attribute_tensors(q=AttributeTensor((2, 300, 4, 64), dtype=FLOAT32))
    forward.run(*tensors, *SCALARS)
    watched = [*tensors, *wrong, *SCALARS[:1]]
    before = [sys.getrefcount(x) for x in watched]
    for _ in range(50):
        forward.leaves(*tensors, *SCALARS)
        with pytest.raises(InputError):
            forward.run(*wrong, *SCALARS)
    gc.collect()

    assert [sys.getrefcount(x) for x in watched] == before


def test_threads_do_not_mix_their_launches(forward, fake):
    """Four threads, each with its own pointers: every recorded launch belongs to one of them as a whole."""
    expected = set()
    calls = []
    for i in range(4):
        tensors = attribute_tensors(seqlen_q=128 * (i + 1))
        tensors[3]._pointer = 0x10000 * (i + 1)
        expected.add((0x10000 * (i + 1), 128 * (i + 1), i + 1))
        calls.append(tensors)
    threads = [threading.Thread(target=lambda t=t: [forward.run(*t, *SCALARS) for _ in range(16)]) for t in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    found = set()
    for launch in fake.launches:
        data = param_bytes(launch)[128:]
        found.add((struct.unpack_from("<Q", data)[0], struct.unpack_from("<i", data, 32)[0], launch.grid[0]))
    assert len(fake.launches) == 64
    assert found == expected
