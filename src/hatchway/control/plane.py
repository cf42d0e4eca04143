"""The control plane's parts, put together: what every handler gets."""

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hatchway.control import archive_keys, metrics
from hatchway.control.announcing import Announcing
from hatchway.control.approving import Approving
from hatchway.control.auditing import Auditing
from hatchway.control.auth import Authenticator
from hatchway.control.broker import BrokerLink
from hatchway.control.claims import Claims
from hatchway.control.config import ControlConfig
from hatchway.control.credentialkeeper import CredentialKeeper
from hatchway.control.engine import Engine
from hatchway.control.follower import Follower
from hatchway.control.hearing import Hearing
from hatchway.control.lifetimes import Lifetimes
from hatchway.control.nodes import NodeLink, Nodes
from hatchway.control.policykeeper import PolicyKeeper
from hatchway.control.poolkeeper import PoolKeeper
from hatchway.control.reconciler import Reconciler
from hatchway.control.removal import Removal
from hatchway.control.views import Condition
from hatchway.control.wakes import Wakes
from hatchway.control.webhooks import Webhook
from hatchway.domain.ids import new_id
from hatchway.storage import keys, policies, settings, tokens
from hatchway.storage.database import Connection, Database
from hatchway.storage.rows import SandboxRow
from hatchway.wire.node import Configure, TokenKey
from hatchway.wire.tokens import Signer

TOKEN_KEY = "token_key"

log = logging.getLogger(__name__)


@dataclass
class Plane:
    """One control plane. Made by `open_plane`, ended by `close`."""

    config: ControlConfig
    database: Database
    auth: Authenticator
    nodes: Nodes
    engine: Engine
    reconciler: Reconciler
    lifetimes: Lifetimes
    wakes: Wakes
    pools: PoolKeeper
    policies: PolicyKeeper
    credentials: CredentialKeeper
    claims: Claims
    follower: Follower
    signer: Signer
    removal: Removal
    hearing: Hearing
    audit: Auditing
    broker: BrokerLink
    approving: Approving
    announcing: Announcing
    requests: int = 0
    """How many requests are in hand, event streams among them."""
    event_streams: int = 0
    """How many event streams are open."""
    requests_of: Counter[str] = field(default_factory=Counter)
    """Requests in hand by project."""
    event_streams_of: Counter[str] = field(default_factory=Counter)
    """Open event streams by project."""
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process is asked to end: open streams close then."""

    async def close(self) -> None:
        """Ends everything of ours; sandboxes and nodes go on."""
        self.ending.set()
        await self.pools.close()
        await self.policies.close()
        await self.credentials.close()
        await self.lifetimes.close()
        await self.wakes.close()
        await self.reconciler.close()
        await self.removal.close()
        await self.engine.close()
        await self.follower.close()
        await self.hearing.close()
        await self.announcing.close()
        await self.approving.close()
        await self.audit.close()
        await self.claims.close()
        await self.nodes.close()
        await self.auth.flush()
        await self.database.close()

    def conditions(self, row: SandboxRow) -> tuple[Condition, ...]:
        """What holds of a sandbox besides its state, as of now."""
        found: list[Condition] = []
        if not self.nodes.is_connected(row.node_id):
            link = self.nodes.find(row.node_id)
            since = f" for {time.time() - link.lost_at:.0f} s" if link is not None and link.lost_at else ""
            found.append(
                Condition(
                    type="node_unreachable",
                    message=f"The node {row.node_id} has not been reachable{since}; the state is the last that is known.",
                )
            )
        if self.reconciler.is_foreign(row):
            found.append(
                Condition(
                    type="foreign_generation",
                    message="Its node holds a newer generation of this sandbox than the database: another control plane moved it.",
                )
            )
        for code, message in sorted((row.policy_conditions or {}).items()):
            found.append(Condition(type=code, message=message))
        if row.state in policies.LIVE and row.policy_applied != row.policy_revision:
            found.append(
                Condition(
                    type="policy_pending",
                    message=f"Its node has not said yet that revision {row.policy_revision} of its policy holds.",
                )
            )
        return tuple(found)

    def place(self, isolation: str | None, candidates: list[NodeLink]) -> NodeLink | None:
        """Chooses the node of a new sandbox: the first connected one that gives the isolation that is required."""
        for link in candidates:
            if link.info is not None and isolation in (None, link.info.isolation):
                return link
        return None


def give_back(places: Counter[str], project: str) -> None:
    """One of a project's places is free again; a project without any is forgotten."""
    places[project] -= 1
    if places[project] <= 0:
        del places[project]


