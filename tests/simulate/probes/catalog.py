"""All probes, by name, and where the hardware's answers are kept."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.simulate.probes import (
    barriers,
    clusters,
    copies_and_barriers,
    elementwise,
    integers,
    tensor_copies,
    warp_exchange,
    wgmma_tiles,
)
from tests.simulate.probes.probe import Probe
from tests.simulate.probes.sweeps import Sweep

PROBES: dict[str, Probe] = {
    probe.name: probe
    for module in (
        elementwise,
        integers,
        warp_exchange,
        copies_and_barriers,
        barriers,
        clusters,
        tensor_copies,
        wgmma_tiles,
    )
    for probe in module.PROBES
}

RECORDING = Path(__file__).parents[2] / "golden" / "h200_probes.npz"


def ptx_digest(probe: Probe | Sweep) -> str:
    """SHA-256 of the PTX text: a recording belongs to one text."""
    return hashlib.sha256(probe.ptx.encode()).hexdigest()
