"""A prefill/decode proxy that knows nothing of kvik: it only copies the `kv_transfer_params` dict across."""

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlsplit

from kvik.demo import client
from tests.vllm.pairs import ASK_PREFILL


class CopyingProxy:
    """Serves on a free loopback port while its `with` block runs."""

    def __init__(self, prefill: str, decode: str) -> None:
        """Between these engines (URLs)."""

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                first = {**request, "max_tokens": 1, "stream": False, "kv_transfer_params": ASK_PREFILL}
                params = client.post(prefill, first, path=self.path)["kv_transfer_params"]
                self._forward({**request, "kv_transfer_params": params})

            def _forward(self, request: dict[str, object]) -> None:
                parts = urlsplit(decode)
                connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
                connection.request(
                    "POST", self.path, json.dumps(request), {"Content-Type": "application/json"}
                )
                answer = connection.getresponse()
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
                self.send_header("Connection", "close")
                self.end_headers()
                while piece := answer.read1(1 << 16):
                    self.wfile.write(piece)
                connection.close()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as above
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "CopyingProxy":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)
