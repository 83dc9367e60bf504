"""Builds the runtime wheel for the interpreter that asks, as pip and cibuildwheel ask (PEP 517).

The same bytes as `fa4build wheel` makes for that host from any other machine. Not for packs: they are data for every
interpreter, see `fa4build wheel`.
"""

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from fa4build.errors import WheelError
from fa4build.shipping.launcher_build import Platform, platform_named
from fa4build.shipping.wheel import write_runtime_wheel


class UnsupportedOperation(WheelError):
    """A step of PEP 517 that this project has no use for."""


def host_platform() -> Platform:
    """The platform of this interpreter. Raises: WheelError when there is no launcher for it."""
    machine = os.uname().machine
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        return platform_named(machine)
    return platform_named(f"{machine}-cp{sys.version_info.major}{sys.version_info.minor}t")


def get_requires_for_build_wheel(config_settings: Mapping[str, str] | None = None) -> list[str]:
    """Nothing beyond fa4build, whose environment this runs in."""
    return []


def build_wheel(
    wheel_directory: str, config_settings: Mapping[str, str] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the runtime wheel into a directory; its file name. Raises: as `prepare_runtime_wheel`."""
    return write_runtime_wheel(host_platform(), Path(wheel_directory)).path.name


def build_sdist(sdist_directory: str, config_settings: Mapping[str, str] | None = None) -> str:
    """Raises: UnsupportedOperation. The sources are those of fa4build."""
    raise UnsupportedOperation("fa4-kernels has no source distribution of its own; its sources are those of fa4build.")
