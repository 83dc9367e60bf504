"""Every error that fa4build raises on purpose, with its exit code on the command line.

A message says what went wrong, the value, what is allowed and what to do next.
"""


class Fa4BuildError(Exception):
    """Root of the tree. `exit_code` is the status the command line ends with.

    `may_pass_again`: whether the same may go well another time, as after a process that was killed.
    """

    exit_code = 1
    may_pass_again = False


class VariantError(Fa4BuildError):
    """A variant id does not parse, or its axes contradict each other. Also a wrong option or argument of a command."""

    exit_code = 2


class NothingSelectedError(Fa4BuildError):
    """A selection matches no variant, or the variant has no kernel yet."""

    exit_code = 3


class RenderError(Fa4BuildError):
    """A template uses an undefined name, or renders more than constants and one call."""

    exit_code = 4


class CompileError(Fa4BuildError):
    """The DSL or the assembler failed, crashed or timed out."""

    exit_code = 5


class ToolchainError(Fa4BuildError):
    """The compiler is missing, has an untested version, or environment variables change what it does."""

    exit_code = 6


class CacheCorruptError(Fa4BuildError):
    """Stored bytes do not match their digest."""

    exit_code = 7


class WheelError(Fa4BuildError):
    """A wheel, pack or manifest is damaged, or disagrees with its contents."""

    exit_code = 8


class LaunchPlanError(Fa4BuildError):
    """A host function cannot be turned into a launch plan, or the plan contradicts PTX or cubin."""

    exit_code = 9


class SimulationError(Fa4BuildError):
    """A kernel failed in the simulator, or the simulator cannot run it."""

    exit_code = 10


class NotCachedError(Fa4BuildError):
    """A kernel that is needed is not in the cache. `ids`: all of those that are not."""

    exit_code = 11

    def __init__(self, message: str, ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.ids = ids


class KeyFileError(Fa4BuildError):
    """A signing key is missing, unreadable or of the wrong kind."""

    exit_code = 12


class CoverageError(Fa4BuildError):
    """Packs lack a kernel that they must have, or contain one that no call can reach."""

    exit_code = 13


class RebuildError(Fa4BuildError):
    """A wheel cannot be rebuilt from its recorded inputs, or the result differs."""

    exit_code = 14


class BundleError(Fa4BuildError):
    """A bundle cannot be written, or its parts contradict each other."""

    exit_code = 15


class FileError(Fa4BuildError):
    """A file or directory cannot be read or written."""

    exit_code = 16
