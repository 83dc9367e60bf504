"""Copies tiles of a (batch, seqlen, num_heads, head_dim) tensor by TMA, scaled; one work item at a time, persistent."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory as mem
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, warpgroup

ROWS, COLS = 64, 64
LOG2_E = 1.4426950408889634


class TmaCopy:
    """Grid: min(number of tiles, num_sms). The kernel splits a tile number by fast divisors made on the host."""

    def __init__(self, *, symbol: str):
        self.kernel.set_name_prefix(symbol, remove_cutlass_symbol=True, keep_mangled_name=False)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        y: cute.Tensor,
        row_sum: cute.Tensor,
        scale: Float32,
        num_sms: Int32,
        stream: cuda.CUstream,
    ):
        order = (1, 3, 2, 0)  # (seqlen, head_dim, num_heads, batch)
        x_view = cute.make_tensor(x.iterator, cute.select(x.layout, mode=order))
        y_view = cute.make_tensor(y.iterator, cute.select(y.layout, mode=order))
        atom_layout = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        tile_layout = cute.tile_to_shape(atom_layout, (ROWS, COLS), order=(0, 1))
        load, x_coords = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), x_view, tile_layout, (ROWS, COLS)
        )
        store, y_coords = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), y_view, tile_layout, (ROWS, COLS)
        )
        num_blocks = cute.ceil_div(x.shape[1], ROWS)
        tiles = num_blocks * x.shape[2] * x.shape[0]
        self.kernel(
            load,
            x_coords,
            store,
            y_coords,
            row_sum,
            cute.FastDivmodDivisor(num_blocks),
            cute.FastDivmodDivisor(x.shape[2]),
            tiles,
            scale * LOG2_E,
        ).launch(grid=(cutlass.min(tiles, num_sms), 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(
        self,
        load: cute.CopyAtom,
        x_coords: cute.Tensor,
        store: cute.CopyAtom,
        y_coords: cute.Tensor,
        row_sum: cute.Tensor,
        blocks_divisor: cute.FastDivmodDivisor,
        heads_divisor: cute.FastDivmodDivisor,
        tiles: Int32,
        scale_log2: Float32,
    ):
        thread, _, _ = arch.thread_idx()
        first, _, _ = arch.block_idx()
        step, _, _ = arch.grid_dim()
        shared = mem.SmemAllocator()
        barrier = shared.allocate_array(Int64, 1)
        layout = cute.tile_to_shape(
            warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16), (ROWS, COLS), order=(0, 1)
        )
        tile = shared.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        if thread == 0:
            arch.mbarrier_init(barrier, 1)
        arch.mbarrier_init_fence()
        arch.sync_threads()
        phase = Int32(0)
        for work in cutlass.range(first, tiles, step, unroll=1):
            rest, block = divmod(work, blocks_divisor)
            batch, head = divmod(rest, heads_divisor)
            x_tiles = cute.local_tile(x_coords[None, None, head, batch], (ROWS, COLS), (None, 0))
            y_tiles = cute.local_tile(y_coords[None, None, head, batch], (ROWS, COLS), (None, 0))
            s_load, g_load = cpasync.tma_partition(
                load, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(x_tiles, 0, 2)
            )
            s_store, g_store = cpasync.tma_partition(
                store, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(y_tiles, 0, 2)
            )
            if thread == 0:
                arch.mbarrier_arrive_and_expect_tx(barrier, ROWS * COLS * 2)
            if arch.make_warp_uniform(arch.warp_idx()) == 0:
                cute.copy(load, g_load[None, block], s_load, tma_bar_ptr=barrier)
            arch.mbarrier_wait(barrier, phase)
            phase ^= 1
            if thread < ROWS:
                total = Float32(0.0)
                for column in cutlass.range_constexpr(COLS):
                    total += tile[thread, column].to(Float32)
                row = block * ROWS + thread
                if row < row_sum.shape[2]:
                    row_sum[batch, head, row] = total * scale_log2
            arch.fence_proxy("async.shared", space="cta")
            arch.sync_threads()
            if arch.make_warp_uniform(arch.warp_idx()) == 0:
                cute.copy(store, s_store, g_store[None, block])
                arch.cp_async_bulk_commit_group()
                arch.cp_async_bulk_wait_group(0, read=True)
            arch.sync_threads()
