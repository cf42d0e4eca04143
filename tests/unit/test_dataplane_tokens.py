"""Who is let in, and whose streams are ended."""

import asyncio
import contextlib
import time
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hatchway.domain.errors import Forbidden, Unauthenticated, Unavailable
from hatchway.node.dataplane.limits import PlaneLimits
from hatchway.node.dataplane.plane import Plane
from hatchway.node.dataplane.tokens import TokenChecker, may_use_sandbox, may_use_scope, may_use_session
from hatchway.wire.node import Configure, TokenKey
from hatchway.wire.tokens import Claims, Signer

SANDBOX, SESSION = "a" * 20, "s" * 20
KEY = Ed25519PrivateKey.generate()


def configure(checker: TokenChecker, *revoked: str, key_id: str = "k", **more: Any) -> None:
    raw = KEY.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    checker.configure(Configure(token_keys=(TokenKey(key_id=key_id, public=raw),), revoked=revoked, **more))


def token(generation: int = 1, session_id: str | None = SESSION, key_id: str = "") -> str:
    return Signer(KEY, "k").issue(
        project="p", sandbox_id=SANDBOX, generation=generation, ttl_s=60, session_id=session_id, key_id=key_id
    )[0]


def code_of(checker: TokenChecker, authorization: str | None) -> str:
    with pytest.raises(Unauthenticated) as caught:
        checker.check(authorization)
    return caught.value.code


def test_before_the_first_configuration_nobody_is_let_in() -> None:
    assert code_of(TokenChecker(), f"Bearer {token()}") == "token_invalid"


def test_a_valid_token_says_what_it_is_for() -> None:
    checker = TokenChecker()
    configure(checker)
    claims = checker.check(f"bearer  {token()} ")
    assert (claims.sandbox_id, claims.session_id, claims.project, claims.generation) == (SANDBOX, SESSION, "p", 1)
    may_use_session(claims, SESSION)
    may_use_sandbox(claims, SANDBOX, "p")
    with pytest.raises(Forbidden, match="wrong_session"):
        may_use_session(claims, "t" * 20)
    with pytest.raises(Forbidden, match="wrong_sandbox"):
        may_use_sandbox(claims, SANDBOX, "q")
    with pytest.raises(Forbidden, match="wrong_sandbox"):
        may_use_sandbox(claims, "b" * 20, "p")


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", "Basic eA==", "Token x"])
def test_no_token(authorization: str | None) -> None:
    checker = TokenChecker()
    configure(checker)
    assert code_of(checker, authorization) == "token_missing"


def test_a_key_that_was_replaced_is_not_a_key_any_more() -> None:
    checker = TokenChecker()
    configure(checker)
    checker.check(f"Bearer {token()}")
    configure(checker, key_id="other")
    assert code_of(checker, f"Bearer {token()}") == "token_invalid"


def test_revocation_tells_once_and_holds() -> None:
    checker = TokenChecker()
    configure(checker)
    one, two = token(), token()
    ids = [checker.check(f"Bearer {each}").token_id for each in (one, two)]
    told: list[int] = []
    checker.on_revoked(lambda: told.append(1))
    configure(checker, ids[0])
    configure(checker, ids[0])
    assert len(told) == 1
    checker.check(f"Bearer {two}")
    configure(checker, *ids)
    assert len(told) == 2
    assert code_of(checker, f"Bearer {one}") == code_of(checker, f"Bearer {two}") == "token_revoked"


def test_tokens_end_with_the_key_that_they_go_back_to() -> None:
    checker = TokenChecker()
    configure(checker)
    ours, others, old = token(key_id="ours"), token(key_id="others"), token()
    configure(checker, revoked_keys=("ours", ""))
    assert code_of(checker, f"Bearer {ours}") == "token_revoked"
    for one in (others, old):
        checker.check(f"Bearer {one}")


def test_the_older_tokens_of_a_sandbox_end_and_newer_ones_do_not() -> None:
    checker = TokenChecker()
    configure(checker)
    older = token()
    cutoff = time.time()
    configure(checker, cutoffs={SANDBOX: cutoff})
    assert code_of(checker, f"Bearer {older}") == "token_revoked"
    while time.time() <= cutoff:
        pass
    checker.check(f"Bearer {token()}")
    configure(checker, cutoffs={"b" * 20: time.time() + 60})
    checker.check(f"Bearer {older}")


def test_an_older_generation_is_refused() -> None:
    checker = TokenChecker()
    configure(checker)
    checker.require_generation(SANDBOX, 3)
    assert code_of(checker, f"Bearer {token(2)}") == "token_superseded"
    checker.check(f"Bearer {token(3)}")
    checker.require_generation(SANDBOX, 0)
    checker.check(f"Bearer {token(2)}")


def test_a_newer_generation_is_told_once() -> None:
    checker = TokenChecker()
    told: list[tuple[str, int]] = []
    checker.on_generation(lambda sandbox_id, generation: told.append((sandbox_id, generation)))
    for generation in (2, 2, 3, 0):
        checker.require_generation(SANDBOX, generation)
    assert told == [(SANDBOX, 2), (SANDBOX, 3)]


def test_a_token_of_a_session_has_no_scope_of_its_sandbox() -> None:
    checker = TokenChecker()
    configure(checker)
    claims = checker.check(f"Bearer {token()}")
    for scope in ("sessions", "files", "ports"):
        with pytest.raises(Forbidden, match="wrong_scope"):
            may_use_scope(claims, scope)
    of_sandbox = checker.check(f"Bearer {token(session_id=None)}")
    may_use_scope(of_sandbox, "sessions")
    with pytest.raises(Forbidden, match="wrong_scope"):
        may_use_scope(of_sandbox, "ports")


async def test_what_was_opened_ends_with_the_right_to_it() -> None:
    checker = TokenChecker()
    configure(checker)
    plane = Plane(cast(Any, None), checker, cast(Any, None), PlaneLimits())
    told: list[tuple[str, str]] = []

    def claims(name: str, *, sandbox_id: str = SANDBOX, left_s: float = 60) -> Claims:
        return Claims(
            token_id=name,
            project="p",
            sandbox_id=sandbox_id,
            session_id=None,
            scopes=frozenset(),
            generation=1,
            expires_at=time.time() + left_s,
        )

    with contextlib.ExitStack() as stack:
        ended = asyncio.Event()
        for one in (claims("revoked"), claims("old"), claims("other", sandbox_id="b" * 20)):
            stack.enter_context(plane.opened(one, lambda why, name=one.token_id: told.append((name, why))))  # type: ignore[misc]
        stack.enter_context(plane.opened(claims("short", left_s=0.01), lambda _: ended.set()))
        configure(checker, "revoked")
        checker.require_generation(SANDBOX, 2)
        async with asyncio.timeout(20):
            await ended.wait()
        plane.close()
        assert told == [("revoked", "revoked"), ("old", "superseded"), ("other", "shutdown")]
    assert not plane.streams
    with pytest.raises(Unavailable, match="closing"), plane.opened(claims("late"), ended.set):  # type: ignore[arg-type]
        pass
