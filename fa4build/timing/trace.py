"""Records what a functional run did, warp by warp, for the timing model to replay: instructions and synchronisation.

The run is in order and eager; which phase of a barrier an arrival or a copy belongs to does not depend on the schedule
of a right kernel, so the replay may put other times to the same events. Kernels whose work depends on time (dynamic
schedulers) are replayed with the work they took here.
"""

from dataclasses import dataclass, field

from fa4build.simulate.instructions.operands import active_warps

# Kinds of events. An event is a tuple of its kind and what is said here. Keys name a phase of a barrier.
WAIT = "wait"  # key, or None when the phase was over before anything happened
ARRIVE = "arrive"  # key, whether the barrier is another CTA's
LOAD = "load"  # key, bytes, whether from shared memory of the cluster
PRODUCT = "product"  # Product
COMMIT = "commit"  # list of keys
STORE = "store"  # Transfer
COPIES = "copies"  # key: cp.async so far
DONE = "done"  # list of Transfer or Product to wait for, whether only their reads
SYNC = "sync"  # key: arrives and waits
TENSOR_WAIT = "tensor_wait"  # "ld" or "st"
EXIT = "exit"


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    """An outgoing copy or reduction; `read_at`, `done_at` are set by the replay."""

    size_bytes: int
    is_reduction: bool
    read_at: float = 0.0
    done_at: float = 0.0


@dataclass(slots=True, kw_only=True, eq=False)
class Product:
    """One MMA. `shared_bytes`: operand bytes read from the shared memory of each CTA, by rank."""

    m: int
    n: int
    cta_group: int
    a_in_tensor_memory: bool
    is_wgmma: bool
    shared_bytes: dict[int, int]
    done_at: float = 0.0

    @property
    def read_at(self) -> float:
        """Operands are free when the product is done."""
        return self.done_at


@dataclass(slots=True, kw_only=True)
class WarpTrace:
    """`items`: node numbers and event tuples, in order."""

    cta: int
    index: int
    items: list = field(default_factory=list)


