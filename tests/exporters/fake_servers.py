"""A package index and a model hub on loopback, small enough to misbehave on purpose."""

import hashlib
import io
import json
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, TypeVar
from urllib.parse import urlsplit

Fault = Literal["truncated", "missing", "stalled"]
S = TypeVar("S", bound="Server")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def build_wheel(package: str, version: str, members: dict[str, bytes]) -> bytes:
    """A wheel that pip accepts."""
    module = package.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


class Server:
    """Files by path, with faults by path and conditions to wait for; counts what was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, Fault] = {}
        self.waits: dict[str, Callable[[], bool]] = {}
        self.requests: list[tuple[str, str]] = []
        self.url = ""

    def answer(self, handler: BaseHTTPRequestHandler, path: str) -> None:
        deadline = time.monotonic() + 60
        while path in self.waits and not self.waits[path]() and time.monotonic() < deadline:
            time.sleep(0.02)
        if path not in self.files or self.faults.get(path) == "missing":
            handler.send_error(404)
            return
        data, start = self.files[path], 0
        if (wanted := handler.headers.get("Range")) and handler.command == "GET":
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(data) - start))
        handler.send_header("Content-Type", "text/html" if path.endswith("/") else "application/octet-stream")
        for name, value in self.headers(path).items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return
        match self.faults.get(path):
            case "truncated":
                handler.wfile.write(data[start : (start + len(data)) // 2])
                handler.close_connection = True
            case "stalled":
                handler.wfile.write(data[start : (start + len(data)) // 2])
                handler.wfile.flush()
                time.sleep(30)
            case _:
                handler.wfile.write(data[start:])

    def headers(self, path: str) -> dict[str, str]:
        return {}

    def asked(self, part: str) -> int:
        """How many GET requests had `part` in their path."""
        return sum(part in path for method, path in self.requests if method == "GET")


class PackageIndex(Server):
    """`/simple/PACKAGE/` and the wheels."""

    def add(self, package: str, version: str, members: dict[str, bytes]) -> str:
        """Publish a wheel; returns its path on the server."""
        file = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        path = f"/files/{file}"
        self.files[path] = build_wheel(package, version, members)
        self.files[f"/simple/{package}/"] = (
            f'<!DOCTYPE html><html><body><a href="{path}">{file}</a></body></html>'.encode()
        )
        return path

    @property
    def options(self) -> list[str]:
        """What makes pip use this index and no configuration of the machine's."""
        return ["--isolated", "--index-url", f"{self.url}/simple"]


class Hub(Server):
    """The few calls of a Hugging Face hub that a download makes."""

    def __init__(self) -> None:
        super().__init__()
        self.files["/"] = b"hub"

    def add(self, repo: str, files: dict[str, bytes]) -> None:
        """Publish a repository at revision main."""
        siblings = []
        for name, data in files.items():
            self.files[f"/{repo}/resolve/main/{name}"] = data
            digest = hashlib.sha256(data).hexdigest()
            lfs = {"sha256": digest, "size": len(data), "pointerSize": 130}
            siblings.append({"rfilename": name, "size": len(data), "blobId": digest[:40], "lfs": lfs})
        info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
        self.files[f"/api/models/{repo}/revision/main"] = json.dumps(info).encode()

    def headers(self, path: str) -> dict[str, str]:
        digest = hashlib.sha256(self.files[path]).hexdigest()
        return {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}


@contextmanager
def running(server: S) -> Iterator[S]:
    """Serve on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            server.requests.append((self.command, path))
            try:
                server.answer(self, path)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    http.block_on_close = False
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
