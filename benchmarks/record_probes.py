"""Run the simulator's probe kernels on a GPU and store what the hardware wrote.

    python benchmarks/record_probes.py assemble --ptxas PATH --cubins DIR     (no GPU needed)
    python benchmarks/record_probes.py record --cubins DIR --out FILE.npz     (on an H200, with torch and numpy)

`assemble` makes one cubin per probe for sm_90a. `record` loads the cubins through the CUDA driver, launches each probe
once and writes inputs, outputs and PTX digests to one file; tests/golden/h200_probes.npz is such a file. It prints how
many words differ from the specification. Exit status: 0 when every probe ran and none differs, 1 otherwise.
"""

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from raw_launch import DidNotEnd, Driver

from fa4build.simulate.tensor_map import pack
from tests.simulate.probes.catalog import PROBES, ptx_digest


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


def run_probe(driver, probe, cubin):
    """Output words of one probe."""
    words, output = driver.to_device(probe.input), driver.to_device(probe.output)
    addresses = {"input": words.data_ptr(), "output": output.data_ptr()}
    maps = [dataclasses.replace(m.tmap, address=addresses[m.buffer] + m.tmap.address) for m in probe.maps]
    pointers = [addresses[name].to_bytes(8, "little") for name in ("input", "output")]
    function = driver.load(cubin, probe.name, probe.shared_bytes)
    parameters = [*pointers, *(pack(tmap) for tmap in maps)]
    driver.launch(function, (probe.ctas, 1, 1), (probe.threads, 1, 1), probe.shared_bytes, parameters)
    return driver.to_host(output, probe.output)


def record(directory, target):
    """Runs all probes and writes what there is. Returns True if every probe ran and equals the specification."""
    driver = Driver()
    arrays = {"device": np.array(driver.device_name)}
    as_specified = True
    for probe in PROBES.values():
        try:
            output = run_probe(driver, probe, (directory / f"{probe.name}.cubin").read_bytes())
        except (DidNotEnd, RuntimeError) as error:
            print(f"{probe.name}: {error!r}; the probes after it are not run")
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
    print(f"wrote {target}: {target.stat().st_size} bytes, {driver.device_name}")
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
    return 0 if record(options.cubins, options.out) else 1


if __name__ == "__main__":
    sys.exit(main())
