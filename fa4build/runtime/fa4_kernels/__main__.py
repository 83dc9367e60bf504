"""`python -m fa4_kernels doctor | list | explain | serves`: what is installed, what it answers; they load no kernel.
`python -m fa4_kernels run script.py`: a program with the modules of flash-attention provided (stacks/workers.py)."""

import argparse
import atexit
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .abi import ABI_HASH
from .dispatch import Device, Problem, dispatch, evidence_text, levels_claimed, levels_passed, steps_of
from .errors import FA4KernelsError, InputError, TrustError
from .loader import DRIVER_PATH, Runtime
from .models.command import add_arguments
from .models.command import run as serves
from .models.gpus import gpu_named
from .packs import Entry, Pack, RefusedPack, installed_packs, newer_than, newest_of, usable
from .stacks import served, workers
from .stacks.modules import MODULE_STACKS
from .trust import TrustPolicy, environment_policy


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status: 0, or 1 when what was asked for does not work here."""
    parser = argparse.ArgumentParser(
        prog="python -m fa4_kernels", description="Ahead-of-time FlashAttention-4 kernels."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="check launcher, driver, devices and packs")
    doctor.add_argument("--driver", default=DRIVER_PATH, help="path of the CUDA driver library")
    listing = commands.add_parser("list", help="list installed kernels")
    listing.add_argument("--target", help="only this target, e.g. sm_90a")
    _add_explain(commands)
    add_arguments(commands.add_parser("serves", help="check that this install has a kernel for every layer of a model"))
    _add_run(commands)
    options = parser.parse_args(arguments)
    if options.command == "run":
        return _run(options)
    run = {"doctor": _doctor, "list": _list, "explain": _explain, "serves": _serves}[options.command]
    try:
        return run(options)
    except TrustError as error:
        return _refuse(str(error))


def _add_explain(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    explain = commands.add_parser("explain", help="show which kernel a call would use, and why not another")
    explain.add_argument(
        "--op", default="fwd", choices=("fwd", "bwd", "bwd_preprocess", "bwd_postprocess", "fwd_combine")
    )
    explain.add_argument("--layout", default="dense", choices=("dense", "varlen", "paged"))
    explain.add_argument("--pages", action="store_true", help="the same as --layout paged")
    explain.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "e4m3", "e5m2"))
    explain.add_argument("--head-dim", type=int, default=128)
    explain.add_argument("--head-dim-v", type=int, help="the head dim of v, if it differs")
    explain.add_argument("--mask", default="full", choices=("full", "causal", "local"))
    for feature, text in (("softcap", "softcap of the scores"), ("sink", "attention sinks"), ("split", "split-KV")):
        explain.add_argument(f"--{feature}", action="store_true", help=text)
    explain.add_argument("--deterministic", action="store_true", help="a deterministic backward")
    explain.add_argument("--capability", default="9.0", help="compute capability of the GPU, e.g. 9.0")
    explain.add_argument("--gpu", help="instead of --capability: H200, B200, sm90, ...")


def _refuse(message: str) -> int:
    print(f"fa4_kernels: {message}", file=sys.stderr)
    return 1


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = commands.add_parser("run", help="run a program that was written for flash-attention on these kernels")
    run.add_argument("--provide", default=",".join(MODULE_STACKS), help="names, separated by commas (default: all)")
    run.add_argument("--fallback", action="store_true", help="send unsupported calls to the installed packages")
    run.add_argument("--report", action="store_true", help="at the end, print which calls our kernels ran")
    run.add_argument("-m", dest="is_module", action="store_true", help="the program is a module")
    run.add_argument("program", nargs=argparse.REMAINDER, help="script or module, and its arguments")


def _run(options: argparse.Namespace) -> int:
    """The program's own errors pass through; they are its own."""
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        return _refuse("run needs a script, or -m and a module")
    stacks = [name for name in options.provide.split(",") if name]
    unknown = [name for name in stacks if name not in MODULE_STACKS]
    if unknown:
        return _refuse(f"cannot provide {', '.join(unknown)}. Allowed: {', '.join(MODULE_STACKS)}")
    if not options.is_module and not Path(program[0]).exists():
        return _refuse(f"there is no script {program[0]}")
    if options.report:
        atexit.register(_report)
    workers.run(stacks, program, fallback=options.fallback, is_module=options.is_module)
    return 0


def _report() -> None:
    """What `served()` counted, on stderr."""
    counts = served()
    for (stack, function), number in sorted(counts.answered.items()):
        print(f"fa4_kernels: {stack}: {function}: {number} calls served", file=sys.stderr)
    for (stack, function, reason), number in sorted(counts.kept.items()):
        print(f"fa4_kernels: {stack}: {function}: {number} calls not served: {reason}", file=sys.stderr)


def _trust() -> TrustPolicy:
    """The policy that this environment sets."""
    return environment_policy(os.environ)


