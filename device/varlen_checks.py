"""One case of a forward or combine kernel against float64: errors over their bounds, and every fault seen."""

import math

from guard_zones import guarded, guards_intact, is_marked
from prove_forward import UNBOUNDED
from varlen_problems import FP8, Drawn, torch_dtype
from varlen_reference import attend


def launcher(runtime, pack, entry):
    """Launches exactly this entry with arguments by name."""
    from fa4_kernels.abi import SIGNATURES
    from fa4_kernels.dispatch import signature_of

    launch, num_sms = runtime.load(pack, entry, 0), runtime.device(0).sm_count
    names = [row[0] for row in SIGNATURES[signature_of(entry)]]

    def run(named):
        launch.run(*(num_sms if name == "num_sms" else named[name] for name in names))

    return run


def merged(torch, parts, lses):
    """Results of split keys made one in float64; lses (splits, ..., heads)."""
    lses = lses.double()
    total = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(torch.isneginf(total), 0, total))
    readable = torch.where(torch.isneginf(lses)[..., None], 0, parts.double())
    return (weights[..., None] * readable).sum(0), total


def synchronize(torch, device):
    """Wait for the device; errors of launches appear here."""
    if device.type == "cuda":
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
        buffers = [guarded(torch, shape, dtype, generator.device) for shape, dtype in zip(shapes, dtypes, strict=True)]
        kernel(named | {name: view for name, (_, view) in zip(names, buffers, strict=True)})
        synchronize(torch, generator.device)
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
        exists = torch.zeros(out.shape[-3], dtype=torch.bool, device=out.device)
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


def check_combine(torch, kernel, axes, case, generator):
    """Random parts, a third of them without a key and NaN, some rows without any."""
    splits, batch, rows, heads = case
    dtype = torch_dtype(torch, axes["dtype"])
    parts = torch.randn(splits, batch, rows, heads, axes["head_dim_v"], device=generator.device, generator=generator)
    lses = 10 * torch.randn(splits, batch, heads, rows, device=generator.device, generator=generator)
    lses[torch.rand(lses.shape, device=generator.device, generator=generator) < 1 / 3] = -math.inf
    lses[..., 3::7] = -math.inf
    parts[torch.isneginf(lses).transpose(2, 3)] = math.nan
    sink = torch.tensor([0.3, 100.0, -1e4, 0.0, -2.0] * heads, device=generator.device)[:heads]
    out_whole, out = guarded(torch, parts.shape[1:], dtype, generator.device)
    lse_whole, lse = guarded(torch, lses.shape[1:], torch.float32, generator.device)
    kernel({"out_partial": parts, "lse_partial": lses, "out": out, "lse": lse, "sink": sink})
    synchronize(torch, generator.device)
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
