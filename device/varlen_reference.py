"""Attention and its gradients, a sequence at a time: in float64 the reference, in the kernel's type the yardstick."""

import math


def scores_of(torch, drawn, q, k, dtype, factor):
    """Masked scores (heads, rows, keys) with every matrix in `dtype`, and the tangents of the cap or None."""
    k = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", (q.to(dtype).to(torch.float64) * drawn.scale * factor).to(dtype), k)
    tangents = None
    if drawn.softcap:
        tangents = torch.tanh(scores / drawn.softcap)
        scores = tangents * drawn.softcap
    rows, keys = scores.shape[1:]
    diagonal = torch.arange(rows, device=q.device)[:, None] + (keys - rows)
    key = torch.arange(keys, device=q.device)[None, :]
    hidden = (key < diagonal - drawn.window[0]) | (key > diagonal + drawn.window[1])
    return scores.masked_fill(hidden, -math.inf), tangents


def softmax(torch, drawn, scores):
    """Weights and lse in float64; the sink in the sum."""
    logits = scores.double()
    if drawn.sink is not None:
        column = drawn.sink.double()[:, None, None].expand(-1, scores.shape[1], 1)
        logits = torch.cat([logits, column], -1)
    lse = torch.logsumexp(logits, -1) if logits.shape[-1] else logits.new_full(logits.shape[:2], -math.inf)
    return torch.exp(scores.double() - torch.where(torch.isneginf(lse), 0, lse)[..., None]), lse


def attend(torch, drawn, b, dtype):
    """(out, lse) of a sequence; float64 is the reference, the kernel's type the yardstick."""
    q, k, v = drawn.sequences[b]
    group = q.shape[1] // k.shape[1]
    factor = torch.ones(q.shape[1], 1, device=q.device, dtype=torch.float64)
    out_factor = factor
    if drawn.descales is not None:
        factors = drawn.descales[:, b].double().repeat_interleave(group, 1)[..., None]
        factor, out_factor = factors[0] * factors[1], factors[2]
    is_fp8 = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    working = torch.float64 if is_fp8 else dtype
    scores, _ = scores_of(torch, drawn, q.float() if is_fp8 or working == torch.float64 else q, k, working, factor)
    weights, lse = softmax(torch, drawn, scores)
    if is_fp8:
        weights = (weights * 256).float().to(dtype).double() / 256
    values = v.to(working).repeat_interleave(group, 1)
    out = torch.einsum("hqk,khd->qhd", weights.to(working), values).double() * out_factor
    return (out.to(torch.bfloat16).double() if is_fp8 else out), lse


def gradients(torch, drawn, b, dout, dtype):
    """(dq, dk, dv) of a sequence with every matrix in `dtype`."""
    q, k, v = (x.to(dtype) for x in drawn.sequences[b])
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    scores, tangents = scores_of(torch, drawn, q, k, dtype, 1.0)
    weights = softmax(torch, drawn, scores)[0].to(dtype)
    dweights = torch.einsum("qhd,khd->hqk", dout.to(dtype), values)
    row_sums = (weights.double() * dweights.double()).sum(-1, keepdim=True).to(dtype)
    dscores = weights * (dweights - row_sums)
    if tangents is not None:
        dscores = dscores * (1 - tangents * tangents)
    dq = torch.einsum("hqk,khd->qhd", dscores, keys) * drawn.scale
    dk = torch.einsum("hqk,qhd->khd", dscores, q * drawn.scale)
    dv = torch.einsum("hqk,qhd->khd", weights, dout.to(dtype))
    return (dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv)))