def _doctor(options: argparse.Namespace) -> int:
    print(f"fa4-kernels {__version__}, ABI {ABI_HASH[:12]}, Python {sys.version.split()[0]}")
    trust = _trust()
    keys = f", keys in {trust.store}: {', '.join(sorted(trust.keys)) or 'none'}" if trust.mode != "off" else ""
    print(f"trust: {trust.mode}{keys}")
    packs = installed_packs(trust)
    for pack in packs:
        if isinstance(pack, RefusedPack):
            print(f"pack {pack.name}: not used: {pack.reason}")
        else:
            manifest = pack.manifest
            targets = ", ".join(manifest.targets)
            print(f"pack {manifest.pack} {manifest.version}: {len(manifest.entries)} kernels for {targets}")
            print(f"  evidence: {_evidence_counts(manifest.entries)}")
    for line in _replaced(packs):
        print(line)
    if not packs:
        print("no pack is installed: pip install 'fa4-kernels[sm90]' (or sm100, sm103)")
    try:
        runtime = Runtime(driver_path=options.driver, packs=packs, stream_of=lambda ordinal: 0)
        major, minor = runtime.driver_version
        print(f"driver {options.driver}: CUDA {major}.{minor}")
        served = [_device_line(runtime, ordinal) for ordinal in range(runtime.num_devices)]
    except FA4KernelsError as error:
        print(f"not usable here: {error}")
        return 1
    if not served:
        print("the driver sees no device")
    return 0 if any(served) and all(not isinstance(pack, RefusedPack) for pack in packs) else 1


def _evidence_counts(entries: Sequence[Entry]) -> str:
    """How many kernels have which highest level: `2 simulated, 1 claimed, 1 none`."""
    states = ("silicon", "simulated", "static", "claimed", "none")
    found = [(levels_passed(entry) or (levels_claimed(entry) and ("claimed",)) or ("none",))[-1] for entry in entries]
    return ", ".join(f"{found.count(state)} {state}" for state in states if state in found)


def _replaced(packs: Sequence[Pack | RefusedPack]) -> list[str]:
    """A line for each pack some of whose kernels are in a newer one too."""
    kernels = [(pack, entry) for pack in usable(packs) for entry in pack.manifest.entries]
    newest, counts = newest_of(kernels), Counter[tuple[str, str, str]]()
    for pack, entry in kernels:
        newer = newer_than(pack, entry.id, newest)
        if newer is not None:
            counts[pack.manifest.pack, pack.manifest.version, newer] += 1
    return [
        f"pack {name} {version}: {count} of its kernels are not used, since {newer} has them too; uninstall the older"
        for (name, version, newer), count in counts.items()
    ]


def _device_line(runtime: Runtime, ordinal: int) -> bool:
    """Print one device; whether an installed kernel runs on it."""
    device = runtime.device(ordinal)
    packs = (pack for pack in runtime.packs if not isinstance(pack, RefusedPack))
    count = sum(entry.target == device.target for pack in packs for entry in pack.manifest.entries)
    print(f"device {ordinal}: {device}, {device.sm_count} SMs: {count} kernels installed")
    return count > 0


def _list(options: argparse.Namespace) -> int:
    shown = 0
    for pack in installed_packs(_trust()):
        if isinstance(pack, RefusedPack):
            print(f"{pack.name}: not used: {pack.reason}", file=sys.stderr)
            continue
        for entry in pack.manifest.entries:
            if options.target in (None, entry.target):
                levels = evidence_text(entry)
                origin = f"{pack.manifest.pack} {pack.manifest.version}"
                print(f"{entry.id}  {entry.target}  {origin}  {levels}")
                shown += 1
    return 0 if shown else 1


def _explain(options: argparse.Namespace) -> int:
    try:
        capability = _capability_of(options)
    except (ValueError, InputError) as error:
        print(f"fa4_kernels: {error}", file=sys.stderr)
        return 2
    head_dim_v = options.head_dim if options.head_dim_v is None else options.head_dim_v
    problem = Problem(
        op=options.op,
        layout="paged" if options.pages else options.layout,
        dtype=options.dtype,
        head_dim=options.head_dim,
        head_dim_v=head_dim_v,
        mask=options.mask,
        deterministic=options.deterministic,
        features=frozenset(name for name in ("softcap", "sink", "split") if getattr(options, name)),
    )
    device, packs = Device(name=options.gpu or "this GPU", compute_capability=capability), installed_packs(_trust())
    decisions = [dispatch(step, device, packs) for step in steps_of(problem)]
    print("\n".join(map(str, decisions)))
    return 0 if all(decision.entry for decision in decisions) else 1


def _capability_of(options: argparse.Namespace) -> tuple[int, int]:
    """Of --gpu, or of --capability. Raises: InputError, ValueError."""
    if options.gpu:
        return gpu_named(options.gpu).compute_capability
    try:
        major, minor = (int(part) for part in options.capability.split("."))
    except ValueError:
        raise ValueError(f"--capability {options.capability}: two numbers are expected, e.g. 9.0") from None
    return major, minor


def _serves(options: argparse.Namespace) -> int:
    return serves(options, installed_packs(_trust()))


if __name__ == "__main__":
    sys.exit(main())
