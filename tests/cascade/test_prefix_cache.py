"""A prefix hit is exactly the same model, salt and tokens, and never includes the last token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cascade.block_pool import BlockPool
from cascade.prefix_cache import ROOT, BlockHasher, PrefixCache

SIZE = 4


def cache_of(tokens: list[int], salt: str = "", num_blocks: int = 16) -> tuple[PrefixCache, list[int]]:
    """A cache that holds the full blocks of `tokens`, and their blocks, released."""
    cache = PrefixCache(BlockPool(num_blocks, SIZE), "model")
    hasher = cache.hasher(salt)
    blocks = cache.pool.allocate(len(tokens) // SIZE)
    parent = ROOT
    for index, block in enumerate(blocks):
        own = tokens[index * SIZE : (index + 1) * SIZE]
        digest = hasher.block_hash(parent, own)
        cache.insert(block, digest, parent, own)
        parent = digest
    cache.pool.release(blocks)
    return cache, blocks


def test_longest_prefix_is_found() -> None:
    cache, blocks = cache_of(list(range(12)))
    assert cache.match([*range(8), 99, 98, 97, 96, 95], cache.hasher("")).blocks == blocks[:2]


@pytest.mark.parametrize(("length", "hits"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_last_prompt_token_is_never_part_of_a_hit(length: int, hits: int) -> None:
    cache, _ = cache_of(list(range(12)))
    assert len(cache.match(list(range(length)), cache.hasher("")).blocks) == hits


def test_another_salt_misses() -> None:
    cache, _ = cache_of(list(range(8)), salt="tenant-a")
    assert cache.match(list(range(9)), cache.hasher("tenant-b")).blocks == []


def test_same_block_after_another_parent_misses() -> None:
    cache, _ = cache_of([1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.match([9, 9, 9, 9, 5, 6, 7, 8, 0], cache.hasher("")).blocks == []


def test_tokens_are_compared_on_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockHasher, "block_hash", lambda self, parent, tokens: b"collision")
    cache, _ = cache_of([1, 2, 3, 4])
    assert cache.match([5, 6, 7, 8, 9], cache.hasher("")).blocks == []


def test_duplicate_content_keeps_the_first_block() -> None:
    cache, blocks = cache_of([1, 2, 3, 4])
    second = cache.pool.allocate(1)
    cache.insert(second[0], cache.hasher("").block_hash(ROOT, [1, 2, 3, 4]), ROOT, [1, 2, 3, 4])
    cache.pool.release(second)
    assert cache.match([1, 2, 3, 4, 5], cache.hasher("")).blocks == blocks
    cache.check()


def test_evicted_block_is_no_longer_found() -> None:
    cache, _ = cache_of(list(range(8)), num_blocks=2)
    cache.pool.allocate(1)
    assert len(cache.match(list(range(9)), cache.hasher("")).blocks) == 1
    cache.check()


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(st.text(max_size=6), st.text(max_size=6), st.lists(st.integers(0, 2**40), max_size=6)),
    st.tuples(st.text(max_size=6), st.text(max_size=6), st.lists(st.integers(0, 2**40), max_size=6)),
)
def test_hash_is_injective_over_its_fields(a: tuple[str, str, list[int]], b: tuple[str, str, list[int]]) -> None:
    digests = [BlockHasher(fingerprint, salt).block_hash(ROOT, tokens) for fingerprint, salt, tokens in (a, b)]
    assert (digests[0] == digests[1]) == (a == b)
