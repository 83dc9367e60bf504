"""Run the simulator's probe kernels on a GPU and store what the hardware wrote.

    python benchmarks/record_probes.py assemble --ptxas PATH --cubins DIR     (no GPU needed)
    python benchmarks/record_probes.py record --cubins DIR --out FILE.npz     (on an H200, with torch and numpy)

`assemble` makes one cubin per probe for sm_90a. `record` loads the cubins through the CUDA driver, launches each probe
once and writes inputs, outputs and PTX digests to one file; tests/golden/h200_probes.npz is such a file. It prints how
many words differ from the specification. Exit status: 0 when every probe ran and none differs, 1 otherwise.
"""

import argparse
import ctypes
import dataclasses
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from fa4build.simulate.tensor_map import pack
from tests.simulate.probes.catalog import PROBES, ptx_digest

TIME_LIMIT_S = 10.0
MAX_DYNAMIC_SHARED_SIZE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def assemble(ptxas, directory):
    """Writes one cubin per probe."""
    directory.mkdir(parents=True, exist_ok=True)
    for probe in PROBES.values():
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "probe.ptx"
            source.write_text(probe.assembly_text())
            target = directory / f"{probe.name}.cubin"
            subprocess.run([ptxas, "-arch=sm_90a", str(source), "-o", str(target)], check=True)
        print(f"{probe.name}: {target.stat().st_size} bytes")


class Driver:
    """The few CUDA driver calls that are needed; torch has made the context current."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, function, *arguments):
        status = getattr(self.library, function)(*arguments)
        if status:
            raise RuntimeError(f"{function} failed with CUDA error {status}")

    def load(self, cubin, name, shared_bytes):
        """The kernel `name` of a cubin. The module stays loaded until the process ends."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(cubin))
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_SIZE, shared_bytes)
        return function

    def launch(self, function, probe, parameters):
        """The probe's CTAs on the default stream. parameters: bytes of each kernel parameter."""
        buffers = [ctypes.create_string_buffer(data, len(data)) for data in parameters]
        pointers = (ctypes.c_void_p * len(buffers))(*(ctypes.addressof(buffer) for buffer in buffers))
        one = ctypes.c_uint(1)
        self.call(
            "cuLaunchKernel", function, ctypes.c_uint(probe.ctas), one, one, ctypes.c_uint(probe.threads), one, one,
            ctypes.c_uint(probe.shared_bytes),
            ctypes.c_void_p(), pointers, ctypes.c_void_p(),
        )  # fmt: skip


def run_probe(torch, driver, probe, cubin):
    """Output words of one probe, or None if it does not end in time (then the GPU context is lost)."""
    words = torch.from_numpy(probe.input.view(np.int32).copy()).cuda()
    output = torch.from_numpy(probe.output.view(np.int32).copy()).cuda()
    addresses = {"input": words.data_ptr(), "output": output.data_ptr()}
    maps = [dataclasses.replace(m.tmap, address=addresses[m.buffer] + m.tmap.address) for m in probe.maps]
    pointers = [addresses[name].to_bytes(8, "little") for name in ("input", "output")]
    function = driver.load(cubin, probe.name, probe.shared_bytes)
    torch.cuda.synchronize()
    driver.launch(function, probe, [*pointers, *(pack(tmap) for tmap in maps)])
    done = torch.cuda.Event()
    done.record(torch.cuda.default_stream())
    deadline = time.monotonic() + TIME_LIMIT_S
    while not done.query():
        if time.monotonic() > deadline:
            return None
        time.sleep(0.001)
    return output.cpu().numpy().view(np.uint32)


def record(directory, target):
    """Runs all probes and writes what there is. Returns True if every probe ran and equals the specification."""
    import torch

    torch.zeros(1, device="cuda")  # makes the primary context current
    driver = Driver()
    arrays = {"device": np.array(torch.cuda.get_device_name())}
    as_specified = True
    for probe in PROBES.values():
        output = run_probe(torch, driver, probe, (directory / f"{probe.name}.cubin").read_bytes())
        if output is None:
            print(f"{probe.name}: did not end within {TIME_LIMIT_S} s; the probes after it are not run")
            as_specified = False
            break
        expected = probe.expected(probe.input)
        places = np.flatnonzero(expected != output)
        print(f"{probe.name}: {places.size} of {output.size} words differ from the specification")
        for i in places[:6]:
            print(f"    word {i}: hardware {output[i]:08x}, specification {expected[i]:08x}")
        as_specified &= places.size == 0
        arrays[f"{probe.name}.input"], arrays[f"{probe.name}.output"] = probe.input, output
        arrays[f"{probe.name}.ptx"] = np.array(ptx_digest(probe))
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(target, **arrays)
    print(f"wrote {target}: {target.stat().st_size} bytes, {arrays['device']}")
    return as_specified


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("assemble")
    making.add_argument("--ptxas", required=True)
    making.add_argument("--cubins", type=Path, required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--cubins", type=Path, required=True)
    recording.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "assemble":
        assemble(options.ptxas, options.cubins)
        return 0
    as_specified = record(options.cubins, options.out)
    sys.stdout.flush()
    return 0 if as_specified else 1


if __name__ == "__main__":
    sys.exit(main())
