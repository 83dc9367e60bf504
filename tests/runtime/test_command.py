"""Contract of `python -m fa4_kernels`: it says what is installed and what would be used, and loads no kernel.

Exit status 0 when what was asked for works here, 1 when it does not, 2 for a wrong command line.
"""

import pytest
from fa4_kernels import __main__ as command
from fa4_kernels import packs

from tests.runtime.fake import write_pack

IDS = ["fwd-sm90a-bf16-hd128-causal", "fwd-sm90a-bf16-hd128-full"]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """One pack of two kernels, as if installed; `installed.append` adds another."""
    found = [packs.open_pack("test", write_pack(tmp_path / "pack", IDS))]
    monkeypatch.setattr(command, "installed_packs", lambda trust: tuple(found))
    return found


def test_doctor_on_a_machine_that_works(launcher, fake, installed, capsys):
    """Versions, packs, driver, devices and how many kernels run on each."""
    status = command.main(["doctor", "--driver", fake.path])

    text = capsys.readouterr().out
    assert status == 0
    assert "pack fa4-kernels-test 0.1.0: 2 kernels for sm_90a" in text
    assert "CUDA 13.0" in text
    assert "device 1: Fake GPU 1 (compute capability 9.0, target sm_90a), 132 SMs: 2 kernels installed" in text
    assert fake.num_loads == 0


def test_doctor_says_what_is_missing(launcher, fake, installed, capsys):
    """No driver; no kernel for the device; a pack that is refused: status 1, with the reason."""
    assert command.main(["doctor", "--driver", "libmissing.so.9"]) == 1
    assert "not usable here: cannot open the CUDA driver libmissing.so.9" in capsys.readouterr().out

    fake.set_capability(10, 0)
    assert command.main(["doctor", "--driver", fake.path]) == 1
    assert "target sm_100a), 132 SMs: 0 kernels installed" in capsys.readouterr().out

    fake.set_capability(9, 0)
    installed.append(packs.RefusedPack(name="newer", reason="its manifest has schema 2"))
    assert command.main(["doctor", "--driver", fake.path]) == 1
    assert "pack newer: not used: its manifest has schema 2" in capsys.readouterr().out


def test_doctor_names_kernels_that_a_newer_pack_has_too(launcher, fake, installed, tmp_path, capsys):
    """An old pack that stayed installed; one line, and no failure."""
    old = write_pack(tmp_path / "old", IDS[:1], change=lambda manifest: manifest.update(pack="other", version="0.0.9"))
    installed.append(packs.open_pack("old", old))
    assert command.main(["doctor", "--driver", fake.path]) == 0
    assert "pack other 0.0.9: 1 of its kernels are not used, since fa4-kernels-test 0.1.0" in capsys.readouterr().out


def test_list_has_one_line_a_kernel(installed, capsys):
    """Id, target, pack, evidence; a target filters."""
    assert command.main(["list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "fwd-sm90a-bf16-hd128-causal  sm_90a  fa4-kernels-test 0.1.0  static",
        "fwd-sm90a-bf16-hd128-full  sm_90a  fa4-kernels-test 0.1.0  static",
    ]
    assert command.main(["list", "--target", "sm_100a"]) == 1
    assert capsys.readouterr().out == ""


def test_explain_is_the_dispatcher(installed, capsys):
    """The same trace as a call would raise or use."""
    assert command.main(["explain", "--mask", "causal"]) == 0
    assert "fwd-sm90a-bf16-hd128-causal from fa4-kernels-test 0.1.0" in capsys.readouterr().out
    assert command.main(["explain", "--capability", "10.0"]) == 1
    assert "pip install 'fa4-kernels[sm100]'" in capsys.readouterr().out
    assert command.main(["explain", "--capability", "ten"]) == 2
