"""The scripts that verify wheels on a machine with a GPU, for whoever has this fa4build, from a checkout or installed.

They import the wheels, torch and one another; where they run, no kernel compiler may be importable.
"""

from pathlib import Path

from fa4build.errors import WheelError
from fa4build.files import write_atomically

_FOLDERS = (Path(__file__).parents[1] / "device_scripts", Path(__file__).parents[2] / "device")
"""Of an installed fa4build; of a checkout, where the first is missing."""


def device_scripts() -> tuple[Path, ...]:
    """The scripts and their README.md, in order of their names."""
    folder = next(path for path in _FOLDERS if path.is_dir())
    return tuple(sorted(path for path in folder.iterdir() if path.suffix in (".py", ".md")))


def write_device_scripts(directory: Path) -> tuple[Path, ...]:
    """Write them into a folder, which is made; returns the scripts written.

    Raises: WheelError where the folder holds a file of such a name with other contents; nothing is written then.
    """
    wanted = {directory / path.name: path.read_bytes() for path in device_scripts()}
    for path, content in wanted.items():
        if path.exists() and path.read_bytes() != content:
            raise WheelError(f"{path}: there is another file of this name. Name a new or empty folder.")
    directory.mkdir(parents=True, exist_ok=True)
    for path, content in wanted.items():
        write_atomically(path, content)
    return tuple(path for path in wanted if path.suffix == ".py")
