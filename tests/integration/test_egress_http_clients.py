"""Programs as people use them, in a sandbox's network: what is allowed works through interception, and what is denied says why in their own words."""

import asyncio
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from tests.support.egress_fixtures import Ground, ground, rule, spec
from tests.support.fake_internet import Site
from tests.support.web_site import Answer, Answering, Asked, files, git_site, serving

__all__ = ["ground"]

WITHIN_S = 120.0
READ_ONLY = {
    "http": {"allow": [{"methods": ["GET", "HEAD"], "paths": ["/simple/**", "/packages/**", "/pkg/**", "/ok"]}]}
}


class Guest:
    """Runs programs in the guest's network, with its resolver and what its agent sets so that they trust the authority."""

    def __init__(self, ground: Ground, folder: Path) -> None:
        self._ground = ground
        self._resolver = folder / "resolv.conf"
        self._resolver.write_text("nameserver 10.200.0.1\n")
        self.home = folder / "home"
        self.home.mkdir()
        self.ca = folder / "guest-ca.pem"

    async def run(self, *argv: str, ok: bool = True, **more: str) -> str:
        """What a program says on both of its streams."""
        assert self._ground.gateway is not None
        self.ca.write_text(self._ground.gateway.opened().ca_certificate)
        trusted = str(self.ca)
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "SSL_CERT_FILE": trusted,
            "REQUESTS_CA_BUNDLE": trusted,
            "CURL_CA_BUNDLE": trusted,
            "NODE_EXTRA_CA_CERTS": trusted,
            "GIT_SSL_CAINFO": trusted,
            "PIP_CERT": trusted,
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_CONFIG_NOSYSTEM": "1",
            **more,
        }
        script = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
        command = self._ground.slot.guest_command("sh", "-c", script, str(self._resolver), *argv)
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.home
        )
        try:
            async with asyncio.timeout(WITHIN_S):
                out, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        said = out.decode(errors="replace")
        assert (process.returncode == 0) is ok, said
        return said


@pytest.fixture
def guest(ground: Ground, tmp_path: Path) -> Guest:
    return Guest(ground, tmp_path)


def need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: that it works through the gateway was not shown")


async def site_of(ground: Ground, answering: Answering, host: str = "index.example", number: int = 10) -> Site:
    return await ground.internet.site(host, port=443, tls=True, handler=serving(answering), number=number)


async def hello(asked: Asked) -> Answer:
    return Answer(f"hello {asked.method} {asked.target} {asked.body.decode()}".encode())


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
async def test_curl(ground: Ground, guest: Guest, version: str) -> None:
    need("curl")
    site = await site_of(ground, hello)
    allowed = {"http": {"allow": [{"methods": ["GET"], "paths": ["/ok"]}, {"methods": ["POST"], "paths": ["/post"]}]}}
    ground.open(spec(rule("index", "index.example", **allowed)))
    where = "https://index.example"
    curl = ["curl", "-sS", version, "-w", " %{http_version}"]
    proto = "2" if version == "--http2" else "1.1"
    assert await guest.run(*curl, f"{where}/ok?a=b") == f"hello GET /ok?a=b  {proto}"
    large = guest.home / "large"
    large.write_bytes(b"x" * 300_000)
    assert (await guest.run(*curl, "--data-binary", f"@{large}", f"{where}/post")).count("x") == 300_000
    said = await guest.run(*curl, "-i", f"{where}/secret")
    assert "403" in said.split("\n")[0]
    assert "path_not_allowed" in said
    assert json.loads(said.split("\r\n\r\n")[-1].rpartition(" ")[0])["rule"] == "index"
    said = await guest.run(*curl, "-i", "-H", "Host: other.example", f"{where}/ok")
    assert "authority_mismatch" in said
    said = await guest.run(*curl, "-i", "-H", "Authorization: Bearer mine", f"{where}/ok")
    assert "client_auth_forbidden" in said
    assert b"secret" not in site.arrived
    assert b"mine" not in site.arrived
    assert b"other.example" not in site.arrived
    said = await guest.run("curl", "-sS", "https://denied.example/", ok=False)
    assert "Could not resolve host" in said


