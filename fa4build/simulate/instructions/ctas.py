"""CTAs and clusters: what warps share."""

import numpy as np

from fa4build.simulate.hardware.gang import SPLIT, WARP, Gang
from fa4build.simulate.instructions.barriers import ClusterBarrier, NamedBarrier
from fa4build.simulate.instructions.memory import RANK_SHIFT, SHARED_BASE

PARAMETER_WINDOW = 0x5000_0000_0000_0000  # addresses of kernel parameters (tensor maps), apart from global memory
SHARED_MAXIMUM = 232_448  # bytes of dynamic shared memory a CTA may have


class Warp:
    """State of one warp that is not in registers."""

    __slots__ = (
        "bulk_groups", "bulk_open", "cluster_generation", "copy_groups", "copy_open", "cta", "index",
        "register_history", "registers", "role",
        "synced_cluster", "tmem_loads", "token", "wgmma_groups", "wgmma_open",
    )  # fmt: skip

    def __init__(self, cta, index: int):
        self.cta, self.index, self.role = cta, index, None
        self.cluster_generation = self.token = None
        self.registers = 0
        self.register_history: list[int] = []
        self.bulk_open: dict[int, list] = {}
        self.bulk_groups: dict[int, list] = {}
        self.copy_open: list = []
        self.copy_groups: list = []
        self.wgmma_open: list = []
        self.wgmma_groups: list = []
        self.tmem_loads: list = []
        self.synced_cluster = False


class RegisterBudget:
    """Registers of one CTA: `total` at launch, `free` now (setmaxnreg moves them between warps)."""

    __slots__ = ("free", "total")

    def __init__(self, total: int):
        self.total, self.free = total, 0


