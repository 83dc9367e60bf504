"""The kernels that faults are planted in: what the compiler made of our forwards, kept.

Kept and not compiled on the spot, so that an edit finds its place and a diagnosis stays the same while the kernels are
worked on. `python -m tests.simulate.mutations.kernels CACHE_DIR [NAME ..]` keeps what is in a cache instead; the places
in `faults` and its siblings may have to follow.
"""

import json
import lzma
import sys
from dataclasses import dataclass
from pathlib import Path

from fa4build.cases.forward import Case
from fa4build.cases.schedules import Run, runs_of_case
from fa4build.matrix.variants import parse_variant
from fa4build.plan import LaunchPlan, plan_from_json
from fa4build.verify.engines import DEFAULT
from fa4build.verify.simulated import Request, prove_case

HERE = Path(__file__).parent / "kept"
NAMES = ("fwd-sm90a-bf16-hd64-full", "fwd-sm100a-bf16-hd128-full")
CLUSTERS = (
    *("bwd-sm90a-bf16-hd128-full-deterministic", "bwd-sm100a-bf16-hd128-full-deterministic"),
    *(
        "bwd-sm100a-bf16-hd128-full-2cta-deterministic",
        "fwd-sm100a-bf16-hd128-full-2cta",
        "fwd_combine-sm90a-bf16-hd64",
    ),
)
"""Whose clusters wait for each other, whose CTAs share products, which starts before the kernel in front has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A compiled kernel: its variant's id, PTX, launch plan, registers a thread."""

    name: str
    ptx: str
    plan: LaunchPlan
    registers: int

    def report(self, ptx: str, case: Case, engine: str = DEFAULT, runs: tuple[Run, ...] = ()) -> str:
        """What a proof of the case says is wrong with a text in the place of its own, "" for nothing.

        Args: runs: of the case; default: those of a proof in this engine.
        """
        variant = parse_variant(self.name)
        request = Request(
            variant_id=self.name, ptx=ptx, plan="", registers=self.registers, seeds=(1,), sha256="", engine=engine
        )
        return "\n".join(prove_case(variant, request, self.plan, case, 1, runs or runs_of_case(engine, 0))[1])


def kept(name: str) -> Kernel:
    """The kernel kept under a variant's id."""
    document = json.loads(lzma.decompress((HERE / f"{name}.json.xz").read_bytes()))
    plan = plan_from_json(document["plan"])
    return Kernel(name=name, ptx=document["ptx"], plan=plan, registers=document["registers"])


def keep(cache_dir: Path, names: tuple[str, ...]) -> None:
    """Keep what a cache holds for names, as compiled now."""
    from fa4build.pipeline import find_cached, require_cached
    from fa4build.store.cache import Cache

    cache = Cache(cache_dir)
    for entry in require_cached(find_cached(map(parse_variant, names), cache)):
        texts = {name: cache.read(entry, name).decode() for name in ("ptx", "plan")}
        document = json.dumps({**texts, "registers": entry.facts["registers"]}, sort_keys=True)
        data = lzma.compress(document.encode(), preset=9 | lzma.PRESET_EXTREME)
        (HERE / f"{entry.name}.json.xz").write_bytes(data)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), tuple(sys.argv[2:]) or (*NAMES, *CLUSTERS))
