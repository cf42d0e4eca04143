"""Secrets that take time to be fetched, and what happens to their sources meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.vault_server import VaultServer as Server

from hatchway.broker import grants as all_grants
from hatchway.broker.config import BrokerConfig, VaultServer
from hatchway.broker.grants import Grants
from hatchway.broker.sources import Sources
from hatchway.broker.store import Store
from hatchway.domain.errors import Unavailable
from hatchway.wire.broker import Binding, Grant, Injection, Source, VaultPath

WITHIN_S = 30.0
OLD, NEW = b"c4n4ry-of-the-vault", b"c4n4ry-that-was-put-anew"
PATH = VaultPath(server="main", mount="secret", path="team/api", field="token")
SOURCE = Source(project="default", name="bot", hosts=("api.example",), version=1, vault=PATH)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    made.secrets["/secret/team/api"] = {"token": OLD.decode()}
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
def sources(server: Server, tmp_path: Path) -> Sources:
    token = tmp_path / "token"
    token.write_text("root-token")
    token.chmod(0o600)
    lent = VaultServer(
        address=server.address, paths={"*": ("secret",)}, hosts=("api.example",), token_file=token, within_s=600.0
    )
    nobody: frozenset[int] = frozenset()
    config = BrokerConfig(folder=tmp_path, control_uids=nobody, node_uids=nobody, egress_uids=(), vaults={"main": lent})
    return Sources(config, Store(tmp_path))


async def until_asked(server: Server) -> None:
    """The server has a request that it does not answer yet."""
    before = len(server.requests)
    async with asyncio.timeout(WITHIN_S):
        while len(server.requests) == before:
            await asyncio.sleep(0.01)


async def test_a_source_that_is_deleted_while_its_secret_is_fetched_lends_nothing(
    server: Server, sources: Sources
) -> None:
    assert (await sources.put(SOURCE)).available
    sources.keep_only(set())
    server.answers.clear()
    fetching = asyncio.ensure_future(sources.held("default", "bot"))
    await until_asked(server)
    assert await sources.delete("default", "bot") == ["bot"]
    server.answers.set()
    with pytest.raises(Unavailable, match="source_unknown"):
        await fetching
    assert sources.current("default", "bot") is None


async def test_a_source_that_is_put_anew_while_its_secret_is_fetched_lends_the_new_one(
    server: Server, sources: Sources
) -> None:
    assert (await sources.put(SOURCE)).available
    server.answers.clear()
    fetching = asyncio.ensure_future(sources.held("default", "bot", anew=True))
    await until_asked(server)
    newer = Source(project="default", name="bot", hosts=("api.example",), version=2, value=NEW)
    putting = asyncio.ensure_future(sources.put(newer))
    async with asyncio.timeout(WITHIN_S):
        while sources.current("default", "bot") is not None:
            await asyncio.sleep(0.01)
    server.answers.set()
    held = await fetching
    assert (held.version, held.secret.reveal()) == (2, NEW)
    assert (await putting).version == 2
    assert sources.current("default", "bot") is held


async def test_a_grant_does_not_wait_for_a_vault_that_is_silent(
    server: Server, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_grants, "LOOK_WITHIN_S", 0.2)
    stored = Source(project="default", name="stored", hosts=("api.example",), version=1, value=NEW)
    await sources.put(SOURCE)
    await sources.put(stored)
    sources.keep_only({("default", "stored")})
    server.answers.clear()
    bindings = tuple(
        Binding(
            credential_id=name,
            source=name,
            placeholder=f"hwp_{name}_placeholder_0123456789",
            inject=(Injection(where="header", name="authorization", format="Bearer {}"),),
            rules=("one",),
            hosts=("api.example",),
        )
        for name in ("bot", "stored")
    )
    grant = Grant(sandbox_id="sandbox1", project="default", generation=1, revision=1, bindings=bindings)
    grants = Grants(sources)
    async with asyncio.timeout(WITHIN_S):
        granted = await grants.put(grant)
    assert list(granted.unavailable) == ["bot"]
    assert "has not answered" in granted.unavailable["bot"]
    server.answers.set()
    assert (await grants.put(grant)).unavailable == {}


async def test_a_tidy_between_two_that_wait_for_a_secret_lets_it_be_fetched_by_one_alone(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn passes from one to the next: whoever comes in between waits for the same one."""
    await sources.put(SOURCE)
    loop, begun, go = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    fetching = most = 0
    came: list[asyncio.Future[object]] = []
    fetch = sources._fetch

    def between() -> None:
        sources.keep_only(set())
        came.append(asyncio.ensure_future(sources.held("default", "bot", anew=True)))

    async def counted(source: Source) -> object:
        nonlocal fetching, most
        fetching += 1
        most = max(most, fetching)
        begun.set()
        await go.wait()
        try:
            return await fetch(source)
        finally:
            fetching -= 1
            if not came:
                loop.call_soon(between)  # it runs when the turn is free, and before the next one has it

    monkeypatch.setattr(sources, "_fetch", counted)
    both = [asyncio.ensure_future(sources.held("default", "bot", anew=True)) for _ in range(2)]
    await begun.wait()
    await asyncio.sleep(0)
    go.set()
    async with asyncio.timeout(WITHIN_S):
        await asyncio.gather(*both)
        await asyncio.gather(*came)
    assert most == 1
    assert not sources._fetching, "nobody fetches, and nothing is kept for it"
