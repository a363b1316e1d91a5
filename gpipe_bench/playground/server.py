"""The page's local server: its files, and answers to its questions, for this machine alone.

A page of another site may send requests here, too. So the server answers only to its own names, which a foreign name
that leads to this machine is not, and questions only as ``application/json``, which a foreign page cannot send unasked.
"""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.playground.page import page_files
from gpipe_bench.playground.questions import ask

_TYPES: Final = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript"}
_MOST_BYTES: Final = 1_000_000


def local_server(port: int) -> ThreadingHTTPServer:
    """The server, which listens on 127.0.0.1; ``serve_forever`` answers.

    Args:
        port: 0 for any that is free.

    Raises:
        ConfigError: the port is taken, or is none.
    """
    try:
        return _Server(("127.0.0.1", port), _Handler)
    except (OSError, OverflowError) as error:
        words = getattr(error, "strerror", None) or "not from 0 to 65535"
        problem = f"--port must be one that is free, got {port} ({words}); use another one, or 0 for any"
        raise ConfigError([problem]) from error


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.files = page_files()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body go as one packet: else they wait for an acknowledgement that is delayed, 40 ms an answer.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        """A file of the page."""
        name = self.path.partition("?")[0].removeprefix("/") or "index.html"
        if not self._is_ours() or name not in self.server.files:
            return self._send(404, b"", "text/plain")
        return self._send(200, self.server.files[name], _TYPES[PurePosixPath(name).suffix])

    def do_POST(self) -> None:
        """The answer to a question."""
        length = self.headers.get("Content-Length", "")
        size = int(length) if length.isascii() and length.isdigit() else _MOST_BYTES + 1
        is_json = self.headers.get("Content-Type") == "application/json"
        if not self._is_ours() or self.path != "/ask" or not is_json or size > _MOST_BYTES:
            self.close_connection = True
            return self._send(403, b"", "text/plain")
        text = self.rfile.read(size).decode(errors="replace")
        return self._send(200, ask(text).encode(), "application/json")

    def _is_ours(self) -> bool:
        port = self.server.server_address[1]
        return self.headers.get("Host") in (f"127.0.0.1:{port}", f"localhost:{port}")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing: a line for each question helps nobody."""
