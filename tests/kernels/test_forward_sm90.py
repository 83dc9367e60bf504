"""Contract: every kind of sm90a forward kernel consists of the instructions it should.

What it computes is tested elsewhere: in the simulator, and on a GPU by the proof. Here: what the compiler made of it,
read from the PTX, and which combinations the constructor refuses.
"""

import re

import pytest

from fa4build.matrix.tuning import tuning_for
from fa4build.matrix.variants import parse_variant
from tests.built import cubin_of

pytestmark = pytest.mark.dsl


@pytest.fixture(
    scope="module", params=["bf16-hd64-causal", "fp16-hd128-local", "bf16-hd192x128-full", "bf16-hd256-full"]
)
def built(request):
    """(tuning, head_dims, number of masked and unmasked inner loops, cubin) of a variant."""
    variant = parse_variant(f"fwd-sm90a-{request.param}")
    tuning = tuning_for(variant)
    cubin = cubin_of(variant.id)
    return tuning, variant.head_dims, {"full": 1, "causal": 2, "local": 3}[variant.mask], cubin


def test_products_have_the_tiles_of_the_tuning_row(built):
    """Q K^T: head_dim / 16 instructions of tile_n columns; P V: tile_n / 16 of head_dim_v. Each loop has both."""
    tuning, (head_dim, head_dim_v), loops, cubin = built
    dtype = "f16" if "fp16" in cubin.symbols[0] else "bf16"
    shapes = re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.{dtype}\.{dtype} ", cubin.ptx)
    steps = {tuning.tile_n: head_dim // 16}
    steps[head_dim_v] = steps.get(head_dim_v, 0) + tuning.tile_n // 16
    assert {int(n): shapes.count(n) for n in set(shapes)} == {n: (loops + 1) * count for n, count in steps.items()}


def test_roles_trade_registers_and_copies_are_tensor_copies(built):
    """One setmaxnreg each way, loads and stores of tiles by TMA alone."""
    tuning, _, _, cubin = built
    assert re.findall(r"setmaxnreg\.(\w+)\.sync\.aligned\.u32\s+(\d+)", cubin.ptx) == [
        ("dec", str(tuning.producer_registers)),
        ("inc", str(tuning.consumer_registers)),
    ]
    assert "cp.async.bulk.tensor.4d.shared::cta.global" in cubin.ptx
    assert "cp.async.bulk.tensor.4d.global.shared::cta" in cubin.ptx
    assert not re.search(r"\bld\.global", cubin.ptx)


def test_the_wait_for_p_v_comes_after_the_exponentials(built):
    """In every inner loop: scores are waited for, then all exponentials run, and only then a wait for everything."""
    tuning, _, loops, cubin = built
    events = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d)|(ex2)\.approx", cubin.ptx)
    text = "".join("e" if ex2 else wait for wait, ex2 in events)
    exponentials = tuning.tile_n // 2 + 2  # two rows of tile_n / 4 a thread, and a factor for each row
    assert len(re.findall(rf"1e{{{exponentials}}}(?=0)", text)) == loops


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tile_m": 192}, "tile_m 192: must be 128"),
        ({"tile_n": 100}, "tile_n 100: must be a multiple of 16"),
        ({"mask": "banded"}, "mask 'banded': must be full, causal or local"),
        ({"order": "random"}, "order 'random': must be natural or longest_first"),
        ({"head_dim": 72}, "head_dim 72: must be a multiple of 16"),
        ({"consumer_registers": 248}, "66560 registers for all warps"),  # 128 * (24 + 2 * 248)
        ({"head_dim": 64}, "use separate_output"),  # O of 128 columns in Q's 64
        ({"head_dim_v": 96}, "use separate_output"),  # 192 bytes a row: another swizzle than Q's 256
    ],
)
def test_what_cannot_run_is_refused(changed, words):
    """Before anything is traced; the message has the value and what is allowed."""
    import cutlass

    from kernels_src.forward.sm90 import ForwardSm90

    row = {"head_dim": 128, "head_dim_v": 128, "mask": "full", "tile_m": 128, "tile_n": 128, "kv_stages": 2}
    row |= {"consumer_warpgroups": 2, "consumer_registers": 240, "producer_registers": 24} | changed
    with pytest.raises(ValueError, match=re.escape(words)):
        ForwardSm90(symbol="refused", dtype=cutlass.BFloat16, **row)
