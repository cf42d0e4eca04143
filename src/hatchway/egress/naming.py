"""Which name a connection is for: what our table has for its address; never what the client says, but where a rule takes that for it.

Each way by which a name gets into the table is held to the same bounds: new names carry something out, since what is connected to is resolved.
"""

from typing import TYPE_CHECKING

from hatchway.domain.policy.verdicts import Action
from hatchway.domain.policy.verdicts import Flow as Connection
from hatchway.egress import peeking
from hatchway.egress.peeking import Denied
from hatchway.egress.synthetic import is_synthetic

if TYPE_CHECKING:
    from hatchway.egress.flows import Flow
    from hatchway.egress.streams import TcpStream


async def name_of(flow: "Flow", client: "TcpStream") -> str:
    """The name that a connection is for; the address itself where a rule for addresses may know it. Raises `Denied`."""
    if not is_synthetic(flow.address):
        return await _rehomed(flow, client) if flow.gateway.rehomes else flow.address
    return flow.gateway.names.name_of(flow.address) or await _bound_again(flow, client)


async def _rehomed(flow: "Flow", client: "TcpStream") -> str:
    """The name that the ClientHello or `Host` says, where a rule takes it whatever address was connected to; the address itself otherwise."""
    gateway = flow.gateway
    if (
        gateway.policy.connect(Connection(address=flow.address, port=flow.port), gateway.now()).action
        is not Action.DENY
    ):
        return flow.address
    try:
        hello = await flow.hello(client)
        name = await peeking.host_in_clear(client) if hello is None else hello.server_name
    except (Denied, TimeoutError):
        return flow.address
    if name is None or not gateway.policy.rehomes(name, flow.port, gateway.now()):
        return flow.address
    gateway.bind(name)
    return name


async def _bound_again(flow: "Flow", client: "TcpStream") -> str:
    """A program may remember an address from before a restart of ours: if its name would get just this one, it is bound again."""
    gateway = flow.gateway
    hello = await flow.hello(client)
    name = None if hello is None else hello.server_name
    if (
        name is None
        or not gateway.names.is_home(name, flow.address)
        or gateway.policy.name(name, gateway.now()).action is Action.DENY
    ):
        raise Denied("dst_unbound", "no name was given this address here; the name has to be looked up first")
    gateway.bind(name)
    return name
