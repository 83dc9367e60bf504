"""Contract: every error can be sent to another process and copied, with what it says; nothing that is ours comes out as
an error of Python or torch.
"""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

import fa4_kernels  # noqa: E402
from fa4_kernels import errors, loader  # noqa: E402

ALL = [x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, errors.FA4KernelsError)]


@pytest.mark.parametrize("kind", ALL)
def test_errors_survive_pickle_and_copy(kind):
    """As multiprocessing and Ray send them."""
    error = kind("what went wrong", 3) if kind is errors.LayoutError else kind("what went wrong")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), str(again)) == (kind, "what went wrong")
        assert getattr(again, "position", None) == getattr(error, "position", None)


def test_preload_without_a_device_is_our_error(launcher, fake, monkeypatch):
    """A torch without CUDA asserts; the caller is told what to do."""
    runtime = loader.Runtime(driver_path=fake.path, packs=(), stream_of=lambda ordinal: 0)
    loader.use_runtime(runtime)
    message = "Torch not compiled with CUDA enabled"
    for error in (AssertionError(message), RuntimeError("No CUDA GPUs are available")):

        def fail(error=error):
            raise error

        monkeypatch.setattr(torch.cuda, "current_device", fail)
        with pytest.raises(errors.DriverError, match="has no current CUDA device"):
            fa4_kernels.preload()
    loader.use_runtime(None)


def test_evidence_is_required_before_there_is_a_driver(launcher, fake, monkeypatch):
    """It is set while a process starts; the runtime that is made later asks for it."""
    loader.use_runtime(None)
    fa4_kernels.require_evidence("simulated")
    made = loader.Runtime(driver_path=fake.path, packs=(), stream_of=lambda ordinal: 0)
    monkeypatch.setattr(loader, "_torch_runtime", lambda: made)
    assert loader.runtime().evidence == "simulated"
    loader.use_runtime(None)


def test_a_device_number_is_not_cut(launcher, fake):
    """2^32 is not device 0."""
    driver = launcher.Driver(fake.path)
    for ordinal in (2**32, -(2**32), 2**31):
        with pytest.raises(errors.DriverError, match=f"device {ordinal} does not exist"):
            driver.device(ordinal)


def test_tables_refuse_what_is_no_tuple(launcher):
    """A TypeError, not a SystemError."""
    calls = launcher.RecipeCalls(torch.Tensor, torch.is_grad_enabled)
    with pytest.raises(TypeError, match="an observer is a pair"):
        launcher.RecipeCalls(torch.Tensor, torch.is_grad_enabled, (1,))
    with pytest.raises((TypeError, ValueError)):
        calls.add("op", {"x": torch.zeros(1)}, (5,), (), (0,))
