"""A server that answers as HashiCorp Vault's documentation says: tokens, AppRole, KV version 2, namespaces, the sealed state, a standby."""

import asyncio
import contextlib
import json
import secrets
import ssl
from typing import Any


class VaultServer:
    """`secrets` are by `namespace/mount/path`; `requests` are what came, as `METHOD path`."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.requests: list[str] = []
        self.tokens: dict[str, float] = {"root-token": 0.0}
        """Token → how long it lives, in seconds; 0: for good."""
        self.roles = {"role": "secret-id"}
        self.secrets: dict[str, dict[str, Any] | None] = {}
        """None: the newest version was deleted."""
        self.forbidden: set[str] = set()
        self.sealed = False
        self.standby = ""
        self.silent = False
        self.answers = asyncio.Event()
        """What comes while it is not set waits for it."""
        self.answers.set()
        self.lease_s = 3600
        self.renewable = True

    @property
    def address(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split("\r\n")[0].split(" ")
                fields = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:-2])
                }
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                self.requests.append(f"{method} {path}")
                if self.silent:
                    await asyncio.Event().wait()
                await self.answers.wait()
                status, more, answer = self._answer(method, path, fields, json.loads(body or b"{}"))
                octets = b"" if answer is None else json.dumps(answer).encode()
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(octets)}\r\n{more}\r\n".encode() + octets)
                await writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    def _answer(self, method: str, path: str, fields: dict[str, str], body: dict[str, Any]) -> tuple[int, str, Any]:
        if self.standby:
            return 307, f"location: {self.standby}{path}\r\n", None
        if self.sealed:
            return 503, "", {"errors": ["Vault is sealed"]}
        if (method, path) == ("POST", "/v1/auth/approle/login"):
            if self.roles.get(body.get("role_id", "")) != body.get("secret_id"):
                return 400, "", {"errors": ["invalid role or secret ID"]}
            token = f"hvs.{secrets.token_hex(12)}"
            self.tokens[token] = self.lease_s
            return 200, "", self._auth(token)
        token = fields.get("x-vault-token", "")
        if token not in self.tokens:
            return 403, "", {"errors": ["permission denied"]}
        if (method, path) == ("POST", "/v1/auth/token/renew-self"):
            if not self.renewable or token == "root-token":
                return 400, "", {"errors": ["lease is not renewable"]}
            return 200, "", self._auth(token)
        mount, data, where = path.removeprefix("/v1/").partition("/data/")
        at = f"{fields.get('x-vault-namespace', '')}/{mount}/{where}"
        if method != "GET" or not data or at in self.forbidden:
            return 403, "", {"errors": ["permission denied"]}
        if at not in self.secrets:
            return 404, "", {"errors": []}
        found = self.secrets[at]
        metadata = {
            "version": 1,
            "deletion_time": "" if found is not None else "2026-01-01T00:00:00Z",
            "destroyed": False,
        }
        whole = {
            "request_id": "x",
            "lease_id": "",
            "renewable": False,
            "lease_duration": 0,
            "data": {"data": found, "metadata": metadata},
        }
        return (200 if found is not None else 404), "", whole

    def _auth(self, token: str) -> dict[str, Any]:
        auth = {
            "client_token": token,
            "lease_duration": self.lease_s,
            "renewable": self.renewable,
            "policies": ["default"],
        }
        return {"request_id": "x", "auth": auth, "data": None}
