"""The roles between sandboxes and the world: the audit writer, the broker of secrets, and the gateways.

Each has a user of its own. A socket that several of them may connect to is its server's, and open to a group that they are in; who it is
that connects the server sees by the peer's user.
"""

import ipaddress
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from hatchway.domain.egress_settings import EgressSettings
from hatchway.domain.errors import Unprocessable
from hatchway.supervisor import folder
from hatchway.supervisor.roles import Role
from hatchway.supervisor.settings import Settings
from hatchway.wire import audit, broker, egress
from hatchway.wire.small_files import replace_file

RESOLV_CONF = Path("/etc/resolv.conf")
MAX_NAME_SERVERS = 3
TRUSTED = "trusted-ca.pem"
"""In the run folder: authorities that upstreams may have beside the system's."""


def roles(settings: Settings) -> list[Role]:
    """All of them, with their sockets, in the order in which one needs another. Raises as `publish_trusted`."""
    publish_trusted(settings)
    shards = [_egress_role(settings, shard) for shard in range(settings.shards)]
    return [_audit_role(settings), _broker_role(settings), *shards]


def files(settings: Settings) -> list[str]:
    """The names of their files in the run folder."""
    pairs = [
        name.format(shard=shard) for shard in range(settings.shards) for name in (egress.SOCKET, egress.FDS_SOCKET)
    ]
    return [audit.SOCKET, broker.SOCKET, broker.LEG_SOCKET, TRUSTED, *pairs]


def _audit_role(settings: Settings) -> Role:
    ids, run_dir = settings.identity, settings.run
    sock = folder.listen_unix(run_dir / audit.SOCKET, socket.SOCK_STREAM, ids.audit, _group(settings, ids.audit))
    senders: dict[int, frozenset[str]] = {}
    for uid, name in (
        (ids.control, "control"),
        (ids.node, "node"),
        (ids.broker, "broker"),
        *((uid, f"egress-{shard}") for shard, uid in enumerate(ids.egress)),
    ):
        senders[uid] = senders.get(uid, frozenset()) | {name}

    def body(ready: Callable[[], None]) -> None:
        from hatchway.audit.journal import Limits
        from hatchway.audit.main import AuditConfig, run

        kept = settings.audit_kept
        limits = Limits(keep=kept.keep_mib << 20, keep_s=kept.keep_days * 86_400)
        config = AuditConfig(folder=settings.audit, senders=senders, readers=frozenset({ids.control, 0}), limits=limits)
        run(config, rpc=sock, ready=ready, alive=ready)

    return Role(
        "audit",
        ids.audit,
        settings.log / "audit.log",
        body=body,
        sockets=(sock,),
        needs=(settings.audit, settings.run),
    )


def _broker_role(settings: Settings) -> Role:
    ids, run_dir = settings.identity, settings.run
    rpc = folder.listen_unix(run_dir / broker.SOCKET, socket.SOCK_STREAM, ids.broker, _group(settings, ids.broker))
    legs = folder.listen_unix(
        run_dir / broker.LEG_SOCKET, socket.SOCK_STREAM, ids.broker, _group(settings, ids.gateways_group)
    )
    trusted, lending = _trusted(settings), settings.lending
    files = [lending.master_key_file]
    for one in lending.vaults.values():
        files += [one.token_file, one.role_id_file, one.secret_id_file, one.ca_file]

    def body(ready: Callable[[], None]) -> None:
        from hatchway.broker.main import BrokerConfig, Lent, VaultServer, run

        config = BrokerConfig(
            folder=settings.broker,
            control_uids=frozenset({ids.control}),
            node_uids=frozenset({ids.node}),
            egress_uids=ids.egress,
            audit=run_dir / audit.SOCKET,
            upstream_ca=trusted,
            proxies=frozenset(proxy.url for proxy in settings.egress.proxies.values()),
            reachable=tuple((service.network, service.port) for service in settings.egress.host_services),
            environment=settings.broker_environment,
            master_key_file=_path(lending.master_key_file),
            master_key_variable=lending.master_key_variable,
            variables={
                name: Lent(projects=frozenset(one.projects), hosts=one.hosts) for name, one in lending.variables.items()
            },
            files_folder=settings.secrets,
            files={
                name: Lent(projects=frozenset(one.projects), hosts=one.hosts) for name, one in lending.files.items()
            },
            vaults={
                name: VaultServer(
                    address=one.address,
                    paths=one.paths,
                    hosts=one.hosts,
                    namespace=one.namespace,
                    token_file=_path(one.token_file),
                    role_id_file=_path(one.role_id_file),
                    secret_id_file=_path(one.secret_id_file),
                    auth_mount=one.auth_mount,
                    ca_file=_path(one.ca_file),
                    refresh_s=one.refresh_s,
                    within_s=one.within_s,
                )
                for name, one in lending.vaults.items()
            },
        )
        run(config, rpc=rpc, legs=legs, ready=ready, alive=ready)

    return Role(
        "broker",
        ids.broker,
        settings.log / "broker.log",
        body=body,
        sockets=(rpc, legs),
        descriptors=() if settings.broker_environment is None else (settings.broker_environment,),
        needs=(settings.broker, settings.run, *(Path(file) for file in files if file is not None)),
        groups=() if ids.rootless else (ids.audit,),
    )


