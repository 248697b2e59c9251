"""The pool of KV blocks: who holds which, what is in them, and which to reuse for a prompt seen before.

A block is `block_size` tokens of every KV-owning layer. Blocks are reference counted; a full block whose step has
run can be made known by its content, and then serves every later request that starts with the same tokens. A block
nobody holds keeps its content until its space is needed: unknown blocks go first, then the least recently used.

    tokens   [0..63] [64..127] [128..191]        block ids are indices 1..num_blocks-1; block 0, the null block,
    block       7       3         9               is what padding points at and is never handed out
    node        1       2         3               a node names one content: these tokens after that parent, salted
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from paraflash.engine.messages import Int32


class Content(NamedTuple):
    """What identifies a full block. Found by hash and compared in full, so two contents never share a block.

    `parent` is the node of the block before (0 at the start). Nodes are numbered anew each time a content enters the
    cache and never reused, so equal parents mean equal tokens all the way down.
    """

    parent: int
    salt: str | None
    tokens: bytes


class Prefix(NamedTuple):
    """Leading full blocks found in the cache, in order, and the node of the last (0 if there is none)."""

    block_ids: list[int]
    node: int


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int = 64):
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; at least 2 are needed, of which block 0 is never handed out")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # next to be taken first
        self._contents: list[Content | None] = [None] * num_blocks
        self._known: dict[Content, tuple[int, int]] = {}  # -> block id, node
        self._last_node = 0

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, those with a reusable content included."""
        return len(self._free)

    def references(self, block_id: int) -> int:
        return self._refs[block_id]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks for writing; what they held is forgotten. Raises ValueError if fewer are free."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks are wanted, {self.num_free} of {self.capacity} are free")
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            content = self._contents[block]
            if content is not None:
                del self._known[content]
                self._contents[block] = None
            self._refs[block] = 1
            taken.append(block)
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Adds a holder to blocks that `find` returned."""
        for block in block_ids:
            if self._contents[block] is None:
                raise ValueError(f"block {block} has no known content and cannot be shared")
            self._refs[block] += 1
            self._free.pop(block, None)

    def free(self, block_ids: Sequence[int]) -> None:
        """Removes one holder from each block of a block table, given in table order.

        The tail of a table is reused before its head: a block is of no use to anyone without those before it.
        """
        for block in reversed(block_ids):
            if not 0 < block < self.num_blocks or self._refs[block] == 0:
                raise ValueError(f"block {block} is not held by anyone and cannot be freed")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._contents[block] is None:
                    self._free.move_to_end(block, last=False)

    def find(self, tokens: Int32, salt: str | None, max_blocks: int) -> Prefix:
        """The longest run of known blocks that `tokens` starts with, at most `max_blocks`. Takes no reference."""
        found, node = [], 0
        for i in range(min(max_blocks, len(tokens) // self.block_size)):
            known = self._known.get(self._content(tokens, i, node, salt))
            if known is None:
                break
            block, node = known
            found.append(block)
        return Prefix(found, node)

    def register(self, block_id: int, tokens: Int32, index: int, parent: int, salt: str | None) -> int:
        """Makes a full, computed block known: block `index` of the sequence `tokens`, after node `parent`.

        Returns its node. If the content is known already (two requests computed it at once), that node is returned
        and the block stays private to its holder.
        """
        if self._refs[block_id] == 0 or self._contents[block_id] is not None:
            raise ValueError(f"block {block_id} is free or registered already")
        if (index + 1) * self.block_size > len(tokens):
            raise ValueError(f"block {index} of a sequence of {len(tokens)} tokens is not full")
        content = self._content(tokens, index, parent, salt)
        if content not in self._known:
            self._last_node += 1
            self._known[content] = (block_id, self._last_node)
            self._contents[block_id] = content
        return self._known[content][1]

    def _content(self, tokens: Int32, index: int, parent: int, salt: str | None) -> Content:
        start = index * self.block_size
        return Content(parent, salt, tokens[start : start + self.block_size].tobytes())
