"""The settings file `hatchway.toml`: read strictly, so that a mistyped line is an error and never a default.

Found by `--config`, else `HATCHWAY_CONFIG`, else `hatchway.toml` in the data folder. What the command line says goes before the file.
"""

import os
import stat
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from hatchway.domain import archive_policy, broker_settings, egress_settings, vmm_policy
from hatchway.domain.archive_policy import ArchivePolicy
from hatchway.domain.broker_settings import BrokerSettings
from hatchway.domain.checking import explain
from hatchway.domain.egress_settings import EgressSettings
from hatchway.domain.errors import Forbidden, HatchwayError, Unprocessable
from hatchway.domain.host_limits import DEFAULTS, HostLimits
from hatchway.domain.oversight_settings import ApprovalSettings, AuditSettings
from hatchway.domain.vmm_policy import DriverName, VmmPolicy
from hatchway.supervisor.settings import (
    DEFAULT_API_PORT,
    DEFAULT_DATA_PORT,
    DEFAULT_E2B_PORT,
    MAX_UID_BASE,
    MIN_UID_BASE,
    Profile,
    Settings,
    Tls,
)

NAME = "hatchway.toml"
MAX_OCTETS = 256 * 1024
MAX_SECRET = 4096

Port = Annotated[int, Meta(ge=0, le=65535)]
Domain = Annotated[
    str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*$", max_length=200)
]
NameAndPort = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*(:[1-9][0-9]{0,4})?$",
        max_length=206,
    ),
]
Url = Annotated[str, Meta(pattern=r"^https?://[^/?#@\s]+$")]


