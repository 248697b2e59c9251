"""The block pool: whoever shares a block finds in it what it is named for, and every block comes back."""

from collections import Counter
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paraflash.engine.blocks import BlockPool, Content

SIZE = 4


def ids(*tokens):
    return np.array(tokens, np.int32)


class Holder:
    """A sequence as the scheduler treats one: shared prefix, own blocks behind it, full ones registered."""

    def __init__(self, pool, memory, tokens, salt):
        self.pool, self.memory, self.salt, self.tokens = pool, memory, salt, list(tokens)
        found = pool.find(ids(*tokens), salt, (len(tokens) - 1) // SIZE)
        pool.share(found.block_ids)
        self.blocks, self.node, self.known = list(found.block_ids), found.node, len(found.block_ids)
        for i, block in enumerate(self.blocks):
            assert memory[block] == (salt, tuple(tokens[: (i + 1) * SIZE])), "a shared block has another content"
        self.blocks += pool.allocate(pool.blocks_for(len(tokens)) - len(self.blocks))
        self.write(self.known)

    def write(self, first):
        for i in range(first, len(self.blocks)):
            self.memory[self.blocks[i]] = (self.salt, tuple(self.tokens[: (i + 1) * SIZE]))

    def append(self, token):
        if len(self.tokens) == len(self.blocks) * SIZE:
            self.blocks += self.pool.allocate(1)
        self.tokens.append(token)
        self.write(len(self.blocks) - 1)

    def register(self):
        for i in range(self.known, len(self.tokens) // SIZE):
            self.node = self.pool.register(self.blocks[i], ids(*self.tokens), i, self.node, self.salt)
            self.known = i + 1


OPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "append", "append", "register", "register", "free"]),
        st.integers(0, 7),
        st.lists(st.integers(0, 1), min_size=1, max_size=14),
        st.sampled_from([None, "a", "b"]),
    ),
    max_size=60,
)


def run(ops, num_blocks):
    pool, memory, holders = BlockPool(num_blocks, SIZE), {}, []
    for op, pick, tokens, salt in ops:
        holder = holders[pick % len(holders)] if holders else None
        if op == "start" and pool.num_free >= pool.blocks_for(len(tokens)):
            holders.append(Holder(pool, memory, tokens, salt))
        elif op == "append" and holder and pool.num_free:
            holder.append(tokens[0])
        elif op == "register" and holder:
            holder.register()
        elif op == "free" and holder:
            pool.free(holder.blocks)
            holders.remove(holder)
        held = Counter(block for h in holders for block in h.blocks)
        assert [pool.references(b) for b in range(num_blocks)] == [held[b] for b in range(num_blocks)]
        assert pool.num_free + len(held) == pool.capacity
        for h in holders:  # nobody wrote over what another one holds
            for i, block in enumerate(h.blocks):
                assert memory[block] == (h.salt, tuple(h.tokens[: (i + 1) * SIZE]))
    for holder in holders:
        pool.free(holder.blocks)
    assert pool.num_free == pool.capacity
    assert not any(pool.references(b) for b in range(num_blocks))


@given(OPS, st.integers(2, 14))
@settings(max_examples=150, deadline=None)
def test_any_interleaving_shares_only_equal_content_and_loses_no_block(ops, num_blocks):
    run(ops, num_blocks)


@given(OPS, st.integers(2, 14))
@settings(max_examples=100, deadline=None)
def test_contents_with_equal_hashes_never_share_a_block(ops, num_blocks):
    with mock.patch.object(Content, "__hash__", lambda self: 7):
        run(ops, num_blocks)


def filled(pool, tokens, salt=None):
    """Blocks of a registered sequence, still held."""
    blocks, node = pool.allocate(len(tokens) // SIZE), 0
    for i, block in enumerate(blocks):
        node = pool.register(block, ids(*tokens), i, node, salt)
    return blocks


def test_null_block_is_never_handed_out():
    pool = BlockPool(5, SIZE)
    assert 0 not in pool.allocate(4)
    with pytest.raises(ValueError, match="1 blocks are wanted, 0 of 4 are free"):
        pool.allocate(1)


def test_freeing_twice_is_an_error():
    pool = BlockPool(5, SIZE)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(ValueError, match="not held"):
        pool.free(blocks)
    with pytest.raises(ValueError, match="not held"):
        pool.free([0])


def test_prefix_is_found_up_to_the_first_difference_and_the_limit():
    pool = BlockPool(9, SIZE)
    blocks = filled(pool, range(12))
    assert pool.find(ids(*range(12)), None, 9).block_ids == blocks
    assert pool.find(ids(*range(11)), None, 9).block_ids == blocks[:2]
    assert pool.find(ids(*range(12)), None, 1).block_ids == blocks[:1]
    assert pool.find(ids(0, 1, 2, 3, 9, 5, 6, 7), None, 9).block_ids == blocks[:1]
    assert pool.find(ids(4, 5, 6, 7), None, 9).block_ids == []  # same tokens, but not at the start


def test_salts_do_not_share():
    pool = BlockPool(9, SIZE)
    blocks = filled(pool, range(8), "a")
    assert pool.find(ids(*range(8)), "b", 9).block_ids == []
    assert pool.find(ids(*range(8)), None, 9).block_ids == []
    assert pool.find(ids(*range(8)), "a", 9).block_ids == blocks


def test_unknown_blocks_are_reused_first_then_the_least_recently_used_tail_first():
    pool = BlockPool(8, SIZE)
    old, new, plain = filled(pool, range(8)), filled(pool, range(20, 28)), pool.allocate(1)
    pool.free(old)
    pool.free(new)
    pool.free(plain)
    never_used = [b for b in range(1, 8) if b not in old + new + plain]
    assert sorted(pool.allocate(3)) == sorted([*plain, *never_used])
    assert pool.allocate(1) == [old[1]]
    assert pool.find(ids(*range(8)), None, 9).block_ids == old[:1]
    assert pool.allocate(3) == [old[0], new[1], new[0]]


def test_sharing_a_block_keeps_it_from_being_reused():
    pool = BlockPool(4, SIZE)
    blocks = filled(pool, range(8))
    pool.free(blocks)
    pool.share(pool.find(ids(*range(8)), None, 9).block_ids)
    assert pool.num_free == 1
    assert not set(pool.allocate(1)) & set(blocks)


def test_block_behind_a_forgotten_parent_is_not_found_under_a_new_one():
    pool = BlockPool(4, SIZE)
    first, second = filled(pool, range(8))
    pool.free([first])  # the holder keeps only the tail
    assert first in pool.allocate(2)
    pool.register(first, ids(9, 9, 9, 9), 0, 0, None)
    assert pool.references(second) == 1
    assert pool.find(ids(9, 9, 9, 9, 4, 5, 6, 7), None, 9).block_ids == [first]
    assert pool.find(ids(*range(8)), None, 9).block_ids == []


def test_content_computed_twice_is_known_once_and_continues_for_both():
    pool = BlockPool(9, SIZE)
    one = filled(pool, range(4))
    (twin,) = pool.allocate(1)
    node = pool.register(twin, ids(*range(8)), 0, 0, None)
    (tail,) = pool.allocate(1)
    pool.register(tail, ids(*range(8)), 1, node, None)
    assert pool.find(ids(*range(8)), None, 9).block_ids == [*one, tail]


def test_block_that_is_not_full_cannot_be_registered():
    pool = BlockPool(4, SIZE)
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="not full"):
        pool.register(block, ids(1, 2, 3), 0, 0, None)
