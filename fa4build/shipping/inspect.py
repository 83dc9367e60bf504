"""What a file holds, after proving that it is whole: wheels, packs, manifests, cubins, launchers and launch plans.

Nothing is written and nothing is unpacked to disk. How it looks on a terminal is the command line's business.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fa4build.errors import CompileError, LaunchPlanError, WheelError
from fa4build.runtime.fa4_kernels.abi import ABI_HASH
from fa4build.shipping.launcher_build import FREE_THREADED_PLATFORMS, PLATFORMS, check_launcher
from fa4build.shipping.manifest import Manifest, manifest_from_json
from fa4build.shipping.pack import MANIFEST_FILE, Pack, read_pack
from fa4build.shipping.wheel_file import WheelContents, read_wheel

KNOWN = "Known are wheels, pack directories, manifest.json, cubins, the launcher and launch plans."


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found.

    Attributes:
        kind: `pack wheel`, `runtime wheel`, `pack`, `manifest`, `cubin`, `launcher` or `launch plan`.
        facts: name -> value, JSON values, in the order they are worth reading.
        rows: one mapping for each part (kernel of a pack, entry of a cubin, launch of a plan), all with equal keys.
    """

    kind: str
    name: str
    facts: Mapping[str, object]
    rows: tuple[Mapping[str, object], ...] = ()

    def as_dict(self) -> dict[str, object]:
        """JSON form."""
        return {"kind": self.kind, "name": self.name, "facts": dict(self.facts), "rows": [dict(r) for r in self.rows]}


def inspect_file(path: Path) -> Report:
    """Tell what a file or pack directory holds; the kind follows from the contents, not from the name.

    Raises: WheelError when it is missing, damaged, or nothing fa4build knows.
    """
    if path.is_dir():
        return _report_pack("pack", path.name, read_pack(path))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WheelError(f"{path}: cannot be read ({error.strerror}). Give an existing file. {KNOWN}") from error
    if path.suffix == ".whl" or data.startswith(b"PK"):
        return _inspect_wheel(path)
    if data.startswith(b"\x7fELF"):
        return _inspect_elf(path.name, data)
    if data.lstrip().startswith(b"{"):
        return _inspect_json(path.name, data)
    raise WheelError(f"{path}: starts with {data[:4]!r}, which is nothing fa4build makes. {KNOWN}")


def _inspect_wheel(path: Path) -> Report:
    """A pack wheel is proven down to each kernel, a runtime wheel down to its launcher."""
    wheel = read_wheel(path)
    common = _wheel_facts(path, wheel)
    packs = [name for name in wheel.files if name.endswith(f"/{MANIFEST_FILE}") and name.count("/") == 1]
    if packs:
        report = _report_pack("pack wheel", path.name, read_pack(path))
        return Report(kind=report.kind, name=report.name, facts={**common, **report.facts}, rows=report.rows)
    known = {platform.launcher_file for platform in (*PLATFORMS, *FREE_THREADED_PLATFORMS)}
    launchers = [name for name in wheel.files if name.rpartition("/")[2] in known]
    if not launchers:
        raise WheelError(f"{path.name}: holds neither a pack nor a launcher, so it is no wheel of fa4build. {KNOWN}")
    launcher = _inspect_elf(launchers[0], wheel.files[launchers[0]])
    if not wheel.tag.endswith(f"-{launcher.facts['platform']}"):
        raise WheelError(f"{path.name}: its launcher is for {launcher.facts['platform']}. Build the wheel again.")
    modules = sorted(name for name in wheel.files if name.endswith(".py"))
    return Report(
        kind="runtime wheel",
        name=path.name,
        facts={**common, **launcher.facts},
        rows=tuple({"file": name, "size": len(wheel.files[name])} for name in [*launchers, *modules]),
    )


def _wheel_facts(path: Path, wheel: WheelContents) -> dict[str, object]:
    """What every wheel has."""
    data = path.read_bytes()
    return {
        "distribution": wheel.name.replace("_", "-"),
        "version": wheel.version,
        "tag": wheel.tag,
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "files": len(wheel.files) + 1,
        "sbom": wheel.sbom() is not None,
    }


