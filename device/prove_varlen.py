"""Prove and time the kernels of packed, paged and split attention, soft cap, sink, fp8 and combine on a GPU.

    python device/prove_varlen.py WHEEL_DIR --out record.json [--select GLOB] [--shard 0/1] [--timing]

Nothing but the wheels, torch and the scripts here. Every kernel of every pack that fits the GPU and that
prove_forward and prove_backward do not prove is run on its cases: against float64, one sequence at a time,
with NaN wherever no result may depend on, marks wherever nothing may be written, twice with equal bits. `--timing` adds
decoding beside the memory's bandwidth, and checks of the public functions (graphs, gradients).

The kernels run in a child process. A child that dies, or says nothing for SILENCE_S, fails the kernel it was at; the
next child goes on behind it. Exit status 1 if anything failed.
"""

import argparse
import fnmatch
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from harness import entries_here, environment_of, install, reason, setting, write
from prove_forward import PACKS, is_plain
from varlen_backward_checks import Chain, check_backward
from varlen_checks import COMBINE, check_combine, check_forward, launcher, synchronize
from varlen_problems import cases_for
from varlen_public_checks import decoding_rows, public_checks

DEVICE = "cuda"
SILENCE_S = 90  # first launches of a kernel load it; no case takes longer


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
            rows.append({"case": name, "ratio": math.inf, "lse_error": math.inf, "faults": [reason(error)]})
            # Raises again if the device is lost; the parent then starts another process.
            synchronize(torch, generator.device)
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
# Processes


def selected(torch, arguments):
    """(pack, entry) of every kernel to prove, in order of their ids."""
    found = entries_here(torch, lambda entry: is_ours(entry) and fnmatch.fnmatchcase(entry.id, arguments.select))
    shard, shards = map(int, arguments.shard.split("/"))
    return found[shard::shards]


def child(arguments):
    """Runs with the installed wheels on the path; writes one line of JSON a kernel."""
    import torch

    facts = setting(torch)
    import fa4_kernels
    from fa4_kernels import loader

    if arguments.only_timing:
        timing = {"public": public_checks(torch, fa4_kernels), "decoding": decoding_rows(torch, fa4_kernels)}
        Path(arguments.rows).write_text(json.dumps(timing) + "\n")
        return 0
    entries = selected(torch, arguments)
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
    ended = 0
    while True:
        _, kernels, rows = read_rows(rows_path)
        if kernels and len(rows) >= len(kernels):
            break
        status = watched([*command, "--skip", str(len(rows))], environment, deadline)
        _, kernels, rows = read_rows(rows_path)
        if time.monotonic() > deadline or not kernels or (status == 0 and len(rows) >= len(kernels)):
            break
        row = lost(kernels[len(rows)], f"the process ended with status {status}")
        with rows_path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['id']:52s} FAIL {row['failures'][0]['faults'][0]}", flush=True)
        ended += 1
        if ended >= 5:
            print("five kernels ended the process; the rest is not run", flush=True)
            break
    return read_rows(rows_path)


def lost(name, why):
    """The row of a kernel that ended its process."""
    failure = {"case": "?", "ratio": math.inf, "lse_error": math.inf, "faults": [why]}
    row = {"id": name, "cubin_sha256": None, "passed": False, "cases": 0, "worst_ratio": math.inf}
    return row | {"worst_lse_error": math.inf, "failures": [failure]}


def parsed():
    """The command line."""
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
    return parser.parse_args()


def in_children(arguments, site, deadline):
    """(facts, ids of all kernels, rows, timing or None) from processes that import the wheels in the folder `site`."""
    rows_path, timing_path = Path(site) / "rows.jsonl", Path(site) / "timing.json"
    options = ["--seed", str(arguments.seed), "--select", arguments.select, "--shard", arguments.shard]
    command = [sys.executable, __file__, arguments.wheel_dir, "--child", *options]
    timing = None
    if arguments.timing or arguments.only_timing:
        watched([*command, "--only-timing", "--rows", str(timing_path)], environment_of(site), deadline)
        timing = json.loads(timing_path.read_text()) if timing_path.exists() else {"error": "no result"}
    if arguments.only_timing:
        return {}, [], [], timing
    return *prove([*command, "--rows", str(rows_path)], environment_of(site), rows_path, deadline), timing


def main():
    arguments = parsed()
    if arguments.child:
        return child(arguments)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as site:
        install(arguments.wheel_dir, site, PACKS)
        facts, kernels, rows, timing = in_children(arguments, site, started + arguments.seconds)
    seconds = round(time.monotonic() - started, 1)
    record = {"schema": 1, **facts, "seed": arguments.seed, "acceptance_seconds": seconds, "variants": rows}
    write(record | ({"timing": timing} if timing else {}), arguments.out)
    failed = [row["id"] for row in rows if not row["passed"]]
    cases = sum(row["cases"] for row in rows)
    print(f"{len(rows)} of {len(kernels)} kernels, {cases} cases, {len(failed)} failed, {seconds} s")
    is_complete = arguments.only_timing or (rows and len(rows) >= len(kernels))
    return 0 if is_complete and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
