"""Which warps of a CTA do what, and how many registers each role gets.

Warpgroup 0 copies (its first warp issues every TMA load, the other three idle); warpgroups 1.. compute, 64 query rows
each.
"""

from typing import NamedTuple

THREADS_PER_WARPGROUP = 128
ROWS_PER_WARPGROUP = 64  # M of one warpgroup matrix instruction
REGISTERS_PER_SM = 65536


class WarpRoles(NamedTuple):
    """Threads of a CTA and registers a thread of each role (multiples of 8, as setmaxnreg wants)."""

    consumer_warpgroups: int
    consumer_registers: int
    producer_registers: int

    @property
    def threads(self) -> int:
        return THREADS_PER_WARPGROUP * (1 + self.consumer_warpgroups)

    @property
    def tile_m(self) -> int:
        return ROWS_PER_WARPGROUP * self.consumer_warpgroups

    def misfit(self) -> str | None:
        """Why this split cannot run, or None. setmaxnreg.inc blocks for ever if the file is short of registers."""
        for registers in (self.consumer_registers, self.producer_registers):
            if registers % 8 or not 24 <= registers <= 256:
                return f"{registers} registers a thread: setmaxnreg takes multiples of 8 from 24 to 256"
        total = THREADS_PER_WARPGROUP * (self.producer_registers + self.consumer_warpgroups * self.consumer_registers)
        if total > REGISTERS_PER_SM:
            return f"{total} registers for all warps, but a multiprocessor has {REGISTERS_PER_SM}"
        return None
