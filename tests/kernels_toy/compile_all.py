"""Compiles every toy kernel for sm_90a: `python -m tests.kernels_toy.compile_all DIRECTORY`.

For each, the directory gets NAME.mlir (the host module in generic form), NAME.ptx and NAME.cubin.
"""

import sys
from pathlib import Path

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from tests.kernels_toy.control_flow import ConditionalLaunch, DataDependentLoop
from tests.kernels_toy.tma_copy import TmaCopy
from tests.kernels_toy.two_launches import TwoLaunches


def strides(count: int, divisibility: int) -> tuple:
    """Symbolic strides in elements, the last one 1."""
    return (*(cute.sym_int64(divisibility=divisibility) for _ in range(count - 1)), 1)


def extents(count: int) -> tuple:
    """Symbolic extents."""
    return tuple(cute.sym_int() for _ in range(count))


def arguments() -> dict[str, tuple]:
    """Name -> (host function, its fake arguments without the stream)."""

    def rows() -> cute.Tensor:
        return make_fake_tensor(BFloat16, (*extents(3), 64), stride=strides(4, 8), assumed_align=16)

    sums = make_fake_tensor(Float32, extents(3), stride=strides(3, 1), assumed_align=4)
    vector = make_fake_tensor(Float32, extents(1), stride=(1,), assumed_align=4)
    matrix = make_fake_tensor(Float32, (*extents(1), 8), stride=strides(2, 1), assumed_align=4)
    conditional = ConditionalLaunch(symbol="toy_conditional")
    return {
        "tma": (TmaCopy(symbol="toy_tma"), rows(), rows(), sums, Float32(1), Int32(1)),
        "two": (TwoLaunches(symbol="toy_two"), vector, Float32(1), Int64(1), Int32(1)),
        "conditional": (conditional, matrix, (Float32(1), Int32(1)), Boolean(True), None),
        "loop": (DataDependentLoop(symbol="toy_loop"), vector, Int32(1)),
    }


def main(directory: Path) -> None:
    """Compile all and write what the tests read."""
    options = f"--gpu-arch sm_90a --enable-tvm-ffi --keep-ptx --keep-cubin --dump-dir {directory}"
    for name, call in arguments().items():
        compiled = cute.compile(*call, make_fake_stream(use_tvm_ffi_env_stream=True), options=options)
        text = compiled.ir_module.operation.get_asm(print_generic_op_form=True)
        (directory / f"{name}.mlir").write_text(text, encoding="utf-8")
        (directory / f"{name}.ptx").write_text(compiled.__ptx__, encoding="utf-8")
        (directory / f"{name}.cubin").write_bytes(compiled.__cubin__)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
