"""A runtime whose kernels are loops over the sequences of a call in float64, on CPU tensors.

Each launch reads and writes its arguments as docs/formats.md, section 1, says, and refuses a list that is not the
signature's: a stand-in for kernels where the subject of a test is what is handed to them.
"""

import numpy as np
import torch
from fa4_kernels import loader
from fa4_kernels.abi import OUTPUT_DTYPES, SIGNATURES, signature_name
from fa4_kernels.dispatch import Device
from fa4_kernels.errors import LayoutError, NoKernelError

LOG2_E = 1.4426950408889634
ROWS = 128  # of a tile of the backward's workspaces
KEYS_A_BLOCK = 16  # of a split
_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_TORCH |= {"f32": torch.float32, "i32": torch.int32}


class ReferenceRuntime:
    """Answers every problem but those for which `lacks(problem)`; `launched` lists what ran."""

    device_type = loader.CPU
    family, packs = None, ()

    def __init__(self, lacks=lambda problem: False, sm_count=16):
        self.lacks, self.launched, self._sm_count = lacks, [], sm_count

    def device(self, ordinal):
        return Device(name="loops", compute_capability=(9, 0), sm_count=self._sm_count)

    def launch_for(self, problem, ordinal):
        if self.lacks(problem):
            raise NoKernelError(f"no kernel for {problem}")
        return _Launch(problem, self)

    def decide(self, problem, ordinal):
        return problem


class _Launch:
    def __init__(self, problem, runtime):
        self._problem, self._runtime = problem, runtime
        self._name = signature_name(problem.op, problem.layout, problem.dtype, problem.features)

    def run(self, *arguments):
        named = bound(self._problem, SIGNATURES[self._name], arguments)
        self._runtime.launched.append(self._name)
        _KERNELS[self._problem.op](named)


