"""Our kernels beside the published flash-attn-4 in the timing model: clocks per block, and where they go.

    python -m benchmarks.timing_side_by_side --cache-dir DIR [CASE]...

Run from the checkout, with flash-attn-4 installed and our variants built into the cache (`fa4build matrix`). Each case
runs in a process of its own, since upstream reads its target from the environment. Results are kept in
benchmarks/timing_side_by_side.json case by case; the table of all of them is written to the .md beside it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
RESULTS, TABLE = HERE / "timing_side_by_side.json", HERE / "timing_side_by_side.md"
BLOCK = 128
PEAK_TFLOPS = 2250  # dense bf16 of a B200, what published shares refer to
LIMIT = 1.05  # of upstream's clocks per block


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One upstream kernel and our counterpart ("" for none). rows: queries (keys in a backward) of one cluster.

    published: TFLOP/s at 8192 tokens as a share of the machine's peak, times PEAK_TFLOPS, 0 for none; sources are in
    docs/timing-model.md.
    """

    op: str
    arch: int
    head_dim: int
    head_dim_v: int
    is_causal: bool
    rows: int
    ours: str = ""
    two_ctas: bool = False
    deterministic: bool = False
    published: float = 0.0


def _case(op: str, head_dim: int, mask: str, rows: int, *, arch: int = 100, ours: bool = True, **more) -> Case:
    value_dim = more.pop("head_dim_v", head_dim)
    dims = f"hd{head_dim}" if value_dim == head_dim else f"hd{head_dim}x{value_dim}"
    name = f"{op}-sm{arch}a-bf16-{dims}-{mask}" + ("-2cta" if more.get("two_ctas") else "")
    name += "-deterministic" if more.get("deterministic") else ""
    return Case(
        op=op,
        arch=arch,
        head_dim=head_dim,
        head_dim_v=value_dim,
        is_causal=mask == "causal",
        rows=rows,
        ours=name if ours else "",
        **more,
    )


CASES = {
    "fwd-hd64-full": _case("fwd", 64, "full", 256, published=869),
    "fwd-hd64-causal": _case("fwd", 64, "causal", 256, published=800),
    "fwd-hd128-full": _case("fwd", 128, "full", 256, published=1522),
    "fwd-hd128-full-2cta": _case("fwd", 128, "full", 512, two_ctas=True, published=1535),
    "fwd-hd128-causal": _case("fwd", 128, "causal", 256, published=1418),
    "fwd-hd192x128-full": _case("fwd", 192, "full", 256, head_dim_v=128, published=1556),
    "fwd-hd192x128-full-2cta": _case("fwd", 192, "full", 512, head_dim_v=128, two_ctas=True, published=1556),
    "fwd-hd192x128-causal": _case("fwd", 192, "causal", 256, head_dim_v=128, published=1494),
    "fwd-hd256-full-2cta": _case("fwd", 256, "full", 256, two_ctas=True),
    "fwd-hd256-causal-2cta": _case("fwd", 256, "causal", 256, two_ctas=True, published=1059),
    "fwd-sm103-hd128-full": _case("fwd", 128, "full", 256, arch=103, published=1653),
    "fwd-sm103-hd64-full": _case("fwd", 64, "full", 256, arch=103, published=1106),
    "bwd-hd64-full": _case("bwd", 64, "full", 128, published=841),
    "bwd-hd128-full-1cta": _case("bwd", 128, "full", 128, published=1248),
    "bwd-hd128-full-2cta": _case("bwd", 128, "full", 256, two_ctas=True, published=1360),
    "bwd-hd128-full-1cta-det": _case("bwd", 128, "full", 128, deterministic=True, published=980),
    "bwd-hd128-full-2cta-det": _case("bwd", 128, "full", 256, two_ctas=True, deterministic=True, published=1167),
    "bwd-hd192x128-full-2cta": _case("bwd", 192, "full", 256, head_dim_v=128, two_ctas=True, published=1073),
    "bwd-hd192x128-full-2cta-det": _case(
        "bwd", 192, "full", 256, head_dim_v=128, two_ctas=True, deterministic=True, published=1030
    ),
}


# --- a process of its own: one kernel ---------------------------------------------------------------------------------


def facts(steady, ptx: str) -> dict:
    """What is kept of a steady state."""
    rounded = {
        name: {key: round(value, 3) for key, value in sorted(getattr(steady, name).items())}
        for name in ("busy", "softmax", "instructions", "waited")
    }
    budgets = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)]
    return {
        "cycles_per_block": round(steady.cycles, 1),
        "quick_copies_cycles_per_block": round(steady.quick_cycles, 1),
        "fixed_cycles": round(steady.fixed, 1),
        "critical": steady.critical,
        "register_budgets": sorted(set(budgets), reverse=True),
        **rounded,
    }


