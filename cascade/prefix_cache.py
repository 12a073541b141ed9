"""The L1 prefix cache: full blocks of verified tokens, found again by a chained hash.

The hash of a block covers everything that its K/V depends on and everyone who may see it: the model's
fingerprint, the tenant's salt, all earlier tokens (through the parent's hash) and its own tokens. Every field
is tagged and carries its length, so that no value of one field can pass for another. A hit is believed only
after the stored tokens have been compared.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from cascade.block_pool import BlockPool, PoolInvariantError

DIGEST_BYTES = 32
ROOT = bytes(DIGEST_BYTES)
"""Parent hash of a sequence's first block."""


def _field(tag: bytes, value: bytes) -> bytes:
    """A tagged field: tag length, tag, value length, value; unambiguous when concatenated."""
    return struct.pack("<I", len(tag)) + tag + struct.pack("<Q", len(value)) + value


class BlockHasher:
    """Hashes the blocks of one model's K/V under one salt."""

    def __init__(self, fingerprint: str, salt: str) -> None:
        base = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"stepwell-kv-1")
        base.update(_field(b"fingerprint", fingerprint.encode()))
        base.update(_field(b"salt", salt.encode()))
        self._base = base

    def block_hash(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The chained hash of a full block that follows the block (or ROOT) with hash `parent`."""
        state = self._base.copy()
        state.update(_field(b"parent", parent))
        state.update(_field(b"tokens", struct.pack(f"<{len(tokens)}q", *tokens)))
        return state.digest()


@dataclass(slots=True, frozen=True)
class _Entry:
    """What a cached block holds; `parent` and `tokens` are what a hit is checked against."""

    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class PrefixHit:
    """The longest cached prefix: its blocks in order and their hashes. Not yet acquired from the pool."""

    blocks: list[int]
    hashes: list[bytes]


class PrefixCache:
    """Index from chained hash to block, over one tier's pool. The pool decides what is evicted."""

    def __init__(self, pool: BlockPool, fingerprint: str) -> None:
        self.pool = pool
        self._fingerprint = fingerprint
        self._block_by_digest: dict[bytes, int] = {}
        self._entry_by_block: dict[int, _Entry] = {}
        pool.on_evict = self._forget

    def hasher(self, salt: str) -> BlockHasher:
        """The hasher for one tenant's sequences."""
        return BlockHasher(self._fingerprint, salt)

    def match(self, tokens: Sequence[int], hasher: BlockHasher) -> PrefixHit:
        """Find the longest run of cached full blocks at the start of `tokens`.

        The last token is never part of a hit: its logits are needed, so it is always recomputed.
        """
        size = self.pool.block_size
        blocks: list[int] = []
        hashes: list[bytes] = []
        parent = ROOT
        for start in range(0, (len(tokens) - 1) // size * size, size):
            own = tuple(tokens[start : start + size])
            digest = hasher.block_hash(parent, own)
            block = self._block_by_digest.get(digest)
            if block is None:
                break
            entry = self._entry_by_block[block]
            if entry.tokens != own or entry.parent != parent:
                break
            blocks.append(block)
            hashes.append(digest)
            parent = digest
        return PrefixHit(blocks, hashes)

    def insert(self, block: int, digest: bytes, parent: bytes, tokens: Sequence[int]) -> None:
        """Index a referenced block whose K/V has been computed for verified `tokens` (one full block).

        A second block with the same content is not indexed; it is freed with its sequence.
        """
        if digest in self._block_by_digest or block in self._entry_by_block:
            return
        self._block_by_digest[digest] = block
        self._entry_by_block[block] = _Entry(digest, parent, tuple(tokens))
        self.pool.keep(block)

    def _forget(self, block: int) -> None:
        entry = self._entry_by_block.pop(block)
        del self._block_by_digest[entry.digest]

    def check(self) -> None:
        """The index is a bijection over exactly the blocks that the pool counts as cached."""
        if len(self._block_by_digest) != len(self._entry_by_block):
            raise PoolInvariantError("prefix index and entries differ in number")
        for digest, block in self._block_by_digest.items():
            if self._entry_by_block[block].digest != digest:
                raise PoolInvariantError(f"block {block} is indexed under another block's hash")
        if len(self._entry_by_block) != self.pool.num_cached:
            raise PoolInvariantError(
                f"{len(self._entry_by_block)} blocks indexed, the pool counts {self.pool.num_cached}"
            )
