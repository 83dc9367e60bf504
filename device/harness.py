"""What the scripts that run on a device share: the wheels alone in a process of their own, the time of a call, checks
that fail one by one, and a record that is on disk after every check.
"""

import datetime
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

COMPILERS = ("cutlass", "tvm_ffi", "fa4build", "flash_attn")


def install(wheel_dir, site, packs="fa4_kernels_*"):
    """Unpacks the runtime and the packs of kernels that `wheel_dir` has into the folder `site`.

    pip takes the runtime's wheel that this interpreter can use, where there are several.
    """
    runtime = list(Path(wheel_dir).glob(f"fa4_kernels-*{platform.machine()}.whl"))
    found = [*runtime, *Path(wheel_dir).glob(f"{packs}.whl")]
    if not runtime or len(found) == len(runtime):
        raise SystemExit(
            f"{wheel_dir}: needs the fa4_kernels wheel for {platform.machine()} and a pack wheel; it has "
            f"{', '.join(sorted(path.name for path in found)) or 'neither'}"
        )
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    names = sorted({path.name.split("-")[0] for path in found})
    subprocess.run([*command, "--find-links", str(wheel_dir), "--target", str(site), *names], check=True)


def environment_of(site):
    """Of a process that imports the wheels and takes our kernels where another family has the same ones."""
    return {
        **os.environ,
        "PYTHONPATH": str(site),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "FA4_KERNELS_FAMILY": "fa4",
    }


def run_installed(script, wheel_dir, packs="fa4_kernels_*"):
    """Exit status of `script --child` with this process's arguments, where the wheels can be imported."""
    with tempfile.TemporaryDirectory() as site:
        install(wheel_dir, site, packs)
        command = [sys.executable, str(script), "--child", *sys.argv[1:]]
        return subprocess.run(command, env=environment_of(site)).returncode


def driver_version():
    """As nvidia-smi prints it; `unknown` where it is not installed."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def setting(torch):
    """Where and with what this runs. Raises SystemExit where a kernel compiler could be imported."""
    for compiler in COMPILERS:
        if importlib.util.find_spec(compiler):
            raise SystemExit(f"{compiler} can be imported here: this would not prove that the wheels work alone")
    from importlib.metadata import distributions

    packs = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"].startswith("fa4-kernels")}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": torch.cuda.get_device_name(),
        "capability": capability(torch),
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "python": platform.python_version(),
        "wheels": packs,
    }


def capability(torch):
    """The target of kernels for this GPU, as manifests spell it."""
    return "sm_{}{}a".format(*torch.cuda.get_device_capability())


def entries_here(torch, is_wanted):
    """(pack, entry) of every installed kernel for this GPU that is wanted, in order of their ids.

    Raises: SystemExit where a pack cannot be used.
    """
    from fa4_kernels.packs import installed_packs, refused, usable

    packs = installed_packs()
    if refused(packs):
        raise SystemExit(f"a pack cannot be used: {refused(packs)}")
    found = [(pack, entry) for pack in usable(packs) for entry in pack.manifest.entries]
    found = [(pack, entry) for pack, entry in found if entry.target == capability(torch) and is_wanted(entry)]
    return sorted(found, key=lambda item: item[1].id)


def median_ms(torch, call, repeats=20, warmup=5):
    """Median of event-timed calls, milliseconds; `call` is given the number of the repeat."""
    for _ in range(warmup):
        call(0)
    times = []
    for i in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call(i)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def reason(error):
    """An exception in a line, with where it was raised."""
    places = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(places[-1].filename).name}:{places[-1].lineno})" if places else ""
    return f"{type(error).__name__}: {str(error)[:500]}{where}"


def write(record, path):
    """The record as it is now."""
    Path(path).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def run_checks(checks, record, path, deadline=float("inf")):
    """Runs each of `checks` (name -> function that returns a dict with `passed`) and keeps the record on disk.

    A check that raises has failed, and so has one that is not begun before `deadline` (time.monotonic()).
    Returns: the exit status.
    """
    results = record.setdefault("checks", {})
    for name, check in checks.items():
        started = time.monotonic()
        if started > deadline:
            results[name] = {"passed": False, "error": "not run: out of time"}
        else:
            try:
                results[name] = check()
            except Exception as error:
                results[name] = {"passed": False, "error": reason(error)}
            results[name]["seconds"] = round(time.monotonic() - started, 1)
        shown = {key: value for key, value in results[name].items() if key not in ("curves", "passed")}
        print(f"{'pass' if results[name]['passed'] else 'FAIL'} {name} {json.dumps(shown)[:700]}", flush=True)
        write(record, path)
    failed = [name for name, result in results.items() if not result["passed"]]
    print(f"{len(results)} checks, {len(failed)} failed{': ' + ', '.join(failed) if failed else ''}", flush=True)
    return 1 if failed else 0
