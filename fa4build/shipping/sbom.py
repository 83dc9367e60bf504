"""Software bills of materials: CycloneDX 1.6 JSON, as PEP 770 puts it into a wheel.

No time and no random serial number: the document is a function of its components, so wheels stay reproducible.
"""

import hashlib
import json
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fa4build.shipping.manifest import canonical_json

SBOM_FILE = "fa4build.cdx.json"
_NAMESPACE = uuid.UUID("8d7e1ae2-2f0e-5c93-9a64-6c1b6d9a0f41")


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One input or part. `kind` is a CycloneDX type: `application`, `library`, `file`; None = not known."""

    kind: str
    name: str
    version: str | None = None
    sha256: str | None = None
    purl: str | None = None

    def document(self) -> dict[str, object]:
        """The component as CycloneDX writes it."""
        document: dict[str, object] = {"type": self.kind, "name": self.name, "bom-ref": self.reference}
        if self.version is not None:
            document["version"] = self.version
        if self.sha256 is not None:
            document["hashes"] = [{"alg": "SHA-256", "content": self.sha256}]
        if self.purl is not None:
            document["purl"] = self.purl
        return document

    @property
    def reference(self) -> str:
        """Unique in a document: kind and name."""
        return f"{self.kind}:{self.name}"


def pypi_component(name: str, version: str, *, sha256: str | None = None) -> Component:
    """A distribution from the Python package index."""
    return Component(kind="library", name=name, version=version, sha256=sha256, purl=f"pkg:pypi/{name}@{version}")


def sbom_json(
    *,
    name: str,
    version: str,
    license_expression: str,
    tools: Iterable[Component],
    parts: Iterable[Component],
    inputs: str,
) -> bytes:
    """The SBOM of one wheel, canonical JSON.

    Args:
        name, version, license_expression: the distribution it describes.
        tools: what made it (compilers, fa4build).
        parts: what is in it or was compiled into it (sources, symbols of binaries).
        inputs: sha256 over all inputs of the build, kept as the property `fa4build:inputs`.
    """
    subject = {
        "type": "library",
        "name": name,
        "version": version,
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "purl": f"pkg:pypi/{name}@{version}",
        "licenses": [{"expression": license_expression}],
    }
    components = sorted(parts, key=lambda part: part.reference)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": subject,
            "tools": {"components": [tool.document() for tool in sorted(tools, key=lambda tool: tool.reference)]},
            "properties": [{"name": "fa4build:inputs", "value": inputs}],
        },
        "components": [component.document() for component in components],
        "dependencies": [{"ref": subject["bom-ref"], "dependsOn": [component.reference for component in components]}],
    }
    digest = hashlib.sha256(canonical_json(document).encode()).hexdigest()
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(_NAMESPACE, digest)}"
    return (canonical_json(document) + "\n").encode()


def sbom_inputs(sbom: bytes) -> str | None:
    """The `inputs` an SBOM of ours was written with, or None when it has none."""
    try:
        properties = json.loads(sbom)["metadata"]["properties"]
        return next(item["value"] for item in properties if item["name"] == "fa4build:inputs")
    except (ValueError, KeyError, TypeError, StopIteration):
        return None


def sbom_components(sbom: bytes) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
    """The tools and the parts of an SBOM that `sbom_json` wrote.

    Raises: ValueError when it is none.
    """
    try:
        document = json.loads(sbom)
        tools = tuple(map(_component, document["metadata"]["tools"]["components"]))
        return tools, tuple(map(_component, document["components"]))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"no SBOM of fa4build ({type(error).__name__}: {error})") from error


def _component(document: dict[str, Any]) -> Component:
    """The inverse of `Component.document`."""
    hashes = document.get("hashes", ())
    return Component(
        kind=document["type"],
        name=document["name"],
        version=document.get("version"),
        sha256=hashes[0]["content"] if hashes else None,
        purl=document.get("purl"),
    )
