"""A model without numbers: it keeps what a real one would keep, and checks that each step finds it in place.

KV of a position is its token id, in a paged store; the sliding windows are one store per slot. The next token is a
function of all tokens read through the block table, so a wrong, shared or overwritten block changes the answer.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from paraflash.config.engine import EngineConfig
from paraflash.config.model import load_config
from paraflash.engine.messages import Sampled, StepInput, StepOutput, TokenLogprobs
from paraflash.engine.request import Delta, Request
from paraflash.engine.sampling_params import SamplingParams
from paraflash.engine.scheduler import Scheduler

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "narrow"
EOS, VOCAB, BLOCK = 1, 1000, 64
MODEL = dataclasses.replace(
    load_config(GOLDEN), vocab_size=VOCAB, eos_token_ids=(EOS,), window=8, num_layers=6, engram_max_ngram=4
)


def next_token(tokens: list[int]) -> int:
    """Never an id below 10, so that no request ends by chance."""
    return 10 + sum(t * (i % 97 + 3) for i, t in enumerate(tokens)) % (VOCAB - 10)


def answer(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(10, VOCAB, length).tolist()


class FakeModel:
    def __init__(self) -> None:
        self.kv: dict[tuple[int, int], int] = {}
        self.windows: dict[int, dict[int, tuple[str, int]]] = defaultdict(dict)
        self.decoder_windows: dict[int, dict[int, tuple[str, int]]] = defaultdict(dict)
        self.positions: dict[str, list[int]] = defaultdict(list)  # every position run, in order
        self.steps: list[StepInput] = []
        self.script: dict[str, list[int]] = {}  # tokens to answer with in place of next_token's

    def execute(self, step: StepInput) -> StepOutput:
        self.steps.append(step)
        output = StepOutput(step.step_id)
        slots = [r.slot for r in step.requests]
        assert len(set(slots)) == len(slots) and len({r.request_id for r in step.requests}) == len(slots)
        writes = [(r.request_id, b) for r in step.requests for b in r.block_ids[r.kv_write_start // BLOCK :]]
        assert len({b for _, b in writes}) == len(writes), "two requests write to one block"
        for r in step.requests:
            window = self.windows[r.slot]
            start, end = r.num_computed, r.num_computed + r.num_tokens
            assert r.num_tokens >= 1 and len(r.block_ids) == -(-end // BLOCK) and 0 not in r.block_ids
            for p in range(max(r.window_start, start - MODEL.window + 1), start):
                assert window[p] == (r.request_id, self.read(r, p)), f"window at {p} is another's"
            assert r.lookback.tolist() == [self.read(r, p) for p in range(max(start - 3, 0), start)]
            for p, token in zip(range(start, end), r.token_ids.tolist(), strict=True):
                window[p] = (r.request_id, token)
                if p >= r.kv_write_start:
                    self.kv[int(r.block_ids[p // BLOCK]), p % BLOCK] = token
                assert self.read(r, p) == token
            self.run_decoder(r)
            self.positions[r.request_id] += range(start, end)
            if r.sample is not None:
                script = self.script.get(r.request_id, [])
                scripted = script[r.sample.step] if r.sample.step < len(script) else None
                token = next_token([self.read(r, p) for p in range(end)]) if scripted is None else scripted
                output.sampled[r.request_id] = Sampled(token, logprob(token))
            if r.prompt_logprobs is not None:
                targets = r.prompt_targets
                assert targets is not None and len(targets) == r.num_tokens
                output.prompt_logprobs[r.request_id] = [logprob(t) for t in targets.tolist() if t >= 0]
        return output

    def run_decoder(self, r) -> None:
        """The layers after the last KV owner: they see the kept rows, and what windows those left (model.md 5.2)."""
        end = r.num_computed + r.num_tokens
        kept = r.num_tokens if r.kept_rows < 0 else r.kept_rows
        window, low = self.decoder_windows[r.slot], r.window_start
        if kept < r.num_tokens:
            assert r.is_prefill and r.prompt_logprobs is None and kept in (0, MODEL.window)
            low = max(low, end - MODEL.window)
        assert kept or r.sample is None
        for p in range(end - kept, end):
            window[p] = (r.request_id, self.read(r, p))
            for q in range(max(low, p - MODEL.window + 1), p):
                assert window[q] == (r.request_id, self.read(r, q)), f"decoder window at {q} is missing"

    def read(self, r, position: int) -> int:
        return self.kv[int(r.block_ids[position // BLOCK]), position % BLOCK]


def logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0, 1, [], [])


# Workloads of several requests: what `Rig` is told, and which requests are aborted at which steps.
MIX = {
    "lengths": st.lists(st.integers(1, 200), min_size=1, max_size=8),
    "budget": st.integers(1, 90),
    "seats": st.integers(1, 5),
    "num_blocks": st.integers(6, 16),
    "threshold": st.sampled_from([0, 1, 13]),
    "same": st.booleans(),
    "replay": st.booleans(),
    "aborts": st.dictionaries(st.integers(0, 40), st.integers(0, 7), max_size=3),
}


def mixed_prompts(lengths: list[int], same: bool) -> dict[str, list[int]]:
    """Prompts r0, r1 .. of these lengths, of one text or each of its own."""
    whole = prompt(200)
    return {f"r{i}": whole[:n] if same else prompt(n, i) for i, n in enumerate(lengths)}


class Rig:
    """A scheduler and a fake model, with the answers put together."""

    def __init__(self, num_blocks: int = 65, **settings):
        defaults = {"max_model_len": 4096, "max_num_batched_tokens": 64, "max_num_seqs": 8, "swa_bounded_replay": True}
        self.config = EngineConfig(model="", **{**defaults, **settings})
        self.scheduler = Scheduler(self.config, MODEL, num_blocks)
        self.model = FakeModel()
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.last: dict[str, Delta] = {}
        self.deltas: dict[str, list[Delta]] = defaultdict(list)

    def add(self, name: str, ids: list[int], *, salt: str | None = None, **params) -> Request:
        made = Request(name, ids, SamplingParams(**{"max_tokens": 4, "temperature": 0, **params}), salt)
        self.scheduler.add(made)
        return made

    def finish_step(self, step: StepInput) -> list[Delta]:
        deltas = self.scheduler.update(step, self.model.execute(step))
        for delta in deltas:
            self.tokens[delta.request_id] += delta.token_ids
            self.last[delta.request_id] = delta
            self.deltas[delta.request_id].append(delta)
        return deltas

    def step(self) -> StepInput:
        step = self.scheduler.schedule()
        assert step is not None
        assert sum(r.num_tokens for r in step.requests) <= self.config.max_num_batched_tokens
        kinds = [r.is_prefill for r in step.requests]
        assert kinds == sorted(kinds), "decode rows come first"
        self.finish_step(step)
        return step

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_unfinished():
                assert self.scheduler.schedule() is None
                return
            self.step()
        raise AssertionError(f"requests are unfinished after {limit} steps")

    @property
    def free(self) -> int:
        return self.scheduler.pool.num_free

    def assert_answers(self, expected: dict[str, list[int]], aborted: set[str]) -> None:
        """Every request has its tokens, an aborted one the first of them, and nothing is held any more."""
        for name, tokens in expected.items():
            got = self.tokens[name]
            assert got == (tokens[: len(got)] if name in aborted else tokens), name
        self.assert_all_returned()

    def assert_all_returned(self) -> None:
        pool = self.scheduler.pool
        assert pool.num_free == pool.capacity
        assert not any(pool.references(b) for b in range(pool.num_blocks))
        assert sorted(self.scheduler._free_slots) == list(range(self.config.max_num_seqs))
