"""What the functions of flash-attention mean, in float64, one sequence at a time, from their documentation alone."""

import contextlib

import torch
from fa4_kernels import answers, api, counts, loader

from tests.runtime.reference_kernels import ReferenceRuntime

ONE_ROUNDING = 2.0**-8


@contextlib.contextmanager
def reference_runtime(monkeypatch, **options):
    """Kernels that are loops, on CPU tensors; counts from zero."""
    for module in (answers, api):
        monkeypatch.setattr(module, "CAN_ANSWER", False)
    made = ReferenceRuntime(**options)
    loader.use_runtime(made)
    counts.reset()
    yield made
    loader.use_runtime(None)


def drawn(*shape, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16).requires_grad_(requires_grad)


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def window_of(left, right, causal):
    """Which (row, key) pairs are seen, as a function of key - diagonal. A negative side is no bound."""
    right = 0 if causal else right
    return lambda distance: (left < 0 or distance >= -left) and (right < 0 or distance <= right)


def attention(q, k, v, sees=lambda distance: True, scale=None, softcap=0.0, sink=None):
    """(out (rows, heads, dim), lse (heads, rows)) of one sequence, bottom right; lse is -inf where nothing is seen."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    shift = k.shape[0] - q.shape[0]
    seen = torch.tensor([[sees(j - i - shift) for j in range(k.shape[0])] for i in range(q.shape[0])], dtype=torch.bool)
    scores = scores.masked_fill(~seen.view(q.shape[0], k.shape[0]), -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.double()[:, None, None].expand(-1, q.shape[0], 1)), -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(torch.isneginf(lse), 0, lse)[..., None])[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def close(actual, expected, roundings=4.0):
    assert actual.shape == expected.shape
    unit = max(expected.abs().max().item(), 1e-6)
    assert (actual.double() - expected).abs().max().item() <= roundings * ONE_ROUNDING * unit


def close_lse(actual, expected):
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    assert torch.allclose(actual.double(), expected, atol=1e-3, rtol=1e-4)
