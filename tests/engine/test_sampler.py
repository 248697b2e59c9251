"""Sampling: the order of the rules, reproducible draws, and log-probabilities of the raw logits."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paraflash.engine.messages import Sampled, SampleSpec
from paraflash.engine.sampler import BadLogits, gumbel_noise, prompt_logprobs, sample, unpack_bitmask

VOCAB = 40


def logits(seed: int = 0, rows: int = 1, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def one(row: list[float] | Tensor, **fields: Any) -> Sampled:
    tensor = torch.as_tensor(row, dtype=torch.float32)[None]
    return sample(tensor, [SampleSpec(**fields)], tensor.shape[1])[0]


def support(row: list[float] | Tensor, draws: int = 400, **fields: Any) -> set[int]:
    """The tokens that ever come out."""
    tensor = torch.as_tensor(row, dtype=torch.float32)[None].repeat(draws, 1)
    specs = [SampleSpec(**{"temperature": 1.0, "seed": 1, **fields, "step": i}) for i in range(draws)]
    return {s.token_id for s in sample(tensor, specs, tensor.shape[1])}


def test_greedy_takes_the_best_and_the_lowest_id_among_equals() -> None:
    assert one([1.0, 3.0, 3.0, 2.0]).token_id == 1


def test_padding_columns_are_never_chosen_nor_counted() -> None:
    row = torch.tensor([[0.0, 1.0, 9.0]])
    got = sample(row, [SampleSpec(logprobs=5)], 2)[0]
    assert got.token_id == 1 and got.logprobs is not None
    assert got.logprobs.top_ids == [1, 0]
    assert got.logprobs.logprob == pytest.approx(-math.log(1 + math.exp(-1)))


def test_the_input_is_not_changed() -> None:
    x = logits()
    before = x.clone()
    sample(x, [SampleSpec(temperature=0.5, logit_bias={1: 5.0}, banned_ids=np.array([2], np.int32))], VOCAB)
    assert torch.equal(x, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1e-300, 1e300])
def test_no_repetition_penalty_breaks_a_mask_or_a_logit(penalty: float, temperature: float) -> None:
    history = np.arange(4, dtype=np.int32)
    for row in ([3.0, 2.0, 0.0, -2.0], [-1.0, -2.0, 0.0, -3.0]):
        for only in range(4):
            fields = {"bitmask": np.array([1 << only], np.int32), "top_p": 0.5, "min_p": 0.1}
            spec = {"repetition_penalty": penalty, "history": history, "prompt_len": 2, "temperature": temperature}
            assert one(row, **spec, **fields).token_id == only


def test_draws_follow_the_softmax() -> None:
    row = torch.tensor([2.0, 1.0, 0.0, -1.0])
    n = 20000
    specs = [SampleSpec(temperature=0.7, seed=3, step=i) for i in range(n)]
    counts = Counter(s.token_id for s in sample(row[None].repeat(n, 1), specs, 4))
    want = (row / 0.7).softmax(0)
    for token in range(4):
        deviation = math.sqrt(n * want[token] * (1 - want[token]))
        assert abs(counts[token] - n * want[token]) < 4.5 * deviation


@settings(max_examples=30, deadline=None)
@given(
    specs=st.lists(
        st.builds(
            SampleSpec,
            temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
            top_p=st.sampled_from([0.1, 0.8, 1.0]),
            top_k=st.sampled_from([0, 1, 5, 100]),
            min_p=st.sampled_from([0.0, 0.05]),
            seed=st.integers(0, 2**63 - 1),
            step=st.integers(0, 10**6),
            logprobs=st.sampled_from([None, 0, 3]),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_a_row_draws_the_same_token_in_any_batch(specs: list[SampleSpec]) -> None:
    x = logits(7, len(specs))
    together = sample(x, specs, VOCAB)
    alone = [sample(x[i : i + 1], [spec], VOCAB)[0] for i, spec in enumerate(specs)]
    assert [t.token_id for t in together] == [t.token_id for t in alone]
    order = list(reversed(range(len(specs))))
    backwards = sample(x[order], [specs[i] for i in order], VOCAB)
    assert [t.token_id for t in together] == [t.token_id for t in reversed(backwards)]


def test_the_noise_depends_on_seed_step_and_token_and_is_fixed_for_all_time() -> None:
    seeds, steps = torch.tensor([[1], [2], [1]]), torch.tensor([[0], [0], [1]])
    noise = gumbel_noise(seeds, steps, 1000)
    assert len(noise.flatten().unique()) == 3000
    assert torch.equal(noise[0, :10], gumbel_noise(seeds[:1], steps[:1], 10)[0])
    # Seeded text must stay the same from one release to the next.
    assert noise[0, :3].tolist() == pytest.approx(PINNED, abs=1e-12)
    correlation = torch.corrcoef(noise)
    assert (correlation - torch.eye(3)).abs().max() < 0.12


PINNED = [0.1772064934697004, 0.1576136418319589, 0.48321051846760354]  # by SplitMix64 in exact integers


def test_top_k_keeps_exactly_k_with_ties_to_the_lower_id() -> None:
    assert support([1.0, 2.0, 2.0, 2.0], top_k=2) == {1, 2}
    assert support([1.0, 1.0, 1.0, 1.0], top_k=1) == {0}


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert support(row, top_p=0.5) == {0}
    assert support(row, top_p=0.51) == {0, 1}
    assert support(row, top_p=0.8001) == {0, 1, 2}
    assert support(row, top_p=1e-9) == {0}


def test_top_p_counts_after_top_k() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the two best, the first has 0.4 / 0.7 = 0.571 of the mass.
    assert support(row, top_k=2, top_p=0.57) == {0}
    assert support(row, top_k=2, top_p=0.58) == {0, 1}


def test_min_p_is_relative_to_the_best_and_counts_after_the_temperature() -> None:
    row = torch.tensor([0.6, 0.3, 0.1]).log()
    assert support(row, min_p=0.4) == {0, 1}
    assert support(row, min_p=0.6) == {0}
    assert support(row, min_p=0.6, temperature=2.0) == {0, 1}


def test_penalties_count_what_they_should() -> None:
    history = np.array([0, 0, 1, 2, 2], np.int32)  # prompt 0, 0, 1; output 2, 2
    common = {"history": history, "prompt_len": 3}
    assert one([2.0, 0.0, 2.9, 1.0], repetition_penalty=2.0, **common).token_id == 2  # 1.0, 0, 1.45, 1.0
    assert one([2.0, 0.0, 1.9, 1.1], repetition_penalty=2.0, **common).token_id == 3  # 1.0, 0, 0.95, 1.1
    assert one([-1.0, -0.9, -0.5, -1.1], repetition_penalty=2.0, **common).token_id == 2  # negative ones are multiplied
    assert one([-1.0, -0.9, -0.6, -1.1], repetition_penalty=2.0, **common).token_id == 3
    assert one([1.0, 1.1, 2.0, 0.0], presence_penalty=0.8, **common).token_id == 2  # once: 1.2
    assert one([1.0, 1.1, 2.0, 0.0], frequency_penalty=0.8, **common).token_id == 1  # twice: 0.4
    assert one([1.0, 1.1, 0.0, 0.0], presence_penalty=2.0, **common).token_id == 1  # the prompt does not count


def test_bias_is_added_before_everything_else() -> None:
    assert one([1.0, 0.0, 0.0], logit_bias={2: 5.0}).token_id == 2
    assert one([1.0, 0.0, 0.0], logit_bias={0: -100.0, 1: 0.5}).token_id == 1
    # (0 + 3) / 2 = 1.5 is less than 2; (0 / 2) + 3 would be more.
    history = np.array([1], np.int32)
    got = one([2.0, 0.0], logit_bias={1: 3.0}, repetition_penalty=2.0, history=history, prompt_len=1)
    assert got.token_id == 0


def mask(*allowed: int, vocab: int = VOCAB) -> np.ndarray:
    words = np.zeros((vocab + 31) // 32, np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return words.view(np.int32)


def test_a_grammar_mask_limits_greedy_and_drawn_tokens() -> None:
    assert one(logits()[0], bitmask=mask(31, 33)).token_id in (31, 33)
    assert support(logits()[0], bitmask=mask(0, 31, 39), temperature=2.0) == {0, 31, 39}


@given(st.sets(st.integers(0, 69)))
def test_bits_of_a_mask_are_tokens(allowed: set[int]) -> None:
    got = unpack_bitmask(mask(*allowed, vocab=70), 70)
    assert set(got.nonzero().flatten().tolist()) == allowed and len(got) == 70


def test_banned_tokens_are_not_chosen_unless_the_grammar_leaves_nothing_else() -> None:
    banned = np.array([1], np.int32)
    assert one([1.0, 5.0, 0.0], banned_ids=banned).token_id == 0
    assert one([1.0, 5.0, 0.0], banned_ids=banned, bitmask=mask(1, 2, vocab=3)).token_id == 2
    assert one([1.0, 5.0, 0.0], banned_ids=banned, bitmask=mask(1, vocab=3)).token_id == 1


def test_nothing_to_choose_is_an_error() -> None:
    with pytest.raises(BadLogits, match="allow no token"):
        one([1.0, 2.0], bitmask=mask(vocab=2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_logits_are_an_error_that_names_the_row(value: float) -> None:
    x = logits(rows=3)
    x[1, 5] = value
    with pytest.raises(BadLogits, match="row 1"):
        sample(x, [SampleSpec()] * 3, VOCAB)
    with pytest.raises(BadLogits, match="row 1"):
        prompt_logprobs(x, torch.zeros(3, dtype=torch.long), 1)


def test_minus_infinity_is_a_token_that_is_never_chosen() -> None:
    row = torch.full((4,), -math.inf)
    row[2] = 0.0
    assert support(row, temperature=2.0) == {2}


def test_logprobs_are_of_the_raw_logits() -> None:
    x = logits(3)
    spec = SampleSpec(temperature=0.1, top_k=1, logit_bias={7: 100.0}, logprobs=3)
    got = sample(x, [spec], VOCAB)[0]
    want = x[0].double().log_softmax(0)
    assert got.token_id == 7 and got.logprobs is not None
    assert got.logprobs.logprob == pytest.approx(want[7].item(), abs=1e-5)
    assert got.logprobs.rank == int((want > want[7]).sum()) + 1
    values, ids = want.topk(3)
    assert got.logprobs.top_ids == ids.tolist()
    assert got.logprobs.top_logprobs == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_only_where_asked_for_and_none_besides_the_token_for_0() -> None:
    got = sample(logits(rows=3), [SampleSpec(), SampleSpec(logprobs=0), SampleSpec(logprobs=2)], VOCAB)
    assert got[0].logprobs is None
    assert got[1].logprobs is not None and got[1].logprobs.top_ids == []
    assert got[2].logprobs is not None and len(got[2].logprobs.top_ids) == 2


def test_prompt_logprobs_are_of_the_given_tokens() -> None:
    x = logits(5, rows=4)
    targets = torch.tensor([3, 0, 39, 11])
    got = prompt_logprobs(x, targets, 2)
    want = x.double().log_softmax(-1)
    for i, entry in enumerate(got):
        assert entry.token_id == targets[i]
        assert entry.logprob == pytest.approx(want[i, targets[i]].item(), abs=1e-5)
        assert entry.top_ids == want[i].topk(2).indices.tolist()
    assert prompt_logprobs(x[:0], targets[:0], 2) == []