def time_upstream(case: Case) -> dict:
    """Compiles upstream's kernel and times it at two lengths."""
    import numpy as np

    from fa4build.plan import evaluate
    from fa4build.simulate import simulate_launch
    from fa4build.timing.attention import BLOCKS, steady_state
    from fa4build.timing.replay import time_launch
    from tests.simulate.upstream_trace import Host, trace

    def operator(torch, interface):
        inputs = []
        for blocks in BLOCKS:
            lengths = (case.rows, blocks * BLOCK) if case.op == "fwd" else (blocks * BLOCK, case.rows)
            inputs.append(_call(torch, interface, case, *lengths))
        return inputs

    calls, inputs = trace(operator)
    host = Host()
    rng = np.random.default_rng(1)
    for tensors in inputs:
        for tensor in tensors:
            array = host.array(tensor)
            sample = rng.standard_normal(array.shape).astype(np.float32)
            array[...] = (sample.view(np.uint32) >> 16).astype(np.uint16) if array.dtype == np.uint16 else sample + 5
    found: dict[str, list] = {}
    texts = {}
    for call in calls:
        for launch in evaluate(call.plan, host._inputs(call)):
            is_main = "flash_fwd_sm" in launch.kernel or "flash_bwd_sm" in launch.kernel
            if launch.is_empty or "combine" in launch.kernel:
                continue
            if is_main:
                found.setdefault(launch.kernel, []).append(
                    time_launch(call.ptx, launch, host.memory, f"sm{case.arch}a")
                )
                texts[launch.kernel] = call.ptx
            else:
                simulate_launch(call.ptx, launch, host.memory)
    ((kernel, runs),) = found.items()
    ctas = len({w.cta for w in runs[0].warps})
    if (ctas == 2) != case.two_ctas:
        raise SystemExit(f"upstream chose {ctas} CTAs for this case")
    return facts(steady_state(*runs), texts[kernel])


def _call(torch, interface, case: Case, seqlen_q: int, seqlen_k: int) -> tuple:
    def tensor(*shape: int, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="cuda")

    q, k = tensor(1, seqlen_q, 1, case.head_dim), tensor(1, seqlen_k, 1, case.head_dim)
    v = tensor(1, seqlen_k, 1, case.head_dim_v)
    if case.op == "fwd":
        interface._flash_attn_fwd(q, k, v, causal=case.is_causal, return_lse=True)
        return q, k, v
    out, dout = tensor(1, seqlen_q, 1, case.head_dim_v), tensor(1, seqlen_q, 1, case.head_dim_v)
    lse = tensor(1, 1, seqlen_q, dtype=torch.float32)
    interface._flash_attn_bwd(q, k, v, out, dout, lse, causal=case.is_causal, deterministic=case.deterministic)
    return q, k, v, out, dout, lse


def time_ours(case: Case, cache_dir: Path) -> dict:
    """Times our kernel from the cache."""
    from fa4build.matrix.variants import parse_variant
    from fa4build.pipeline import find_cached, require_cached
    from fa4build.plan import plan_from_json
    from fa4build.store.cache import Cache
    from fa4build.timing.attention import time_backward, time_forward

    cache = Cache(cache_dir)
    (entry,) = require_cached(find_cached((parse_variant(case.ours),), cache))
    plan, ptx = plan_from_json(cache.read(entry, "plan").decode()), cache.read(entry, "ptx").decode()
    shape = {"head_dim": case.head_dim, "head_dim_v": case.head_dim_v, "is_causal": case.is_causal}
    arch = f"sm{case.arch}a"
    if case.op == "fwd":
        return facts(time_forward(plan, ptx, arch, seqlen_q=case.rows, **shape), ptx)
    return facts(time_backward(plan, ptx, arch, seqlen_k=case.rows, **shape), ptx)


def _environment(case: Case, scratch: str) -> dict:
    one_cta = "1" if case.op == "bwd" and not case.two_ctas else "0"
    return dict(
        os.environ,
        CUTE_DSL_ARCH=f"sm_{case.arch}a",
        FLASH_ATTENTION_ARCH=str(case.arch),
        FLASH_ATTENTION_NUM_SMS="148",
        FA_DISABLE_2CTA=one_cta,
        CUTE_DSL_KEEP="ptx,cubin",
        CUTE_DSL_DUMP_DIR=scratch,
    )


def _measure(name: str, whose: str, cache_dir: Path) -> dict | None:
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", __spec__.name, "--one", name, whose, "--cache-dir", str(cache_dir)]
        done = subprocess.run(
            command, env=_environment(CASES[name], scratch), capture_output=True, text=True, timeout=900, check=False
        )
    if done.returncode:
        print(f"{name} {whose}: {done.stderr.strip().splitlines()[-1] if done.stderr else 'failed'}", flush=True)
        return None
    return json.loads(done.stdout.splitlines()[-1])


# --- the table --------------------------------------------------------------------------------------------------------


