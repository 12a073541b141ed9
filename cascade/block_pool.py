"""The block pool: who references which K/V block of one tier. It counts; it never touches K/V itself.

A block is in exactly one of three states:
- referenced: `ref_count > 0`, in the table of at least one sequence;
- kept: unreferenced, but its content is indexed by the prefix cache; evicted least recently used first;
- free: unreferenced and without content worth keeping.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class PoolInvariantError(AssertionError):
    """The pool's bookkeeping contradicts itself or the sequences' tables. A bug, never a request's fault."""


class BlockPool:
    """Reference counts over `num_blocks` blocks of `block_size` token positions each.

    `on_evict(block)` is called before a kept block is handed out again, so that its index entry can go.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict: Callable[[int], None] | None = None
        self._ref_count = [0] * num_blocks
        # A stack: blocks that were touched before are handed out again before fresh pages of memory are.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._indexed: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: free and kept."""
        return len(self._free) + len(self._kept)

    @property
    def num_cached(self) -> int:
        """Blocks whose content the prefix cache indexes, referenced or not."""
        return len(self._indexed)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` positions."""
        return -(-tokens // self.block_size)

    def is_kept(self, block: int) -> bool:
        """True when acquiring this block takes it out of what `num_free` counts."""
        return block in self._kept

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, each with one reference; free ones first, then the least recently used kept.

        Raises ValueError when there are fewer: the caller asks `num_free` first.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked, {self.num_free} of {self.num_blocks} free")
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._kept.popitem(last=False)
                self._indexed.discard(block)
                if self.on_evict is not None:
                    self.on_evict(block)
            self._ref_count[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block of a prefix hit (referenced or kept)."""
        for block in blocks:
            if self._ref_count[block] == 0:
                if block not in self._kept:
                    raise PoolInvariantError(f"block {block} is free and cannot be shared")
                del self._kept[block]
            self._ref_count[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each block of a table.

        Last block first: of one chain the tail is evicted before the head, which more prompts share.
        """
        for block in reversed(blocks):
            if self._ref_count[block] <= 0:
                raise PoolInvariantError(f"block {block} released without a reference")
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                if block in self._indexed:
                    self._kept[block] = None
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """Mark a referenced block as indexed: once released it is kept instead of freed."""
        if self._ref_count[block] <= 0:
            raise PoolInvariantError(f"block {block} is indexed without a reference")
        self._indexed.add(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare every count with the block tables of all live sequences; raises PoolInvariantError."""
        expected = [0] * self.num_blocks
        for table in tables:
            if len(set(table)) != len(table):
                raise PoolInvariantError(f"a table holds a block twice: {list(table)}")
            for block in table:
                expected[block] += 1
        if expected != self._ref_count:
            wrong = {b: (n, e) for b, (n, e) in enumerate(zip(self._ref_count, expected, strict=True)) if n != e}
            raise PoolInvariantError(f"reference counts differ from tables (block: (counted, expected)): {wrong}")
        unreferenced = {block for block, count in enumerate(expected) if count == 0}
        free = set(self._free)
        if len(free) != len(self._free) or free & self._kept.keys() or free | self._kept.keys() != unreferenced:
            raise PoolInvariantError(
                f"{len(unreferenced)} blocks unreferenced, but {len(self._free)} free and {len(self._kept)} kept"
            )
        if not self._kept.keys() <= self._indexed or free & self._indexed:
            raise PoolInvariantError("kept blocks and the index disagree")