class Cta:
    """One CTA: shared memory, barriers, tensor memory, gangs."""

    def __init__(self, cluster, program, rank: int, ctaid: tuple[int, int, int], launch):
        self.cluster, self.program, self.rank, self.ctaid = cluster, program, rank, ctaid
        self.block = launch.block
        self.memory = cluster.memory
        self.observer = cluster.observer
        self.rank_bits = np.uint32(rank << RANK_SHIFT)
        self.shared_limit = SHARED_BASE + (launch.smem + 15) // 16 * 16
        self.shared = _views(np.full(self.shared_limit, 0xC1, np.uint8))
        self.shared[2][:] = 0x7FC1  # NaN in bf16 and, twice, in f32
        self.mbarriers: dict = {}
        self.named_clocks: dict = {}
        self.named = [NamedBarrier(i) for i in range(16)]
        self.tmem = None
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        self.threads, self.exited = threads, 0
        self.local = np.full((threads, max(program.function.local_bytes, 1)), 0xC1, np.uint8)
        self.special = _special_registers(self, launch)
        self.symbols = _symbol_addresses(program.function, cluster.module, rank)
        self.warps = [Warp(self, i) for i in range(-(-threads // WARP))]
        self.register_budget = None
        if launch.registers is not None:
            self.register_budget = RegisterBudget(launch.registers * threads)
            for warp in self.warps:
                warp.registers = launch.registers
        first = Gang(self, program, self.warps, program.fresh_registers(WARP * len(self.warps)))
        self.gangs = (
            [Gang(self, program, [w], program.fresh_registers(WARP)) for w in self.warps] if launch.by_warp else [first]
        )
        if threads % WARP:
            self._drop_surplus_lanes(threads)

    def _drop_surplus_lanes(self, threads: int) -> None:
        for gang in self.gangs:
            beyond = gang.tids >= threads
            if beyond.any():
                gang.exited = beyond
                gang.set_mask(~beyond)

    def symbol_address(self, name: str) -> int:
        """Address of a shared, parameter or local symbol."""
        return self.symbols[name]

    def name_of(self, offset: int) -> str:
        """A shared offset in the words of the launch's field table, else relative to the dynamic base."""
        relative = offset - SHARED_BASE
        for name, start, size, stride in self.cluster.shared_names:
            if start <= relative < start + size:
                index = (relative - start) // stride
                return f"{name}[{index}]" if size > stride else name
        return f"smem+{relative}"

    def threads_alive(self) -> int:
        """Threads that have not exited."""
        return self.threads - self.exited

    def note_exit(self, gang: Gang, mask) -> None:
        """Lanes exit: barriers that count live threads may complete."""
        self.exited += int(np.count_nonzero(mask))
        if self.observer is not None:
            self.observer.lanes_exit(gang, mask)
        self.cluster.barrier.check()

    def replace(self, gang: Gang, children: list[Gang]) -> None:
        """Puts children in the place of a gang that has split."""
        position = self.gangs.index(gang)
        self.gangs[position : position + 1] = children
        gang.dead = True

    def split_by(self, gang: Gang, keys: list) -> int:
        """Splits a gang by one key per warp (None joins the first group)."""
        groups: dict = {}
        for k, key in enumerate(keys):
            groups.setdefault(key, []).append(k)
        idle = groups.pop(None, [])
        first = next(iter(groups))
        groups[first] = sorted(groups[first] + idle)
        self.replace(gang, [gang.subset(chosen) for chosen in groups.values()])
        return SPLIT


def _views(data: np.ndarray) -> dict[int, np.ndarray]:
    return {size: data.view(f"u{size}") for size in (1, 2, 4, 8)}


def _special_registers(cta: Cta, launch) -> dict[str, int]:
    cluster = launch.cluster
    values: dict[str, int] = {}
    for axis, name in enumerate("xyz"):
        values[f"ntid.{name}"] = launch.block[axis]
        values[f"ctaid.{name}"] = cta.ctaid[axis]
        values[f"nctaid.{name}"] = launch.grid[axis]
        values[f"clusterid.{name}"] = cta.ctaid[axis] // cluster[axis]
        values[f"nclusterid.{name}"] = launch.grid[axis] // cluster[axis]
        values[f"cluster_ctaid.{name}"] = cta.ctaid[axis] % cluster[axis]
        values[f"cluster_nctaid.{name}"] = cluster[axis]
    values["cluster_ctarank"] = cta.rank
    values["cluster_nctarank"] = cluster[0] * cluster[1] * cluster[2]
    values["nwarpid"] = -(-cta.block[0] * cta.block[1] * cta.block[2] // WARP)
    values["dynamic_smem_size"] = launch.smem
    values["smid"] = cta.cluster.index * len(launch.cluster) + cta.rank
    values["gridid"] = 1
    return values


def _symbol_addresses(function, module, rank: int) -> dict[str, int]:
    symbols = {p.name: PARAMETER_WINDOW + p.offset for p in function.parameters}
    for shared in module.shared_symbols:
        symbols[shared.name] = SHARED_BASE | rank << RANK_SHIFT
    symbols.update(function.local_symbols)
    return symbols


class Cluster:
    """CTAs that run together. `parameters`: the kernel's parameter block."""

    def __init__(
        self,
        launch,
        program,
        module,
        memory,
        engine,
        observer,
        grid_work,
        index: int,
        first_ctaid: tuple[int, int, int],
    ):
        self.memory, self.engine, self.observer, self.module, self.index = memory, engine, observer, module, index
        self.parameters, self.shared_names = launch.parameters, launch.shared_names
        self.grid_work = grid_work
        self.claim_failed = False
        self.check_state = None
        self.tensor_maps = launch.tensor_maps
        self.scheduler = None
        self.barrier = ClusterBarrier(self)
        x, y, z = launch.cluster
        self.ctas: list[Cta] = []
        for rank in range(x * y * z):
            offset = (rank % x, rank // x % y, rank // (x * y))
            ctaid = tuple(f + o for f, o in zip(first_ctaid, offset, strict=True))
            self.ctas.append(Cta(self, program, rank, ctaid, launch))
