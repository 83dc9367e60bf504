"""Contract of a build with a remote cache that has bad moments.

A fault that may pass is asked again, with growing random pauses; a server that goes on failing is left alone, tried
again by one request, and used again once that is answered. A matrix is looked up side by side, with one request a miss.
Nothing of that ends a build or is told more than once.
"""

import threading
import time
import warnings

import pytest

from fa4build.store import remote_cache as module
from fa4build.store.cache import Cache
from fa4build.store.remote_cache import DirectoryStore, RemoteCacheWarning, SharedCache
from tests.store.test_remote_cache import KEY, VALUES, put
from tests.store.test_remote_cache import server as server


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Milliseconds in place of seconds."""
    monkeypatch.setattr(module, "PAUSE_S", 0.002)
    monkeypatch.setattr(module, "OPEN_S", 0.2)


class Flaky(DirectoryStore):
    """A directory whose requests fail as `failures` says, one after another; None = it is answered."""

    def __init__(self, root, failures=()):
        super().__init__(root)
        self.failures, self.asked, self.lock = list(failures), [], threading.Lock()
        self.at_a_time, self.most = 0, 0

    def get(self, path):
        with self.lock:
            self.asked.append(path)
            failure = self.failures.pop(0) if self.failures else None
            self.at_a_time += 1
            self.most = max(self.most, self.at_a_time)
        try:
            time.sleep(0.01)
            if failure is not None:
                raise failure
            return super().get(path)
        finally:
            with self.lock:
                self.at_a_time -= 1


@pytest.fixture
def filled(tmp_path):
    """A remote directory with one entry."""
    put(SharedCache(tmp_path / "a", DirectoryStore(tmp_path / "shared"), writes=True))
    return tmp_path / "shared"


@pytest.mark.parametrize("count", [1, 2])
def test_a_hiccup_is_asked_again_and_not_told(tmp_path, filled, count):
    """Once or twice a reset connection, then the entry."""
    cache = SharedCache(tmp_path / "b", Flaky(filled, [ConnectionResetError("reset")] * count))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get(KEY) is not None


def test_one_503_is_asked_again(tmp_path, server, monkeypatch):
    """By HTTP; a 404 or a 401 is not."""
    put(SharedCache(tmp_path / "a", module.store_at(server.url), writes=True))
    answers = [503]
    plain = server.do_GET
    monkeypatch.setattr(server, "do_GET", lambda self: self._answer(answers.pop()) if answers else plain(self))

    assert SharedCache(tmp_path / "b", module.store_at(server.url)).get(KEY) is not None


def test_a_deadline_is_not_waited_for_twice(tmp_path, filled):
    """What took a minute once is not asked again at once."""
    store = Flaky(filled, [OSError("not done after 60 s")])
    with pytest.warns(RemoteCacheWarning, match="not done after 60 s; going on without it"):
        assert SharedCache(tmp_path / "b", store).get(KEY) is None

    assert len(store.asked) == 1


def test_a_server_that_comes_back_is_used_again(tmp_path, filled):
    """Three failures open the circuit; while it is open nobody asks; then one request tries, and all go on."""
    store = Flaky(filled, [ConnectionRefusedError("down")] * 3)
    cache = SharedCache(tmp_path / "b", store)
    with pytest.warns(RemoteCacheWarning, match="down; going on without it"):
        assert cache.get(KEY) is None
    assert cache.get(KEY) is None
    assert len(store.asked) == 3
    time.sleep(0.25)

    assert cache.get(KEY) is not None


def test_a_server_that_stays_away_is_left_alone_longer(tmp_path, filled):
    """The second time for twice as long, and nobody is told again."""
    store = Flaky(filled, [ConnectionRefusedError("down")] * 100)
    cache = SharedCache(tmp_path / "b", store)
    with pytest.warns(RemoteCacheWarning):
        cache.get(KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            time.sleep(0.25)
            cache.get(KEY)

    assert len(store.asked) == 6


def test_a_matrix_is_looked_up_side_by_side_with_one_request_a_miss(tmp_path, filled):
    """Forty keys, one of them there; afterwards every `get` is local."""
    store = Flaky(filled)
    cache = SharedCache(tmp_path / "b", store)
    keys = [KEY, *(f"{number:064x}" for number in range(40))]
    cache.look_ahead(keys)
    found = [cache.get(key) for key in keys]

    assert [entry is not None for entry in found] == [True] + [False] * 40
    assert 4 <= store.most <= module.LOOKUPS
    assert sorted(path for path in store.asked if path.startswith("ac/")) == sorted(f"ac/{key}" for key in keys)
    assert Cache(tmp_path / "b").read(found[0], "cubin") == VALUES["cubin"]


def test_a_server_that_is_down_is_told_once_for_a_whole_matrix(tmp_path, filled):
    """However many requests were on their way."""
    store = Flaky(filled, [ConnectionRefusedError("down")] * 500)
    with pytest.warns(RemoteCacheWarning) as told:
        SharedCache(tmp_path / "b", store).look_ahead(f"{number:064x}" for number in range(100))

    assert len(told) == 1
    assert len(store.asked) <= module.TRIES * module.LOOKUPS + module.TRIES