def _report_pack(kind: str, name: str, pack: Pack) -> Report:
    """A pack: its manifest, and whose signatures it carries."""
    report = _report_manifest(kind, name, pack.manifest)
    facts = {**report.facts, "signed_by": [signature.key_id for signature in pack.signatures]}
    return Report(kind=kind, name=name, facts=facts, rows=report.rows)


def _report_manifest(kind: str, name: str, manifest: Manifest) -> Report:
    """A manifest, with one row a kernel."""
    facts = {
        "pack": manifest.pack,
        "version": manifest.version,
        "family": manifest.family,
        "targets": list(manifest.targets),
        "abi": manifest.abi,
        "abi_is_ours": manifest.abi == ABI_HASH,
        "toolchain": dict(manifest.toolchain),
        "kernels": len(manifest.entries),
        "groups": len(manifest.groups),
        "raw_bytes": manifest.raw_bytes,
        "packed_bytes": manifest.packed_bytes,
    }
    rows = tuple(
        {
            "id": entry.id,
            "registers": entry.facts.registers,
            "spill_bytes": entry.facts.spill_bytes,
            "shared_bytes": entry.facts.shared_bytes,
            "cubin_bytes": entry.cubin.size,
            "cubin_sha256": entry.cubin.sha256,
            "evidence": entry.evidence_level,
        }
        for entry in manifest.entries
    )
    return Report(kind=kind, name=name, facts=facts, rows=rows)


def _inspect_elf(name: str, data: bytes) -> Report:
    """A cubin or a launcher; the ELF header's machine field (bytes 18 and 19) tells which."""
    machine = int.from_bytes(data[18:20], "little")
    if machine == 190:  # EM_CUDA
        return _inspect_cubin(name, data)
    for platform in PLATFORMS:
        if machine == platform.elf_number:
            check_launcher(data, platform)
            facts = {"platform": platform.tag, "launcher_bytes": len(data)}
            return Report(kind="launcher", name=name, facts=facts)
    raise WheelError(f"{name}: an ELF file for machine {machine}, neither a cubin nor a launcher. {KNOWN}")


def _inspect_cubin(name: str, data: bytes) -> Report:
    """Facts read back from the ELF file."""
    from fa4build.compiling.cubin import read_cubin

    try:
        cubin = read_cubin(data, origin=name)
    except CompileError as error:
        raise WheelError(f"{error} Get the file again, or build the variant again.") from error
    facts = {
        "target": cubin.target,
        "ptxas": cubin.ptxas,
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    rows = tuple(
        {
            "symbol": kernel.symbol,
            "registers": kernel.registers,
            "local_bytes": kernel.local_bytes,
            "shared_bytes": kernel.shared_bytes,
        }
        for kernel in cubin.kernels
    )
    return Report(kind="cubin", name=name, facts=facts, rows=rows)


def _inspect_json(name: str, data: bytes) -> Report:
    """A launch plan says so in `format`; everything else must be a manifest."""
    try:
        document = json.loads(data)
        is_plan = isinstance(document, dict) and "format" in document
    except (ValueError, RecursionError):
        is_plan = b'"fa4build.launchplan"' in data
    if not is_plan:
        return _report_manifest("manifest", name, manifest_from_json(data, origin=name))
    return _inspect_plan(name, data)


def _inspect_plan(name: str, data: bytes) -> Report:
    """A launch plan, with one row a launch."""
    from fa4build.plan import plan_from_json

    try:
        plan = plan_from_json(data.decode())
    except (LaunchPlanError, UnicodeDecodeError) as error:
        raise WheelError(f"{name}: {error}") from error
    facts = {
        "origin": dict(plan.origin),
        "spec": dict(plan.spec),
        "arguments": [argument.name for argument in plan.args],
        "nodes": len(plan.nodes),
        "guards": [guard.message for guard in plan.guards],
        "vectors": len(plan.vectors),
    }
    rows = tuple(
        {
            "kernel": launch.kernel,
            "block": list(launch.block),
            "cluster": list(launch.cluster),
            "smem": launch.smem,
            "params": len(launch.params),
        }
        for launch in plan.launches
    )
    return Report(kind="launch plan", name=name, facts=facts, rows=rows)
