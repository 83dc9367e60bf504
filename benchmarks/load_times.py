"""How long kernels of a pack take to load, on the host: from files to launches that can be called.

    python benchmarks/load_times.py dist/fa4_kernels_sm100a-*.whl [more pack wheels]

Times are of the runtime alone: files read, groups decompressed and checked, plans decoded and bound. The CUDA driver is
a stand-in that takes every cubin at once, so what a real one needs to place code on a GPU is not in them. One row a
pack: opening it (seal and manifest), one kernel (median and worst over all kernels, each with nothing decompressed
before), and every kernel of the pack by `preload`. Best of three, in milliseconds; of the processor, which on an idle
machine are those of a clock, since one thread works; the whole pack, which two threads load, by the clock and by the
processor. The goals are 30 ms for one kernel and 300 ms for a pack.
"""

import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "fa4build" / "runtime")]

from fa4build.shipping.backend import host_platform  # noqa: E402
from fa4build.shipping.launcher_build import build_launcher, launcher_sources  # noqa: E402
from fa4build.shipping.wheel import RUNTIME_DIR  # noqa: E402

REPEATS = 3
CAPABILITIES = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_103a": (10, 3)}

DRIVER = """
static int capability[2];
void stand_in_capability(int major, int minor) { capability[0] = major, capability[1] = minor; }
int cuInit(unsigned flags) { return flags != 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuGetErrorName(int error, const char **name) { return *name = "error", error == 0; }
int cuGetErrorString(int error, const char **text) { return *text = "error", error == 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char *name, int size, int device) { return name[0] = 0, size == device; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? capability[0] : attribute == 76 ? capability[1] : attribute == 16 ? 148 : 232448;
    return device;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = capability, device; }
int cuCtxGetCurrent(void **context) { return *context = capability, 0; }
int cuCtxPushCurrent_v2(void *context) { return context == 0; }
int cuCtxPopCurrent_v2(void **context) { return *context = capability, 0; }
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    return *library = (void *)code, a || b || c || d || e || f;
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name) { return *kernel = (void *)name, !library; }
int cuKernelGetFunction(void **function, void *kernel) { return *function = kernel, 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return !function || attribute == value; }
int cuTensorMapEncodeTiled(void *out) { return !out; }
int cuLaunchKernelEx(const void *config) { return !config; }
"""


def main(wheels: list[str]) -> None:
    """Print a row for each wheel."""
    with tempfile.TemporaryDirectory() as directory:
        driver = compiled_driver(Path(directory))
        load_launcher(Path(directory))
        print("| pack | kernels | wheel, kB | open, ms | one kernel, median | worst | whole pack, clock | processor |")
        print("|---|---|---|---|---|---|---|---|")
        for number, wheel in enumerate(map(Path, wheels)):
            site = Path(directory) / f"site{number}"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
            (manifest,) = site.glob("*/manifest.json")
            print(row(wheel, manifest.parent, driver), flush=True)


def compiled_driver(directory: Path) -> Path:
    """The stand-in driver as a shared library."""
    (directory / "driver.c").write_text(DRIVER)
    command = [sys.executable, "-m", "ziglang", "cc", "-w", "-O1", "-shared", "-fPIC", "driver.c", "-o", "driver.so"]
    subprocess.run(command, cwd=directory, check=True)
    return directory / "driver.so"


def load_launcher(directory: Path) -> None:
    """Let `fa4_kernels` find a launcher for this interpreter."""
    import fa4_kernels

    platform = host_platform()
    (directory / platform.launcher_file).write_bytes(build_launcher(launcher_sources(RUNTIME_DIR), platform))
    fa4_kernels.__path__.append(str(directory))


def row(wheel: Path, pack_dir: Path, driver: Path) -> str:
    """One line of the table."""
    import ctypes

    from fa4_kernels.loader import Runtime
    from fa4_kernels.packs import Pack, RefusedPack, open_pack

    pack = open_pack(wheel.name, pack_dir)
    if isinstance(pack, RefusedPack):
        raise SystemExit(f"{wheel.name}: {pack.reason}")
    ctypes.CDLL(str(driver)).stand_in_capability(*CAPABILITIES[pack.manifest.targets[0]])

    def runtime(packs: tuple[Pack, ...]) -> Runtime:
        return Runtime(driver_path=str(driver), packs=packs, stream_of=lambda ordinal: 0)

    def milliseconds(work: Callable[[Runtime], object], clock: Callable[[], float] = time.process_time) -> float:
        times = []
        for _ in range(REPEATS):
            fresh = runtime((pack,))
            start = clock()
            work(fresh)
            times.append(1e3 * (clock() - start))
        return min(times)

    opening = milliseconds(lambda _: open_pack(wheel.name, pack_dir))
    single = [milliseconds(lambda r, e=entry.id: r.preload([0], e)) for entry in pack.manifest.entries]
    whole = milliseconds(lambda r: r.preload([0]), time.perf_counter)
    work = milliseconds(lambda r: r.preload([0]))
    name, count = pack.manifest.pack, len(pack.manifest.entries)
    numbers = (opening, statistics.median(single), max(single), whole, work)
    return f"| {name} | {count} | {wheel.stat().st_size / 1000:.0f} | " + " | ".join(f"{x:.1f}" for x in numbers) + " |"


if __name__ == "__main__":
    main(sys.argv[1:])
