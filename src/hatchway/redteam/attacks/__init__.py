"""The attacks, in tables by class. A table holds names, titles and scripts of the guest (the room's `guest` has what they call), and imports `attack` alone; the room's `runner` and `naive` call.

Ids are those of the catalogue (N link and network, D names, T TLS, H HTTP, A allowed services, C credentials, G gateway and policy, E escape), with a variation.
In a script, M is the attempt's marker and B the same as octets: it stands where nothing may arrive, never in what the policy allows.
"""

from hatchway.redteam.attacks import (
    channel,
    copies,
    escape,
    floods,
    gateway,
    http,
    http2,
    link,
    meanwhile,
    names,
    services,
    tls,
)
from hatchway.redteam.attacks.attack import CLASSES, CONDITIONS, Attack

__all__ = ["ATTACKS", "CLASSES", "CONDITIONS", "Attack", "chosen"]

ATTACKS: tuple[Attack, ...] = (
    *link.ATTACKS,
    *names.ATTACKS,
    *tls.ATTACKS,
    *http.ATTACKS,
    *http2.ATTACKS,
    *services.ATTACKS,
    *gateway.ATTACKS,
    *escape.ATTACKS,
    *meanwhile.ATTACKS,
    *copies.ATTACKS,
    *channel.ATTACKS,
    *floods.ATTACKS,
)


def chosen(only: str) -> tuple[Attack, ...]:
    """The attacks that a word of the command line means: ids, or beginnings of ids (H08, H), with commas between. All of them for an empty one."""
    words = {word.strip() for word in only.split(",") if word.strip()}
    begun = tuple(words - {one.id for one in ATTACKS})
    return tuple(one for one in ATTACKS if not words or one.id in words or one.id.startswith(begun))
