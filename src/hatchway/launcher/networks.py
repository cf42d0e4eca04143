"""Which VM has which network: kept from its start, or its adoption, until it is forgotten."""

from collections.abc import Callable
from functools import partial

from hatchway.launcher.errors import Refused
from hatchway.launcher.log import say
from hatchway.launcher.loop import Loop
from hatchway.launcher.network import Fetch, Lost, Network, Rules, Watch
from hatchway.launcher.ruleset import VERSION
from hatchway.wire.launcher import VmRecord

Answer = Callable[[Watch], None]
NEVER = -1
"""No state of rules has this number."""
_REMEDY = "stop the sandbox and start it again"


class _Attached:
    """The network of one VM, or why it has none."""

    def __init__(self, lack: str = "") -> None:
        self.watch: Watch | None = None
        self.lack = lack
        """Empty while there is one, or its shim was not heard yet."""
        self.waiting: list[Callable[[], None]] = []
        """Who waits until its shim was heard."""


class Networks:
    """The networks of all VMs that have a record. `changed` is told the new state of a VM's rules, after they were put back."""

    def __init__(self, loop: Loop, rules: Rules | None, changed: Callable[[str, int], None]) -> None:
        self._loop = loop
        self._rules = rules
        self._changed = changed
        self._attached: dict[str, _Attached] = {}

    @property
    def possible(self) -> bool:
        """Whether VMs can have a network here."""
        return self._rules is not None

    def add(self, record: VmRecord, network: Network | None) -> None:
        """A VM was started, with this network or without; it is this room's to close."""
        attached = self._attached[record.sandbox_id] = _Attached("" if network else "it was started without")
        if network is not None:
            self._guard(record, attached, network)

    def adopt(self, record: VmRecord, folder: int, *, alive: bool) -> None:
        """Takes the network of a VM over from its shim, by its socket in the VM's folder."""
        lack = "it was started without" if not record.network else "" if alive else "it ended"
        attached = self._attached[record.sandbox_id] = _Attached(lack)
        if not lack:
            Fetch(self._loop, folder, partial(self._fetched, record, attached))

    def forget(self, sandbox_id: str) -> None:
        """Closes what is held for a VM. Idempotent."""
        attached = self._attached.pop(sandbox_id, None)
        if attached is not None and attached.watch is not None:
            attached.watch.close()

    def use(self, sandbox_id: str, answer: Answer, refuse: Callable[[Refused], None]) -> None:
        """Calls `answer` with a VM's network, or `refuse`: at once, or when its shim was heard."""
        attached = self._attached.get(sandbox_id)
        if attached is None:
            refuse(Refused("unknown", "no VM of this id and generation lives"))
            return
        if attached.watch is None and not attached.lack:
            attached.waiting.append(lambda: self.use(sandbox_id, answer, refuse))
            return
        lack = attached.lack if attached.watch is None else attached.watch.lost
        if attached.watch is not None and not lack:
            try:
                answer(attached.watch)
                return
            except Lost as error:
                lack = str(error)
        refuse(Refused("no_network", f"the VM has no network: {lack}", _REMEDY))

    def _fetched(self, record: VmRecord, attached: _Attached, what: Network | str) -> None:
        if isinstance(what, Network):
            self._guard(record, attached, what)
        else:
            attached.lack = what
            say(f"a sandbox's network cannot be taken over: {what}", level="error", sandbox_id=record.sandbox_id)
        waiting, attached.waiting = attached.waiting, []
        for again in waiting:
            again()

    def _guard(self, record: VmRecord, attached: _Attached, network: Network) -> None:
        if self._rules is None or self._attached.get(record.sandbox_id) is not attached:
            attached.lack = "there is no network for VMs here any more"
            network.close()
            return
        changed = partial(self._changed, record.sandbox_id)
        state = record.rules if record.ruleset == VERSION else NEVER
        attached.watch = Watch(self._loop, network, state, self._rules, record.sandbox_id, changed)
