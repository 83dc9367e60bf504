"""Contract: calls over packed sequences, pages and split keys reach real kernels through the launcher.

Kernels compiled here; the launcher encodes their parameters for a stand-in driver, and the PTX simulator executes what
arrives there, on CPU tensors. What the kernels compute is the acceptance sets' business; here it is that every list,
also one without elements, arrives where its kernel looks for it. Tolerance: bf16 rounding.
"""

import math

import pytest

pytestmark = pytest.mark.dsl
torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import fa4_kernels  # noqa: E402
from fa4_kernels import loader  # noqa: E402

from tests.runtime.simulated import SimulatedRuntime, compile_variants  # noqa: E402
from tests.runtime.test_packed import attention, close, drawn, ints  # noqa: E402

IDS = (
    "fwd-sm90a-bf16-hd64-causal-varlen",
    "fwd-sm90a-bf16-hd64-full-paged-split",
    "fwd_combine-sm90a-bf16-hd64",
    "fwd-sm90a-bf16-hd64-full-sink",
    "bwd_preprocess-sm90a-bf16-hd64",
    "bwd-sm90a-bf16-hd64-full",
    "bwd_postprocess-sm90a-bf16-hd64",
)
BLACKWELL_IDS = ("fwd-sm100a-bf16-hd256-causal-paged-split", "fwd_combine-sm100a-bf16-hd256")


@pytest.fixture(scope="module")
def cubins(tmp_path_factory):
    return compile_variants(IDS)


@pytest.fixture
def runtime(launcher, fake, tmp_path, cubins):
    made = SimulatedRuntime(cubins, tmp_path, fake)
    loader.use_runtime(made)
    yield made
    loader.use_runtime(None)


@pytest.fixture
def blackwell(launcher, fake, tmp_path, tmp_path_factory):
    """The same on a device of compute capability 10.0, with kernels of head_dim 256."""
    fake.set_capability(10, 0)
    made = SimulatedRuntime(compile_variants(BLACKWELL_IDS), tmp_path, fake)
    loader.use_runtime(made)
    yield made
    loader.use_runtime(None)


def names(runtime):
    return [
        name.removesuffix("_0").replace("_", "-").replace("fwd-combine", "fwd_combine") for name in runtime.launched
    ]


@pytest.mark.parametrize("used", [None, (3, 0, 20)], ids=["whole", "used"])
def test_packed_sequences(runtime, used):
    """Three sequences, the second without queries; with and without a list of used lengths."""
    q, k, v = (drawn(n, h, 64, seed=h + n) for n, h in ((25, 2), (40, 1), (40, 1)))
    lists = {} if used is None else {"seqused_q": ints(*used)}
    out, _ = fa4_kernels.flash_attn_varlen_func(q, k, v, ints(0, 5, 5, 25), ints(0, 9, 12, 40), causal=True, **lists)

    for rows, keys, length in ((slice(0, 5), slice(0, 9), 0), (slice(5, 25), slice(12, 40), 2)):
        cut = slice(rows.start, rows.stop if used is None else rows.start + used[length])
        expected, _ = attention(q[cut].double(), k[keys].double(), v[keys].double(), causal=True)
        close(out[cut], expected)
    assert names(runtime) == ["fwd-sm90a-bf16-hd64-causal-varlen"]


def test_decoding_over_pages_in_parts(runtime):
    """Two sequences of 100 and 20 keys in pages of 64, in three parts and their merge; the table is garbage beyond."""
    q, cache = drawn(2, 1, 4, 64), torch.full((4, 64, 2, 64), math.nan, dtype=torch.bfloat16)
    keys = drawn(120, 2, 64, seed=1)
    cache[2], cache[0, :36], cache[3, :20] = keys[:64], keys[64:100], keys[100:]
    table = torch.tensor([[2, 0], [3, 2**31 - 1]], dtype=torch.int32)
    out, _ = fa4_kernels.flash_attn_with_kvcache(q, cache, cache, ints(100, 20), table, num_splits=3)

    for b, rows in enumerate((keys[:100], keys[100:])):
        close(out[b], attention(q[b].double(), rows.double(), rows.double())[0])
    assert names(runtime) == ["fwd-sm90a-bf16-hd64-full-paged-split", "fwd_combine-sm90a-bf16-hd64"]


def test_decoding_of_head_dim_256_on_blackwell(blackwell):
    """Three queries a sequence, the last of them see all keys; pages of 16 rows, two parts and their merge."""
    q, cache = drawn(2, 3, 2, 256), torch.full((10, 16, 1, 256), math.nan, dtype=torch.bfloat16)
    keys, table = drawn(90, 1, 256, seed=1), torch.full((2, 5), 2**31 - 1, dtype=torch.int32)
    table[0], table[1, 0] = ints(7, 2, 9, 4, 0), 5
    for row, key in enumerate(keys[:80]):
        cache[table[0, row // 16], row % 16] = key
    cache[5, :10] = keys[80:]
    out, _ = fa4_kernels.flash_attn_with_kvcache(q, cache, cache, ints(80, 10), table, causal=True, num_splits=2)

    for b, rows in enumerate((keys[:80], keys[80:])):
        close(out[b], attention(q[b].double(), rows.double(), rows.double(), causal=True)[0])
    assert names(blackwell) == list(BLACKWELL_IDS)


def test_a_sink_and_its_gradient(runtime):
    """Forward with a sink; the backward kernels know of it by the lse alone."""
    q, k, v = (drawn(1, n, h, 64, seed=h + n, requires_grad=True) for n, h in ((20, 2), (40, 1), (40, 1)))
    sink = torch.tensor([0.5, 2.0], requires_grad=True)
    out, _ = fa4_kernels.flash_attn_func(q, k, v, learnable_sink=sink)
    expected, _ = attention(*(x[0].double() for x in (q, k, v)), sink=sink)
    weights = drawn(*out.shape, seed=3)
    found = torch.autograd.grad((out * weights).sum(), (q, k, v, sink))
    reference = torch.autograd.grad((expected * weights[0].double()).sum(), (q, k, v, sink))

    close(out[0], expected)
    for one, right in zip(found, reference, strict=True):
        close(one, right.double(), 0.02)
