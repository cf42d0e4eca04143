"""The node role: puts the parts of one node together and runs them until it is asked to end."""

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from starlette.routing import Route

from hatchway.audit.client import AuditClient
from hatchway.domain import vmm_policy
from hatchway.domain.errors import HatchwayError
from hatchway.domain.host_limits import DEFAULTS, HostLimits
from hatchway.domain.ids import new_id
from hatchway.domain.shapes import Shape
from hatchway.domain.vmm_policy import VmmPolicy
from hatchway.node import scrape
from hatchway.node.activity import Uses
from hatchway.node.artifacts.fetching import Fetches
from hatchway.node.artifacts.keeper import Keeper
from hatchway.node.artifacts.spool import Spool
from hatchway.node.capacity import Capacity
from hatchway.node.context import Context
from hatchway.node.dataplane.app import make_app
from hatchway.node.dataplane.archives import Archives
from hatchway.node.dataplane.ports.names import DEFAULT_DOMAINS, PortNames
from hatchway.node.dataplane.server import DataPlaneServer
from hatchway.node.dataplane.tokens import TokenChecker
from hatchway.node.egress.gateways import Gateways
from hatchway.node.events import Events
from hatchway.node.exports import Exports
from hatchway.node.images.bake import Baker
from hatchway.node.images.store import Images
from hatchway.node.imports import Imports
from hatchway.node.sandboxes import Sandboxes
from hatchway.node.service import NodeService
from hatchway.node.sessions.sessions import Sessions
from hatchway.node.sessions.surroundings import Limits
from hatchway.node.snapshots import Snapshots
from hatchway.node.vmm import choice
from hatchway.node.vmm.launcher import LauncherClient
from hatchway.node.vmm.seam import VmmError
from hatchway.node.waking import Waker
from hatchway.wire import audit
from hatchway.wire.ballast import Ballast
from hatchway.wire.metrics import MetricsAccess, turn
from hatchway.wire.small_files import replace_file

KEEP_BALLAST_EVERY_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsConfig:
    """Listener for control processes on other hosts: files in PEM."""

    host: str
    port: int
    certificate: Path
    key: Path
    client_ca: Path


@dataclass(frozen=True)
class NodeConfig:
    """What the supervisor (or a unit file on a host of its own) tells a node."""

    folder: Path
    images: Path
    run_dir: Path
    ram_library: Path
    attach_url: str
    control_uids: frozenset[int]
    bake_default: bool = True
    limits: HostLimits = DEFAULTS
    port_domains: tuple[str, ...] = DEFAULT_DOMAINS
    """Domains under which the ports of sandboxes have names."""
    vmm: VmmPolicy = vmm_policy.DEFAULT
    metrics: MetricsAccess = field(default_factory=MetricsAccess)
    """Who may read /metrics."""
    shards: int = 0
    """How many gateway processes there are beside the node; with none sandboxes have no way out."""
    store: str | None = None
    """URL of the store that suspended sandboxes are kept in beside this node."""
    import_from: tuple[str, ...] = ()
    """Prefixes of addresses that archives may be fetched from, besides the store."""
    tls: TlsConfig | None = None


def run(
    config: NodeConfig,
    *,
    control: socket.socket,
    data: socket.socket,
    ready: Callable[[], None],
    alive: Callable[[], None] | None = None,
    data_tls: ssl.SSLContext | None = None,
) -> None:
    """Runs the node until SIGTERM; the sandboxes go on without it. `ready` is called when it serves, `alive` every second from then on."""
    asyncio.run(_run(config, control, data, ready, alive, data_tls))


