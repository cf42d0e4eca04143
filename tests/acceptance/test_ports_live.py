"""Ports and terminals of a real sandbox: servers that its user starts, reached from outside as browsers and programs do."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from conftest import Service
from websockets.asyncio.client import connect

from hatchway.client import Hatchway, Sandbox

pytestmark = pytest.mark.vm

WITHIN_S = 120
WEB = """
import http.server as h
h.ThreadingHTTPServer.request_queue_size = 200
h.ThreadingHTTPServer(('127.0.0.1', 8000), h.SimpleHTTPRequestHandler).serve_forever()
"""
ECHO = """
import asyncio
async def echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def main():
    async with await asyncio.start_server(echo, '127.0.0.1', 9000): await asyncio.Event().wait()
asyncio.run(main())
"""


LISTENING = """
import socket, time
for port in (8000, 9000):
    for _ in range(1000):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    else:
        raise SystemExit(f"nothing listens on {port}")
"""


@dataclass
class Reached:
    """A sandbox, and what its token is good for."""

    sandbox: Sandbox
    token: str
    data_url: str
    port_url: str
    headers: dict[str, str]

    def host(self, port: int) -> str:
        """The name of a port."""
        return httpx.URL(self.port_url.replace("{port}", str(port))).netloc.decode()

    def client(self, port: int, **headers: str) -> httpx.Client:
        """A client of a port; the name is not looked up."""
        return httpx.Client(base_url=self.data_url, headers={"host": self.host(port), **headers}, timeout=WITHIN_S)


@pytest.fixture(scope="module")
def hatchway(service: Service) -> Iterator[Hatchway]:
    with service.client() as client:
        yield client


@pytest.fixture(scope="module")
def reached(service: Service, hatchway: Hatchway) -> Iterator[Reached]:
    with hatchway.sandboxes.create() as sandbox:
        servers = [sandbox.start(["python3", "-c", WEB], cwd="/usr/lib"), sandbox.start(["python3", "-c", ECHO])]
        headers = {"authorization": f"Bearer {service.key}"}
        made = httpx.post(
            f"{service.url}/v1/sandboxes/{sandbox.id}/tokens", json={"scopes": ["ports", "sessions"]}, headers=headers
        )
        assert made.status_code == 201, made.text
        body = made.json()
        found = Reached(sandbox, body["token"], body["data_plane_url"], body["port_url"], headers)
        sandbox.run(["python3", "-c", LISTENING]).check()
        yield found
        for server in servers:
            server.close()


def test_a_web_server_by_token_and_by_link(reached: Reached) -> None:
    with reached.client(8000, **{"hatchway-token": reached.token}) as client:
        listing = client.get("/")
        assert listing.status_code == 200
        assert "python3" in listing.text
        assert client.get("/no-such-thing").status_code == 404
    with reached.client(8000) as browser:
        assert browser.get("/").status_code == 401
        opened = browser.get(f"/.hatchway/open?token={reached.token}&to=/python3/")
        assert (opened.status_code, opened.headers["location"]) == (303, "/python3/")
        cookie = opened.headers["set-cookie"].split(";")[0]
        assert browser.get("/python3/", headers={"cookie": cookie}).status_code == 200


def test_nothing_listens_there(reached: Reached) -> None:
    with reached.client(8001, **{"hatchway-token": reached.token}) as client:
        answer = client.get("/")
        assert (answer.status_code, answer.json()["code"]) == (502, "port_closed")


async def test_many_at_once_and_large_ones(reached: Reached) -> None:
    headers = {"host": reached.host(8000), "hatchway-token": reached.token}
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=reached.data_url, headers=headers, timeout=WITHIN_S, limits=limits) as client:
        answers = await asyncio.gather(*[client.get("/os-release") for _ in range(100)])
        assert {answer.status_code for answer in answers} == {200}
    sent = bytes(range(256)) * 8_000
    address = f"{reached.data_url.replace('http', 'ws')}/v1/sandboxes/{reached.sandbox.id}/ports/9000/tcp"
    authorized = {"authorization": f"Bearer {reached.token}"}
    async with connect(address, additional_headers=authorized, proxy=None) as connection:

        async def send() -> None:
            for at in range(0, len(sent), 200_000):
                await connection.send(sent[at : at + 200_000])
            await connection.send(json.dumps({"eof": True}))

        sending = asyncio.ensure_future(send())
        got = bytearray()
        async with asyncio.timeout(WITHIN_S):
            while isinstance(message := await connection.recv(), bytes):
                got += message
        await sending
        assert message == '{"eof":true}'
    assert bytes(got) == sent


async def test_a_terminal_in_a_browser(reached: Reached, service: Service) -> None:
    made = httpx.post(
        f"{service.url}/v1/sandboxes/{reached.sandbox.id}/sessions",
        json={"argv": ["/bin/bash", "--norc"], "env": {"PS1": "$ "}, "pty": {"rows": 20, "cols": 70}},
        headers=reached.headers,
    )
    session: dict[str, Any] = made.json()["session"]
    address = session["attach_url"].replace("http", "ws").removesuffix("attach") + "ws"
    offered: list[Any] = ["hatchway.v1", f"hatchway.token.{session['token']}"]
    async with connect(address, subprotocols=offered, proxy=None) as connection:
        output = b""

        async def until(text: bytes) -> None:
            nonlocal output
            async with asyncio.timeout(WITHIN_S):
                while text not in output:
                    message = await connection.recv()
                    output += message if isinstance(message, bytes) else b""
            output = output.split(text, 1)[1]

        await until(b"$ ")
        await connection.send(b"id -un; stty size\n")
        await until(b"user\r\n20 70\r\n")
        await connection.send(json.dumps({"resize": {"rows": 5, "cols": 9}}))
        await connection.send(b"stty size\n")
        await until(b"5 9\r\n")
        await connection.send(b"echo $((40 + 2)); sleep 1000\n")
        await until(b"42\r\n")
        await connection.send(b"\x03")
        await until(b"$ ")
        await connection.send(b"exit 7\n")
        async with asyncio.timeout(WITHIN_S):
            async for message in connection:
                if isinstance(message, str) and json.loads(message)["event"] == "exit":
                    assert json.loads(message)["code"] == 7
        assert connection.close_code == 1000


def test_states(reached: Reached, service: Service) -> None:
    """The last one: it changes the sandbox."""
    with reached.client(8000, **{"hatchway-token": reached.token}) as client:
        reached.sandbox.pause()
        answer = client.get("/")
        assert (answer.status_code, answer.json()["code"]) == (409, "sandbox_not_running")
        assert "resume" in answer.json()["remedy"]
        reached.sandbox.resume()
        assert client.get("/").status_code == 200
    with reached.client(8000, **{"hatchway-token": reached.token[:-4] + "AAAA"}) as client:
        assert client.get("/").status_code == 401
