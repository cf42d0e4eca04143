"""Credentials, for blocking code: `Hatchway.credentials`. `acredentials` has the same for asyncio."""

from collections.abc import Iterator, Mapping, Sequence

from . import credentialcalls
from .models import Credential, MasterKey
from .records import all_of
from .transport import SyncDriver


class Credentials:
    """Secrets for the requests of sandboxes; no sandbox ever has one. All of it needs a key with the scope `admin`."""

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver

    def put(
        self,
        name: str,
        hosts: Sequence[str],
        *,
        value: str | None = None,
        variable: str | None = None,
        file: str | None = None,
        vault: Mapping[str, str] | None = None,
    ) -> Credential:
        """Makes a credential or changes one. It is never sent to another host than `hosts`, whatever a policy says.

        Exactly one source is given: the `value` itself, which the broker keeps encrypted; a `variable` or a `file` of the broker, one that
        its configuration lists; or `vault` with `server`, `mount`, `path` and `field`. Raises `Unprocessable` for a value or hosts that
        cannot be used, `Forbidden("not_lent")`, and `Unavailable("broker_unavailable")`.
        """
        body = credentialcalls.credential_body(hosts, value, variable, file, vault)
        return self._driver.run(credentialcalls.put_credential(name, body))

    def get(self, name: str, *, check: bool = False) -> Credential:
        """Looks a credential up, without its value; with `check` also whether the value can be had now."""
        return self._driver.run(credentialcalls.get_credential(name, check=check))

    def list(self) -> Iterator[Credential]:
        """Iterates over the credentials of the project, without their values."""
        return all_of(self._driver, credentialcalls.credentials())

    def delete(self, name: str) -> None:
        """Forgets a credential; connections that use it are cut."""
        self._driver.run(credentialcalls.delete_credential(name))

    def rotate_key(self) -> MasterKey:
        """Makes a new master key and seals all stored values of the installation with it. Needs a key with the scope `installation`.

        Raises `Conflict("master_key_foreign")` where the operator keeps the master key.
        """
        return self._driver.run(credentialcalls.rotate_master_key())