def tflops(case: Case, run: dict, seqlen: int = 8192) -> float:
    """What the clocks would mean at 8192 tokens if every SM were always at work, at the clock of the peak figure.

    Causal: the average over query tiles (key tiles in the backward) of what each has to do.
    """
    ctas = 2 if case.two_ctas else 1
    rows = case.rows // ctas
    blocks = seqlen / BLOCK
    if case.is_causal:
        tiles = seqlen // case.rows
        blocks = sum((i + 1) * case.rows / BLOCK for i in range(tiles)) / tiles
    dims = case.head_dim + case.head_dim_v if case.op == "fwd" else 2.5 * (case.head_dim + case.head_dim_v)
    useful = 2.0 * rows * dims * (seqlen / 2 if case.is_causal else seqlen)
    share = useful / 8192 / (run["fixed_cycles"] + blocks * run["cycles_per_block"])
    return share * PEAK_TFLOPS


def table(results: dict) -> str:
    """The results as Markdown."""
    lines = [
        "# Timing model, side by side",
        "",
        "Made by `python -m benchmarks.timing_side_by_side`; what the figures are worth: docs/timing-model.md. Clocks",
        f"are per block of {BLOCK} keys (forward, one CTA's queries) or queries (backward, one CTA's keys), in the",
        "steady state, without masked blocks; `fixed` is what a CTA costs beyond its blocks. Quick copies: if K and V",
        "came as on an idle chip, which shows the pipelines where the loads hide them.",
        "",
        "| case | ours | upstream | ratio | with quick copies: ours | upstream | ratio | fixed: ours / upstream "
        "| at 8192: ours / upstream / published TFLOP/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        row = results.get(name)
        if row:
            lines.append(_row(name, case, row.get("ours"), row.get("upstream")))
    lines += ["", *_details(results)]
    return "\n".join(lines) + "\n"


def _row(name: str, case: Case, ours: dict | None, upstream: dict | None) -> str:
    cells = [name]
    for key in ("cycles_per_block", "quick_copies_cycles_per_block"):
        cells += [f"{run[key]:.0f}" if run else "-" for run in (ours, upstream)]
        cells.append(_ratio(ours[key] / upstream[key]) if ours and upstream else "-")
    cells.append(" / ".join(f"{run['fixed_cycles']:.0f}" if run else "-" for run in (ours, upstream)))
    speeds = [f"{tflops(case, run):.0f}" if run else "-" for run in (ours, upstream)]
    cells.append(" / ".join([*speeds, f"{case.published:.0f}" if case.published else "-"]))
    return f"| {' | '.join(cells)} |"


def _ratio(value: float) -> str:
    return f"{value:.3f}" + ("" if value <= LIMIT else " (over)")


def _details(results: dict) -> list[str]:
    lines = [
        "## Where the clocks go",
        "",
        "Instructions of one softmax warp per block (after folding, see docs), of them exponentials, FMA pipe, ALU;",
        "then shares of the steady state: units in use, and how long each role waits at barriers.",
        "",
        "| case | whose | instr | mufu | fma | alu | registers | in use | waits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        for whose in ("ours", "upstream"):
            run = row.get(whose)
            if not run:
                continue
            counts = " | ".join(f"{run['softmax'].get(unit, 0):.0f}" for unit in ("issue", "mufu", "fma", "alu"))
            shown = ("tensor", "mufu", "issue", "alu", "fma", "shared", "copy_in", "copy_out")
            busy = ", ".join(f"{u} {run['busy'][u]:.0%}" for u in shown if u in run["busy"])
            waits = ", ".join(f"{role} {share:.0%}" for role, share in run["waited"].items() if role != "other")
            budgets = "/".join(map(str, run["register_budgets"]))
            lines.append(f"| {name} | {whose} | {counts} | {budgets} | {busy} | {waits} |")
    return lines


def main() -> None:
    """Measures the cases named, or all, and writes results and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--only", choices=("ours", "upstream"))
    parser.add_argument("--one", nargs=2, metavar=("CASE", "WHOSE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, whose = arguments.one
        run = time_upstream(CASES[name]) if whose == "upstream" else time_ours(CASES[name], arguments.cache_dir)
        print(json.dumps(run))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in arguments.cases or CASES:
        row = results.setdefault(name, {})
        row["case"] = asdict(CASES[name])
        for whose in [arguments.only] if arguments.only else ("ours", "upstream"):
            if whose == "ours" and not CASES[name].ours:
                continue
            run = _measure(name, whose, arguments.cache_dir)
            if run is not None:
                row[whose] = run
                print(name, whose, run["cycles_per_block"], run["fixed_cycles"], flush=True)
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    ordered = {name: results[name] for name in CASES if name in results}
    TABLE.write_text(table(ordered), encoding="utf-8")


if __name__ == "__main__":
    main()
