"""`hatchway e2b certificate` and `ca`: what they make is taken by clients that trust it, for this domain and no other."""

import datetime
import json
import ssl
import stat
import tomllib
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from hatchway.cli.app import app
from hatchway.domain.errors import Conflict, Forbidden, Unprocessable
from hatchway.supervisor import configuration, profile
from hatchway.supervisor.certificates import Files, files_of, make_authority, make_certificate

NOW = datetime.datetime.now(datetime.UTC)


def shakes_hands(files: Files, trusted: Path, name: str) -> bool:
    """Whether a client that trusts this authority alone takes the certificate for a name."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(trusted))
    server.load_cert_chain(files.certificate, files.key)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, there, server_hostname=name), server.wrap_bio(there, back, server_side=True)]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError:
                return False
    return True


def test_it_is_good_for_the_names_below_the_domain_and_for_no_others(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "SBX.example.", NOW)
    for name in ("api.sbx.example", "8000-abcdefghij0123456789.sbx.example", "sbx.example"):
        assert shakes_hands(files, files.authority, name), name
    for name in ("a.b.sbx.example", "other.example"):
        assert not shakes_hands(files, files.authority, name), name
    assert stat.S_IMODE(files.key.stat().st_mode) == stat.S_IMODE(files.authority_key.stat().st_mode) == 0o600


def test_the_authority_vouches_for_its_domain_alone(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "sbx.example", NOW)
    other = make_authority(tmp_path, "bank.example", NOW)
    for one, key in ((other.authority, files.authority), (other.authority_key, files.authority_key)):
        mode = one.stat().st_mode
        one.write_bytes(key.read_bytes())
        one.chmod(mode)
    stolen = make_certificate(tmp_path, "bank.example", NOW)
    assert not shakes_hands(stolen, files.authority, "bank.example")


def test_another_certificate_is_of_the_same_authority(tmp_path: Path) -> None:
    first = make_certificate(tmp_path, "sbx.example", NOW)
    trusted, certificate = first.authority.read_bytes(), first.certificate.read_bytes()
    again = make_certificate(tmp_path, "sbx.example", NOW + datetime.timedelta(days=300))
    assert again.authority.read_bytes() == trusted
    assert again.certificate.read_bytes() != certificate
    assert shakes_hands(again, first.authority, "api.sbx.example") is False, "it is of the future"


def test_what_cannot_be_used_is_said(tmp_path: Path) -> None:
    for domain in ("", "*.sbx.example", "sbx.example:443", "-a.example", "a/b", "../x", "x" * 64):
        with pytest.raises(Unprocessable):
            files_of(tmp_path, domain)
    files = make_authority(tmp_path, "sbx.example", NOW)
    with pytest.raises(Conflict):
        make_certificate(tmp_path, "sbx.example", NOW + datetime.timedelta(days=4000))
    files.authority_key.chmod(0o644)
    with pytest.raises(Forbidden):
        make_certificate(tmp_path, "sbx.example", NOW)
    files.authority_key.write_bytes(b"no key")
    files.authority_key.chmod(0o600)
    with pytest.raises(Unprocessable):
        make_certificate(tmp_path, "sbx.example", NOW)


def test_the_command_says_what_belongs_into_the_settings(tmp_path: Path) -> None:
    def hatchway(*words: str) -> str:
        result = CliRunner().invoke(app, ["e2b", *words, "--data-dir", str(tmp_path)])
        assert result.exit_code == 0, result.output
        return result.stdout

    said = hatchway("certificate", "--domain", "sbx.example")
    settings = said.split("\n\n")[1]
    (tmp_path / "hatchway.toml").write_text(settings)
    (tmp_path / "hatchway.toml").chmod(0o600)
    read = configuration.settings(tmp_path)
    assert tomllib.loads(settings)["e2b"]["domain"] == read.e2b_domain == f"sbx.example:{read.e2b_port}"
    assert read.e2b_tls is not None
    assert profile.load_tls(read.e2b_tls)
    trusted = json.loads(hatchway("ca", "--domain", "sbx.example", "--json"))["ca"]
    assert f"SSL_CERT_FILE={trusted}" in said
    assert f"NODE_EXTRA_CA_CERTS={trusted}" in said
    made = json.loads(hatchway("certificate", "--domain", "sbx.example", "--json"))
    names = x509.load_pem_x509_certificate(Path(made["certificate"]).read_bytes())
    assert names.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
        x509.DNSName
    ) == ["sbx.example", "*.sbx.example"]
    failed = CliRunner().invoke(app, ["e2b", "ca", "--domain", "*.x", "--data-dir", str(tmp_path)])
    assert failed.exit_code == 1
    assert "bad_domain" in failed.stderr


@pytest.mark.parametrize(
    ("domain", "good"),
    [("sbx.example", True), ("sbx.example:8443", True), ("localhost:7443", True), ("*.sbx.example", False), ("https://x", False), ("sbx.example:0", False)],
)  # fmt: skip
def test_the_domain_in_the_settings(tmp_path: Path, domain: str, good: bool) -> None:
    file = tmp_path / "hatchway.toml"
    file.write_text(f'[e2b]\ndomain = "{domain}"\n')
    file.chmod(0o600)
    if good:
        assert configuration.settings(tmp_path).e2b_domain == domain
        assert configuration.settings(tmp_path, e2b_domain="other.example").e2b_domain == "other.example"
        with pytest.raises(Unprocessable):
            configuration.settings(tmp_path, e2b_domain="*.example")
    else:
        with pytest.raises(Unprocessable):
            configuration.settings(tmp_path)
