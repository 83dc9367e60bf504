"""Run this project's forward kernels on a GPU for a few small problems and store what the hardware wrote.

    python tests/recordings/record_forward.py compile --kernels DIR                  (no GPU needed; the CuTe DSL is)
    python tests/recordings/record_forward.py record --kernels DIR --out FILE.npz    (on an H200, with torch and numpy)

`compile` writes cubin, PTX and launch plan of each variant. `record` evaluates the plans, launches the cubins through
the CUDA driver, and writes outputs, PTX and plans to one file; tests/golden/h200_forward.npz is such a file, and
tests/simulate/test_forward_recording.py demands the same bits of the simulator. Inputs are made from fixed seeds.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fa4build.plan import BytesParam, evaluate, failed_guard, plan_from_json, plan_to_json
from fa4build.simulate.hardware.tensor_map import TensorMap, pack, repaired
from tests.recordings.raw_launch import Driver
from tests.simulate.forward_cases import CASES, VARIANTS, arrays_of, packed_text, scalars_of


def compile_variants(directory):
    """Writes kernel.cubin, kernel.ptx and plan.json of every variant, each in its own folder."""
    from fa4build.compiling.compile import compile_kernel
    from fa4build.compiling.render import render
    from fa4build.compiling.toolchain import current_toolchain
    from fa4build.matrix.tuning import tuning_for
    from fa4build.matrix.variants import parse_variant

    for name in VARIANTS:
        variant, folder = parse_variant(name), directory / name
        cubin = compile_kernel(render(variant, tuning_for(variant)), current_toolchain(), folder / "work")
        (folder / "kernel.cubin").write_bytes(cubin.elf)
        (folder / "kernel.ptx").write_text(cubin.ptx)
        (folder / "plan.json").write_text(plan_to_json(cubin.plan))
        print(f"{name}: {len(cubin.elf)} bytes")


def parameter_bytes(param):
    """A kernel parameter as the driver wants it."""
    if isinstance(param, BytesParam):
        return bytes(param.data)
    tmap = TensorMap(
        address=param.addr, dtype=param.dtype, dims=tuple(param.dims), strides=tuple(param.strides),
        box=tuple(param.box), element_strides=tuple(param.elem_strides), swizzle=param.swizzle,
        interleave=param.interleave, l2_promotion=param.l2_promotion, oob_fill=param.oob_fill,
    )  # fmt: skip
    return pack(repaired(tmap))


def run_case(driver, plan, cubin, variant, case):
    """(out, lse) that the GPU writes for one problem."""
    _, _, dtype, head_dim, mask = variant.split("-")
    head_dim = int(head_dim.removeprefix("hd"))
    arrays = arrays_of(case, head_dim, dtype)
    tensors = {name: driver.to_device(array) for name, array in arrays.items()}
    inputs = scalars_of(case, head_dim, mask, driver.num_sms)
    for name, array in arrays.items():
        inputs[f"{name}.ptr"] = tensors[name].data_ptr()
        for axis, extent in enumerate(array.shape):
            inputs[f"{name}.shape[{axis}]"] = extent
            inputs[f"{name}.stride[{axis}]"] = array.strides[axis] // array.itemsize
    broken = failed_guard(plan, inputs)
    if broken:
        raise RuntimeError(f"{variant}, {case.name}: {broken}")
    for launch in evaluate(plan, inputs):
        if tuple(launch.cluster) != (1, 1, 1):
            raise RuntimeError(f"{variant}: clusters of {launch.cluster} cannot be launched by this script")
        function = driver.load(cubin, launch.kernel, launch.smem)
        driver.launch(function, launch.grid, launch.block, launch.smem, [parameter_bytes(p) for p in launch.params])
    return tuple(driver.to_host(tensors[name], arrays[name]) for name in ("out", "lse"))


def record(directory, target):
    """Runs every case of every variant and writes the recording."""
    driver = Driver()
    stored = {"device": np.array(driver.device_name), "num_sms": np.array(driver.num_sms)}
    for variant in VARIANTS:
        folder = directory / variant
        ptx, plan_text = (folder / "kernel.ptx").read_text(), (folder / "plan.json").read_text()
        stored[f"{variant}.ptx"], stored[f"{variant}.plan"] = packed_text(ptx), packed_text(plan_text)
        for case in CASES:
            out, lse = run_case(
                driver, plan_from_json(plan_text), (folder / "kernel.cubin").read_bytes(), variant, case
            )
            stored[f"{variant}.{case.name}.out"], stored[f"{variant}.{case.name}.lse"] = out, lse.view(np.uint32)
            print(f"{variant}, {case.name}: {out.size} + {lse.size} words")
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(target, **stored)
    print(f"wrote {target}: {target.stat().st_size} bytes, {driver.device_name}")


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("compile").add_argument("--kernels", type=Path, required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--kernels", type=Path, required=True)
    recording.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "compile":
        compile_variants(options.kernels)
    else:
        record(options.kernels, options.out)


if __name__ == "__main__":
    main()
