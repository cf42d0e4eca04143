"""What the API has besides sandboxes and sessions: snapshots, operations, pools, templates, keys; for blocking code. `arecords` has the same for asyncio."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from . import calls, poolcalls, tenancycalls
from .models import Key, NewKey, Operation, Pool, Snapshot, Template
from .transport import SyncDriver

T = TypeVar("T")


def all_of(driver: SyncDriver, listing: calls.Listing[T]) -> Iterator[T]:
    """Iterates over a list of the API, page by page."""
    cursor: str | None = None
    while True:
        page = driver.run(listing.page(cursor))
        yield from page.items
        cursor = page.cursor
        if cursor is None:
            return


class Snapshots:
    """The snapshots of the project."""

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver

    def get(self, snapshot_id: str) -> Snapshot:
        """Returns the snapshot with this id; raises `NotFound`."""
        return self._driver.run(calls.get_snapshot(snapshot_id))

    def list(self, *, sandbox: str | None = None, kind: str | None = None) -> Iterator[Snapshot]:
        """Iterates over the snapshots of this sandbox and kind, newest first, page by page."""
        return all_of(self._driver, calls.snapshots(sandbox, kind))

    def delete(self, snapshot_id: str) -> Snapshot:
        """Deletes a snapshot; it is `deleting` while its node is away."""
        return self._driver.run(calls.delete_snapshot(snapshot_id))


class Operations:
    """The records of lifecycle requests."""

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver

    def get(self, operation_id: str) -> Operation:
        """Returns the operation with this id; raises `NotFound`."""
        return self._driver.run(calls.get_operation(operation_id))

    def list(self) -> Iterator[Operation]:
        """Iterates over the operations of the project, page by page."""
        return all_of(self._driver, calls.operations())

    def wait(self, operation_id: str, *, timeout: float = 120.0) -> Operation:
        """Stays until it has succeeded; raises `OperationFailed`, or `WaitTimeout` after `timeout` seconds."""
        return self._driver.run(calls.wait_operation(operation_id, timeout_s=timeout))

    def cancel(self, operation_id: str) -> Operation:
        """Asks that it be given up."""
        return self._driver.run(calls.cancel_operation(operation_id))


class Pools:
    """Sandboxes that are made ahead, so that a creation has only to claim one."""

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver

    def put(
        self,
        name: str,
        template: str,
        size: int,
        *,
        vcpus: int | None = None,
        memory_mib: int | None = None,
        disk_mib: int | None = None,
    ) -> Pool:
        """Makes a pool of `size` sandboxes, or changes it; what is not given is as for a sandbox. Members that do not fit any more are replaced."""
        body = calls.compact(template=template, size=size, vcpus=vcpus, memory_mib=memory_mib, disk_mib=disk_mib)
        return self._driver.run(poolcalls.put_pool(name, body))

    def get(self, name: str) -> Pool:
        """Returns the pool with this name, and how full it is; raises `NotFound`."""
        return self._driver.run(poolcalls.get_pool(name))

    def list(self) -> Iterator[Pool]:
        """Iterates over the pools of the project."""
        return all_of(self._driver, poolcalls.pools())

    def delete(self, name: str) -> Pool:
        """Lets it run dry: it is gone when its last member is. What was claimed stays."""
        return self._driver.run(poolcalls.delete_pool(name))


class Templates:
    """What sandboxes can be made from."""

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver

    def list(self) -> Iterator[Template]:
        """Iterates over the releases that are there."""
        return all_of(self._driver, calls.templates())

    def get(self, reference: str) -> Template:
        """Returns the release behind `name`, `name:tag` or `name@sha256:…`; raises `NotFound`."""
        return self._driver.run(calls.get_template(reference))


class Keys:
    """The API keys of the project."""

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver

    def create(
        self,
        name: str,
        *,
        scopes: Sequence[str] | None = None,
        expires_in: float | None = None,
        project: str | None = None,
        e2b: bool = False,
    ) -> NewKey:
        """Makes a key; its secret is in the answer, once. It is valid for `expires_in` seconds, without it until it is revoked.

        With `project` it is one of that project, which needs the scope `installation`. `e2b`: in the form that SDKs of E2B send.
        """
        return self._driver.run(calls.create_key(calls.key_body(name, scopes, expires_in, project, e2b)))

    def list(self, project: str | None = None) -> Iterator[Key]:
        """Iterates over the keys, without their secrets: of the own project, or with the scope `installation` of any."""
        return all_of(self._driver, tenancycalls.keys_of(project))

    def get(self, key_id: str) -> Key:
        """Returns the key with this id, without its secret; raises `NotFound`."""
        return self._driver.run(calls.get_key(key_id))

    def own(self) -> Key:
        """Returns the key that asks, without its secret: its project, and what it may do."""
        return self._driver.run(calls.own_key())

    def rotate(self, key_id: str, *, overlap: float = 0.0) -> NewKey:
        """Makes a key in the place of another, which goes on for `overlap` seconds; the secret is in the answer, once."""
        return self._driver.run(tenancycalls.rotate_key(key_id, overlap))

    def delete(self, key_id: str) -> None:
        """Revokes a key: it stops working at once."""
        self._driver.run(calls.delete_key(key_id))