async def _run(
    config: NodeConfig,
    control: socket.socket,
    data: socket.socket,
    ready: Callable[[], None],
    alive: Callable[[], None] | None,
    data_tls: ssl.SSLContext | None,
) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)

    events = Events()
    images = Images(config.images, config.folder / "templates")
    launcher = LauncherClient(config.run_dir / "launcher.sock")
    driver = await choice.make(
        config.vmm,
        launcher=launcher,
        run_dir=config.run_dir,
        folder=config.folder,
        ram_library=config.ram_library,
        limits=config.limits,
    )
    hello = await launcher.hello()
    network = hello.network
    root = config.folder / "sandboxes"
    root.mkdir(exist_ok=True, mode=0o700)
    kept = Limits(kept_per_sandbox=config.limits.kept_output_mib << 20)
    sessions = Sessions(config.folder / "sessions", on_status=events.session, limits=kept)
    sessions.load()
    baker = Baker(driver, launcher, config.folder / "baked", network=network)
    gateways = Gateways(config.run_dir, config.shards, launcher, network=network)
    gateways.on_asked, gateways.on_ask_ended = events.asked, events.ask_ended
    journal = AuditClient(config.run_dir / audit.SOCKET, "node") if config.shards else None
    if journal is not None:
        journal.start()
        gateways.record_drops(journal.record)
    context = Context(
        root=root,
        host_boot_id=_host_boot_id(),
        driver=driver,
        launcher=launcher,
        images=images,
        baker=baker,
        sessions=sessions,
        events=events,
        capacity=Capacity(config.limits, root, baker.page_cache_mib),
        ballast=Ballast(config.folder / "ballast", config.limits.ballast_mib << 20),
        gateways=gateways,
        drop=lambda sandbox_id: sandboxes.drop(sandbox_id),
        host_warnings=hello.warnings,
        network=network,
        keeper=None if config.store is None else Keeper(config.store, config.folder / "releases"),
    )
    sandboxes = Sandboxes(context, Snapshots(config.folder / "snapshots"))
    exports = Exports(context, sandboxes.snapshots, Spool(config.folder / "exports"))
    uploads = Spool(config.folder / "uploads")
    fetches = Fetches(uploads, store=config.store, allowed=config.import_from)
    imports = Imports(context, sandboxes, uploads, fetches)
    await asyncio.to_thread(_load_archives, exports, imports)
    await sandboxes.adopt_all()
    tokens, names = TokenChecker(), PortNames(config.port_domains)
    for sandbox in sandboxes.all():
        tokens.require_generation(sandbox.record.sandbox_id, sandbox.record.generation)
    uses, waker = Uses(), Waker(events, sandboxes.is_awake, sandboxes.is_asleep)
    service = NodeService(
        context,
        sandboxes,
        tokens,
        _node_id(config.folder),
        config.attach_url,
        names.url(config.attach_url),
        exports=exports,
        imports=imports,
        uses=uses,
        waker=waker,
    )
    servers = [await service.serve_unix(control, config.control_uids)]
    if config.tls is not None:
        tls = config.tls
        servers.append(await service.serve_tls(tls.host, tls.port, tls.certificate, tls.key, tls.client_ca))

    scraping = Route("/metrics", scrape.Metrics(context, sandboxes, sessions, config.metrics), methods=["GET"])
    archives = Archives(exports.spool, uploads, fetches)
    app = make_app(
        sessions,
        tokens,
        sandboxes,
        port_domains=config.port_domains,
        archives=archives,
        uses=uses,
        waker=waker,
        journal=journal,
        routes=[scraping],
    )
    dataplane = DataPlaneServer(app, [data], tls=data_tls)
    await dataplane.start()
    sweeping = loop.create_task(sessions.run_sweeper())
    if context.keeper is not None:
        context.keeper.start()
    clearing = [loop.create_task(spool.run_sweeper()) for spool in (exports.spool, imports.uploads)]
    turning = loop.create_task(turn(alive))
    holding = loop.create_task(_keep_ballast(context.ballast))
    baking = loop.create_task(_bake_default(context)) if config.bake_default else None
    ready()
    await ended.wait()

    for server in servers:
        server.close()
    for task in (sweeping, holding, turning, baking, *clearing):
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    waker.close()
    await fetches.close()
    await dataplane.stop()
    await context.baker.close()
    await sessions.close()
    await sandboxes.release()
    await gateways.close()
    if journal is not None:
        await journal.close()
    if context.keeper is not None:
        await context.keeper.close()


def _load_archives(exports: Exports, imports: Imports) -> None:
    exports.spool.load()
    imports.uploads.load()
    imports.clear()


async def _keep_ballast(ballast: Ballast) -> None:
    """Takes again what was given up, as soon as there is room."""
    while True:
        if not ballast.whole:
            await asyncio.to_thread(ballast.keep)
        await asyncio.sleep(KEEP_BALLAST_EVERY_S)


async def _bake_default(context: Context) -> None:
    """Makes the first creation as fast as every other: bakes `seed:latest` in the default shape."""
    try:
        release = context.images.resolve("seed:latest")
        await context.baker.baked(release, Shape())
    except (HatchwayError, VmmError, OSError) as error:
        log.warning("the default shape could not be baked yet: %s", error)


def _host_boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _node_id(folder: Path) -> str:
    """The node's identity: made once, kept in its folder."""
    file = folder / "identity.json"
    with contextlib.suppress(FileNotFoundError):
        return str(msgspec.json.decode(file.read_bytes())["node_id"])
    node_id = new_id()
    replace_file(file, msgspec.json.encode({"node_id": node_id}))
    return node_id
