"""Contract of the shared cache.

A local miss is looked up remotely, checked byte for byte, and kept locally; nothing is sent unless asked for. What does
not match its digest or its key counts as absent, and a server that fails is told once and never ends a build. Entries
are ActionResults, so that servers that check what they store accept them.
"""

import base64
import hashlib
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fa4build import cli
from fa4build.cache import OBJECTS, Cache, key_inputs, key_of
from fa4build.remote_cache import (
    ACTION_FILE,
    DirectoryStore,
    RemoteCacheWarning,
    SharedCache,
    action_result,
    read_action_result,
    store_at,
)

INPUTS = key_inputs("source", "tuning", "toolchain", "options")
KEY = key_of(INPUTS)
VALUES = {"cubin": b"\x7fELF" * 100, "plan": b"{}", "ptx": b"ptx", "log": b""}


class Server(BaseHTTPRequestHandler):
    """bazel-remote's dialect in memory: a blob is stored under its sha256 alone, an action only after its blobs."""

    blobs: dict[str, bytes]
    requests: list[str]
    password: str | None

    def log_message(self, *_: object) -> None:
        """Silent."""

    def _allowed(self) -> bool:
        cls = type(self)
        cls.requests.append(f"{self.command} {self.path[:5]}")
        expected = cls.password and "Basic " + base64.b64encode(cls.password.encode()).decode()
        if cls.password and self.headers["Authorization"] != expected:
            self._answer(401)
            return False
        return True

    def _answer(self, code: int, data: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self._allowed():
            data = type(self).blobs.get(self.path)
            self._answer(404 if data is None else 200, data or b"")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._allowed():
            return
        kind, _, name = self.path.lstrip("/").partition("/")
        whole = kind == "cas" and hashlib.sha256(data).hexdigest() == name
        if kind == "ac":
            whole = all(f"/cas/{digest}" in type(self).blobs for digest, _ in read_action_result(data).values())
        if whole:
            type(self).blobs[self.path] = data
        self._answer(200 if whole else 400)


@pytest.fixture
def server():
    """A server in a thread, with its handler class for looking inside."""
    handler = type("Handler", (Server,), {"blobs": {}, "requests": [], "password": None})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        handler.url = f"http://127.0.0.1:{http.server_port}"
        yield handler
        http.shutdown()
        thread.join()


@pytest.fixture(params=["http", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Both kinds of store."""
    if request.param == "file":
        return (tmp_path / "shared").as_uri()
    return request.getfixturevalue("server").url


def shared(root: Path, url: str, *, writes: bool = False) -> SharedCache:
    return SharedCache(root, store_at(url), writes=writes)


def put(cache: Cache) -> None:
    cache.put(name="fwd", inputs=INPUTS, facts={"registers": 1}, objects=VALUES)


def test_what_one_machine_compiles_another_finds(tmp_path: Path, url: str) -> None:
    """Every object and fact, also after the remote cache is gone."""
    put(shared(tmp_path / "a", url, writes=True))
    entry = shared(tmp_path / "b", url).get(KEY)
    local = Cache(tmp_path / "b")

    assert entry is not None
    assert entry == Cache(tmp_path / "a").get(KEY)
    assert {name: local.read(local.get(KEY), name) for name in OBJECTS} == VALUES


def test_nothing_is_sent_unless_asked_for(tmp_path: Path, server) -> None:
    """Read only by default: one question, no PUT."""
    cache = shared(tmp_path / "a", server.url)
    assert cache.get(KEY) is None
    put(cache)

    assert server.requests == ["GET /ac/" + KEY[0]]
    assert server.blobs == {}


def test_what_is_there_locally_is_not_asked_for(tmp_path: Path, server) -> None:
    """A warm build needs no network."""
    put(Cache(tmp_path / "a"))

    assert shared(tmp_path / "a", server.url).get(KEY) is not None
    assert server.requests == []


@pytest.mark.parametrize("damage", ["cubin", "log", ACTION_FILE, "other key", "no result", "missing file"])
def test_what_does_not_match_is_absent(tmp_path: Path, damage: str) -> None:
    """A warning, no entry, nothing kept locally."""
    store = DirectoryStore(tmp_path / "shared")
    put(SharedCache(tmp_path / "a", store, writes=True))
    result = tmp_path / "shared" / "ac" / KEY
    digests = read_action_result(result.read_bytes())
    wanted = KEY
    if damage in digests:
        blob = tmp_path / "shared" / "cas" / digests[damage][0]
        blob.write_bytes(b"?" + blob.read_bytes()[1:])
    elif damage == "other key":
        wanted = "0" * 64
        result.rename(result.with_name(wanted))
    elif damage == "no result":
        result.write_bytes(b"\xff\xff")
    else:
        result.write_bytes(action_result({name: value for name, value in digests.items() if name != "plan"}))
    with pytest.warns(RemoteCacheWarning, match="counts as absent"):
        assert SharedCache(tmp_path / "b", store).get(wanted) is None

    assert not (tmp_path / "b").exists()


def test_an_action_whose_blob_was_evicted_is_a_plain_miss(tmp_path: Path) -> None:
    """Servers drop old blobs; that is no damage."""
    store = DirectoryStore(tmp_path / "shared")
    put(SharedCache(tmp_path / "a", store, writes=True))
    digests = read_action_result((tmp_path / "shared" / "ac" / KEY).read_bytes())
    (tmp_path / "shared" / "cas" / digests["plan"][0]).unlink()

    assert SharedCache(tmp_path / "b", store).get(KEY) is None


def test_a_server_that_does_not_answer_is_told_once(tmp_path: Path) -> None:
    """Nobody listens; the second question is not asked, and storing still works locally."""
    cache = shared(tmp_path / "a", "http://127.0.0.1:9", writes=True)
    with pytest.warns(RemoteCacheWarning, match="going on without it"):
        assert cache.get(KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get("1" * 64) is None
        put(cache)

    assert cache.get(KEY) is not None


def test_user_and_password_come_from_the_url(tmp_path: Path, server) -> None:
    """Basic authentication; without it the server refuses, and that is told."""
    server.password = "builder:p@ss"
    put(shared(tmp_path / "a", server.url.replace("://", "://builder:p%40ss@"), writes=True))
    with pytest.warns(RemoteCacheWarning, match="401"):
        assert shared(tmp_path / "b", server.url).get(KEY) is None

    assert f"/ac/{KEY}" in server.blobs


def test_action_results_are_protobuf() -> None:
    """Field 2 (path: field 1, digest: field 2 with hash and size): bytes written out by hand from the message types."""
    digest = b"\x0a\x40" + b"a" * 64 + b"\x10\xac\x02"  # size 300 = 0b10_0101100
    file = b"\x0a\x05cubin" + b"\x12" + bytes([len(digest)]) + digest
    expected = b"\x12" + bytes([len(file)]) + file

    assert action_result({"cubin": ("a" * 64, 300)}) == expected
    # An exit code (field 4) and a fixed-width field are passed over.
    assert read_action_result(b"\x20\x00\x3d\0\0\0\0" + expected) == {"cubin": ("a" * 64, 300)}
    for cut in range(1, len(expected)):
        with pytest.raises(ValueError, match="is"):
            read_action_result(expected[:cut])


@pytest.mark.parametrize("url", ["ftp://host/", "host:8080", "file://other/dir", "http://"])
def test_other_urls_are_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With what is allowed."""
    with pytest.raises(ValueError, match="allowed are"):
        store_at(url)
    with pytest.raises(SystemExit) as ended:
        cli.main(["matrix", "--remote-cache", url, "--dry-run"])

    assert ended.value.code == 2
    assert "allowed are" in capsys.readouterr().err
