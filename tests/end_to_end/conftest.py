"""The compiled launcher and the stand-in driver of the runtime's tests, for calls of what was built."""

from tests.runtime.conftest import fake, fake_driver_path, launcher  # noqa: F401