class Listener(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an HTTP service listens. Paths of files are from the settings file's folder on."""

    host: str = "127.0.0.1"
    port: Port | None = None
    certificate: str | None = None
    key: str | None = None
    url: Url | None = None
    """How clients reach it, where that is not what it listens on: behind a name, or a proxy."""


class E2b(Listener, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The API of E2B, a listener of its own."""

    enabled: bool = True
    domain: NameAndPort | None = None
    """Under which ports of sandboxes have names, `PORT-ID.DOMAIN`; with the port that clients use, where that is not 443."""
    secret_file: str | None = None
    """The secret that tokens of sandboxes are derived from, where several wrappers share one; its path is from the settings file's folder on."""
    data_ca_file: str | None = None
    """Authorities that the data planes of other nodes are certified by, in PEM, where they are not the system's."""


class Metrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may read /metrics of both listeners."""

    token_file: str | None = None
    """File whose content is the token; its path is from the settings file's folder on."""


class File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. docs/production.md explains it."""

    profile: Profile = "development"
    allow_emulated: bool = False
    uid_base: Annotated[int, Meta(ge=MIN_UID_BASE, le=MAX_UID_BASE)] | None = None
    bake: bool = True
    api: Listener = Listener()
    data: Listener = Listener()
    e2b: E2b = E2b()
    database_url: Annotated[str, Meta(min_length=1, max_length=2048)] | None = None
    """A PostgreSQL database, without a password in the URL; left out: a file in the data folder."""
    database_password_file: str | None = None
    port_domains: Annotated[tuple[Domain, ...], Meta(max_length=16)] = ("localhost",)
    """Names of sandboxes' ports lie under these domains, of which nothing else may use a name."""
    metrics: Metrics = Metrics()
    limits: HostLimits = DEFAULTS
    vmm: VmmPolicy = vmm_policy.DEFAULT
    archives: ArchivePolicy = archive_policy.DEFAULT
    audit: AuditSettings = AuditSettings()
    approvals: ApprovalSettings = ApprovalSettings()
    egress: EgressSettings = egress_settings.DEFAULT
    broker: BrokerSettings = broker_settings.DEFAULT


def find(named: Path | None, data_dir: Path) -> Path | None:
    """The settings file that is to be read; None where there is none and none was named."""
    if named is None and (by_environment := os.environ.get("HATCHWAY_CONFIG")):
        named = Path(by_environment)
    if named is not None:
        return named.absolute()
    usual = data_dir / NAME
    return usual if usual.exists() else None


def read(path: Path) -> File:
    """Reads a settings file. Raises `Forbidden("config_insecure")`, `Unprocessable("config_invalid")` and those that name a field."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Unprocessable(
            "config_unreadable", f"{path} cannot be read: {error.strerror}.", "Name another file with --config."
        ) from error
    try:
        check_file(fd, path)
        content = b""
        while len(content) <= MAX_OCTETS and (more := os.read(fd, MAX_OCTETS + 1)):
            content += more
    finally:
        os.close(fd)
    if len(content) > MAX_OCTETS:
        raise invalid(path, f"it has more than {MAX_OCTETS} octets")
    try:
        table: Any = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise invalid(path, str(error)) from None
    try:
        return msgspec.convert(table, File)
    except msgspec.ValidationError as error:
        found = explain(str(error), File)
        raise Unprocessable("config_invalid", f"{path}: {found.cause}", found.remedy, **found.extra) from None


def invalid(path: Path, why: str) -> HatchwayError:
    """The error of a file that cannot be what it should be."""
    return Unprocessable("config_invalid", f"{path}: {why}.", "docs/production.md shows a whole file.")


def check_file(fd: int, path: Path, *, private: bool = False) -> None:
    """Raises `Forbidden("config_insecure")` for an open file that others own or can change, or read where it is `private`."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise Forbidden("config_insecure", f"{path} is not a file.", "Name another one.")
    if found.st_uid not in (0, os.geteuid()):
        raise Forbidden("config_insecure", f"{path} belongs to user {found.st_uid}.", f"`chown {os.geteuid()} {path}`.")
    forbidden, fix, what = (0o077, "go-rwx", "read") if private else (0o022, "go-w", "changed")
    if found.st_mode & forbidden:
        mode = f"mode {found.st_mode & 0o777:o}"
        raise Forbidden("config_insecure", f"{path} can be {what} by others ({mode}).", f"`chmod {fix} {path}`.")


def settings(
    data_dir: Path,
    named: Path | None = None,
    *,
    profile: Profile | None = None,
    allow_emulated: bool | None = None,
    bake: bool | None = None,
    vmm: DriverName | None = None,
    api_host: str | None = None,
    api_port: int | None = None,
    data_host: str | None = None,
    data_port: int | None = None,
    e2b: bool | None = None,
    e2b_host: str | None = None,
    e2b_port: int | None = None,
    e2b_domain: str | None = None,
    database_url: str | None = None,
) -> Settings:
    """The settings of an installation: of its file, where it has one, with what the command line says before it.

    Raises what `read` does.
    """
    path = find(named, data_dir)
    file = File() if path is None else read(path)
    folder = data_dir if path is None else path.parent
    if path is not None:
        _check_domains(path, file)
    # Whoever wants any port for the API wants no certain one for this either, unless he says so.
    port = _first(api_port, file.api.port, DEFAULT_API_PORT)
    usual_e2b_port = 0 if port == 0 else DEFAULT_E2B_PORT
    return Settings(
        data_dir=data_dir,
        config=path,
        profile=profile or file.profile,
        allow_emulated=file.allow_emulated if allow_emulated is None else allow_emulated,
        uid_base=file.uid_base,
        metrics_token=None if file.metrics.token_file is None else folder / file.metrics.token_file,
        bake=file.bake if bake is None else bake,
        limits=file.limits,
        vmm=file.vmm if vmm is None else msgspec.structs.replace(file.vmm, driver=vmm),
        api_host=api_host or file.api.host,
        api_port=port,
        api_tls=_tls(path, folder, "api", file.api),
        api_url=file.api.url,
        data_host=data_host or file.data.host,
        data_port=_first(data_port, file.data.port, DEFAULT_DATA_PORT),
        data_tls=_tls(path, folder, "data", file.data),
        data_url=file.data.url,
        e2b=file.e2b.enabled if e2b is None else e2b,
        e2b_host=e2b_host or file.e2b.host,
        e2b_port=_first(e2b_port, file.e2b.port, usual_e2b_port),
        e2b_tls=_tls(path, folder, "e2b", file.e2b),
        e2b_url=file.e2b.url,
        e2b_domain=file.e2b.domain if e2b_domain is None else _domain(e2b_domain),
        e2b_secret=None if file.e2b.secret_file is None else folder / file.e2b.secret_file,
        e2b_data_ca=None if file.e2b.data_ca_file is None else folder / file.e2b.data_ca_file,
        database_url=database_url or os.environ.get("HATCHWAY_DATABASE_URL") or file.database_url,
        database_password_file=None if file.database_password_file is None else folder / file.database_password_file,
        port_domains=file.port_domains,
        archives=file.archives,
        audit_kept=file.audit,
        webhook=file.approvals.webhook,
        webhook_secret=_webhook_secret(path, folder, file.approvals),
        egress=_located(file.egress, folder),
        lending=_lending(file.broker, folder),
    )


def _lending(broker: BrokerSettings, folder: Path) -> BrokerSettings:
    """Paths of files from the settings file's folder on."""

    def at(path: str | None) -> str | None:
        return None if path is None else str(folder / path)

    vaults = {
        name: msgspec.structs.replace(
            one,
            token_file=at(one.token_file),
            role_id_file=at(one.role_id_file),
            secret_id_file=at(one.secret_id_file),
            ca_file=at(one.ca_file),
        )
        for name, one in broker.vaults.items()
    }
    return msgspec.structs.replace(broker, master_key_file=at(broker.master_key_file), vaults=vaults)


def _located(egress: EgressSettings, folder: Path) -> EgressSettings:
    """With the paths of files as they are from anywhere."""
    return msgspec.structs.replace(
        egress, trusted_ca_files=tuple(str(folder / path) for path in egress.trusted_ca_files)
    )


def _check_domains(path: Path, file: File) -> None:
    """A service under a domain of ports would get no request: all names there are ports'."""
    for url in filter(None, (file.api.url, file.data.url, file.e2b.url)):
        host = (urlsplit(url).hostname or "").removesuffix(".")
        for domain in file.port_domains:
            if host.endswith(f".{domain}"):
                raise invalid(path, f"`{url}` lies under the domain of ports {domain}")


def _webhook_secret(path: Path | None, folder: Path, approvals: ApprovalSettings) -> Path | None:
    if (approvals.webhook is None) != (approvals.webhook_secret_file is None):
        assert path is not None
        raise invalid(path, "`approvals` has one of `webhook` and `webhook_secret_file` without the other")
    return None if approvals.webhook_secret_file is None else folder / approvals.webhook_secret_file


def read_secret(path: Path) -> bytes:
    """The one line of a file that nobody else can read. Raises `Forbidden("config_insecure")`, `Unprocessable("secret_unusable")`."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unusable(path, str(error.strerror)) from error
    with os.fdopen(fd, "rb") as file:
        check_file(fd, path, private=True)
        return parse_secret(file.read(MAX_SECRET + 2), path)


def parse_secret(content: bytes, path: Path) -> bytes:
    """The one line that a file of a secret has. Raises `Unprocessable("secret_unusable")`."""
    content = content.rstrip(b"\r\n")
    if not content or len(content) > MAX_SECRET or b"\n" in content:
        raise Unprocessable(
            "secret_unusable",
            f"{path} is not one line of at most {MAX_SECRET} octets.",
            "`openssl rand -hex 32` makes one.",
        )
    return content


def unusable(path: Path, why: str) -> HatchwayError:
    """The error of a file of a secret that cannot be read."""
    return Unprocessable("secret_unusable", f"{path} cannot be read: {why}.", "Name another file in the settings.")


def _domain(given: str) -> str:
    try:
        return msgspec.convert(given, NameAndPort)
    except msgspec.ValidationError:
        raise Unprocessable(
            "bad_domain", f"{given[:200]!r} is no domain.", "Write it as sbx.example, or sbx.example:7443."
        ) from None


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _tls(path: Path | None, folder: Path, name: Literal["api", "data", "e2b"], listener: Listener) -> Tls | None:
    if listener.certificate is None and listener.key is None:
        return None
    if listener.certificate is None or listener.key is None:
        assert path is not None
        raise invalid(path, f"`{name}` has one of `certificate` and `key` without the other")
    return Tls(certificate=folder / listener.certificate, key=folder / listener.key)
