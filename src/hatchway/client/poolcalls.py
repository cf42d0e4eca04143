"""Pools as flows: which request, and what the answer means. No I/O."""

from collections.abc import Mapping

from .calls import Listing, either, exchange, segment
from .models import Pool
from .steps import Flow, Request


def pools() -> Listing[Pool]:
    """The pools of the project."""
    return Listing("/v1/pools", "pools", Pool)


def get_pool(name: str) -> Flow[Pool]:
    """Asks for one pool."""
    reply = yield from exchange(Request("GET", f"/v1/pools/{segment(name)}"))
    return either(reply.body, "pool", Pool)


def put_pool(name: str, body: Mapping[str, object]) -> Flow[Pool]:
    """Makes a pool, or changes it."""
    reply = yield from exchange(Request("PUT", f"/v1/pools/{segment(name)}", json=body))
    return either(reply.body, "pool", Pool)


def delete_pool(name: str) -> Flow[Pool]:
    """Lets a pool run dry."""
    reply = yield from exchange(Request("DELETE", f"/v1/pools/{segment(name)}"))
    return either(reply.body, "pool", Pool)
