"""Contract of the family `upstream`: its operators compute attention and its gradients from the wheel.

Kernels are compiled and packed as the command line does, called through `fa4_kernels.call` on CPU tensors, and every
launch that reaches the driver is executed by the simulator with its checks. So what is shown is right together: the
matrix, the launch plans under the driver's tensor maps, the recipes' order, workspaces, paddings and zero fills.
flash-attn-4 is optional.
"""

import importlib.util

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("fa4_kernels")

from fa4_kernels import call, flash_attn_func, loader  # noqa: E402

from tests.end_to_end.simulated_family import KNOWN, FamilyRuntime, build  # noqa: E402

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn-4 is not installed"),
]
CAPABILITIES = {"sm90": (9, 0), "sm100": (10, 0), "sm103": (10, 3)}
# Outputs near 1 in bf16 (half an ulp: 0.004) and the kernels' own bf16 P and dS.
OUT_ERROR, FP8_OUT_ERROR, LSE_ERROR, GRADIENT_ERROR = 0.008, 0.04, 1e-4, 0.015


@pytest.fixture
def operators(launcher, fake, tmp_path):
    """Build kernels and become the runtime of this process; returns it."""

    def start(arch, *globs, allowed=KNOWN, **options):
        fake.set_capability(*CAPABILITIES[arch])
        built = build("flash-attn-4", arch, globs, tmp_path)
        runtime = FamilyRuntime(built, fake, checks=True, allowed=allowed, **options)
        loader.use_runtime(runtime)
        return runtime

    yield start
    loader.use_runtime(None)