async def test_g21_curl_in_clear(ground: Ground, guest: Guest) -> None:
    """Only by a rule for it, and held to the same; HTTP/2 without TLS is none of it (H23)."""
    need("curl")
    site = await ground.internet.site("index.example", port=80, handler=serving(hello), number=10)
    clear = {"tls": {"mode": "none"}, "http": {"allow": [{"methods": ["GET"], "paths": ["/ok"]}]}}
    ground.open(spec(rule("index", "index.example", **clear), rule("other", "other.example")))
    assert await guest.run("curl", "-sS", "http://index.example/ok") == "hello GET /ok "
    assert "path_not_allowed" in await guest.run("curl", "-sS", "http://index.example/secret")
    assert "authority_mismatch" in await guest.run(
        "curl", "-sS", "-H", "Host: other.example", "http://index.example/ok"
    )
    arrived = site.arrived
    await guest.run("curl", "-sS", "--http2-prior-knowledge", "http://index.example/ok", ok=False)
    assert await guest.run("curl", "-sS", "--http2", "http://index.example/ok") == "hello GET /ok "
    assert b"upgrade" not in site.arrived.lower()
    assert b"secret" not in site.arrived
    assert site.arrived.count(b"GET /ok") == arrived.count(b"GET /ok") + 1
    assert "port_not_allowed" in await guest.run("curl", "-sS", "http://other.example/"), "it is allowed over TLS alone"


PYTHON = """
import sys
{imports}
answer = {get}("https://index.example/ok")
assert answer.status_code == 200 and answer.text.startswith("hello GET /ok"), answer
{get}("https://index.example/secret").raise_for_status()
"""


@pytest.mark.parametrize("library", ["requests", "httpx", "httpx over HTTP/2"])
async def test_python_libraries(ground: Ground, guest: Guest, library: str) -> None:
    site = await site_of(ground, hello)
    ground.open(spec(rule("index", "index.example", **READ_ONLY)))
    name = library.split()[0]
    get = "httpx.Client(http2=True).get" if "2" in library else f"{name}.get"
    said = await guest.run(sys.executable, "-c", PYTHON.format(imports=f"import {name}", get=get), ok=False)
    assert "403" in said
    if "2" not in library:  # which has no reasons in its status lines
        assert "Hatchway: path_not_allowed" in said
    assert site.arrived.count(b"HTTP/1.1") == 1


