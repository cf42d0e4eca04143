"""What a sandbox trusts: real clients in a real guest, against a server whose certificate the given authority signed."""

import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from guest_machine import Shell, machine, release, shell

from hatchway.node.guest.seam import GuestError

pytestmark = pytest.mark.vm
__all__ = ["machine", "release", "shell"]

CLIENTS = {
    "curl": "curl -sS https://localhost:PORT/",
    "the system's store": "env -i PATH=$PATH curl -sS https://localhost:PORT/",
    "another user": "sudo -n -u nobody curl -sS https://localhost:PORT/",
    "OpenSSL without variables": (
        "env -i PATH=$PATH python3 -Sc 'import socket, ssl; "
        's = ssl.create_default_context().wrap_socket(socket.create_connection(("localhost", PORT)), server_hostname="localhost"); '
        's.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n"); print(s.makefile().read().split("\\n\\n")[-1], end="")\''
    ),
}
"""The first reads the variables, the second the system's file, the last what OpenSSL takes without being told."""
SERVER = """
import http.server, ssl, sys
class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "6"); self.end_headers(); self.wfile.write(b"hello\\n")
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/tmp/server.pem")
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Authority:
    """As the gateway makes one: a key on P-256, a short life."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._certificate = builder.sign(self._key, hashes.SHA256())
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * day)
            .not_valid_after(now + 2 * day)
        )

    def server(self) -> str:
        """PEM of a key and a certificate for localhost."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        builder = self._builder(subject, key.public_key()).add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return (private + certificate.public_bytes(serialization.Encoding.PEM)).decode()


async def serve(shell: Shell, authority: Authority) -> int:
    """Starts a server in the guest; returns its port."""
    await shell.output(
        f"cat >/tmp/server.pem <<'END'\n{authority.server()}END\ncat >/tmp/server.py <<'END'\n{SERVER}END\n"
    )
    _, sink = await shell.start("exec python3 /tmp/server.py")
    await sink.until(lambda: b"\n" in sink.out)
    return int(sink.out)


async def outcome(shell: Shell, client: str, port: int) -> bool:
    """Whether it trusted the server."""
    end, said = await shell.run(CLIENTS[client].replace("PORT", str(port)) + " 2>&1", user="user")
    if end.exit_code == 0:
        assert said == "hello\n", client
        return True
    assert "certificate" in said.lower(), (client, said)
    return False


async def test_clients_trust_the_authority_that_is_given_and_no_other(shell: Shell) -> None:
    mine, other = Authority("first"), Authority("second")
    await shell.link.setup(ca="", env={})
    port = await serve(shell, mine)
    assert not await outcome(shell, "curl", port)
    await shell.link.setup(ca=mine.pem)
    assert [client for client in CLIENTS if not await outcome(shell, client, port)] == []
    await shell.link.setup(ca=other.pem)
    assert not await outcome(shell, "the system's store", port)
    await shell.link.setup(ca=mine.pem, env={"CURL_CA_BUNDLE": "/dev/null"})  # what the user says comes first
    assert not await outcome(shell, "curl", port)


async def test_only_root_changes_what_all_trust(shell: Shell) -> None:
    await shell.link.setup(ca=Authority("mine").pem, env={})
    for path in (
        "/run/hatchway/ca-certificates.crt",
        "/run/hatchway/ca.crt",
        "/etc/ssl/certs/ca-certificates.crt",
        "/usr/lib/ssl/cert.pem",
    ):
        end, _ = await shell.run(f": 2>/dev/null >{path} || rm -f {path} || mv {path} /tmp/x", user="user")
        assert end.exit_code != 0, path
    assert await shell.output("stat -c '%U %a' -L /etc/ssl/certs/ca-certificates.crt") == "root 644\n"


async def test_what_is_no_certificate_is_refused(shell: Shell) -> None:
    with pytest.raises(GuestError) as refused:
        await shell.link.setup(ca="no certificate")
    assert "58" in str(refused.value)
