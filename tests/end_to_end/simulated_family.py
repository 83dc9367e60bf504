"""Operators of a foreign family on CPU tensors: built, packed, called by recipe, executed by the simulator."""

import dataclasses
import json
import zipfile
from pathlib import Path

from fa4_kernels import loader, packs

from fa4build.families.registry import family_named
from fa4build.matrix.selection import Selection
from fa4build.pipeline import build_matrix, find_cached
from fa4build.plan import plan_from_json
from fa4build.shipping.release import write_wheels
from fa4build.simulate import simulate_launch
from fa4build.store.cache import Cache
from tests.runtime.fake import fake_cubin
from tests.runtime.simulated import _memory_of, _recorded_launch

# What upstream's own kernels do and the simulator's rules would object to: barriers left half complete by pipeline
# tails, a store not waited for before exit, warps of one warpgroup with different register budgets, tensor memory
# handed from thread to thread by barriers without tcgen05 fences and wait::ld.
KNOWN = ("R5-exit", "R7w", "R9-register", "R12", "R14", "R15-after", "R15-before")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A pack of the family for one target, and the PTX of each kernel by id."""

    pack: packs.Pack
    ptx: dict[str, str]


def build(family: str, arch: str, globs: tuple[str, ...], directory: Path) -> Built:
    """Compile the selected kernels and write their wheel, as the command line does."""
    chosen, cache = family_named(family), Cache(directory / "cache")
    selection = Selection(arches=(arch,), globs=globs)
    report = build_matrix(selection, cache, 1, family=chosen, allow_spills=True)
    assert report.exit_code == 0, [outcome.message for outcome in report.outcomes]
    found = find_cached(chosen.expand(selection), cache, family=chosen)
    (wheel,) = write_wheels(
        selection, cache, out_dir=directory / "dist", platforms=(), allow_spills=True, family=chosen
    )
    with zipfile.ZipFile(wheel.path) as archive:
        archive.extractall(directory / "site")
    pack = packs.open_pack(family, next((directory / "site").glob("*/manifest.json")).parent)
    assert isinstance(pack, packs.Pack), pack
    return Built(pack=pack, ptx={recipe.name: cache.read(entry, "ptx").decode() for recipe, entry in found})


class _StandInReader(packs.PackReader):
    """The real plan, with a cubin that the stand-in driver takes."""

    def read(self, pack, entry):
        _, text = super().read(pack, entry)
        launches = json.loads(text)["launches"]
        return fake_cubin(**{k["kernel"]: [p.get("size", 128) for p in k["params"]] for k in launches}), text


class FamilyRuntime(loader.Runtime):
    """Executes every launch of a recipe before the next one; `launched` is (kernel, cluster size)."""

    def __init__(self, built: Built, fake, family=None, **options):
        settings = {"device_type": loader.CPU, "stream_of": lambda _: 0, "family": family}
        super().__init__(driver_path=fake.path, packs=[built.pack], **settings)
        self._reader = _StandInReader()
        self.built, self.fake, self.options, self.launched = built, fake, options, []

    def load_as_planned(self, pack, entry, ordinal):
        return self._simulated(super().load_as_planned(pack, entry, ordinal), pack, entry)

    def load(self, pack, entry, ordinal):
        return self._simulated(super().load(pack, entry, ordinal), pack, entry)

    def _simulated(self, launch, pack, entry):
        plan = plan_from_json(self._reader.read(pack, entry)[1].decode())
        return _Simulated(launch, self.built.ptx[entry.id], plan, self)


class _Simulated:
    def __init__(self, launch, ptx, plan, runtime):
        self._launch, self._ptx, self._plan, self._runtime = launch, ptx, plan, runtime

    def run(self, *arguments):
        self._runtime.fake.reset_launches()
        self._launch.run(*arguments)
        memory = _memory_of(arguments)
        for record, planned in zip(self._runtime.fake.launches, self._plan.launches, strict=True):
            launch = dataclasses.replace(_recorded_launch(record, planned), cluster=tuple(record.cluster))
            self._runtime.launched.append((launch.kernel, launch.cluster[0]))
            simulate_launch(self._ptx, launch, memory, **self._runtime.options)