def wheel() -> bytes:
    made = io.BytesIO()
    content = {
        "thing.py": b"answer = 42\n",
        "thing-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n",
        "thing-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in content) + "thing-1.0.dist-info/RECORD,,\n"
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in {**content, "thing-1.0.dist-info/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return made.getvalue()


async def test_a01_pip_installs_and_cannot_reach_what_is_denied(ground: Ground, guest: Guest) -> None:
    built = wheel()
    page = f'<a href="/packages/thing-1.0-py3-none-any.whl#sha256={hashlib.sha256(built).hexdigest()}">thing-1.0-py3-none-any.whl</a>'
    lost = '<a href="/private/lost-1.0-py3-none-any.whl">lost-1.0-py3-none-any.whl</a>'
    site = await site_of(
        ground,
        files(
            {
                "/simple/thing/": ("text/html", page.encode()),
                "/simple/lost/": ("text/html", lost.encode()),
                "/packages/thing-1.0-py3-none-any.whl": ("application/zip", built),
                "/private/lost-1.0-py3-none-any.whl": ("application/zip", built),
            }
        ),
    )
    ground.open(spec(rule("index", "index.example", **READ_ONLY)))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "--disable-pip-version-check",
        "--retries",
        "0",
        "--no-cache-dir",
        "install",
        "--no-deps",
    ]
    pip += [
        "--target",
        str(guest.home / "lib"),
        "--index-url",
        "https://index.example/simple/",
        "--cert",
        str(guest.ca),
    ]
    said = await guest.run(*pip, "thing")
    assert "Successfully installed thing-1.0" in said
    assert (guest.home / "lib" / "thing.py").read_text() == "answer = 42\n"
    said = await guest.run(*pip, "lost", ok=False)
    assert "403" in said
    assert "Hatchway: path_not_allowed" in said
    assert b"/private/" not in site.arrived
    for method in (b"PUT", b"POST", b"DELETE"):
        assert method not in site.arrived


async def test_a01_uv_installs_and_shows_what_is_denied(ground: Ground, guest: Guest) -> None:
    need("uv")
    built = wheel()
    link = '<a href="/{}/{}-1.0-py3-none-any.whl">{}-1.0-py3-none-any.whl</a>'
    site = await site_of(
        ground,
        files(
            {
                "/simple/thing/": ("text/html", link.format("packages", "thing", "thing").encode()),
                "/simple/lost/": ("text/html", link.format("private", "lost", "lost").encode()),
                "/packages/thing-1.0-py3-none-any.whl": ("application/zip", built),
                "/private/lost-1.0-py3-none-any.whl": ("application/zip", built),
            }
        ),
    )
    ground.open(spec(rule("index", "index.example", **READ_ONLY)))
    uv = ["uv", "--no-config", "--no-cache", "pip", "install", "--no-deps", "--python", sys.executable]
    uv += ["--target", str(guest.home / "lib"), "--index-url", "https://index.example/simple/"]
    await guest.run(*uv, "thing")
    assert (guest.home / "lib" / "thing.py").read_text() == "answer = 42\n"
    said = await guest.run(*uv, "lost", ok=False)
    assert "Not allowed by the policy of this sandbox, No rule says that GET /private/" in said
    assert b"/private/" not in site.arrived


def package() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, data in {
            "package/package.json": b'{"name": "thing", "version": "1.0.0"}',
            "package/index.js": b"module.exports = 42\n",
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return made.getvalue()


async def test_a01_npm_installs_and_does_not_publish(ground: Ground, guest: Guest) -> None:
    need("npm")
    built = package()
    about = {
        "name": "thing",
        "dist-tags": {"latest": "1.0.0"},
        "versions": {
            "1.0.0": {
                "name": "thing",
                "version": "1.0.0",
                "dist": {
                    "tarball": "https://index.example/pkg/thing-1.0.0.tgz",
                    "integrity": "sha512-" + b64encode(hashlib.sha512(built).digest()).decode(),
                },
            }
        },
    }
    site = await site_of(
        ground,
        files(
            {
                "/pkg/thing": ("application/json", json.dumps(about).encode()),
                "/pkg/thing-1.0.0.tgz": ("application/octet-stream", built),
            }
        ),
    )
    ground.open(spec(rule("index", "index.example", **READ_ONLY)))
    settings = {
        "npm_config_registry": "https://index.example/pkg/",
        "npm_config_audit": "false",
        "npm_config_fund": "false",
        "npm_config_update_notifier": "false",
        "npm_config_fetch_retries": "0",
        "npm_config_cache": str(guest.home / "cache"),
        "npm_config_globalconfig": str(guest.home / "none"),
    }
    await guest.run("npm", "install", "thing", **settings)
    assert (guest.home / "node_modules" / "thing" / "index.js").read_text() == "module.exports = 42\n"
    folder = guest.home / "mine"
    folder.mkdir()
    (folder / "package.json").write_text('{"name": "mine", "version": "1.0.0"}')
    (guest.home / ".npmrc").write_text("//index.example/pkg/:_authToken=mine\n")
    said = await guest.run("npm", "publish", str(folder), ok=False, **settings)
    assert "403" in said
    assert "Hatchway: method_not_allowed" in said
    assert b"PUT" not in site.arrived
    assert b"_attachments" not in site.arrived


async def test_git_fetches_and_does_not_push(ground: Ground, guest: Guest, tmp_path: Path) -> None:
    need("git")
    root = tmp_path / "repositories"
    work = tmp_path / "work"
    author = ["-c", "user.name=x", "-c", "user.email=x@example.test"]
    for argv in (
        ["git", "init", "-q", "--bare", "-b", "main", str(root / "team" / "code.git")],
        ["git", "init", "-q", "-b", "main", str(work)],
        ["git", "-C", str(work), *author, "commit", "-q", "--allow-empty", "-m", "first"],
        ["git", "-C", str(work), "push", "-q", str(root / "team" / "code.git"), "main"],
    ):
        subprocess.run(argv, check=True, capture_output=True)
    site = await site_of(ground, git_site(root), "git.example")
    ground.open(
        spec(rule("code", "git.example", protocol="git", git={"operations": ["fetch"], "repositories": ["/team/**"]}))
    )
    await guest.run("git", "clone", "-q", "https://git.example/team/code.git", "code")
    assert "first" in await guest.run("git", "-C", "code", "log", "--oneline")
    await guest.run("git", "-C", "code", *author, "commit", "-q", "--allow-empty", "-m", "second")
    said = await guest.run("git", "-C", "code", "push", "-q", "origin", "main", ok=False)
    assert "remote: Hatchway: query_not_allowed: " in said
    assert "403" in said
    assert b"receive-pack" not in site.arrived
    said = await guest.run("git", "clone", "-q", "https://git.example/other/code.git", "other", ok=False)
    assert "remote: Hatchway: path_not_allowed: " in said
    assert b"/other/" not in site.arrived
    arrived = site.arrived
    said = await guest.run(
        "git", "clone", "-q", "https://git.example/team/code.git", "dumb", ok=False, GIT_SMART_HTTP="0"
    )
    assert "remote: Hatchway: " in said
    assert site.arrived == arrived, "the dumb protocol, which fetches any file, does not leave"


NODE = """
const fine = await fetch("https://index.example/ok");
if (fine.status !== 200 || !(await fine.text()).startsWith("hello GET /ok")) throw new Error("not fine");
const denied = await fetch("https://index.example/secret", {method: "POST", body: "x"});
console.log(denied.status, denied.statusText, (await denied.json()).code);
"""


async def test_node_fetch(ground: Ground, guest: Guest) -> None:
    need("node")
    site = await site_of(ground, hello)
    ground.open(spec(rule("index", "index.example", **READ_ONLY)))
    said = await guest.run("node", "--input-type=module", "-e", NODE)
    assert said.startswith("403 Forbidden - Hatchway: ")
    assert said.strip().endswith(("path_not_allowed", "method_not_allowed"))
    assert b"secret" not in site.arrived


JAVA = """
import java.net.URI;
import java.net.http.*;
public class Ask {
  public static void main(String[] all) throws Exception {
    HttpClient client = HttpClient.newHttpClient();
    for (String path : new String[] {"/ok", "/secret"}) {
      HttpRequest request = HttpRequest.newBuilder(URI.create("https://index.example" + path)).build();
      HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
      System.out.println(answer.version() + " " + answer.statusCode() + " " + answer.body());
    }
  }
}
"""


async def test_java(ground: Ground, guest: Guest) -> None:
    need("java")
    need("keytool")
    site = await site_of(ground, hello)
    ground.open(spec(rule("index", "index.example", **READ_ONLY)))
    (guest.home / "Ask.java").write_text(JAVA)
    assert ground.gateway is not None
    guest.ca.write_text(ground.gateway.opened().ca_certificate)
    store = guest.home / "trust.p12"
    subprocess.run(
        [
            "keytool",
            "-importcert",
            "-noprompt",
            "-alias",
            "hatchway",
            "-file",
            str(guest.ca),
            "-keystore",
            str(store),
            "-storepass",
            "changeit",
        ],
        check=True,
        capture_output=True,
    )
    said = await guest.run(
        "java", f"-Djavax.net.ssl.trustStore={store}", "-Djavax.net.ssl.trustStorePassword=changeit", "Ask.java"
    )
    fine, denied = said.strip().split("\n")[:2]
    assert fine.startswith("HTTP_2 200 hello GET /ok")
    assert denied.startswith("HTTP_2 403 ")
    assert "path_not_allowed" in denied
    assert b"secret" not in site.arrived


GO = """
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
)

func main() {
	for _, url := range os.Args[1:] {
		answer, err := http.Get(url)
		if err != nil {
			fmt.Println("failed", err)
			continue
		}
		body, _ := io.ReadAll(answer.Body)
		fmt.Printf("%s %d %q\\n", answer.Proto, answer.StatusCode, body)
	}
}
"""


async def test_go(ground: Ground, guest: Guest, tmp_path: Path) -> None:
    """Go has a TLS and an HTTP/2 of its own, and takes its trust from SSL_CERT_FILE."""
    need("go")
    site = await site_of(ground, hello)
    ground.open(spec(rule("index", "index.example", **READ_ONLY)))
    source, program = tmp_path / "ask.go", guest.home / "ask"
    source.write_text(GO)
    # Built outside of the guest's network: with its own network stack, as most programs are.
    settings = {"CGO_ENABLED": "0", "GOCACHE": str(tmp_path / "cache"), "GOPATH": str(tmp_path / "path"), "GO111MODULE": "off", "GOTOOLCHAIN": "local"}  # fmt: skip
    build = ["go", "build", "-o", str(program), str(source)]
    await asyncio.to_thread(
        subprocess.run, build, check=True, capture_output=True, env={**os.environ, **settings}, cwd=tmp_path
    )
    said = await guest.run(
        str(program), "https://index.example/ok", "https://index.example/secret", "https://denied.example/ok"
    )
    fine, denied, unknown = said.strip().split("\n")
    assert fine.startswith('HTTP/2.0 200 "hello GET /ok')
    assert denied.startswith("HTTP/2.0 403 ")
    assert "path_not_allowed" in denied
    assert unknown.startswith("failed ")
    assert "denied.example" in unknown
    said = await guest.run(str(program), "https://index.example/ok", GODEBUG="http2client=0")
    assert said.startswith('HTTP/1.1 200 "hello GET /ok')
    said = await guest.run(str(program), "https://index.example/ok", SSL_CERT_FILE="/nonexistent", SSL_CERT_DIR="/nonexistent")  # fmt: skip
    assert "certificate" in said, "it is the authority that makes it work, and nothing else"
    assert b"secret" not in site.arrived


WEBSOCKET = """
import asyncio, ssl, websockets
async def main():
    async with websockets.connect("wss://socket.example/ws") as socket:
        await socket.send("hello")
        print(await socket.recv())
    try:
        await websockets.connect("wss://socket.example/other")
    except websockets.InvalidStatus as error:
        print(error.response.status_code, error.response.reason_phrase)
asyncio.run(main())
"""


async def test_websocket(ground: Ground, guest: Guest) -> None:
    import websockets

    heard: list[Any] = []

    async def talk(socket: websockets.ServerConnection) -> None:
        async for message in socket:
            heard.append((socket.request.path if socket.request else "", message))
            await socket.send(f"heard {message}")

    address = f"{ground.internet.net}.20"
    ground.internet.names.zone["socket.example"] = [address]
    server = await websockets.serve(talk, address, 443, ssl=ground.internet.site_context("socket.example"))
    try:
        ground.open(
            spec(
                rule(
                    "socket",
                    "socket.example",
                    protocol="websocket",
                    http={"allow": [{"methods": ["GET"], "paths": ["/ws"]}]},
                )
            )
        )
        said = await guest.run(sys.executable, "-c", WEBSOCKET)
        assert said.startswith("heard hello\n403 Forbidden - Hatchway: path_not_allowed")
        assert heard == [("/ws", "hello")]
    finally:
        server.close()
        await server.wait_closed()
