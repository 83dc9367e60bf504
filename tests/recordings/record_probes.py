"""Run the simulator's probe kernels on a GPU and store what the hardware wrote.

    python tests/recordings/record_probes.py assemble --ptxas PATH --cubins DIR     (no GPU needed)
    python tests/recordings/record_probes.py record --cubins DIR --out FILE.npz     (on an H200, with torch and numpy)

`assemble` makes one cubin per probe for sm_90a. `record` loads the cubins through the CUDA driver, launches each probe
once and writes inputs, outputs and PTX digests to one file; tests/golden/h200_probes.npz is such a file. Of sweeps it
writes a digest of each segment's results. It prints how many words of the probes differ from the specification. One
that ends in an error does not keep the others from running. Exit status: 0 when every probe ran and none differs, 1
otherwise.
"""

import argparse
import dataclasses
import multiprocessing
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fa4build.simulate.hardware.tensor_map import pack
from tests.recordings.raw_launch import DidNotEnd, Driver
from tests.simulate.probes.catalog import PROBES, ptx_digest
from tests.simulate.probes.sweeps import SWEEPS, digest


def assemble(ptxas, directory):
    """Writes one cubin per probe."""
    directory.mkdir(parents=True, exist_ok=True)
    for probe in (PROBES | SWEEPS).values():
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "probe.ptx"
            source.write_text(probe.assembly_text() if probe.name in PROBES else probe.ptx)
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


def record_probe(driver, cubin, probe):
    """Arrays to store for a probe, and whether it is as specified."""
    output = run_probe(driver, probe, cubin)
    expected = probe.expected(probe.input)
    places = np.flatnonzero(expected != output)
    print(f"{probe.name}: {places.size} of {output.size} words differ from the specification", flush=True)
    for i in places[:6]:
        print(f"    word {i}: hardware {output[i]:08x}, specification {expected[i]:08x}", flush=True)
    return {"input": probe.input, "output": output}, places.size == 0


def record_sweep(driver, cubin, sweep):
    """Arrays to store for a sweep. It is compared with the specification where that is tested: it may take minutes."""
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(digest, run_probe(driver, sweep.probe(s), cubin)) for s in sweep.segments]
        digests = [future.result() for future in waiting]
    print(f"{sweep.name}: {sum(s.count for s in sweep.segments)} inputs in {len(digests)} segments", flush=True)
    return {"sha256": np.array(digests)}, True


def record_one(name, directory):
    """Runs one probe or sweep in this process."""
    subject = (PROBES | SWEEPS)[name]
    driver, cubin = Driver(), (directory / f"{name}.cubin").read_bytes()
    arrays, as_specified = (record_sweep if name in SWEEPS else record_probe)(driver, cubin, subject)
    arrays["ptx"] = np.array(ptx_digest(subject))
    return {f"{name}.{key}": value for key, value in arrays.items()}, as_specified, driver.device_name


def work_through(names, directory, connection):
    """A child process: sends what each probe gave; an error of the GPU ends its context, and with it the child."""
    for name in names:
        try:
            connection.send(record_one(name, directory))
        except (DidNotEnd, RuntimeError) as error:
            connection.send(f"{name}: {str(error) or repr(error)}".splitlines()[0])
            return


def record(directory, target):
    """Runs all probes and writes what there is. Returns True if every probe ran and equals the specification."""
    import torch  # noqa: F401  once, before the children are made

    context = multiprocessing.get_context("fork")
    names, arrays, as_specified = [*PROBES, *SWEEPS], {}, True
    while names:
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=work_through, args=(names, directory, theirs))
        child.start()
        theirs.close()
        for name in tuple(names):
            try:
                answer = ours.recv()
            except EOFError:
                answer = f"{name}: its process died"
            names.remove(name)
            if isinstance(answer, str):
                print(answer)
                as_specified = False
                break
            recorded, equal, device = answer
            arrays |= recorded | {"device": np.array(device)}
            as_specified &= equal
        child.kill()
        child.join()
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
    return 0 if record(options.cubins, options.out) else 1


if __name__ == "__main__":
    sys.exit(main())