async def open_plane(config: ControlConfig) -> Plane:
    """Opens the database, takes up unfinished operations, begins to connect to the nodes. Raises what `Database.open` raises."""
    controller = new_id()
    database = await Database.open(
        config.database,
        password=config.database_password,
        controller=controller,
        ballast=config.ballast_mib << 20,
    )
    database.on_transaction = metrics.transaction
    try:
        signer, public = await database.write(_signer)
        await database.write(archive_keys.ensure)
        await database.read(archive_keys.trusted, config.trusted_archive_keys)  # a mistake in it is told now

        async def configure() -> Configure:
            void = await database.read(tokens.revocations)
            return Configure(
                token_keys=(TokenKey(key_id=signer.key_id, public=public),),
                revoked=void.tokens,
                revoked_keys=void.keys,
                cutoffs=void.cutoffs,
                archive_keys=await database.read(archive_keys.trusted, config.trusted_archive_keys),
            )

        auth = Authenticator(database)
        nodes = Nodes(config.nodes, configure)
        claims = Claims(database, controller, lease_s=config.lease_s, bound_s=config.operation_bound_s)
        follower = Follower(database)
        engine = Engine(
            database, nodes, claims, concurrency=config.max_concurrent_operations, bound_s=config.operation_bound_s
        )
        reconciler = Reconciler(
            database,
            nodes,
            engine,
            auth,
            claims,
            every_s=config.reconcile_every_s,
            deleted_kept_s=config.deleted_kept_s,
        )
        await database.write(keys.ensure_project, keys.DEFAULT_PROJECT)
        claims.nodes = lambda: [link.node_id for link in nodes.ready() if link.node_id is not None]
        claims.on_claimed = engine.submit
        claims.on_lapsed = engine.drop_all
        broker = BrokerLink(config.broker_socket, config.broker_uid)
        removal = Removal(database, nodes, engine, broker)
        keeper = PolicyKeeper(database, nodes)
        engine.on_behind = keeper.look
        reconciler.on_compared = keeper.look
        hearing = Hearing(engine, reconciler, auth, nodes, removal, keeper)
        follower.listeners.append(hearing.hear)
        claims.on_gained.append(hearing.gained)
        await follower.start()
        await claims.start()
        auditing = Auditing(database, claims, config.audit_socket)
        await auditing.start()
        wakes = Wakes(database, engine)
        reconciler.on_wake = wakes.wanted
        approving = Approving(database, nodes)
        reconciler.on_asked, reconciler.on_ask_ended = approving.asked, approving.ended
        engine.consent = approving.consent
        follower.listeners.append(approving.hear)
        await approving.start()
        hook = None if config.webhook_url is None else Webhook(config.webhook_url, config.webhook_secret)
        announcing = Announcing(database, claims, hook)
        await announcing.start()
        await reconciler.start()
        engine.start()
        await removal.start()
        nodes.start()
        lifetimes = Lifetimes(database, nodes, engine)
        lifetimes.start()
        pools = PoolKeeper(database, nodes, engine)
        pools.start()
        keeper.start()
        credential_keeper = CredentialKeeper(database, broker)
        credential_keeper.start()
    except BaseException:
        await database.close()
        raise
    return Plane(
        config,
        database,
        auth,
        nodes,
        engine,
        reconciler,
        lifetimes,
        wakes,
        pools,
        keeper,
        credential_keeper,
        claims,
        follower,
        signer,
        removal,
        hearing,
        auditing,
        broker,
        approving,
        announcing,
    )


def _signer(connection: Connection) -> tuple[Signer, bytes]:
    """The installation's signing key; made the first time. It lies in the database, which only we can read."""
    stored = settings.get(connection, TOKEN_KEY)
    if stored is None:
        stored = {"id": new_id(), "private": Ed25519PrivateKey.generate().private_bytes_raw().hex()}
        settings.put(connection, TOKEN_KEY, stored)
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(stored["private"]))
    return Signer(key, stored["id"]), key.public_key().public_bytes_raw()
