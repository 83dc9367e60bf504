"""Prove and time the kernels of packed, paged and split attention, soft cap, sink, fp8 and combine on a GPU.

    python benchmarks/prove_packed_on_device.py WHEEL_DIR --out record.json [--select GLOB] [--shard 0/1] [--timing]

Nothing but the wheels, torch and the scripts here. Every kernel of every pack that fits the GPU and that
prove_on_device and prove_backward_on_device do not prove is run on its cases: against float64, one sequence at a time,
with NaN wherever no result may depend on, marks wherever nothing may be written, twice with equal bits. `--timing` adds
decoding beside the memory's bandwidth, and checks of the public functions (graphs, gradients).

The kernels run in a child process. A child that dies, or says nothing for SILENCE_S, fails the kernel it was at; the
next child goes on behind it. Exit status 1 if anything failed.
"""

import argparse
import datetime
import fnmatch
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

from prove_on_device import GUARD_BITS, UNBOUNDED, driver_version, guarded, guards_intact, is_plain, median_ms

DEVICE = "cuda"
SILENCE_S = 90  # first launches of a kernel load it; no case takes longer
TILE = 128  # rows of a tile of the backward's workspaces
FP8 = ("e4m3", "e5m2")
PEAK_BYTES_A_SECOND = {"H200": 4.8e12, "H100": 3.35e12, "B200": 8e12, "B300": 8e12}


@dataclass(frozen=True)
class Case:
    """Sequences by length; used lengths where rows behind them exist. `splits`, `page_size`: for kernels with them."""

    name: str
    lengths_q: tuple
    lengths_k: tuple
    used_q: tuple | None = None
    used_k: tuple | None = None
    heads_q: int = 2
    heads_kv: int = 2
    window: tuple | None = None
    fill: str = "normal"
    page_size: int = 64
    splits: int = 3
    softcap: float = 15.0
    sink: float | None = None


def sparse(rows, batch):
    """Lengths of `batch` sequences, 0 where not named."""
    return tuple(rows.get(b, 0) for b in range(batch))


PACKED = (
    Case("single", (1,), (1,)),
    Case("unequal", (113, 7, 300, 1), (113, 7, 300, 1)),
    Case("unequal-keys", (5, 130, 1), (200, 17, 129), heads_q=4, heads_kv=1),
    Case("empty-ones", (0, 3, 0, 0, 20, 0), (5, 0, 0, 9, 40, 7)),
    Case(
        "very-many-empty",
        sparse({0: 1, 31: 2, 32: 130, 255: 3, 256: 2, 1029: 1}, 1030),
        sparse({0: 3, 31: 40, 33: 129, 255: 1, 1029: 2}, 1030),
    ),
    Case("used-lengths", (60, 140, 9, 20), (150, 70, 10, 30), (33, 129, 0, 20), (129, 70, 10, 0)),
    Case("group-of-five", (33, 17), (65, 90), heads_q=5, heads_kv=1),
    Case("large", (4096, 1000, 2048), (4096, 3000, 129), heads_q=4, heads_kv=2),
    Case("many", tuple(range(1, 200, 3)), tuple(range(400, 1, -6))[:67], heads_q=8, heads_kv=1),
    Case("rising", (3, 40), (900, 400), fill="rising"),
    Case("large-logits", (64, 3), (300, 500), fill="large_logits"),
    *(
        Case(f"decode-{rows}", (rows,) * 3, (16384, 9000, 1), heads_q=8, heads_kv=1, used_k=(16384, 8999, 1))
        for rows in (1, 2, 5, 8)
    ),
)
DENSE = (
    Case("single", (1,), (1,)),
    Case("odd", (17,), (129,)),
    Case("batch", (127,) * 3, (130,) * 3, heads_q=4, heads_kv=1),
    Case("group-of-five", (33,), (65,), heads_q=5, heads_kv=1),
    Case("more-queries", (1000,), (129,)),
    Case("large", (4096,), (4096,), heads_q=2, heads_kv=1),
    Case("large-logits", (64,), (300,), fill="large_logits"),
    Case("rising", (64,), (1000,), fill="rising"),
)
WINDOWS = ((64, 0), (20, UNBOUNDED), (UNBOUNDED, 7), (3, 3), (0, 0), (-10, 40))


def cases_for(axes, op):
    """The cases of a forward or backward kernel."""
    cases = list(DENSE if axes["layout"] == "dense" else PACKED)
    if op == "bwd":
        cases = [case for case in cases if not case.name.startswith("decode")]
    if axes["layout"] == "paged":
        sizes = {"unequal": 16, "unequal-keys": 128, "decode-2": 16, "decode-5": 128}
        cases = [replace(case, used_k=case.used_k or case.lengths_k) for case in cases]
        cases = [replace(case, page_size=sizes.get(case.name, 64)) for case in cases]
    if axes["mask"] == "local":
        shapes = [case for case in cases if case.name in ("unequal", "odd")]
        cases = [replace(case, window=WINDOWS[i % len(WINDOWS)]) for i, case in enumerate(cases)]
        cases += [replace(case, name=f"{case.name}-{window}", window=window) for window in WINDOWS for case in shapes]
    small = next(case for case in cases if case.name in ("unequal", "odd"))
    if axes.get("sink"):
        cases += [replace(small, name=f"sink{sink:g}", sink=sink) for sink in (0.0, -1e4, 100.0)]
    if axes.get("softcap"):
        cases += [replace(small, name="small-cap", softcap=0.5, fill="large_logits")]
    if axes.get("split"):
        more = [case for case in cases if case.name in ("unequal-keys", "decode-1", "empty-ones")]
        cases += [replace(case, name=f"{case.name}-{n}", splits=n) for case in more for n in (1, 2, 5, 33)]
    if axes["dtype"] in FP8:
        cases += [
            Case("tail-mass", (3,), (1100,), fill="tail_mass", used_k=(1100,) if axes["layout"] == "paged" else None)
        ]
    return cases