def bound(problem, signature, arguments):
    """Arguments by name. Asserts what the launcher and the plan's guards check, and asks for copies as it does."""
    assert len(arguments) == len(signature), (problem, len(arguments), [row[0] for row in signature])
    words = {"variant": problem.dtype, "output": OUTPUT_DTYPES[problem.dtype]}
    extents = {"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v}
    for position, ((name, kind, dtype, *rest), argument) in enumerate(zip(signature, arguments, strict=True)):
        if kind == "scalar":
            assert isinstance(argument, {"i32": int, "f32": float}[dtype]), (name, argument)
            continue
        assert argument.dtype == _TORCH[words.get(dtype, dtype)], (name, argument.dtype)
        if argument.stride(-1) != 1 and argument.shape[-1] > 1:
            raise LayoutError(f"{name} has strides {argument.stride()}", position)
        assert all(stride > 0 for stride in argument.stride())
        for extent, number in zip(rest[0], argument.shape, strict=True):
            assert extents.setdefault(extent, number) == number, (name, extent, number, extents)
    for number in (extents.get(f"num_seqused{x}") for x in ("_q", "_k", "")):
        assert number in (None, 0, extents.get("batch_plus_one", 0) - 1)
    assert extents.get("batch_plus_one", 0) == extents.get("batch", extents.get("batch_plus_one", 1) - 1) + 1 or (
        "batch_plus_one" not in extents
    )
    return {row[0]: argument for row, argument in zip(signature, arguments, strict=True)}


def array(tensor):
    """Values in float64, or int64."""
    return tensor.detach().to(torch.float64 if tensor.is_floating_point() else torch.int64).numpy()


def write(tensor, place, values):
    """Rounded to the tensor's type."""
    tensor[place] = torch.from_numpy(np.ascontiguousarray(values)).to(tensor.dtype)


def sequences(named):
    """(b, place of the rows of q, their number, place of the rows of k, or None for pages) of every sequence."""
    if "cu_seqlens_q" not in named:
        for b in range(named["q"].shape[0]):
            yield b, b, named["q"].shape[1], b
        return
    starts_q = array(named["cu_seqlens_q"])
    for b in range(len(starts_q) - 1):
        used_q, used_k = (array(named[f"seqused_{x}"]) for x in "qk")
        length = used_q[b] if len(used_q) else starts_q[b + 1] - starts_q[b]
        rows = slice(starts_q[b], starts_q[b] + length)
        if "page_table" in named:
            yield b, rows, length, None
            continue
        starts_k = array(named["cu_seqlens_k"])
        keys = used_k[b] if len(used_k) else starts_k[b + 1] - starts_k[b]
        yield b, rows, length, slice(starts_k[b], starts_k[b] + keys)


def keys_of(named, b, place):
    """k and v of a sequence, (keys, heads, dim)."""
    if place is not None:
        return tuple(array(named[name][place]) for name in "kv")
    size, table = named["k"].shape[1], array(named["page_table"])
    order = [(table[b, j // size], j % size) for j in range(array(named["seqused_k"])[b])]
    shape = [(0, *named[name].shape[2:]) for name in "kv"]
    found = ([array(named[name][page, row]) for page, row in order] for name in "kv")
    return tuple(np.array(rows).reshape(-1, *shape[0][1:2], named["kv"[i]].shape[-1]) for i, rows in enumerate(found))


def raw_scores(named, b, q, k):
    """(heads, rows, keys), scaled and capped, and the tangents of the cap or None; keys by query head."""
    group = q.shape[1] // k.shape[1]
    factor = np.ones(q.shape[1])
    if "q_descale" in named:
        factor = np.repeat(array(named["q_descale"])[b] * array(named["k_descale"])[b], group)
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, axis=1)) * named["softmax_scale"]
    scores = scores * factor[:, None, None]
    if "softcap" not in named:
        return scores, None
    tangents = np.tanh(scores / named["softcap"])
    return tangents * named["softcap"], tangents


def seen(named, rows, keys):
    """(rows, keys): which key a query sees."""
    diagonal = np.arange(rows)[:, None] + keys - rows
    key = np.arange(keys)[None]
    return (key >= diagonal - named["window_left"]) & (key <= diagonal + named["window_right"])


def forward(named):
    is_split = "out_partial" in named
    num_splits = named["out_partial"].shape[0] if is_split else 1
    for b, rows, length, place in sequences(named):
        q, (k, v) = array(named["q"][rows]), keys_of(named, b, place)
        scores, _ = raw_scores(named, b, q, k)
        visible = seen(named, length, len(k))
        blocks = -(-len(k) // KEYS_A_BLOCK)
        share = -(-blocks // num_splits) * KEYS_A_BLOCK
        for split in range(num_splits):
            part = visible.copy()
            part[:, : split * share] = False
            part[:, (split + 1) * share :] = False if is_split else part[:, (split + 1) * share :]
            out, lse = softmax_of(named, np.where(part, scores, -np.inf), v)
            if "v_descale" in named:
                out = out * np.repeat(array(named["v_descale"])[b], q.shape[1] // v.shape[1])[None, :, None]
            if is_split:
                out[np.isneginf(lse)] = np.nan  # anything
                write(named["out_partial"][split], rows, out)
                named["lse_partial"][split, :, rows] = torch.from_numpy(lse.T).float()
            else:
                write(named["out"], rows, out)
                target = named["lse"][b] if isinstance(rows, int) else named["lse"][:, rows]
                target.copy_(torch.from_numpy(lse.T))


def softmax_of(named, scores, v):
    """out (rows, heads, dim_v) and lse (rows, heads) of masked scores (heads, rows, keys)."""
    sink = array(named["sink"])[:, None] if "sink" in named else np.full((scores.shape[0], 1), -np.inf)
    unit = np.maximum(scores.max(axis=-1, initial=-np.inf), sink)
    unit0 = np.where(np.isneginf(unit), 0, unit)
    weights = np.exp(scores - unit0[..., None])
    total = weights.sum(axis=-1) + np.exp(sink - unit0)
    values = np.repeat(v, scores.shape[0] // v.shape[1], axis=1)
    out = np.einsum("hqk,khd->qhd", weights / np.where(total == 0, 1, total)[..., None], values)
    with np.errstate(divide="ignore"):
        return out, (np.log(total) + unit0).T


def combine(named):
    lse = array(named["lse_partial"]).swapaxes(-1, -2)
    sink = array(named["sink"]) if "sink" in named else np.full(lse.shape[-1], -np.inf)
    unit = np.maximum(lse.max(axis=0), sink)
    unit = np.where(np.isneginf(unit), 0, unit)
    total = np.exp(lse - unit).sum(axis=0) + np.exp(sink - unit)
    weights = np.exp(lse - unit) / np.where(total == 0, 1, total)
    parts = np.where(np.isneginf(lse)[..., None], 0, array(named["out_partial"]))
    write(named["out"], ..., (weights[..., None] * parts).sum(axis=0))
    with np.errstate(divide="ignore"):
        write(named["lse"], ..., (np.log(total) + unit).swapaxes(-1, -2))


def tiles(named, starts, used, total):
    """(place of rows, their number, first row in the workspace) of every sequence."""
    if starts is None:
        return [(b, total, None) for b in range(named)]
    starts, used = array(starts), array(used)
    found = []
    for b in range(len(starts) - 1):
        length = used[b] if len(used) else starts[b + 1] - starts[b]
        found.append((slice(starts[b], starts[b] + length), length, (starts[b] + ROWS * b) // ROWS * ROWS))
    return found


def places(named, tensor):
    """(index of the rows, index of the same in a workspace, index of its whole tiles) of every sequence."""
    starts = named.get("cu_seqlens_q", named.get("cu_seqlens"))
    used = named.get("seqused_q", named.get("seqused"))
    for rows, length, tile in tiles(tensor.shape[0], starts, used, tensor.shape[1]):
        end = -(-length // ROWS) * ROWS
        if tile is None:
            yield rows, (rows, slice(None), slice(length)), (rows,)
        else:
            inner = (slice(None), slice(tile, tile + length))
            yield rows, inner, (slice(None), slice(tile, tile + end))


def preprocess(named):
    for name in ("dpsum", "lse_log2", "dq_accum"):
        named[name].fill_(float("nan"))
    for rows, inner, whole in places(named, named["out"]):
        lse = named["lse"][rows] if isinstance(rows, int) else named["lse"][:, rows]
        named["dpsum"][whole], named["dq_accum"][whole] = 0, 0
        named["lse_log2"][whole] = float("inf")
        named["dpsum"][inner] = (named["out"][rows].double() * named["dout"][rows].double()).sum(-1).T.float()
        named["lse_log2"][inner] = torch.where(torch.isneginf(lse), float("inf"), lse * LOG2_E)
    named["dq_semaphore"].zero_()


def backward(named):
    for (b, rows, length, place), (_, inner, _) in zip(sequences(named), places(named, named["q"]), strict=True):
        q, dout, (k, v) = array(named["q"][rows]), array(named["dout"][rows]), keys_of(named, b, place)
        scores, tangents = raw_scores(named, b, q, k)
        lse, dpsum = (array(named[name][inner])[..., None] for name in ("lse_log2", "dpsum"))
        weights = np.where(seen(named, length, len(k)), np.exp2(scores * LOG2_E - lse), 0)
        group = q.shape[1] // k.shape[1]
        dscores = weights * (np.einsum("qhd,khd->hqk", dout, np.repeat(v, group, axis=1)) - dpsum)
        if tangents is not None:
            dscores = dscores * (1 - tangents**2)
        named["dq_accum"][inner] += torch.from_numpy(
            np.einsum("hqk,khd->hqd", dscores, np.repeat(k, group, axis=1))
        ).float()
        dk = np.einsum("hqk,qhd->khd", dscores, q) * named["softmax_scale"]
        dv = np.einsum("hqk,qhd->khd", weights, dout)
        for name, gradient in (("dk", dk), ("dv", dv)):
            write(named[name], place, gradient.reshape(len(k), k.shape[1], group, gradient.shape[-1]).sum(axis=2))


def postprocess(named):
    for rows, inner, _ in places(named, named["gradient"]):
        values = named["accumulator"][inner] * named["scale"]
        named["gradient"][rows] = values.swapaxes(0, 1).to(named["gradient"].dtype)


_KERNELS = {
    "fwd": forward,
    "fwd_combine": combine,
    "bwd_preprocess": preprocess,
    "bwd": backward,
    "bwd_postprocess": postprocess,
}
