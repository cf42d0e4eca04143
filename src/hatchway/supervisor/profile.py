"""What a profile refuses before anything is started: listeners, keys, files, isolation. docs/production.md lists it.

`development` is for one user of one machine: loopback only, a key made for him. `production` falls back to nothing that is weaker
than it should be: every refusal names what it found and how to mend it.
"""

import asyncio
import ipaddress
import os
import ssl
import stat
from pathlib import Path

from hatchway.domain.errors import Forbidden, Unavailable, Unprocessable
from hatchway.supervisor.configuration import check_file
from hatchway.supervisor.settings import Settings, Tls
from hatchway.wire.metrics import MIN_TOKEN, MetricsAccess, hash_token

MARK = "profile"
"""File in the data folder that says which profile it was used with."""


def check_listeners(settings: Settings) -> None:
    """Raises `Forbidden("not_loopback")` for a listener that other machines reach without what that needs."""
    for name, host, tls in (
        ("api", settings.api_host, settings.api_tls),
        ("data", settings.data_host, settings.data_tls),
        *([("e2b", settings.e2b_host, settings.e2b_tls)] if settings.e2b else []),
    ):
        if is_loopback(host):
            continue
        if not settings.production:
            raise Forbidden(
                "not_loopback",
                f"{host} is no loopback address: what other machines reach needs TLS, and keys that were not made for development.",
                f"Listen on 127.0.0.1 or ::1, or use `--profile production` with a certificate in [{name}].",
            )
        if tls is None:
            raise Forbidden(
                "not_loopback",
                f"{host} is no loopback address, and a listener that other machines reach needs TLS.",
                f"Name `certificate` and `key` in [{name}] of the settings file, or listen on loopback behind a proxy with TLS.",
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_folder(settings: Settings) -> None:
    """What lies in the data folder must fit the profile. To be called when the folder was prepared and is locked.

    Raises `Forbidden` with `production_folder`, `development_keys`, `insecure_state`.
    """
    mark = settings.data_dir / MARK
    known = _word(mark)
    if not settings.production:
        if known == "production":
            raise Forbidden(
                "production_folder",
                f"{settings.data_dir} is the folder of a production service; without that profile it would get a key for everything.",
                "`hatchway up --profile production`, or another data folder.",
            )
        return
    for key in (settings.development_key, settings.control / "dev.key"):
        if key.exists() or key.is_symlink():
            raise Forbidden(
                "development_keys",
                f"{key} is a key made for development: it lies in a file, and may do everything.",
                "`hatchway keys revoke --development --offline` revokes it and removes the file.",
            )
    check_private(settings)


def check_private(settings: Settings) -> None:
    """Raises `Forbidden("insecure_state")` for state that others than its owner can read, or that belongs to somebody else."""
    ids = settings.identity
    owners = (
        (settings.control, ids.control),
        (settings.node, ids.node),
        (settings.audit, ids.audit),
        (settings.broker, ids.broker),
        (settings.e2b_folder, ids.e2b),
    )
    for folder, owner in owners:
        if not folder.exists():
            continue  # it will be made, as it should be
        for path in (folder, *sorted(folder.iterdir())):
            found = path.lstat()
            if found.st_uid not in (owner, os.geteuid()):
                raise Forbidden(
                    "insecure_state",
                    f"{path} belongs to user {found.st_uid}, not to {owner}.",
                    f"`chown {owner} {path}`.",
                )
            # What is in a folder that nobody else may enter is closed by it; only the folders themselves have to be.
            if path == folder and found.st_mode & 0o077:
                raise Forbidden(
                    "insecure_state",
                    f"{path} can be entered by others (mode {stat.S_IMODE(found.st_mode):o}).",
                    f"`chmod go-rwx {path}`.",
                )


def note(settings: Settings) -> None:
    """Marks the data folder as one of production, for good: a later start without the profile is refused."""
    mark = settings.data_dir / MARK
    if settings.production and _word(mark) != "production":
        fd = os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "w") as file:
            file.write("production\n")


