"""Salts: one for each tenant and its own salts, the same at every gateway."""

import itertools

from coordinator.protocol.cache_salt import SALT_CHARS, CacheSalts
from coordinator.protocol.prefixes import BLOCK_TOKENS, prefix_hashes

SECRET = "a-shared-secret-of-the-test"


def test_every_gateway_makes_the_same_salts() -> None:
    one, two = CacheSalts(SECRET), CacheSalts(SECRET)
    for tenant, own in itertools.product(("acme", "größer"), (None, "", "mine", "\ud800")):
        salt = one.of(tenant, own)
        assert salt is not None
        assert salt == two.of(tenant, own)
        assert len(salt) == SALT_CHARS
        assert tenant not in salt


def test_salts_differ_by_tenant_by_own_salt_and_by_secret() -> None:
    tenants = ("a", "ab", "a\0b", "1", "1\0")
    salts = [
        CacheSalts(secret).of(tenant, own)
        for secret, tenant, own in itertools.product(
            (SECRET, SECRET + "x"), tenants, (None, "b", "\0b", "bc")
        )
    ]
    assert len(set(salts)) == len(salts)


def test_without_a_tenant_the_salt_is_the_client_s() -> None:
    assert CacheSalts(SECRET).of("", None) is None
    assert CacheSalts(SECRET).of("", "mine") == "mine"


def test_prompts_with_different_salts_share_no_block() -> None:
    prompt = range(3 * BLOCK_TOKENS)
    plain, one, two = (set(prefix_hashes(prompt, salt)) for salt in (None, "one", "two"))
    assert len(plain) == len(one) == len(two) == 3
    assert not plain & one | one & two | plain & two
    assert prefix_hashes(prompt, "") == prefix_hashes(prompt)
    assert prefix_hashes(prompt, "one")[:2] == prefix_hashes(prompt[: 2 * BLOCK_TOKENS], "one")
