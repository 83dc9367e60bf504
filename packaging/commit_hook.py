"""Hatch build hook: the commit of the checkout goes into wheel and sdist as `fa4build/commit.txt`.

`fa4build --version` reads it where there is no checkout any more. The same commit gives the same bytes.
"""

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMMIT_MODULE = "fa4build/cli/commit.py"


class CommitHook(BuildHookInterface):
    """Adds the file to standard builds; an editable one stays in its checkout. Without a commit nothing is added."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatch before it collects files; `version` is `standard` or `editable`."""
        commit = _commit_of(Path(self.root)) if version == "standard" else None
        if commit is None:
            return
        self._directory = tempfile.TemporaryDirectory(prefix="fa4build-commit-")
        path = Path(self._directory.name) / "commit.txt"
        path.write_text(f"{commit}\n", encoding="utf-8")
        build_data["force_include"][str(path)] = "fa4build/commit.txt"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what `initialize` made."""
        if hasattr(self, "_directory"):
            self._directory.cleanup()


def _commit_of(root: Path) -> str | None:
    """By fa4build's own reader, which needs no other module."""
    spec = importlib.util.spec_from_file_location("fa4build_commit", root / COMMIT_MODULE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.commit_of(root)
