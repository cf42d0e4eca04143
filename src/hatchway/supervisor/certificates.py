"""A certificate authority of this installation for one domain, and the certificate of a listener that has all names directly below it.

For the domain under which ports of E2B's sandboxes have names, where nobody else gives a certificate. The authority can vouch for that domain
and nothing else: who trusts it trusts nobody for the rest of the internet.
"""

import datetime
import os
import re
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hatchway.domain.errors import Conflict, Unprocessable
from hatchway.supervisor.configuration import check_file
from hatchway.wire.small_files import replace_file

FOLDER = "e2b-tls"
AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 397
"""The longest that clients take of a public authority's certificate; some hold others to it too."""
_BACKDATE = datetime.timedelta(hours=1)
_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*", re.ASCII)


@dataclass(frozen=True)
class Files:
    """Where everything lies."""

    folder: Path

    @property
    def authority(self) -> Path:
        """What clients have to trust."""
        return self.folder / "ca.pem"

    @property
    def authority_key(self) -> Path:
        """Vouches for the domain: 0600."""
        return self.folder / "ca.key"

    @property
    def certificate(self) -> Path:
        """Of the listener, with the authority's behind it."""
        return self.folder / "certificate.pem"

    @property
    def key(self) -> Path:
        """Of the listener: 0600."""
        return self.folder / "certificate.key"


def files_of(data_dir: Path, domain: str) -> Files:
    """Where what belongs to a domain lies in a data folder. Raises `Unprocessable("bad_domain")`."""
    domain = domain.lower().removesuffix(".")
    if len(domain) > 200 or not _DOMAIN.fullmatch(domain):
        raise Unprocessable(
            "bad_domain", f"{domain[:200]!r} is no domain.", "Write it as sbx.example: no scheme, no port, no star."
        )
    return Files(data_dir / FOLDER / domain)


def make_authority(data_dir: Path, domain: str, now: datetime.datetime) -> Files:
    """Makes the authority for a domain, where there is none yet. Raises `Unprocessable("bad_domain")`, `Forbidden("config_insecure")`, `OSError`."""
    files = files_of(data_dir, domain)
    files.folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    files.folder.mkdir(mode=0o755, exist_ok=True)
    if files.authority_key.exists() and files.authority.exists():
        return files
    name = files.folder.name
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Hatchway"),
            x509.NameAttribute(NameOID.COMMON_NAME, f"Hatchway authority for {name}"[:64]),
        ]
    )
    certificate = (
        _builder(subject, subject, key, now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(
            x509.NameConstraints(permitted_subtrees=[x509.DNSName(name)], excluded_subtrees=None), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    replace_file(files.authority_key, _pem_of(key))
    replace_file(files.authority, certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)
    return files


def make_certificate(data_dir: Path, domain: str, now: datetime.datetime) -> Files:
    """Makes a certificate for a domain and all names directly below it, signed by its authority, which is made where there is none.

    Takes the place of a former one. Raises what `make_authority` does, and `Conflict("authority_expired")`.
    """
    files = make_authority(data_dir, domain, now)
    authority, authority_key = _load(files)
    if authority.not_valid_after_utc <= now:
        raise Conflict(
            "authority_expired",
            f"The authority in {files.folder} has expired.",
            "Move the folder away, make another one, and have clients trust that.",
        )
    name = files.folder.name
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    until = min(now + datetime.timedelta(days=CERTIFICATE_DAYS), authority.not_valid_after_utc)
    certificate = (
        _builder(subject, authority.subject, key, now, until=until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name), x509.DNSName(f"*.{name}")]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    chain = certificate.public_bytes(serialization.Encoding.PEM) + authority.public_bytes(serialization.Encoding.PEM)
    replace_file(files.key, _pem_of(key))
    replace_file(files.certificate, chain, mode=0o644)
    return files


def _load(files: Files) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Raises `Forbidden("config_insecure")`, `Unprocessable("authority_unusable")`."""
    fd = os.open(files.authority_key, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        check_file(fd, files.authority_key, private=True)
        content = file.read(65_536)
    try:
        key = serialization.load_pem_private_key(content, None)
        certificate = x509.load_pem_x509_certificate(files.authority.read_bytes())
    except (ValueError, TypeError) as error:
        raise _unusable(files, str(error)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise _unusable(files, "its certificate is not of its key")
    return certificate, key


def _unusable(files: Files, why: str) -> Unprocessable:
    return Unprocessable(
        "authority_unusable", f"The authority in {files.folder} cannot be used: {why}.", "Move the folder away, and make another one."
    )  # fmt: skip


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    days: int = 0,
    until: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATE)
        .not_valid_after(until or now + datetime.timedelta(days=days))
    )


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