# --------------------------------------------------------------------------------------------------------------------
# Inputs


def torch_dtype(torch, dtype):
    """The type of q, k, v."""
    return {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }[dtype]


class Drawn:
    """Sequences of a case, exact in the kernel's type, and what says where they lie."""

    def __init__(self, torch, case, axes, generator):
        self.torch, self.case, self.axes, self.generator = torch, case, axes, generator
        self.dtype = torch_dtype(torch, axes["dtype"])
        self.rows_q, self.rows_k = case.used_q or case.lengths_q, case.used_k or case.lengths_k
        self.sequences = [self._sequence(n, m) for n, m in zip(self.rows_q, self.rows_k, strict=True)]
        self.window = {"full": (UNBOUNDED, UNBOUNDED), "causal": (UNBOUNDED, 0)}.get(axes["mask"], case.window)
        self.scale = axes["head_dim"] ** -0.5
        self.softcap = case.softcap if axes.get("softcap") else 0.0
        self.sink = None
        if axes.get("sink"):
            self.sink = self.normal(case.heads_q) if case.sink is None else self.full(case.heads_q, case.sink)
        self.descales = None
        if axes["dtype"] in FP8:
            shape = (3, len(self.rows_q), case.heads_kv)
            factors = torch.rand(shape, generator=generator, device=DEVICE) + 0.5
            self.descales = torch.ones_like(factors) if case.fill == "tail_mass" else factors

    def normal(self, *shape):
        """Standard normal numbers."""
        return self.torch.randn(shape, device=DEVICE, generator=self.generator)

    def full(self, count, number):
        """A vector of one number."""
        return self.torch.full((count,), float(number), device=DEVICE)

    def _sequence(self, rows, keys):
        case, head_dim = self.case, self.axes["head_dim"]
        q, k = self.normal(rows, case.heads_q, head_dim), self.normal(keys, case.heads_kv, head_dim)
        v = self.normal(keys, case.heads_kv, self.axes["head_dim_v"])
        if case.fill == "large_logits":
            q = q * 8
        elif case.fill == "rising":
            q = q * 0.1 + 1
            k = k * 0.1 + (4.0 * self.torch.arange(keys, device=DEVICE) / 32 / head_dim**0.5)[:, None, None]
        elif case.fill == "tail_mass":
            q, k, v = self.torch.ones_like(q), self.torch.zeros_like(k), self.torch.ones_like(v)
            k[0], v[0] = {64: 1.25}.get(head_dim, 0.875), 0
        return tuple(x.to(self.dtype) for x in (q, k, v))

    def ints(self, numbers):
        """A list for the kernels."""
        return self.torch.tensor(list(numbers), dtype=self.torch.int32, device=DEVICE)

    def starts(self, lengths):
        """cu_seqlens."""
        return self.ints([0, *(sum(lengths[: b + 1]) for b in range(len(lengths)))])

    def packed(self, parts, lengths, tail=5):
        """One behind the other, with NaN in every other row."""
        whole = self.torch.full((sum(lengths) + tail, *parts[0].shape[1:]), math.nan, device=DEVICE).to(parts[0].dtype)
        start = 0
        for part, length in zip(parts, lengths, strict=True):
            whole[start : start + len(part)] = part
            start += length
        return whole

    def places(self):
        """Where the rows of each sequence lie in packed queries."""
        start = 0
        for rows, length in zip(self.rows_q, self.case.lengths_q, strict=True):
            yield slice(start, start + rows)
            start += length

    def arguments(self):
        """Inputs by the names of the signature."""
        case, layout = self.case, self.axes["layout"]
        q, k, v = ([sequence[i] for sequence in self.sequences] for i in range(3))
        named = {"softmax_scale": self.scale, "window_left": self.window[0], "window_right": self.window[1]}
        named |= {"softcap": self.softcap, "sink": self.sink, "scale": self.scale}
        if self.descales is not None:
            named |= dict(zip(("q_descale", "k_descale", "v_descale"), self.descales, strict=True))
        if layout == "dense":
            return named | {"q": self.torch.stack(q), "k": self.torch.stack(k), "v": self.torch.stack(v)}
        named |= {"q": self.packed(q, case.lengths_q), "cu_seqlens_q": self.starts(case.lengths_q)}
        named |= {"cu_seqlens": named["cu_seqlens_q"]}
        named["seqused_q"] = named["seqused"] = self.ints(case.used_q or ())
        named["seqused_k"] = self.ints(case.used_k or ())
        if layout == "varlen":
            named |= {"k": self.packed(k, case.lengths_k), "v": self.packed(v, case.lengths_k)}
            return named | {"cu_seqlens_k": self.starts(case.lengths_k)}
        return named | self._pages(k, v)

    def _pages(self, k, v):
        size, counts = self.case.page_size, [-(-n // self.case.page_size) for n in self.rows_k]
        order = self.torch.randperm(sum(counts) + 3, generator=self.torch.Generator().manual_seed(7)).tolist()
        table = [[2**31 - 1, -1, 12345678][b % 3 : b % 3 + 1] * (max(counts) + 2) for b in range(len(counts))]
        pages = {}
        for name, parts in (("k", k), ("v", v)):
            shape = (len(order), size, *parts[0].shape[1:])
            pages[name] = self.torch.full(shape, math.nan, device=DEVICE).to(self.dtype)
        for b, count in enumerate(counts):
            for n in range(count):
                table[b][n] = order.pop()
                for name, parts in (("k", k), ("v", v)):
                    piece = parts[b][n * size : (n + 1) * size]
                    pages[name][table[b][n], : len(piece)] = piece
        return pages | {"page_table": self.torch.tensor(table, dtype=self.torch.int32, device=DEVICE)}


# --------------------------------------------------------------------------------------------------------------------
# Reference


def scores_of(torch, drawn, q, k, dtype, factor):
    """Masked scores (heads, rows, keys) with every matrix in `dtype`, and the tangents of the cap or None."""
    k = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", (q.to(dtype).to(torch.float64) * drawn.scale * factor).to(dtype), k)
    tangents = None
    if drawn.softcap:
        tangents = torch.tanh(scores / drawn.softcap)
        scores = tangents * drawn.softcap
    rows, keys = scores.shape[1:]
    diagonal = torch.arange(rows, device=DEVICE)[:, None] + (keys - rows)
    key = torch.arange(keys, device=DEVICE)[None, :]
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
    factor = torch.ones(q.shape[1], 1, device=DEVICE, dtype=torch.float64)
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


# --------------------------------------------------------------------------------------------------------------------
# One case of a forward


def is_marked(torch, view):
    """Which elements still hold the mark that they were given before the launch."""
    size = view.element_size()
    return view.contiguous().view({2: torch.int16, 4: torch.int32}[size]) == GUARD_BITS[size]


def merged(torch, parts, lses):
    """Results of split keys made one in float64; lses (splits, ..., heads)."""
    lses = lses.double()
    total = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(torch.isneginf(total), 0, total))
    readable = torch.where(torch.isneginf(lses)[..., None], 0, parts.double())
    return (weights[..., None] * readable).sum(0), total


def synchronize(torch):
    """Wait for the device; errors of launches appear here."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def check_forward(torch, kernel, axes, case, generator):
    """A row: the error over its bound (`ratio` <= 1 passes) and every fault seen."""
    drawn = Drawn(torch, case, axes, generator)
    named = drawn.arguments()
    out_dtype = torch.bfloat16 if axes["dtype"] in FP8 else drawn.dtype
    is_dense, is_split = axes["layout"] == "dense", bool(axes.get("split"))
    rows = named["q"].shape[:-1]
    lse_shape = (rows[0], rows[2], rows[1]) if is_dense else (rows[1], rows[0])
    shapes = ((*rows, axes["head_dim_v"]), lse_shape)
    names, dtypes = ("out", "lse"), (out_dtype, torch.float32)
    if is_split:
        names, dtypes = ("out_partial", "lse_partial"), (torch.float32, torch.float32)
        shapes = tuple((case.splits, *shape) for shape in shapes)
    runs = []
    for _ in range(2):
        buffers = [guarded(torch, shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        kernel(named | {name: view for name, (_, view) in zip(names, buffers, strict=True)})
        synchronize(torch)
        runs.append(buffers)
    faults = [
        f"wrote outside {name}"
        for name, (whole, _) in zip(names, runs[0], strict=True)
        if not guards_intact(torch, whole)
    ]
    for name, first, again in zip(names, runs[0], runs[1], strict=True):
        if not torch.equal(first[0].view(torch.uint8), again[0].view(torch.uint8)):
            faults.append(f"a repeat gave other bits of {name}")
    row = judge(torch, drawn, *(view for _, view in runs[0]), is_dense, is_split)
    return row | {"case": case.name, "faults": faults + row["faults"]}


def judge(torch, drawn, out, lse, is_dense, is_split):
    """Compare with the reference, sequence by sequence."""
    faults, exists = [], None
    if not is_dense:
        exists = torch.zeros(out.shape[-3], dtype=torch.bool, device=DEVICE)
        for place in drawn.places():
            exists[place] = True
        beyond = is_marked(torch, out)[..., ~exists, :, :].all() and is_marked(torch, lse)[..., ~exists].all()
        faults += [] if beyond else ["wrote rows that do not exist"]
    lse_rows = lse.transpose(-1, -2)
    whole, whole_lse = merged(torch, out, lse_rows) if is_split else (out.double(), lse_rows.double())
    off = allowed = largest = lse_off = 0.0
    every = []
    for b, place in enumerate(range(len(drawn.sequences)) if is_dense else drawn.places()):
        if drawn.sequences[b][0].numel() == 0:
            continue
        ref, ref_lse = attend(torch, drawn, b, torch.float64)
        same, _ = attend(torch, drawn, b, drawn.dtype)
        found, found_lse = whole[place], whole_lse[place].T
        if torch.isnan(found).any() or torch.isnan(found_lse).any():
            return {"ratio": math.inf, "lse_error": math.inf, "faults": [*faults, f"NaN or unwritten in sequence {b}"]}
        if not torch.equal(torch.isneginf(found_lse), torch.isneginf(ref_lse)):
            faults.append(f"lse is -inf on other rows than the empty ones in sequence {b}")
        difference = (found_lse - ref_lse) / ref_lse.abs().clamp(min=1)
        lse_off = max(lse_off, difference.masked_fill(torch.isneginf(ref_lse), 0).abs().max().item())
        off = max(off, (found - ref).abs().max().item())
        allowed = max(allowed, (same - ref).abs().max().item())
        largest = max(largest, ref.abs().max().item())
        every.append((found.flatten(), ref.flatten()))
    bound = 2 * allowed + largest * 2.0 ** (-11 if drawn.dtype == torch.float16 else -8)
    if not off <= bound:
        faults.append(f"out is off by {off:.3g}, allowed {bound:.3g}")
    if not lse_off <= 1e-4:
        faults.append(f"lse is off by {lse_off:.3g}, allowed 1e-4")
    if drawn.descales is not None and every:
        found, ref = (torch.cat(parts) for parts in zip(*every, strict=True))
        cosine = torch.nn.functional.cosine_similarity(found, ref, dim=0).item() if ref.any() else 1.0
        faults += [] if cosine > 0.99 else [f"cosine {cosine:.4f}, more than 0.99 is needed"]
        is_light = drawn.case.fill == "tail_mass" and drawn.window == (UNBOUNDED, UNBOUNDED) and drawn.sink is None
        if is_light and not ((found - ref).abs() <= 0.1 * ref.abs()).all():
            faults.append(f"light keys got lost: {found.min().item():.4f} instead of {ref.min().item():.4f}")
    return {"ratio": off / bound if bound else float(off > 0), "lse_error": lse_off, "faults": faults}


# --------------------------------------------------------------------------------------------------------------------
# Combine


def check_combine(torch, kernel, axes, case, generator):
    """Random parts, a third of them without a key and NaN, some rows without any."""
    splits, batch, rows, heads = case
    dtype = torch_dtype(torch, axes["dtype"])
    parts = torch.randn(splits, batch, rows, heads, axes["head_dim_v"], device=DEVICE, generator=generator)
    lses = 10 * torch.randn(splits, batch, heads, rows, device=DEVICE, generator=generator)
    lses[torch.rand(lses.shape, device=DEVICE, generator=generator) < 1 / 3] = -math.inf
    lses[..., 3::7] = -math.inf
    parts[torch.isneginf(lses).transpose(2, 3)] = math.nan
    sink = torch.tensor([0.3, 100.0, -1e4, 0.0, -2.0] * heads, device=DEVICE)[:heads]
    out_whole, out = guarded(torch, parts.shape[1:], dtype)
    lse_whole, lse = guarded(torch, lses.shape[1:], torch.float32)
    kernel({"out_partial": parts, "lse_partial": lses, "out": out, "lse": lse, "sink": sink})
    synchronize(torch)
    with_sink = lses.transpose(2, 3)
    if axes.get("sink"):
        column = sink.expand(1, batch, rows, heads)
        with_sink = torch.cat([with_sink, column])
        parts = torch.cat([parts, torch.zeros_like(parts[:1])])
    ref, ref_lse = merged(torch, parts, with_sink)
    ref_lse = ref_lse.transpose(1, 2)
    bound = ref.abs().max().item() * 2.0 ** (-11 if dtype == torch.float16 else -8) + 2.0**-18 * 6
    off = (out.double() - ref).abs().max().item()
    difference = ((lse.double() - ref_lse) / ref_lse.abs().clamp(min=1)).masked_fill(torch.isneginf(ref_lse), 0)
    lse_off = difference.abs().max().item()
    faults = (
        [] if guards_intact(torch, out_whole) and guards_intact(torch, lse_whole) else ["wrote outside the outputs"]
    )
    faults += [] if torch.equal(torch.isneginf(lse), torch.isneginf(ref_lse)) else ["lse is -inf on other rows"]
    faults += [] if off <= bound else [f"out is off by {off:.3g}, allowed {bound:.3g}"]
    faults += [] if lse_off <= 1e-4 else [f"lse is off by {lse_off:.3g}, allowed 1e-4"]
    return {
        "case": f"s{splits}-b{batch}-q{rows}-h{heads}",
        "ratio": off / bound,
        "lse_error": lse_off,
        "faults": faults,
    }


COMBINE = ((1, 1, 1, 1), (2, 1, 1, 8), (3, 2, 17, 2), (5, 1, 1000, 4), (17, 2, 3, 5), (128, 4, 1, 32), (256, 1, 2, 1))


# --------------------------------------------------------------------------------------------------------------------
# Backward


class Chain:
    """preprocess, the entry itself, postprocess: the product's loader, no dispatch for the main kernel."""

    def __init__(self, runtime, pack, entry):
        from fa4_kernels.dispatch import Problem

        axes = entry.axes
        problem = {"dtype": axes["dtype"], "head_dim": axes["head_dim"], "layout": axes["layout"]}
        before = Problem(op="bwd_preprocess", head_dim_v=axes["head_dim_v"], **problem)
        after = Problem(op="bwd_postprocess", head_dim_v=axes["head_dim"], **problem)
        self.launches = [launcher(runtime, *find(runtime, step)) for step in (before, None, after) if step is not None]
        self.launches.insert(1, launcher(runtime, pack, entry))

    def run(self, named):
        """All three."""
        for launch in self.launches:
            launch(named)


def find(runtime, problem):
    """Pack and entry for a problem."""
    from fa4_kernels.dispatch import chosen

    return chosen(runtime.decide(problem, 0))


def check_backward(torch, chain, axes, case, generator):
    """dq, dk, dv against float64; zeros or nothing beyond the sequences."""
    drawn = Drawn(torch, case, axes, generator)
    named, is_dense = drawn.arguments(), axes["layout"] == "dense"
    douts, outs, lses, expected, same = [], [], [], [], []
    for b, (q, _, v) in enumerate(drawn.sequences):
        douts.append(drawn.normal(q.shape[0], q.shape[1], v.shape[2]).to(drawn.dtype))
        out, lse = attend(torch, drawn, b, torch.float64)
        outs.append(out.to(drawn.dtype))
        lses.append(lse.float().T)
        expected.append(gradients(torch, drawn, b, douts[-1], torch.float64))
        same.append(gradients(torch, drawn, b, douts[-1], drawn.dtype))
    pack = torch.stack if is_dense else lambda parts: drawn.packed(parts, case.lengths_q)
    named |= {"out": pack(outs), "dout": pack(douts), "lse": pack(lses).transpose(-1, -2).contiguous()}
    heads, batch = case.heads_q, len(case.lengths_q)
    rounded = -(-case.lengths_q[0] // TILE) * TILE
    padded = (heads, (named["q"].shape[0] + TILE * batch) // TILE * TILE)
    rows = (batch, heads, rounded) if is_dense else padded
    runs = []
    for _ in range(2):
        for name in ("dpsum", "lse_log2"):
            named[name] = torch.full(rows, math.nan, device=DEVICE)
        named["dq_accum"] = named["accumulator"] = torch.full((*rows, axes["head_dim"]), math.nan, device=DEVICE)
        named["dq_semaphore"] = torch.full((*rows[:-1], rows[-1] // TILE), 77, dtype=torch.int32, device=DEVICE)
        buffers = [guarded(torch, named[name].shape, drawn.dtype) for name in "qkv"]
        named |= {"gradient": buffers[0][1], "dk": buffers[1][1], "dv": buffers[2][1]}
        chain.run(named)
        synchronize(torch)
        runs.append(buffers)
    faults, worst = [], 0.0
    for i, name in enumerate(("dq", "dk", "dv")):
        whole, found = runs[0][i]
        ratio, wrong = judge_gradient(torch, drawn, name, i, found, expected, same, is_dense)
        worst, faults = max(worst, ratio), faults + wrong
        faults += [] if guards_intact(torch, whole) else [f"wrote outside {name}"]
        if (i > 0 or axes.get("deterministic")) and not torch.equal(
            found.view(torch.int16), runs[1][i][1].view(torch.int16)
        ):
            faults.append(f"a repeat gave other bits of {name}")
    return {"case": case.name, "ratio": worst, "lse_error": 0.0, "faults": faults}


def noise(drawn, name):
    """What float32 sums alone may be off by, where the gradient is exactly 0 (one key in the window).

    As fa4build/acceptance_backward.py for standard normal tensors, whose largest element is about 5; dq and dk are dS
    times k and q.
    """
    factors = {"dq": 1, "dk": 0}.get(name)
    largest = 5.0
    if factors is not None:
        parts = [sequence[factors] for sequence in drawn.sequences if sequence[factors].numel()]
        largest = max((part.abs().max().item() for part in parts), default=largest)
    return 2.0**-18 * max(1, drawn.axes["head_dim"] / 128) * max(1, largest / 5)


def judge_gradient(torch, drawn, name, i, found, expected, same, is_dense):
    """(error over its bound, faults) of dq, dk or dv."""
    lengths, used = (drawn.case.lengths_q, drawn.rows_q) if i == 0 else (drawn.case.lengths_k, drawn.rows_k)
    off = allowed = largest = 0.0
    start, exists = 0, torch.zeros(found.shape[0], dtype=torch.bool, device=DEVICE)
    for b, (length, rows) in enumerate(zip(lengths, used, strict=True)):
        place = b if is_dense else slice(start, start + rows)
        exists[place], start = True, start + length
        if not expected[b][i].numel():
            continue
        part = found[place].double()
        if not torch.isfinite(part).all():
            return math.inf, [f"{name} is not finite or unwritten in sequence {b}"]
        off = max(off, (part - expected[b][i]).abs().max().item())
        allowed = max(allowed, (same[b][i].double() - expected[b][i]).abs().max().item())
        largest = max(largest, expected[b][i].abs().max().item())
    rounding = largest * 2.0 ** (-11 if drawn.dtype == torch.float16 else -8)
    bound = 2 * allowed + rounding + noise(drawn, name)
    faults = [] if off <= bound else [f"{name} is off by {off:.3g}, allowed {bound:.3g}"]
    beyond = found[~exists]
    if not (is_marked(torch, beyond) | (beyond == 0)).all():
        faults.append(f"{name} holds numbers beyond the sequences")
    return off / bound, faults


# --------------------------------------------------------------------------------------------------------------------
# One kernel


def launcher(runtime, pack, entry):
    """Launches exactly this entry with arguments by name."""
    from fa4_kernels.abi import SIGNATURES
    from fa4_kernels.dispatch import signature_of

    launch, num_sms = runtime.load(pack, entry, 0), runtime.device(0).sm_count
    names = [row[0] for row in SIGNATURES[signature_of(entry)]]

    def run(named):
        launch.run(*(num_sms if name == "num_sms" else named[name] for name in names))

    return run


def is_ours(entry):
    """What the other two scripts do not prove."""
    return entry.op == "fwd_combine" or (entry.op in ("fwd", "bwd") and not is_plain(entry))


def check_kernel(torch, runtime, pack, entry, seed):
    """All cases of one kernel: a row of the record. A case that raises is a fault; the rest go on."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    axes = entry.axes
    if entry.op == "bwd":
        kernel, check, cases = Chain(runtime, pack, entry), check_backward, cases_for(axes, "bwd")
    else:
        kernel = launcher(runtime, pack, entry)
        is_combine = entry.op == "fwd_combine"
        check, cases = (check_combine, COMBINE) if is_combine else (check_forward, cases_for(axes, "fwd"))
    rows = []
    for case in cases:
        try:
            rows.append(check(torch, kernel, axes, case, generator))
        except Exception as error:
            name = getattr(case, "name", str(case))
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {str(error)[:300]} ({place.name}, line {place.lineno})"
            rows.append({"case": name, "ratio": math.inf, "lse_error": math.inf, "faults": [text]})
            synchronize(torch)  # raises again if the device is lost: the parent starts another process
    failed = [row for row in rows if row["faults"]]
    return {
        "id": entry.id,
        "cubin_sha256": entry.cubin.sha256,
        "passed": not failed,
        "cases": len(rows),
        "worst_ratio": max(row["ratio"] for row in rows),
        "worst_lse_error": max(row["lse_error"] for row in rows),
        "failures": failed[:5],
    }


# --------------------------------------------------------------------------------------------------------------------
# Timing and the public functions


def time_decoding(torch, fa4_kernels, batch, heads_q, heads_kv, rows, keys, page_size, num_splits, causal=True):
    """Milliseconds of one step, and the share of the memory's bandwidth that reading keys and values once takes."""
    head_dim = 128
    q = torch.randn(batch, rows, heads_q, head_dim, device=DEVICE, dtype=torch.bfloat16)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=DEVICE)
    table = None
    shape = (batch, keys, heads_kv, head_dim)
    if page_size:
        pages = batch * keys // page_size
        shape = (pages, page_size, heads_kv, head_dim)
        table = torch.randperm(pages, device=DEVICE).int().view(batch, -1)
    k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))

    def step(_):
        fa4_kernels.flash_attn_with_kvcache(q, k, v, lengths, table, causal=causal, num_splits=num_splits)

    milliseconds = median_ms(torch, step)
    peak = next((rate for name, rate in PEAK_BYTES_A_SECOND.items() if name in torch.cuda.get_device_name()), math.nan)
    share = 2 * batch * keys * heads_kv * head_dim * 2 / (milliseconds * 1e-3) / peak
    return {
        "batch": batch,
        "heads": f"{heads_q}/{heads_kv}",
        "rows": rows,
        "keys": keys,
        "page_size": page_size,
        "num_splits": num_splits,
        "ms": milliseconds,
        "bandwidth_share": share,
    }


def decoding_rows(torch, fa4_kernels):
    """Decoding over 16k keys: few and many sequences, with and without pages, split by choice and not at all."""
    rows = []
    for page_size in (0, 16, 64, 128):
        for batch, heads_q, heads_kv, queries in (
            (1, 32, 8, 1),
            (4, 32, 8, 1),
            (32, 32, 8, 1),
            (64, 32, 4, 1),
            (32, 32, 8, 4),
        ):
            for num_splits in (0, 1):
                try:
                    arguments = (batch, heads_q, heads_kv, queries, 16384, page_size, num_splits)
                    row = time_decoding(torch, fa4_kernels, *arguments)
                except Exception as error:
                    row = {
                        "error": f"{type(error).__name__}: {str(error)[:200]}",
                        "page_size": page_size,
                        "batch": batch,
                    }
                rows.append(row)
                print("decode", json.dumps(row), flush=True)
    return rows


def check_graph(torch, fa4_kernels):
    """A captured step follows the lengths of the cache at each replay."""
    q = torch.randn(2, 1, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 1024, 2, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([100, 1000], dtype=torch.int32, device=DEVICE)
    call = lambda: fa4_kernels.flash_attn_with_kvcache(q, k, v, lengths, num_splits=2)[0]  # noqa: E731
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for numbers in ([100, 1000], [1024, 3], [0, 517]):
        lengths.copy_(torch.tensor(numbers, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, call()), f"lengths {numbers}"


def check_autograd(torch, fa4_kernels):
    """flash_attn_varlen_func with a sink: gradients against float64, sequence by sequence."""
    axes = {"dtype": "bf16", "head_dim": 128, "head_dim_v": 128, "mask": "causal", "layout": "varlen", "sink": True}
    drawn = Drawn(torch, PACKED[1], axes, torch.Generator(device=DEVICE).manual_seed(3))
    named = drawn.arguments()
    total = sum(PACKED[1].lengths_q)
    q, k, v = (named[name][:total].clone().requires_grad_() for name in "qkv")
    sink = drawn.sink.clone().requires_grad_()
    starts = (named["cu_seqlens_q"], named["cu_seqlens_k"])
    out, lse = fa4_kernels.flash_attn_varlen_func(q, k, v, *starts, causal=True, learnable_sink=sink, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (q, k, v, sink), (dout, dlse))
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v, sink)]
    loss = 0
    for place in drawn.places():
        parts = [x[place] for x in inputs[:3]]
        scores = torch.einsum("qhd,khd->hqk", *parts[:2]) * drawn.scale
        n = scores.shape[1]
        scores = scores.masked_fill(torch.ones(n, n, device=DEVICE).triu(1).bool(), -math.inf)
        logits = torch.cat([scores, inputs[3][:, None, None].expand(-1, n, 1)], -1)
        one = torch.einsum("hqk,khd->qhd", torch.softmax(logits, -1)[..., :-1], parts[2])
        loss = loss + (one * dout[place].double()).sum() + (torch.logsumexp(logits, -1) * dlse[:, place].double()).sum()
    for name, a, b in zip(("dq", "dk", "dv", "dsink"), found, torch.autograd.grad(loss, inputs), strict=True):
        off, largest = (a.double() - b).abs().max().item(), b.abs().max().item()
        assert off <= 0.03 * largest, f"{name} is off by {off:.3g} of {largest:.3g}"


def check_compile(torch, fa4_kernels):
    """torch.compile(fullgraph=True) gives what eager mode gives."""
    q, k, v = (torch.randn(300, 4, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    starts = torch.tensor([0, 100, 300], dtype=torch.int32, device=DEVICE)
    call = lambda q, k, v: fa4_kernels.flash_attn_varlen_func(q, k, v, starts, starts, causal=True)[0]  # noqa: E731
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v))


def public_checks(torch, fa4_kernels):
    """Name -> `pass` or what went wrong."""
    results = {}
    for check in (check_graph, check_autograd, check_compile):
        try:
            check(torch, fa4_kernels)
            results[check.__name__] = "pass"
        except Exception as error:
            results[check.__name__] = f"{type(error).__name__}: {str(error)[:300]}"
        print(check.__name__, results[check.__name__], flush=True)
    return results


# --------------------------------------------------------------------------------------------------------------------
# Processes


def selected(arguments, packs, capability):
    """(pack, entry) of every kernel to prove, in order of their ids."""
    found = [(pack, entry) for pack in packs for entry in pack.manifest.entries if entry.target == capability]
    found = sorted((item for item in found if is_ours(item[1])), key=lambda item: item[1].id)
    found = [item for item in found if fnmatch.fnmatchcase(item[1].id, arguments.select)]
    shard, shards = map(int, arguments.shard.split("/"))
    return found[shard::shards]


def child(arguments):
    """Runs with the installed wheels on the path; writes one line of JSON a kernel."""
    import importlib.util

    import torch

    for compiler in ("cutlass", "tvm_ffi", "fa4build"):
        if importlib.util.find_spec(compiler):
            raise SystemExit(f"{compiler} can be imported here: this would not prove that the wheels work alone")
    import fa4_kernels
    from fa4_kernels import loader
    from fa4_kernels.packs import installed_packs, refused, usable

    if refused(installed_packs()):
        raise SystemExit(f"a pack cannot be used: {refused(installed_packs())}")
    capability = "sm_{}{}a".format(*torch.cuda.get_device_capability())
    if arguments.only_timing:
        timing = {"public": public_checks(torch, fa4_kernels), "decoding": decoding_rows(torch, fa4_kernels)}
        Path(arguments.rows).write_text(json.dumps(timing) + "\n")
        return 0
    entries = selected(arguments, tuple(usable(installed_packs())), capability)
    facts = {"device": torch.cuda.get_device_name(), "capability": capability, "torch": torch.__version__}
    with Path(arguments.rows).open("a") as rows:
        rows.write(json.dumps({"facts": facts, "kernels": [entry.id for _, entry in entries]}) + "\n")
        for pack, entry in entries[arguments.skip :]:
            row = check_kernel(torch, loader.runtime(), pack, entry, arguments.seed)
            rows.write(json.dumps(row) + "\n")
            rows.flush()
            verdict = "pass" if row["passed"] else f"FAIL {json.dumps(row['failures'][:2])[:400]}"
            print(f"{row['id']:52s} {row['cases']:3d} cases  worst {row['worst_ratio']:.2f}  {verdict}", flush=True)
    return 0


def watched(command, environment, deadline):
    """Exit status of a child; it is killed after SILENCE_S without a line, or at the deadline."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    last = [time.monotonic()]

    def follow():
        for line in process.stdout:
            last[0] = time.monotonic()
            print(line, end="", flush=True)

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    while process.poll() is None:
        time.sleep(0.2)
        now = time.monotonic()
        if now - last[0] > SILENCE_S or now > deadline:
            process.kill()
            print(f"killed: {'out of time' if now > deadline else 'silent'}", flush=True)
            break
    process.wait()
    reader.join(5)
    return process.returncode


def read_rows(path):
    """(facts, ids of all kernels, rows so far) of the children's file; a torn last line is left out."""
    facts, kernels, rows = {}, [], []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if "kernels" in document:
            facts, kernels = document["facts"], document["kernels"]
        else:
            rows.append(document)
    return facts, kernels, rows


def prove(command, environment, rows_path, deadline):
    """Children until every kernel has a row: (facts, rows)."""
    lost = []
    while True:
        _, kernels, rows = read_rows(rows_path)
        done = len(rows)
        if kernels and done >= len(kernels):
            break
        status = watched([*command, "--skip", str(done)], environment, deadline)
        _, kernels, rows = read_rows(rows_path)
        if time.monotonic() > deadline or not kernels:
            break
        if status == 0 and len(rows) >= len(kernels):
            break
        name = kernels[len(rows)]
        reason = f"the process ended with status {status}"
        failure = {"case": "?", "ratio": math.inf, "lse_error": math.inf, "faults": [reason]}
        row = {"id": name, "cubin_sha256": None, "passed": False, "cases": 0, "worst_ratio": math.inf}
        row |= {"worst_lse_error": math.inf, "failures": [failure]}
        with rows_path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        lost.append(name)
        print(f"{name:52s} FAIL {reason}", flush=True)
        if len(lost) >= 5:
            print("five kernels ended the process; the rest is not run", flush=True)
            break
    return read_rows(rows_path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel_dir")
    parser.add_argument("--out", default="record.json")
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--select", default="*", help="glob over the ids of kernels")
    parser.add_argument("--shard", default="0/1", help="I/N: every N-th kernel from the I-th on")
    parser.add_argument("--timing", action="store_true")
    parser.add_argument("--only-timing", action="store_true")
    parser.add_argument("--seconds", type=float, default=540, help="after which what is left is not run")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments)
    wheels = sorted(Path(arguments.wheel_dir).glob(f"fa4_kernels-*{platform.machine()}.whl"))
    wheels += sorted(Path(arguments.wheel_dir).glob("fa4_kernels_sm*.whl"))
    if len(wheels) < 2:
        raise SystemExit(
            f"{arguments.wheel_dir}: needs the fa4_kernels wheel for {platform.machine()} and a pack wheel"
        )
    started = time.monotonic()
    deadline = started + arguments.seconds
    with tempfile.TemporaryDirectory() as site:
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*install, "--target", site, *map(str, wheels)], check=True)
        environment = {**os.environ, "PYTHONPATH": site, "PYTHONDONTWRITEBYTECODE": "1"}
        rows_path, timing_path = Path(site) / "rows.jsonl", Path(site) / "timing.json"
        options = ["--seed", str(arguments.seed), "--select", arguments.select, "--shard", arguments.shard]
        command = [sys.executable, __file__, arguments.wheel_dir, "--child", *options]
        timing = None
        if arguments.timing or arguments.only_timing:
            watched([*command, "--only-timing", "--rows", str(timing_path)], environment, deadline)
            timing = json.loads(timing_path.read_text()) if timing_path.exists() else {"error": "no result"}
        facts, kernels, rows = {}, [], []
        if not arguments.only_timing:
            command += ["--rows", str(rows_path)]
            facts, kernels, rows = prove(command, environment, rows_path, deadline)
    record = {
        "schema": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **facts,
        "driver": driver_version(),
        "python": platform.python_version(),
        "seed": arguments.seed,
        "acceptance_seconds": round(time.monotonic() - started, 1),
        "variants": rows,
        **({"timing": timing} if timing else {}),
    }
    Path(arguments.out).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    failed = [row["id"] for row in rows if not row["passed"]]
    print(
        f"{len(rows)} of {len(kernels)} kernels, {sum(row['cases'] for row in rows)} cases, {len(failed)} failed, "
        f"{record['acceptance_seconds']} s"
    )
    is_complete = arguments.only_timing or (rows and len(rows) >= len(kernels))
    return 0 if is_complete and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
