"""The certificate authority of one sandbox: what makes a client inside trust the gateway, and nobody else anything.

Its key lives in this process and in the node's record of the sandbox alone; its certificate is constrained to the names that the policy
allows, so that a stolen key is worth nothing for any other. A leaf is made after a connection was allowed, never before, for one name.
"""

import datetime
import ipaddress
import os
import ssl
from collections import OrderedDict
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_DAYS = 30
LEAF_DAYS = 7
MAX_LEAVES = 64
MAX_CERTIFICATE = 12 * 1024
"""Octets of the authority's certificate in PEM: the guest takes 16 KiB. More names than fit are constrained by what they end in, and where
even that is too much, not at all."""
_BACKDATE = datetime.timedelta(days=1)
"""A guest's clock may be behind for a moment after a restore."""
_NOBODY = "nothing.invalid"


class BadKey(ValueError):
    """What was given is no P-256 key in PKCS #8."""


class Authority:
    """One sandbox's authority with its leaves. `certificate` changes with `constrain`, the key never."""

    def __init__(self, key: bytes, label: str, names: Sequence[str] | None, now: datetime.datetime) -> None:
        """`key` is PKCS #8 DER (empty: a new one is made); `label` is in the subject, for people; `names` are those of `constrain`.

        Raises `BadKey`.
        """
        self._key = _load(key) if key else ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Hatchway"),
                x509.NameAttribute(NameOID.COMMON_NAME, f"Hatchway gateway of {label}"[:64]),
            ]
        )
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._leaves: OrderedDict[tuple[str, tuple[str, ...]], tuple[datetime.datetime, ssl.SSLContext]] = OrderedDict()
        self._names: tuple[str, ...] | None = ()
        self.certificate = ""
        self.constrain(names, now)

    @property
    def key(self) -> bytes:
        """PKCS #8 DER."""
        return self._key.private_bytes(
            serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def constrain(self, names: Sequence[str] | None, now: datetime.datetime) -> None:
        """Makes the certificate anew for the names (`x.example`: it and all below) that leaves may be for; the same names change nothing.

        None: for any name, since the policy lets any name pass.
        """
        wanted = None if names is None else tuple(sorted(set(names)))
        if self.certificate and wanted == self._names and not self.renewal_due(now):
            return
        self._names = wanted
        self._leaves.clear()
        if wanted is None:
            self.certificate = self._sign_authority(None, now)
            return
        for depth in (127, 4, 3, 2, 1):
            permitted = _reduced(wanted, depth)
            self.certificate = self._sign_authority(permitted, now)
            if len(self.certificate) <= MAX_CERTIFICATE:
                return
        self.certificate = self._sign_authority(None, now)

    def renewal_due(self, now: datetime.datetime) -> bool:
        """Whether half of the certificate's time is over."""
        return now > self._not_after - datetime.timedelta(days=CA_DAYS / 2)

    def context(self, name: str, alpn: tuple[str, ...], now: datetime.datetime) -> ssl.SSLContext:
        """Returns what a server needs that is `name` towards the client. Call it only for what was allowed."""
        found = self._leaves.get((name, alpn))
        if found is not None and now < found[0]:
            self._leaves.move_to_end((name, alpn))
            return found[1]
        context = self._make_context(name, alpn, now)
        self._leaves[name, alpn] = (now + datetime.timedelta(days=LEAF_DAYS / 2), context)
        self._leaves.move_to_end((name, alpn))
        while len(self._leaves) > MAX_LEAVES:
            self._leaves.popitem(last=False)
        return context

    def _sign_authority(self, permitted: tuple[str, ...] | None, now: datetime.datetime) -> str:
        self._not_after = now + datetime.timedelta(days=CA_DAYS)
        public = self._key.public_key()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(self._subject)
            .issuer_name(self._subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BACKDATE)
            .not_valid_after(self._not_after)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(authority=True), critical=True)
            .add_extension(
                x509.NameConstraints(
                    permitted_subtrees=(
                        None if permitted is None else [x509.DNSName(name) for name in permitted or (_NOBODY,)]
                    ),
                    excluded_subtrees=[
                        x509.IPAddress(ipaddress.IPv4Network("0.0.0.0/0")),
                        x509.IPAddress(ipaddress.IPv6Network("::/0")),
                    ],
                ),
                critical=True,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM).decode()

    def _make_context(self, name: str, alpn: tuple[str, ...], now: datetime.datetime) -> ssl.SSLContext:
        public = self._leaf_key.public_key()
        leaf = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if len(name) <= 64 else []))
            .issuer_name(self._subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BACKDATE)
            .not_valid_after(min(now + datetime.timedelta(days=LEAF_DAYS), self._not_after))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=len(name) > 64)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        context = server_context(alpn)
        _load_chain(
            context,
            self._leaf_key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + leaf.public_bytes(serialization.Encoding.PEM),
        )
        return context


def server_context(alpn: tuple[str, ...]) -> ssl.SSLContext:
    """A server's side without a certificate yet: nothing of one connection is of use in another, and nothing comes before the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.num_tickets = 0  # and so no early data either
    context.set_ecdh_curve("prime256v1")
    if alpn:
        context.set_alpn_protocols(list(alpn))
    return context


def _load_chain(context: ssl.SSLContext, pem: bytes) -> None:
    """`ssl` takes certificates from files alone: one in memory, which nobody else can open, serves."""
    fd = os.memfd_create("leaf", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _load(key: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        loaded = serialization.load_der_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise BadKey("the key of the authority cannot be read") from error
    if not isinstance(loaded, ec.EllipticCurvePrivateKey) or not isinstance(loaded.curve, ec.SECP256R1):
        raise BadKey("the key of the authority is not of the curve P-256")
    return loaded


def _reduced(names: tuple[str, ...], depth: int) -> tuple[str, ...]:
    """The names by their last `depth` labels, without those that another one covers."""
    short = {".".join(name.split(".")[-depth:]) for name in names}
    return tuple(
        sorted(name for name in short if not any(_parent(name, up) in short for up in range(1, name.count(".") + 1)))
    )


def _parent(name: str, up: int) -> str:
    return ".".join(name.split(".")[up:])
