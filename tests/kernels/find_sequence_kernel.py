"""A kernel around `find_sequence` alone: `python -m tests.kernels.find_sequence_kernel DIR` writes its PTX.

Block b looks for tile number b: found[b] = (is_valid, sequence, tile within the sequence).
"""

import sys
from pathlib import Path

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute import arch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from kernels_src.integers import select
from kernels_src.scheduling.varlen_tiles import find_sequence

SYMBOL, TILE_M = "toy_find", 64


class Find:
    """Lengths are those of cu_seqlens, or of seqused if that has elements."""

    def __init__(self):
        self.kernel.set_name_prefix(SYMBOL, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def __call__(self, cu: cute.Tensor, used: cute.Tensor, found: cute.Tensor, group: Int32, heads: Int32, stream):
        self.kernel(cu, used, found, group, heads).launch(grid=(found.shape[0], 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, cu: cute.Tensor, used: cute.Tensor, found: cute.Tensor, group: Int32, heads: Int32):
        index = arch.block_idx()[0]
        is_valid, sequence, rest = find_sequence(index, cu, used, cu.shape[0] - 1, group, heads, TILE_M)
        if arch.lane_idx() == 0:
            found[index, 0] = select(is_valid, 1, 0)
            found[index, 1] = sequence
            found[index, 2] = rest


def main(directory: Path) -> None:
    """Compile it."""
    cu, used = (make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,), assumed_align=4) for _ in range(2))
    found = make_fake_tensor(Int32, (cute.sym_int(), 3), stride=(3, 1), assumed_align=4)
    compiled = cute.compile(
        Find(), cu, used, found, Int32(1), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--gpu-arch sm_90a --enable-tvm-ffi --keep-ptx --dump-dir {directory}",
    )  # fmt: skip
    (directory / "find.ptx").write_text(compiled.__ptx__, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
