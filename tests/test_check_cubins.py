"""Contract of `make check-cubins`: every kernel that was proven is compiled, to the very bytes; anything else is named.

On stand-ins: what compiling 1286 kernels gives is for the command itself to say.
"""

import pytest

from fa4build.store.cache import Cache
from fa4build.store.evidence import write_simulated
from tests import check_cubins

PROVEN = {"fwd-a": "a" * 64, "fwd-b": "b" * 64}


def test_equal_cubins_differ_in_nothing():
    """Each kernel proven, each compiled, digest for digest."""
    assert check_cubins.differences(PROVEN, dict(PROVEN)) == ()


@pytest.mark.parametrize(
    ("compiled", "expected"),
    [
        ({"fwd-a": "a" * 64, "fwd-b": "c" * 64}, f"fwd-b: cubin {'c' * 16}, proven is {'b' * 16}"),
        ({"fwd-a": "a" * 64, "fwd-b": None}, "fwd-b: not compiled"),
        ({"fwd-a": "a" * 64}, "fwd-b: not compiled"),
        ({**PROVEN, "fwd-c": "c" * 64}, "fwd-c: evidence/ has no proof of it"),
    ],
)
def test_a_kernel_that_differs_is_named(compiled, expected):
    """Other bytes, none, or a kernel that nobody proved."""
    assert check_cubins.differences(PROVEN, compiled) == (expected,)


def test_the_proofs_of_every_target_are_read(tmp_path):
    """One file a target."""
    write_simulated(tmp_path / "sm90a" / "simulated.json", {"fwd-a": ("a" * 64, {"cases": 1})})
    write_simulated(tmp_path / "sm100a" / "simulated.json", {"fwd-b": ("b" * 64, {"cases": 1})})

    assert check_cubins.committed(tmp_path) == PROVEN


def test_an_empty_cache_holds_none_of_the_proven_kernels(tmp_path):
    """Every kernel of the matrix is asked for, of all targets; those of evidence/ are among them."""
    compiled = check_cubins.compiled(Cache(tmp_path))

    assert set(compiled.values()) == {None}
    assert set(check_cubins.committed(check_cubins.EVIDENCE_DIR)) <= set(compiled)


@pytest.mark.parametrize(
    ("compiled", "status", "last"),
    [
        (PROVEN, 0, "2 kernels proven, 0 differ"),
        ({"fwd-a": "a" * 64, "fwd-b": "c" * 64}, 1, "2 kernels proven, 1 differ"),
    ],
)
def test_the_exit_status_tells(monkeypatch, capsys, tmp_path, compiled, status, last):
    """0 if all are equal, 1 if one is not."""
    monkeypatch.setattr(check_cubins, "committed", lambda directory: PROVEN)
    monkeypatch.setattr(check_cubins, "compiled", lambda cache: compiled)

    assert check_cubins.main([str(tmp_path)]) == status
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_nothing_to_compare_is_an_error(monkeypatch, capsys, tmp_path):
    """No directory, or a checkout without proofs: not "all equal"."""
    assert check_cubins.main([]) == 2
    monkeypatch.setattr(check_cubins, "EVIDENCE_DIR", tmp_path)

    assert check_cubins.main([str(tmp_path)]) == 2
    assert "no proofs" in capsys.readouterr().err