class Recorder:
    """An observer (see checks/observer.py) that writes down instead of checking. Use with `by_warp`."""

    def __init__(self) -> None:
        self.program = None
        self.warps: dict[tuple[int, int], WarpTrace] = {}
        self.contributions: dict = {}  # key -> how many events complete the phase
        self.broadcasts: dict[int, bool] = {}  # site -> all lanes always named one shared address

    def attach(self, program) -> "Recorder":
        """Takes the program that is going to run."""
        self.program = program
        return self

    def notes(self) -> tuple[str, ...]:
        """Nothing is checked."""
        return ()

    def note(self, text: str) -> None:
        """Nothing is checked."""

    def error(self, rule: str, site: int, text: str) -> None:
        """Nothing is checked."""

    def _trace(self, warp) -> WarpTrace:
        cluster = warp.cta.cluster.index
        key = (cluster, warp.cta.rank, warp.index)
        found = self.warps.get(key)
        if found is None:
            found = self.warps[key] = WarpTrace(cta=warp.cta.rank, index=warp.index)
        return found

    def _add(self, g, mask, event: tuple) -> None:
        for k in active_warps(g, mask):
            self._trace(g.warps[k]).items.append(event)

    def _phase(self, barrier) -> tuple:
        return (barrier.cta.cluster.index, barrier.cta.rank, barrier.offset, barrier.phase)

    def _contribute(self, key, count: int = 1):
        self.contributions[key] = self.contributions.get(key, 0) + count
        return key

    def enter_node(self, g, node: int) -> None:
        """A gang is about to execute a node; a system node that is tried again counts once."""
        for warp in g.warps:
            items = self._trace(warp).items
            if not items or items[-1] != node:
                items.append(node)

    # --- asynchronous operations

    def issue(self, g, warp, op, channel, reads, writes, site: int) -> None:
        """An asynchronous operation starts."""
        items = self._trace(warp).items
        opcode = self.program.function.instructions[site].opcode
        if channel in ("mma", "wgmma"):
            product = self._product(opcode, site, reads, writes)
            op.token = product
            items.append((PRODUCT, product))
        elif channel == "bulk":
            size = sum(16 * len(units) for kind, _, units in reads if kind == "smem")
            op.token = Transfer(size_bytes=size, is_reduction=".reduce" in opcode)
            items.append((STORE, op.token))
        elif channel == "cp.async":
            size = sum(16 * len(units) for kind, _, units in writes if kind == "smem")
            op.token = Transfer(size_bytes=size, is_reduction=False)
            items.append((COPIES, op.token))
        else:
            size = sum(16 * len(units) for kind, _, units in writes if kind == "smem")
            key = self._contribute(self._phase(channel))
            items.append((LOAD, key, size, ".shared::cluster.shared::cta" in opcode))

    def _product(self, opcode: str, site: int, reads, writes) -> Product:
        shared: dict[int, int] = {}
        for entry in reads:
            if entry[0] == "smem":
                shared[entry[1].rank] = shared.get(entry[1].rank, 0) + 16 * len(entry[2])
        if opcode.startswith("wgmma"):
            n = int(opcode.split(".m64n")[1].split("k")[0])
            return Product(m=64, n=n, cta_group=1, a_in_tensor_memory=False, is_wgmma=True, shared_bytes=shared)
        group = 2 if "cta_group::2" in opcode else 1
        blocks = [entry[2] for entry in writes]
        m = sum(rows for _, rows, _, _ in blocks)
        n = blocks[0][3]
        if group == 2 and len(blocks) == 4:
            m, n = m // 2, 2 * n
        from_tmem = any(entry[0] == "tmem" and entry[2][3] == 8 and entry[2][2] != blocks[0][2] for entry in reads)
        return Product(m=m, n=n, cta_group=group, a_in_tensor_memory=from_tmem, is_wgmma=False, shared_bytes=shared)

    def ops_waited(self, g, mask, ops: list, what: str) -> None:
        """The warps wait for operations."""
        tokens = [op.token for op in ops if op.token is not None]
        self._add(g, mask, (DONE, tokens, what == "bulk reads"))

    def copies_so_far(self, warp) -> tuple:
        """Token of an arrival that follows the warp's cp.async."""
        keys: list = []
        self._trace(warp).items.append((COMMIT, keys, "copies"))
        return (keys,)

    def products_so_far(self, warp) -> tuple:
        """Token of a commit."""
        keys: list = []
        self._trace(warp).items.append((COMMIT, keys, "products"))
        return (keys,)

    def deferred_arrive(self, barrier, clock: tuple) -> None:
        """The arrival of a commit happens."""
        clock[0].append(self._contribute(self._phase(barrier)))

    # --- barriers

    def arrive(self, g, mask, barrier, site: int) -> None:
        """Threads arrive at an mbarrier."""
        key = self._phase(barrier)
        for k in active_warps(g, mask):
            self._contribute(key)
            self._trace(g.warps[k]).items.append((ARRIVE, key, barrier.cta is not g.cta))

    def wait_passed(self, g, mask, barrier, parity: int, site: int) -> None:
        """Threads saw the end of a phase."""
        key = None
        if barrier.phase:
            key = (barrier.cta.cluster.index, barrier.cta.rank, barrier.offset, barrier.phase - 1)
        self._add(g, mask, (WAIT, key))

    def named_arrive(self, g, mask, barrier, generation: int, is_sync: bool) -> None:
        """Warps enter a named barrier."""
        key = ("named", g.cta.cluster.index, g.cta.rank, barrier.index, generation)
        for k in active_warps(g, mask):
            self._contribute(key)
            self._trace(g.warps[k]).items.append((SYNC, key) if is_sync else (ARRIVE, key, False))

    def cluster_arrive(self, g, mask, barrier, relaxed: bool) -> None:
        """Warps arrive at the cluster barrier."""
        key = ("cluster", g.cta.cluster.index, barrier.generation)
        for k in active_warps(g, mask):
            self._contribute(key)
            self._trace(g.warps[k]).items.append((ARRIVE, key, True))

    def cluster_passed(self, g, mask, barrier) -> None:
        """Warps passed the cluster barrier."""
        self._add(g, mask, (WAIT, ("cluster", g.cta.cluster.index, barrier.generation - 1)))

    def tmem_wait(self, g, mask, kind: str) -> None:
        """tcgen05.wait::ld and ::st."""
        if kind in ("ld", "st"):
            self._add(g, mask, (TENSOR_WAIT, kind))

    def lanes_exit(self, g, mask) -> None:
        """Threads leave."""
        self._add(g, mask, (EXIT,))

    # --- what time does not depend on

    def shared_access(self, g, offset, size: int, mask, site: int, is_write: bool) -> None:
        """Loads of one address by all lanes move its bytes once; bank conflicts are not modelled."""
        if self.broadcasts.get(site, True):
            self.broadcasts[site] = len(offset) == 0 or bool((offset == offset[0]).all())

    def global_access(self, *_) -> None:
        """Costs are those of the instruction."""

    def tmem_access(self, *_) -> None:
        """Costs are those of the instruction."""

    def tmem_freed(self, *_) -> None:
        """No time."""

    def barrier_created(self, *_) -> None:
        """No time."""

    def phase_completed(self, *_) -> None:
        """Follows from its contributions."""

    def named_completed(self, *_) -> None:
        """Follows from its contributions."""

    def named_passed(self, *_) -> None:
        """Part of the arrival's event."""

    def cluster_completed(self, *_) -> None:
        """Follows from its contributions."""

    def fence(self, *_) -> None:
        """Costs are those of the instruction."""

    def warp_barrier(self, *_) -> None:
        """Costs are those of the instruction."""

    def atomic(self, *_) -> None:
        """Costs are those of the instruction."""

    def acquire(self, *_) -> None:
        """Costs are those of the instruction."""

    def cluster_exit(self, cluster) -> None:
        """Nothing is checked."""
