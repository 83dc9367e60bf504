"""One case of a backward kernel, with the kernels before and after it, against float64."""

import math

from guard_zones import guarded, guards_intact, is_marked
from varlen_checks import launcher, synchronize
from varlen_problems import Drawn
from varlen_reference import attend, gradients

TILE = 128  # rows of a tile of the workspaces


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
            named[name] = torch.full(rows, math.nan, device=generator.device)
        named["dq_accum"] = named["accumulator"] = torch.full(
            (*rows, axes["head_dim"]), math.nan, device=generator.device
        )
        named["dq_semaphore"] = torch.full(
            (*rows[:-1], rows[-1] // TILE), 77, dtype=torch.int32, device=generator.device
        )
        buffers = [guarded(torch, named[name].shape, drawn.dtype, generator.device) for name in "qkv"]
        named |= {"gradient": buffers[0][1], "dk": buffers[1][1], "dv": buffers[2][1]}
        chain.run(named)
        synchronize(torch, generator.device)
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

    As fa4build/cases/backward.py for standard normal tensors, whose largest element is about 5; dq and dk are dS
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
    start, exists = 0, torch.zeros(found.shape[0], dtype=torch.bool, device=found.device)
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
