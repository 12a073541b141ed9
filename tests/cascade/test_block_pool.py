"""The block pool never loses a block, never shares one that was not asked for, and evicts the oldest first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cascade.block_pool import BlockPool, PoolInvariantError

BLOCKS = 12


def test_allocates_every_block_once() -> None:
    pool = BlockPool(BLOCKS, 4)
    assert sorted(pool.allocate(BLOCKS)) == list(range(BLOCKS))
    assert pool.num_free == 0


def test_allocating_too_many_takes_nothing() -> None:
    pool = BlockPool(BLOCKS, 4)
    with pytest.raises(ValueError, match="13 blocks asked, 12 of 12 free"):
        pool.allocate(BLOCKS + 1)
    assert pool.num_free == BLOCKS


def test_shared_block_is_freed_with_its_last_reference() -> None:
    pool = BlockPool(BLOCKS, 4)
    table = pool.allocate(2)
    pool.acquire(table)
    pool.release(table)
    assert pool.num_free == BLOCKS - 2
    pool.release(table)
    assert pool.num_free == BLOCKS


def test_kept_blocks_are_evicted_least_recently_used_first_and_tail_before_head() -> None:
    pool = BlockPool(3, 4)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    chain = pool.allocate(2)
    other = pool.allocate(1)
    for block in chain + other:
        pool.keep(block)
    pool.release(chain)
    pool.release(other)
    pool.allocate(3)
    assert evicted == [chain[1], chain[0], other[0]]


def test_acquired_block_is_not_evicted() -> None:
    pool = BlockPool(2, 4)
    table = pool.allocate(2)
    pool.keep(table[0])
    pool.release(table)
    pool.acquire([table[0]])
    assert pool.allocate(1) == [table[1]]
    assert pool.num_free == 0


def test_release_without_reference_is_refused() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(PoolInvariantError, match="block 0 released"):
        pool.release([0])


def test_check_finds_a_leaked_block() -> None:
    pool = BlockPool(2, 4)
    pool.allocate(1)
    with pytest.raises(PoolInvariantError, match="reference counts differ"):
        pool.check([])


class PoolMachine(RuleBasedStateMachine):
    """Random allocation, sharing, indexing and release against a model of plain tables."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, 4)
        self.pool.on_evict = self.evict
        self.tables: list[list[int]] = []
        self.indexed: set[int] = set()

    def evict(self, block: int) -> None:
        assert all(block not in table for table in self.tables), "a referenced block was evicted"
        self.indexed.remove(block)

    @rule(count=st.integers(0, BLOCKS))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(ValueError, match="blocks asked"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert not set(blocks) & {b for table in self.tables for b in table}
        assert not set(blocks) & self.indexed
        self.tables.append(blocks)

    @rule(data=st.data())
    def share_prefix(self, data: st.DataObject) -> None:
        reachable = sorted({b for table in self.tables for b in table} | self.indexed)
        if reachable:
            blocks = data.draw(st.lists(st.sampled_from(reachable), unique=True, min_size=1))
            self.pool.acquire(blocks)
            self.tables.append(blocks)

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        blocks = sorted({b for table in self.tables for b in table})
        if blocks:
            block = data.draw(st.sampled_from(blocks))
            self.pool.keep(block)
            self.indexed.add(block)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.tables:
            self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def accounts_balance(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.num_free == BLOCKS - len({b for table in self.tables for b in table})
        assert self.pool.num_cached == len(self.indexed)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