def normal(seed, *shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def attention(q, k, v, mask):
    """(out, lse, probabilities) in float64; q (seqlen_q, heads, d), k and v of as many heads."""
    q, k, v = (x.float().double().numpy() for x in (q, k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    i, j = np.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0], np.arange(k.shape[0])
    visible = {"full": np.full(scores.shape[1:], True), "causal": j <= i, "local": (j <= i + 64) & (j >= i - 100)}[mask]
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    out = np.einsum("hqk,khd->qhd", weights / total, v)
    return out, (np.log(total) + top)[..., 0], weights / total


def error(found, expected):
    return float(np.abs(found.float().double().numpy() - expected).max())


def spread(x, ratio):
    return x.repeat_interleave(ratio, dim=-2)


FORWARD = [
    pytest.param("sm100", "hd64-causal-r1", {"head_dim": 64, "mask": "causal"}, id="sm100-1cta"),
    pytest.param("sm100", "hd128-full-r1-2cta", {"seqlen_q": 520, "clusters": 2}, id="sm100-2cta"),
    pytest.param("sm100", "hd128-full-r4-decode", {"seqlen_q": 20, "ratio": 4}, id="sm100-decode-gqa"),
    pytest.param("sm100", "hd128-causal-r4", {"mask": "causal", "ratio": 4}, id="sm100-gqa"),
    pytest.param("sm100", "hd128-local-r1-short", {"mask": "local", "seqlen_q": 200}, id="sm100-local-short"),
    pytest.param("sm100", "hd128-causal-r1", {"mask": "causal", "dtype": torch.float8_e4m3fn}, id="sm100-fp8"),
    pytest.param("sm103", "hd128-causal-r1", {"mask": "causal"}, id="sm103"),
    pytest.param("sm90", "hd256-causal-r1", {"head_dim": 256, "mask": "causal"}, id="sm90-hd256"),
    pytest.param("sm90", "hd192x128-causal-r1", {"head_dim": 192, "head_dim_v": 128, "mask": "causal"}, id="sm90-192"),
]


@pytest.mark.parametrize(("arch", "fields", "options"), FORWARD)
def test_dense_forward(operators, arch, fields, options):
    """out and lse of one batch against float64."""
    dtype, ratio = options.get("dtype", torch.bfloat16), options.get("ratio", 1)
    head_dim, mask = options.get("head_dim", 128), options.get("mask", "full")
    spelled = "e4m3" if dtype.itemsize == 1 else "bf16"
    runtime = operators(arch, f"fwd-{arch}a-{spelled}-{fields}")
    q = normal(1, 1, options.get("seqlen_q", 300), ratio, head_dim, dtype=dtype)
    k = normal(2, 1, 333, 1, head_dim, dtype=dtype)
    v = normal(3, 1, 333, 1, options.get("head_dim_v", head_dim), dtype=dtype)
    window = {"window_left": 100, "window_right": 64} if mask == "local" else {}
    out, lse = call("fwd", q=q, k=k, v=v, mask=mask, **window)
    expected, expected_lse, _ = attention(q[0], spread(k, ratio)[0], spread(v, ratio)[0], mask)

    assert error(out[0], expected) < (FP8_OUT_ERROR if dtype.itemsize == 1 else OUT_ERROR)
    assert error(lse[0], expected_lse) < LSE_ERROR
    assert {clusters for _, clusters in runtime.launched} == {options.get("clusters", 1)}


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_packed_sequences(operators, arch):
    """Each of three sequences is attention of its own."""
    operators(arch, f"fwd-{arch}a-bf16-hd128-causal-varlen-r1")
    lengths = (100, 257, 40)
    starts = torch.tensor([0, 100, 357, 397], dtype=torch.int32)
    q, k, v = (normal(seed, 397, 1, 128) for seed in (1, 2, 3))
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": max(lengths), "mask": "causal"}
    out, lse = call("fwd", q=q, k=k, v=v, layout="varlen", **options)
    for first, length in zip(starts.tolist(), lengths, strict=False):
        part = slice(first, first + length)
        expected, expected_lse, _ = attention(q[part], k[part], v[part], "causal")
        assert error(out[part], expected) < OUT_ERROR
        assert error(lse[:, part], expected_lse) < LSE_ERROR


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_pages(operators, arch):
    """Pages in any order, of which the last is partly used and the unused hold NaN."""
    operators(arch, f"fwd-{arch}a-bf16-hd128-causal-paged-r1*")
    q = normal(1, 1, 300, 1, 128)
    k, v = (torch.full((5, 128, 1, 128), float("nan"), dtype=torch.bfloat16) for _ in range(2))
    table = torch.tensor([[3, 0, 4]], dtype=torch.int32)
    whole_k, whole_v = normal(2, 333, 1, 128), normal(3, 333, 1, 128)
    for page, start in zip(table[0].tolist(), (0, 128, 256), strict=True):
        for pages, whole in ((k, whole_k), (v, whole_v)):
            part = whole[start : start + 128]
            pages[page] = 0
            pages[page, : len(part)] = part
    used = torch.tensor([333], dtype=torch.int32)
    out, lse = call("fwd", q=q, k=k, v=v, page_table=table, seqused_k=used, layout="paged", mask="causal")
    expected, expected_lse, _ = attention(q[0], whole_k, whole_v, "causal")

    assert error(out[0], expected) < OUT_ERROR
    assert error(lse[0], expected_lse) < LSE_ERROR


def test_split_keys_are_merged(operators):
    """Three parts of 700 keys, then the merge; its tile is half empty, and it reads rows it never uses (R9)."""
    globs = ("fwd-sm100a-bf16-hd64-full-split-r1-decode", "fwd_combine-sm100a-bf16-hd64")
    runtime = operators("sm100", *globs, allowed=(*KNOWN, "R9"))
    q, k, v = normal(1, 1, 8, 1, 64), normal(2, 1, 700, 1, 64), normal(3, 1, 700, 1, 64)
    out, lse = call("fwd", q=q, k=k, v=v, split=True, num_splits=3)
    expected, expected_lse, _ = attention(q[0], k[0], v[0], "full")

    assert error(out[0], expected) < OUT_ERROR
    assert error(lse[0], expected_lse) < LSE_ERROR
    assert len(runtime.launched) == 2


BACKWARD = [
    pytest.param("sm100", "hd128-causal-r1", {"mask": "causal", "clusters": 2}, id="sm100-2cta"),
    pytest.param("sm100", "hd64-full-r1", {"head_dim": 64}, id="sm100-1cta"),
    pytest.param(
        "sm100", "hd64-causal-r4-deterministic", {"head_dim": 64, "mask": "causal", "ratio": 4}, id="sm100-det"
    ),
    pytest.param("sm90", "hd128-full-r1", {}, id="sm90"),
    pytest.param("sm90", "hd128-causal-r4-deterministic", {"mask": "causal", "ratio": 4}, id="sm90-det-gqa"),
]


@pytest.mark.parametrize(("arch", "fields", "options"), BACKWARD)
def test_dense_backward(operators, arch, fields, options):
    """dq, dk and dv of the whole chain against float64."""
    head_dim, ratio, mask = options.get("head_dim", 128), options.get("ratio", 1), options.get("mask", "full")
    chain = [f"bwd-{arch}a-bf16-{fields}", f"bwd_*-{arch}a-bf16-hd{head_dim}*"]
    runtime = operators(arch, *chain)
    q, k, v = normal(1, 1, 200, ratio, head_dim), normal(2, 1, 333, 1, head_dim), normal(3, 1, 333, 1, head_dim)
    dout = normal(4, 1, 200, ratio, head_dim)
    keys, values = spread(k, ratio)[0], spread(v, ratio)[0]
    expected, lse, p = attention(q[0], keys, values, mask)
    out, lse = torch.from_numpy(expected).to(torch.bfloat16)[None], torch.from_numpy(lse).float()[None].contiguous()
    tensors = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
    dq, dk, dv = call("bwd", **tensors, mask=mask, deterministic="deterministic" in fields)

    g, scale = dout[0].double().numpy(), head_dim**-0.5
    q64, k64, v64 = (x.double().numpy() for x in (q[0], keys, values))
    rows = np.einsum("qhd,qhd->hq", g, expected)
    ds = p * (np.einsum("qhd,khd->hqk", g, v64) - rows[..., None]) * scale
    assert error(dq[0], np.einsum("hqk,khd->qhd", ds, k64)) < GRADIENT_ERROR
    assert error(dk[0, :, 0], np.einsum("hqk,qhd->kd", ds, q64)) < GRADIENT_ERROR * ratio
    assert error(dv[0, :, 0], np.einsum("hqk,qhd->kd", p, g)) < GRADIENT_ERROR * ratio
    assert max(clusters for _, clusters in runtime.launched) == options.get("clusters", 1)


def test_gradients_of_the_attention_function(operators):
    """`flash_attn_func` and `backward()` with the family asked for: its forward, and its backward by the recipe."""
    globs = ("fwd-sm90a-bf16-hd64-causal-r1", "bwd-sm90a-bf16-hd64-causal-r1", "bwd_*-sm90a-bf16-hd64-m128")
    runtime = operators("sm90", *globs, family="upstream")
    q, k, v = (normal(seed, 1, 130, 1, 64).requires_grad_() for seed in (1, 2, 3))
    dout = normal(4, 1, 130, 1, 64)
    out, _ = flash_attn_func(q, k, v, causal=True)
    out.backward(dout)

    expected, _, p = attention(*(x[0].detach() for x in (q, k, v)), "causal")
    g, q64, k64, v64 = (x[0].detach().double().numpy() for x in (dout, q, k, v))
    rows = np.einsum("qhd,qhd->hq", g, expected)
    ds = p * (np.einsum("qhd,khd->hqk", g, v64) - rows[..., None]) * 64**-0.5
    assert error(out[0].detach(), expected) < 2 * OUT_ERROR
    assert error(q.grad[0], np.einsum("hqk,khd->qhd", ds, k64)) < GRADIENT_ERROR
    assert error(k.grad[0], np.einsum("hqk,qhd->khd", ds, q64)) < GRADIENT_ERROR
    assert error(v.grad[0], np.einsum("hqk,qhd->khd", p, g)) < 2 * GRADIENT_ERROR
    kinds = [name.split("_sm90a")[0] for name, _ in runtime.launched]
    assert kinds == ["fwd", "bwd_preprocess", "bwd", "bwd_dq"]
