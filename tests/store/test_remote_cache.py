"""Contract of the shared cache.

A local miss is looked up remotely, checked byte for byte, and kept locally; nothing is sent unless asked for. What does
not match its digest or its key counts as absent, and a server that fails is told once and never ends a build. Entries
are ActionResults, so that servers that check what they store accept them.
"""

import base64
import hashlib
import socket
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fa4build import cli
from fa4build.store import remote_cache as module
from fa4build.store.cache import Cache
from fa4build.store.entries import OBJECTS
from fa4build.store.keys import key_inputs, key_of
from fa4build.store.remote_cache import (
    ACTION_FILE,
    DirectoryStore,
    RemoteCacheWarning,
    SharedCache,
    action_result,
    read_action_result,
    store_at,
)
from tests.cubins import MadeUpEntry, made_up_cubin, made_up_plan

CUBIN = made_up_cubin({"fwd_sm90a_0": MadeUpEntry()})
VALUES = {"cubin": CUBIN, "plan": made_up_plan(CUBIN, ["fwd_sm90a_0"]), "ptx": b"ptx", "log": b""}
FACTS = {"target": "sm_90a", "symbols": ["fwd_sm90a_0"], "registers": 168, "spill_bytes": 0, "shared_bytes": 200000}
INPUTS = key_inputs({"symbol": "fwd_sm90a", "variant": {"arch": "sm90a"}}, "tuning", "toolchain", "options")
KEY = key_of(INPUTS)


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
    cache.put(name="fwd-sm90a", inputs=INPUTS, facts=FACTS, objects=VALUES)


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


