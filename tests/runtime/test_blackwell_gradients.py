"""Contract: on devices of compute capability 10.0 and 10.3 `flash_attn_func` and its gradients reach the kernels of
their targets, in order, and what those compute is attention.

Kernels compiled here; the launcher hands their parameters to a stand-in driver, and the PTX simulator executes what
arrives there. Tolerance: the acceptance rule of gradients.
"""

import pytest

pytestmark = pytest.mark.dsl
torch = pytest.importorskip("torch")
pytest.importorskip("cutlass")

import fa4_kernels  # noqa: E402
from fa4_kernels import loader  # noqa: E402

from tests.runtime.simulated import SimulatedRuntime, compile_variants  # noqa: E402
from tests.runtime.test_autograd import UNBOUNDED, assert_gradients  # noqa: E402


def chain(arch, head_dims, forward, backward, last):
    """The ids of a whole pass, in the order of their launches; `last`: head_dim of the query's gradient."""
    before = f"bwd_preprocess-{arch}-bf16-{head_dims}"
    return (
        f"fwd-{arch}-bf16-{head_dims}-{forward}",
        before,
        f"bwd-{arch}-bf16-{head_dims}-{backward}",
        f"bwd_postprocess-{arch}-bf16-{last}",
    )


PASSES = {
    "one CTA": ((10, 0), chain("sm100a", "hd64", "causal", "causal", "hd64"), (64, 64), {"causal": True}),
    "one CTA, deterministic": (
        (10, 3),
        chain("sm103a", "hd64", "causal", "causal-deterministic", "hd64"),
        (64, 64),
        {"causal": True, "deterministic": True},
    ),
    "two CTAs": ((10, 3), chain("sm103a", "hd128", "full", "full-2cta", "hd128"), (128, 128), {}),
    "two CTAs, other values": (
        (10, 0),
        chain("sm100a", "hd192x128", "causal", "causal-2cta", "hd192"),
        (192, 128),
        {"causal": True},
    ),
    "head_dim 256": (
        (10, 0),
        chain("sm100a", "hd256", "causal-2cta", "causal-2cta", "hd256"),
        (256, 256),
        {"causal": True},
    ),
}


@pytest.mark.parametrize("kind", PASSES)
def test_a_whole_pass_on_blackwell(launcher, fake, tmp_path, kind):
    """Two query heads on one key head, more keys than queries, no length a multiple of a tile."""
    capability, ids, (head_dim, head_dim_v), options = PASSES[kind]
    fake.set_capability(*capability)
    (tmp_path / "compile").mkdir()
    runtime = SimulatedRuntime(compile_variants(ids), tmp_path, fake)
    generator = torch.Generator().manual_seed(head_dim)
    shapes = ((1, 140, 2, head_dim), (1, 200, 1, head_dim), (1, 200, 1, head_dim_v))
    q, k, v = (torch.randn(s, generator=generator).bfloat16().requires_grad_() for s in shapes)
    dout = torch.randn((1, 140, 2, head_dim_v), generator=generator).bfloat16()
    loader.use_runtime(runtime)
    try:
        fa4_kernels.flash_attn_func(q, k, v, **options)[0].backward(dout)
    finally:
        loader.use_runtime(None)

    launched = [name.rsplit("_", 1)[0] for name in runtime.launched]
    assert list(dict.fromkeys(launched)) == [name.replace("-", "_") for name in ids]
    assert_gradients((q, k, v), dout, (UNBOUNDED, 0 if options.get("causal") else UNBOUNDED))
