"""Contract: the plan that fa4build extracts from a real forward kernel is what the launcher launches.

One kernel is compiled with the DSL. Its stored vectors and random problems are evaluated in C and by fa4build's
evaluator; a call of `flash_attn_func` with CPU tensors goes through the whole runtime to the stand-in driver.
"""

import hashlib
import json

import pytest
from fa4_kernels import plan as encoding
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.dsl
torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

from fa4_kernels import InputError, loader, packs  # noqa: E402

from fa4build.plan.as_json import plan_to_json  # noqa: E402
from fa4build.plan.evaluation import canonical_digest, evaluate, failed_guard  # noqa: E402
from tests.built import cubin_of  # noqa: E402
from tests.runtime.fake import entry_axes, fake_cubin, read_map, write_pack  # noqa: E402

ID = "fwd-sm90a-bf16-hd128-local"
BLOB = packs.Blob(group=0, offset=0, size=1, sha256="")


@pytest.fixture(scope="module")
def plan():
    """The launch plan of a real kernel."""
    return cubin_of(ID).plan


@pytest.fixture(scope="module")
def entry(plan):
    op, axes = entry_axes(ID)
    symbols = tuple(launch.kernel for launch in plan.launches)
    return packs.Entry(id=ID, op=op, target="sm_90a", axes=axes, cubin=BLOB, plan=BLOB, symbols=symbols, evidence={})


@pytest.fixture(scope="module")
def compiled(launcher, plan, entry):
    """The plan in C."""
    document = encoding.parse_plan(plan_to_json(plan))
    return launcher.Plan(encoding.encode_plan(*loader.bound_plan(document, entry)))


def test_stored_vectors_are_reproduced(plan, compiled):
    """Every example in the plan has its digest, and breaks no guard."""
    assert plan.vectors
    for vector in plan.vectors:
        assert hashlib.sha256(compiled.evaluate(dict(vector.inputs))).hexdigest() == vector.sha256
        assert compiled.failed_guard(dict(vector.inputs)) is None


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_problems_are_those_of_the_reference(plan, compiled, data):
    """Any input leaves, legal or not: the same canonical bytes and the same first broken guard."""
    inputs = dict(data.draw(st.sampled_from(plan.vectors)).inputs)
    for name in data.draw(st.lists(st.sampled_from(sorted(inputs)), max_size=6)):
        is_long = name.endswith("]") or name.endswith(".ptr")
        if not isinstance(inputs[name], float):
            bits = 63 if is_long else 31
            inputs[name] = data.draw(st.one_of(st.integers(0, 5000), st.integers(-(1 << bits), (1 << bits) - 1)))

    expected = canonical_digest(evaluate(plan, inputs))

    assert hashlib.sha256(compiled.evaluate(inputs)).hexdigest() == expected
    assert compiled.failed_guard(inputs) == failed_guard(plan, inputs)


@pytest.fixture
def attention(launcher, fake, tmp_path, plan):
    """`flash_attn_func` with a pack whose one plan is the real one."""
    import fa4_kernels

    sizes = {}
    document = json.loads(plan_to_json(plan))
    for launch in document["launches"]:
        sizes[launch["kernel"]] = [128 if p["kind"] == "tmap" else p["size"] for p in launch["params"]]
    directory = write_pack(tmp_path / "pack", [ID], plan=document, cubin=fake_cubin(**sizes))
    options = {"driver_path": fake.path, "device_type": loader.CPU, "packs": [packs.open_pack("test", directory)]}
    loader.use_runtime(loader.Runtime(**options, stream_of=lambda ordinal: 0))
    yield fa4_kernels.flash_attn_func
    loader.use_runtime(None)


@pytest.mark.parametrize("is_transposed", [False, True], ids=["bshd", "bhsd"])
def test_a_call_encodes_the_maps_of_its_tensors(attention, fake, plan, is_transposed):
    """Address, extents and strides of q, k, v and out arrive in the maps, whatever their order in memory."""
    q = torch.zeros(2, 200, 4, 128, dtype=torch.bfloat16)
    k, v = (torch.zeros(2, 77, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    if is_transposed:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    out, _ = attention(q, k, v, window_size=(30, 5))

    (launch,) = fake.launches
    maps, offset = [], 0
    data = bytes(launch.bytes[: launch.num_bytes])
    for param in plan.launches[0].params:
        size = getattr(param, "size", 128)
        if not hasattr(param, "size"):
            maps.append(read_map(data[offset : offset + 128]))
        offset += size
    by_address = {m["address"]: m for m in maps}
    for tensor in (q, k, v, out):
        found = by_address[tensor.data_ptr()]
        expected = {2 * stride for stride in tensor.stride()[:3]}
        assert set(found["strides"]) == expected
        assert sorted(found["dims"]) == sorted(tensor.shape)
    assert launch.kernel.decode() == plan.launches[0].kernel
    assert all(extent > 0 for extent in launch.grid)


def test_extents_over_its_range_are_refused_with_the_numbers(attention, fake):
    """2^31 queries: the plan's guard speaks, and nothing is launched."""
    k = torch.zeros(1, 5, 1, 128, dtype=torch.bfloat16)
    runtime = loader.runtime()
    (entry,) = runtime.packs[0].manifest.entries
    launch = runtime.load(runtime.packs[0], entry, 0)

    class Huge:
        """Attribute calls of a tensor that does not exist."""

        shape, dtype = (1, 1 << 31, 1, 128), torch.bfloat16

        def data_ptr(self):
            return 0x10000

        def stride(self):
            return (1 << 38, 128, 128, 1)

        def get_device(self):
            return -1

    with pytest.raises(InputError, match=r"q\.shape\[1\] = 2147483648"):
        launch.run(Huge(), k, k, Huge(), torch.zeros(1, 1, 5), 0.1, 5, 5, 132)
    assert fake.launches == []