def check_vmm(settings: Settings, kernel: Path) -> None:
    """Raises `Unavailable("vmm_unusable")` where the machine monitor that was asked for cannot run the sandboxes here."""
    from hatchway.node.vmm import choice
    from hatchway.node.vmm.seam import VmmError

    try:
        asyncio.run(choice.choose(settings.vmm, settings.node, settings.run, kernel))
    except VmmError as error:
        raise Unavailable(
            "vmm_unusable",
            str(error),
            "`hatchway doctor` shows what there is; docs/installation.md how to bring Firecracker.",
        ) from error


def check_isolation(settings: Settings, kernel: Path) -> None:
    """Raises `Unavailable("isolation_emulated")` where production would run sandboxes under emulation that nobody asked for by name."""
    if not settings.production or settings.allow_emulated:
        return
    from hatchway.node.vmm import choice, machines, probe
    from hatchway.node.vmm.host import Host

    if asyncio.run(choice.choose(settings.vmm, settings.node, settings.run, kernel)).driver == "firecracker":
        return  # it has hardware virtualization, or was not chosen
    machine = machines.machine_of(Host.read().architecture)
    verdict = asyncio.run(probe.kvm_verdict(machine, settings.run, kernel))
    if verdict is None or not verdict.works:
        raise Unavailable(
            "isolation_emulated",
            "Sandboxes would have software emulation for a boundary, which its makers do not support as one: "
            + (verdict.detail if verdict is not None else "nothing is known of KVM here"),
            "Use a machine where `hatchway doctor` shows working KVM, or allow it by name: `allow_emulated = true`.",
        )


def check_tls(settings: Settings) -> None:
    """Raises what `load_tls` does, for any listener."""
    for tls in (settings.api_tls, settings.data_tls, settings.e2b_tls):
        if tls is not None:
            load_tls(tls)


def load_tls(tls: Tls) -> ssl.SSLContext:
    """What a listener needs to speak TLS, at least 1.2. Raises `Forbidden("config_insecure")`, `Unprocessable("tls_unusable")`."""
    for path, private in ((tls.certificate, False), (tls.key, True)):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise unusable(path, str(error.strerror)) from error
        try:
            check_file(fd, path, private=private)
        finally:
            os.close(fd)
    return context_of(tls, tls.certificate, tls.key)


def context_of(tls: Tls, certificate: str | Path, key: str | Path) -> ssl.SSLContext:
    """Like `load_tls`, of files that were checked and may be copies of those that `tls` names. Raises `Unprocessable("tls_unusable")`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # A key with a passphrase must not make the service ask for it on a terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise unusable(tls.certificate, str(error)) from error
    return context


def load_metrics(settings: Settings) -> MetricsAccess:
    """Who may read the metrics. Raises `Forbidden("config_insecure")`, `Unprocessable("metrics_token_unusable")`."""
    path = settings.metrics_token
    if path is None:
        return MetricsAccess(local=not settings.production)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _no_token(path, str(error.strerror)) from error
    with os.fdopen(fd, "rb") as file:
        check_file(fd, path, private=True)
        content = file.read(4_096)
    try:
        token = content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise _no_token(path, "it is not ASCII") from None
    if len(token) < MIN_TOKEN or not token.isprintable() or " " in token:
        raise _no_token(path, f"it is not one word of at least {MIN_TOKEN} characters")
    return MetricsAccess(token_hash=hash_token(token), local=False)


def _no_token(path: Path, why: str) -> Unprocessable:
    return Unprocessable(
        "metrics_token_unusable",
        f"{path} holds no token for the metrics: {why}.",
        f"`openssl rand -hex 24 > {path}`, and `chmod 600 {path}`.",
    )


def unusable(path: Path, why: str) -> Unprocessable:
    """The error of a certificate or key that cannot be used."""
    return Unprocessable(
        "tls_unusable",
        f"TLS cannot be spoken with {path}: {why}.",
        "`certificate` is a file in PEM with the certificate and its chain, `key` one with its key, without a passphrase.",
    )


def _word(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    with os.fdopen(fd) as file:
        return file.read(64).strip()
