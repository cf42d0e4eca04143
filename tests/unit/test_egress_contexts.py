"""Contexts of TLS towards sites: what takes long and holds up all handshakes of a shard is done once, however many connections begin together."""

import asyncio
import ssl

from hatchway.domain.policy.terms import Terms
from hatchway.domain.policy.verdicts import Action, Verdict
from hatchway.egress.http.seam import FlowError
from hatchway.egress.upstream import Dialler, OutConfig, Target


class Counting(Dialler):
    """Counts the contexts that it makes."""

    made = 0

    def _make_context(self, target: Target, alpn: tuple[str, ...]) -> ssl.SSLContext:
        self.made += 1
        return super()._make_context(target, alpn)


def target(*authorities: str) -> Target:
    return Target(
        host="site.example",
        port=443,
        tls=True,
        terms=Terms(upstream_ca=authorities),
        judge=lambda *_: Verdict(action=Action.ALLOW),
    )


async def test_connections_that_begin_together_share_what_they_trust() -> None:
    dialler = Counting(OutConfig())
    contexts = await asyncio.gather(*(dialler._context(target(), ("http/1.1",)) for _ in range(20)))
    assert dialler.made == 1
    assert len(set(contexts)) == 1
    assert await dialler._context(target(), ("http/1.1",)) is contexts[0]
    assert await dialler._context(target(), ("h2",)) is not contexts[0]
    assert dialler.made == 2


async def test_one_that_gives_up_takes_it_from_nobody() -> None:
    dialler = Counting(OutConfig())
    first, second = (asyncio.create_task(dialler._context(target(), ())) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert isinstance(await second, ssl.SSLContext)
    assert dialler.made == 1


async def test_what_cannot_be_made_is_told_to_all_and_tried_again() -> None:
    dialler = Counting(OutConfig())
    for made in (1, 2):
        told = await asyncio.gather(*(dialler._context(target("no PEM"), ()) for _ in range(3)), return_exceptions=True)
        assert [type(one) for one in told] == [FlowError] * 3
        assert dialler.made == made