def _egress_role(settings: Settings, shard: int) -> Role:
    ids, run_dir = settings.identity, settings.run
    rpc = folder.listen_unix(run_dir / egress.SOCKET.format(shard=shard), socket.SOCK_STREAM, ids.node)
    fds = folder.listen_unix(run_dir / egress.FDS_SOCKET.format(shard=shard), socket.SOCK_SEQPACKET, ids.node)

    def body(ready: Callable[[], None]) -> None:
        from hatchway.domain.policy.addresses import parse_network
        from hatchway.egress.main import EgressConfig, run
        from hatchway.egress.resolver import NameServer
        from hatchway.egress.upstream import HostService, OutConfig, UpstreamProxy

        given = settings.egress
        out = OutConfig(
            servers=tuple(NameServer(address, port, name) for address, port, name in name_servers(given)),
            extra_ca=_trusted(settings),
            host_services=tuple(HostService(parse_network(one.network), one.port) for one in given.host_services),
            proxies={name: UpstreamProxy(one.url, one.by_address) for name, one in given.proxies.items()},
            broker=run_dir / broker.LEG_SOCKET,
        )
        config = EgressConfig(shard=shard, run_dir=run_dir, node_uids=frozenset({ids.node}), out=out)
        run(config, rpc=rpc, fds=fds, ready=ready, alive=ready)

    return Role(
        f"egress-{shard}",
        ids.egress[shard],
        settings.log / f"egress-{shard}.log",
        body=body,
        sockets=(rpc, fds),
        needs=(settings.run,),
        groups=() if ids.rootless else (ids.audit, ids.gateways_group),
    )


def name_servers(egress_settings: EgressSettings) -> list[tuple[str, int, str]]:
    """The servers that gateways ask: address, port, and the name of the certificate over TLS. Those that were configured, else the host's."""
    if egress_settings.name_servers:
        return [(one.address, one.port or (853 if one.name else 53), one.name) for one in egress_settings.name_servers]
    return [(address, 53, "") for address in _of_host()]


def _of_host() -> list[str]:
    try:
        lines = RESOLV_CONF.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found: list[str] = []
    for line in lines:
        words = line.split()
        if words[:1] == ["nameserver"] and len(words) > 1:
            try:
                found.append(str(ipaddress.ip_address(words[1].partition("%")[0])))
            except ValueError:
                continue
    return found[:MAX_NAME_SERVERS]


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def publish_trusted(settings: Settings) -> None:
    """Puts the authorities that upstreams may have where gateways and broker can read them; the files may be closed to their users.

    Raises `Unprocessable("ca_unusable")`.
    """
    texts: list[str] = []
    for name in settings.egress.trusted_ca_files:
        try:
            text = Path(name).read_text(encoding="ascii")
            ssl.create_default_context(cadata=text)
        except (OSError, ValueError, ssl.SSLError) as error:
            raise Unprocessable(
                "ca_unusable",
                f"{name} holds no authorities: {error}",
                "`trusted_ca_files` in [egress] names files in PEM.",
            ) from None
        texts.append(text)
    if texts:
        replace_file(settings.run / TRUSTED, "\n".join(texts).encode(), mode=0o644, durable=False)
    else:
        (settings.run / TRUSTED).unlink(missing_ok=True)


def _trusted(settings: Settings) -> tuple[Path, ...]:
    return (settings.run / TRUSTED,) if settings.egress.trusted_ca_files else ()


def _group(settings: Settings, gid: int) -> int | None:
    return None if settings.identity.rootless else gid