# --- servers that misbehave -------------------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\n"
LENGTH = OK + b"Content-Length: 10\r\n"
ANSWERS = {
    "closes at once": b"",
    "garbage": b"\x00\xff\xfe garbage\r\n\r\n",
    "half a status line": b"HTTP/1.1 2",
    "no number": b"HTTP/1.1 abc OK\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "terminal escapes": b"HTTP/1.1 500 \x1b[2J\x1b[31mred\r\n\r\n",
    "two lines": b"HTTP/1.1 503 a\x0bb\x85c\r\n\r\n",
    "header over 64 kB": OK + b"X: " + b"a" * 70_000 + b"\r\n\r\n",
    "status over 64 kB": b"HTTP/1.1 200 " + b"a" * 70_000 + b"\r\n\r\n",
    "over 100 headers": OK + b"".join(b"X%d: y\r\n" % n for n in range(200)) + b"\r\n",
    "headers cut": OK + b"Content-Le",
    "body cut": LENGTH + b"\r\nabc",
    "negative length": OK + b"Content-Length: -5\r\n\r\nabc",
    "length is a word": OK + b"Content-Length: ten\r\n\r\nabc",
    "huge length": OK + b"Content-Length: 99999999999999999999999\r\n\r\nabc",
    "chunks cut": OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
    "bad chunk size": OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n",
    "negative chunk": OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nab\r\n0\r\n\r\n",
    "endless chunk size": OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * 70_000,
    "compressed": OK + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00",
    "text for an action": OK + b"Content-Length: 6\r\n\r\n<html>",
    "redirect to a file": b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n",
    "redirect to ftp": b"HTTP/1.1 302 Found\r\nLocation: ftp://127.0.0.1/x\r\n\r\n",
    "redirect to nowhere": b"HTTP/1.1 302 Found\r\n\r\n",
    "redirect to no host": b"HTTP/1.1 302 Found\r\nLocation: http://[::bad/\r\n\r\n",
    "redirect that no codec reads": b"HTTP/1.1 302 Found\r\nLocation: http://a\xff..\xc3/\r\n\r\n",
    "redirect to itself": b"HTTP/1.1 302 Found\r\nLocation: /ac\r\n\r\n",
    "asks for a password": b"HTTP/1.1 401 No\r\nWWW-Authenticate: Basic realm=x\r\n\r\n",
    "continues for ever": b"HTTP/1.1 100 Continue\r\n\r\n" * 3000,
    "moved without a word": b"HTTP/1.1 304 Not Modified\r\n\r\n",
}


@pytest.fixture
def raw_server():
    """Starts a server that sends these bytes to whoever asks, slowly if `pause` is given; returns its URL."""
    stop, listeners, threads = threading.Event(), [], []

    def serve(listener: socket.socket, answer: bytes, pause: float) -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.settimeout(5)
                    connection.recv(65536)
                    for part in [answer] if not pause else (answer[i : i + 1] for i in range(len(answer))):
                        connection.sendall(part)
                        if pause and stop.wait(pause):
                            return
                except OSError:
                    continue

    def start(answer: bytes, pause: float = 0.0) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        thread = threading.Thread(target=serve, args=(listener, answer, pause), daemon=True)
        thread.start()
        threads.append(thread)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    stop.set()
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_whatever_a_server_sends_is_a_miss_and_one_line(tmp_path: Path, raw_server, answer: bytes) -> None:
    """No traceback, nothing kept, and nothing in the line that a terminal would obey; storing works locally."""
    cache = shared(tmp_path / "a", raw_server(answer), writes=True)
    with pytest.warns(RemoteCacheWarning, match="remote cache: ") as told:
        assert cache.get(KEY) is None
    lines = [str(item.message) for item in told if item.category is RemoteCacheWarning]
    assert len(lines) == 1
    assert lines[0].isprintable()
    assert not (tmp_path / "a").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        put(cache)
    assert cache.get(KEY) is not None


@pytest.mark.parametrize("place", ["status", "headers", "body"])
def test_a_drip_ends_at_the_deadline(tmp_path: Path, raw_server, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte every 50 ms never lets a read time out; the whole blob has half a second here."""
    monkeypatch.setattr(module, "DEADLINE_S", 0.5)
    answer = {"status": b"HTTP/1.1 " + b" " * 200, "headers": OK + b"X: " + b"a" * 200, "body": LENGTH + b"\r\n"}
    cache = shared(tmp_path / "a", raw_server(answer[place] + b"a" * 200, pause=0.05))
    started = time.monotonic()
    with pytest.warns(RemoteCacheWarning, match=r"not done after 0\.5 s; going on without it"):
        assert cache.get(KEY) is None

    assert time.monotonic() - started < 5


def test_a_password_is_told_to_no_other_host(tmp_path: Path, raw_server, server) -> None:
    """A redirect to another port is followed, without it."""
    server.password = "builder:secret"
    target = server.url.encode()
    first = raw_server(b"HTTP/1.1 302 Found\r\nLocation: " + target + b"/ac/x\r\nContent-Length: 0\r\n\r\n")
    with pytest.warns(RemoteCacheWarning, match="401"):
        assert shared(tmp_path / "a", first.replace("://", "://builder:secret@")).get(KEY) is None


def test_another_kernel_under_this_key_is_absent(tmp_path: Path) -> None:
    """Right key, right digests; the cubin is 16 bytes of rubbish, or takes other registers."""
    for number, cubin in enumerate((b"0123456789abcdef", made_up_cubin({"fwd_sm90a_0": MadeUpEntry(registers=90)}))):
        store = DirectoryStore(tmp_path / f"shared{number}")
        other = SharedCache(tmp_path / f"a{number}", store, writes=True)
        objects = {**VALUES, "cubin": cubin, "plan": made_up_plan(cubin, ["fwd_sm90a_0"])}
        other.put(name="fwd-sm90a", inputs=INPUTS, facts=FACTS, objects=objects)
        with pytest.warns(RemoteCacheWarning, match=r"kernel fwd-sm90a: .* It counts as absent"):
            assert SharedCache(tmp_path / f"b{number}", store).get(KEY) is None

        assert not (tmp_path / f"b{number}").exists()
