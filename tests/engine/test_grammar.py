"""Answers that follow a grammar: any walk through the allowed tokens ends in a text that the grammar accepts."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paraflash import LLM, SamplingParams
from paraflash.config.model import load_config
from paraflash.engine.grammar import Grammars, GrammarState
from paraflash.engine.request import RequestRefused
from paraflash.engine.sampler import unpack_bitmask
from paraflash.engine.sampling_params import StructuredOutputs
from paraflash.engine.tokenizer import load_tokenizer

NARROW = Path(__file__).parent.parent / "data" / "golden" / "narrow"
MODEL = load_config(NARROW)
TOKENIZER = load_tokenizer(NARROW)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "kind": {"enum": ["big", "small"]}},
    "required": ["count", "kind"],
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(NARROW, MODEL)


def allowed(state: GrammarState) -> set[int]:
    mask = state.bitmask()
    assert mask is not None and mask.dtype == np.int32 and mask.shape == (MODEL.vocab_size // 32,)
    return set(unpack_bitmask(mask, MODEL.vocab_size).nonzero().flatten().tolist())


def walk(state: GrammarState, seed: int, limit: int = 400) -> str:
    """Follows random allowed tokens, the end as soon as it may come."""
    pick = random.Random(seed)
    ids: list[int] = []
    for _ in range(limit):
        choices = allowed(state)
        token = 1 if 1 in choices else pick.choice(sorted(choices))
        state.accept(token)
        if token == 1:
            assert state.finished and state.failed is None
            return str(TOKENIZER.decode(ids))
        ids.append(token)
    pytest.skip("the random walk did not come to an end")


@pytest.mark.parametrize("seed", range(5))
def test_a_json_schema_gives_an_object_of_it(grammars: Grammars, seed: int) -> None:
    value = json.loads(walk(grammars.start(StructuredOutputs(json=SCHEMA)), seed))
    assert isinstance(value["count"], int) and value["kind"] in ("big", "small")


def test_a_schema_may_be_text_and_json_object_means_any_object(grammars: Grammars) -> None:
    assert json.loads(walk(grammars.start(StructuredOutputs(json=json.dumps(SCHEMA))), 1))["kind"]
    state = grammars.start(StructuredOutputs(json_object=True))
    starts = {TOKENIZER.decode([i])[:1] for i in allowed(state)}
    assert "{" in starts and not starts & {"[", '"', "1"}


@pytest.mark.parametrize("seed", range(3))
def test_regex_choice_ebnf_and_structural_tag(grammars: Grammars, seed: int) -> None:
    assert re.fullmatch("[0-9]{3}-(a|bc)", walk(grammars.start(StructuredOutputs(regex="[0-9]{3}-(a|bc)")), seed))
    choice = ['say "hi"', "line\nbreak", "é"]
    assert walk(grammars.start(StructuredOutputs(choice=choice)), seed) in choice
    assert walk(grammars.start(StructuredOutputs(grammar='root ::= "x" ("y" | "z")')), seed) in ("xy", "xz")
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "tag"}}
    assert walk(grammars.start(StructuredOutputs(structural_tag=tag)), seed) == "tag"


def test_after_the_end_only_the_stop_token_is_allowed(grammars: Grammars) -> None:
    state = grammars.start(StructuredOutputs(choice=["a"]))
    walk(state, 0)
    assert allowed(state) == {1}
    state.accept(1)
    assert allowed(state) == {1} and state.failed is None


def test_control_tokens_are_never_part_of_an_answer(grammars: Grammars) -> None:
    state = grammars.start(StructuredOutputs(regex=".*"))
    assert 0 not in allowed(state) and 2 not in allowed(state)


def test_two_requests_with_one_grammar_do_not_share_their_place(grammars: Grammars) -> None:
    one, two = (grammars.start(StructuredOutputs(choice=["ab", "cd"])) for _ in range(2))
    (a,) = TOKENIZER.encode("a").ids
    before = allowed(two)
    assert a in allowed(one)
    one.accept(a)
    assert allowed(one) != before and allowed(two) == before


@pytest.mark.parametrize(
    "fields",
    [
        {"json": "not json"},
        {"json": {"type": "nonsense"}},
        {"json": {"type": "string", "pattern": "("}},
        {"regex": "("},
        {"regex": "a{2"},
        {"grammar": "root ::= missing"},
        {"grammar": "x"},
        {"choice": []},
        {"choice": [""]},
        {"structural_tag": {"type": "structural_tag"}},
        {"structural_tag": "{"},
    ],
)
def test_a_wrong_grammar_is_refused_and_names_its_field(grammars: Grammars, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused, match="structured_outputs: ") as error:
        grammars.start(StructuredOutputs(**fields))
    assert error.value.field == "structured_outputs" and "/project/" not in str(error.value)


def test_a_token_outside_the_grammar_marks_the_request_as_failed(grammars: Grammars) -> None:
    state = grammars.start(StructuredOutputs(choice=["a"]))
    allowed(state)
    state.accept(50)
    assert state.failed is not None and state.bitmask() is None


@pytest.mark.parametrize("fields", [{"grammar": "root ::= root"}, {"regex": "[^\\x00-\\U0010ffff]"}])
def test_a_grammar_that_lets_no_token_follow_ends_its_request_alone(fields: dict[str, Any]) -> None:
    with LLM(NARROW, device="cpu", dtype="float32") as llm:
        free = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        stuck = SamplingParams(structured_outputs=StructuredOutputs(**fields), logprobs=0)
        got = [o.outputs[0] for o in llm.generate([[5], [6], [5]], [free, stuck, free], use_tqdm=False)]
        assert llm.core.stats()["kv_usage"] == 0
    assert (got[1].token_ids, got[1].text, got[1].logprobs, got[1].finish_reason) == ([], "", [], "abort")
    assert got[1].stop_reason == "the grammar lets no token follow"
    assert got[0].token_ids == got[2].token_ids and len(got[0].token_ids) == 3


def test_answers_of_a_model_follow_their_grammars_beside_free_ones() -> None:
    with LLM(NARROW, device="cpu", dtype="float32") as llm:
        params = [
            SamplingParams(
                temperature=1.0, seed=1, max_tokens=20, structured_outputs=StructuredOutputs(regex="[a-f]{4}")
            ),
            SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputs(choice=["yes", "no"])),
            SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
            SamplingParams(
                temperature=0.0, min_tokens=9, max_tokens=20, structured_outputs=StructuredOutputs(choice=["yes", "no"])
            ),
        ]
        got = [o.outputs[0] for o in llm.generate(["a"] * 4, params, use_tqdm=False)]
    assert re.fullmatch("[a-f]{4}", got[0].text) and got[0].finish_reason == "stop"
    assert got[1].text in ("yes", "no") and got[1].finish_reason == "stop"
    assert len(got[2].token_ids) == 5
    assert got[3].text in ("yes", "no")
