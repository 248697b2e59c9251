"""Conversations that share a system prompt, with and without prefix caching: hit rate and time to the first token.

    python benchmarks/multi_turn.py [--model FOLDER] [--device cpu] [--pcp 2] [--repeat 3]

All conversations send their next turn at once; the whole history is the prompt each time. Without --model a small
random checkpoint is written to a temporary folder (8 layers, hidden size 64, window 128). Ids are random, so only
times and counts mean anything. Prints a line of JSON per setting.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
from typing import Any

import numpy as np

from paraflash import LLM, SamplingParams
from paraflash.checkpoint.synthetic import synthetic_config, write_synthetic


def play(llm: LLM, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One set of conversations from the first turn to the last on whatever the cache holds of other seeds."""
    random = np.random.default_rng(seed)
    ids = lambda count: random.integers(3, llm.core.model.vocab_size, count).tolist()  # noqa: E731
    system = ids(args.system)
    histories = [list(system) for _ in range(args.conversations)]
    params = SamplingParams(temperature=0.0, max_tokens=args.answer, ignore_eos=True)
    before = llm.core.stats()
    ttft, prompts, cached = [], [], []
    for _ in range(args.turns):
        for history in histories:
            history += ids(args.question)
        outputs = llm.generate([{"prompt_token_ids": h} for h in histories], params, use_tqdm=False)
        for history, output in zip(histories, outputs, strict=True):
            history += output.outputs[0].token_ids
        metrics = [o.metrics for o in outputs]
        ttft.append([m.first_token_time - m.arrival_time for m in metrics if m and m.first_token_time is not None])
        prompts.append(sum(len(o.prompt_token_ids) for o in outputs))
        cached.append(sum(o.num_cached_tokens for o in outputs))
    after = llm.core.stats()
    queries, hits = (after[name] - before[name] for name in ("prefix_queries", "prefix_hits"))
    return {
        "hit_rate": hits / queries if queries else 0.0,
        "cached_share_by_turn": [c / p for c, p in zip(cached, prompts, strict=True)],
        "ttft_by_turn": [statistics.mean(t) for t in ttft],
        "ttft": statistics.mean(t for turn in ttft for t in turn),
        "ttft_later_turns": statistics.mean(t for turn in ttft[1:] for t in turn) if args.turns > 1 else None,
    }


def median(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Median of each number over the repetitions."""
    merged: dict[str, Any] = {}
    for name, value in results[0].items():
        if isinstance(value, list):
            columns = zip(*(r[name] for r in results), strict=True)
            merged[name] = [round(statistics.median(c), 4) for c in columns]
        else:
            merged[name] = None if value is None else round(statistics.median(r[name] for r in results), 4)
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pcp", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--system", type=int, default=1000, help="tokens of the shared system prompt")
    parser.add_argument("--question", type=int, default=60, help="tokens of each user turn")
    parser.add_argument("--answer", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3, help="sets of conversations a setting; medians are reported")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            write_synthetic(folder, synthetic_config("tiny", {"text_config.sliding_window": 128}, quantise=False))
        for replay in (True, False):
            for caching in (True, False):
                with LLM(
                    args.model or folder,
                    device=args.device,
                    tensor_parallel_size=args.tp,
                    prefill_context_parallel_size=args.pcp,
                    enable_prefix_caching=caching,
                    swa_bounded_replay=replay,
                    max_num_batched_tokens=args.max_num_batched_tokens,
                ) as llm:
                    play(llm, args, seed=1000)  # warm-up
                    result = median([play(llm, args, seed) for seed in range(args.repeat)])
                print(json.dumps({"replay": replay, "prefix_caching": caching, **result}), flush=True)


if __name__ == "__main__":
    main()
