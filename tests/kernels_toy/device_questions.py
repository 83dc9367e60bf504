"""Three hosts that ask for the number of multiprocessors, for the tests of the compile on a second device.

Their kernels write a number to each row; a grid of at most one block a multiprocessor goes over the rows.
"""

import dataclasses
import json
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils
from cutlass import Int32
from cutlass.cute import arch


def multiprocessors() -> int:
    """What the trace's device answers."""
    return cutlass.utils.HardwareInfo().get_device_multiprocessor_count()


class Grid:
    """The answer sizes the grid."""

    number = 1

    @cute.jit
    def __call__(self, out: cute.Tensor, stream: cuda.CUstream):
        blocks = cutlass.min(out.shape[0], multiprocessors())
        self.kernel(out).launch(grid=(blocks, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        row = arch.block_idx()[0]
        while row < out.shape[0]:
            out[row] = Int32(self.number)
            row += arch.grid_dim()[0]


class Handed(Grid):
    """The answer is an attribute that the kernel reads."""

    def __init__(self):
        self.number = multiprocessors()


class Inside(Grid):
    """The kernel itself asks."""

    @cute.kernel
    def kernel(self, out: cute.Tensor):
        row = arch.block_idx()[0]
        while row < out.shape[0]:
            out[row] = Int32(multiprocessors())
            row += arch.grid_dim()[0]


def setup() -> dict[str, str]:
    """The compile process: with torch, as for libraries that take its tensors."""
    from fa4build.families import tracing

    return tracing.setup()


def compile_kernel(request, options):
    """Compile the host that the payload names, as if a library had asked; `second.json` tells of the second compile."""
    from fa4build.families.tracing import compile_by_library, use_target

    use_target(request["target"])
    kinds = {kind.__name__: kind for kind in (Grid, Handed, Inside)}

    def library():
        extent = cute.sym_int32(symbol="rows")
        out = cute.runtime.make_fake_tensor(Int32, (extent,), stride=(1,), assumed_align=4)
        cute.compile(kinds[request["payload"]["host"]](), out, cute.runtime.make_fake_stream())

    found = compile_by_library(
        library,
        wanted=(request["payload"]["host"], 0),
        request=request,
        options=options,
        spec={},
        names={},
        forget=lambda: None,
    )
    asked = found.on_other_device

    def noted(with_kernels):
        second = asked(with_kernels)
        Path("second.json").write_text(json.dumps({"with_kernels": with_kernels, "found": second is not None}))
        return second

    return dataclasses.replace(found, on_other_device=noted)
