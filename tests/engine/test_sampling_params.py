"""Sampling parameters: what is let in, and how a refusal names what is wrong."""

import math
import pickle

import numpy as np
import pytest

from paraflash.engine.request import Request, RequestRefused, sample_spec
from paraflash.engine.sampling_params import BadField, SamplingParams, StructuredOutputs, seed_of_sample

NAN, INF = math.nan, math.inf
BAD = [
    ("n", [0, -1, 1.5, True, "2", None]),
    ("temperature", [NAN, INF, -1, -0.001, 2.001, "hot", None, True]),
    ("top_p", [NAN, 0, -0.1, 1.01, 2, None]),
    ("top_k", [-2, 1.0, None, NAN]),
    ("min_p", [NAN, -0.1, 1.1]),
    ("presence_penalty", [NAN, -2.1, 2.1]),
    ("frequency_penalty", [NAN, -2.1, 2.1]),
    ("repetition_penalty", [NAN, INF, 0, -1]),
    ("seed", [1.5, 2**63, -(2**63) - 1, "x", True]),
    ("max_tokens", [0, -5, 1.5, NAN, True, "many"]),
    ("min_tokens", [-1, NAN, 17]),
    ("logprobs", [-1, 1.0, NAN, True]),
    ("prompt_logprobs", [-1, 1.0, NAN]),
    ("stop", ["", ["a", ""], [1], 5, {"a": 1}]),
    ("stop_token_ids", [[-1], [1.0], [True], 7, "7"]),
    ("ignore_eos", [None, 1, "yes"]),
    ("skip_special_tokens", [None, 0]),
    ("include_stop_str_in_output", [None, 0]),
    ("logit_bias", [{-1: 1.0}, {1: NAN}, {1: 101}, {"1": 1.0}, [1], {1: None}]),
    ("structured_outputs", ["json", {"json": {}}]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD for value in values])
def test_bad_value_is_refused_by_name(name, value):
    with pytest.raises(BadField) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name
    assert str(caught.value) == f"{name} is {caught.value.value!r}; {caught.value.allowed} is needed"
    named, given = repr(caught.value.value), repr(value)
    assert named in given or given in named  # an element of a list is named itself


@pytest.mark.parametrize(
    "good",
    [
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0},
        {"temperature": 2.0, "top_p": 1e-6, "min_p": 1.0, "top_k": 5},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.3},
        {"max_tokens": None, "min_tokens": 100, "seed": -5},
        {"logprobs": 0, "prompt_logprobs": 20, "stop": "x", "stop_token_ids": [0, 5], "logit_bias": {0: -100, 7: 100}},
        {"structured_outputs": StructuredOutputs(json={"type": "object"})},
    ],
)
def test_values_at_the_borders_are_allowed(good):
    SamplingParams(**good)


def test_an_integer_beyond_floats_is_refused():
    with pytest.raises(BadField, match="temperature"):
        SamplingParams(temperature=10**400)


def test_limits_of_the_engine_are_checked_when_given():
    SamplingParams(logprobs=20).check(100, 20)
    with pytest.raises(BadField, match="logprobs is 25; an integer from 0 to 20"):
        SamplingParams(logprobs=25).check(100, 20)
    with pytest.raises(BadField, match="stop_token_ids is 100; an integer from 0 to 99"):
        SamplingParams(stop_token_ids=[100]).check(100, 20)
    with pytest.raises(BadField, match="logit_bias"):
        SamplingParams(logit_bias={100: 1.0}).check(100, 20)


def test_stop_strings_are_a_list_and_minus_one_is_no_seed():
    assert SamplingParams(stop="end").stop_strings == ["end"]
    assert SamplingParams().stop_strings == []
    assert SamplingParams(seed=-1).seed is None


def test_every_sample_has_a_seed_of_its_own_that_fits_and_is_no_minus_one():
    assert [seed_of_sample(7, i) for i in range(3)] == [7, 8, 9]
    assert [seed_of_sample(-3, i) for i in range(4)] == [-3, -2, 0, 1]
    assert [seed_of_sample(2**63 - 1, i) for i in range(2)] == [2**63 - 1, -(2**63)]
    assert seed_of_sample(None, 1) is None


def test_min_tokens_above_max_tokens_is_refused():
    with pytest.raises(BadField, match="at most max_tokens 4"):
        SamplingParams(max_tokens=4, min_tokens=5)


@pytest.mark.parametrize("given", [{}, {"json": "{}", "regex": "a"}, {"json_object": False}])
def test_structured_outputs_take_exactly_one_grammar(given):
    with pytest.raises(BadField, match="exactly one of json, regex"):
        StructuredOutputs(**given)


@pytest.mark.parametrize("error", [BadField("top_p", 2, "a number"), RequestRefused("max_tokens", "too many")])
def test_refusals_survive_a_process_border(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.field) == (type(error), str(error), error.field)


@pytest.mark.parametrize("ids", [[1.5], [True], ["1"], [[1], [2]], [[1], [2, 3]], [2**31], [2**70], [None], "text"])
def test_prompt_that_is_not_a_list_of_ids_is_refused(ids):
    with pytest.raises(RequestRefused) as caught:
        Request("r", ids, SamplingParams())
    assert caught.value.field == "prompt_token_ids"


def request(**params):
    made = Request("r", [3, 4, 5], SamplingParams(**params))
    made.eos_ids = () if params.get("ignore_eos") else (1,)
    return made


def test_stop_tokens_are_banned_until_min_tokens():
    one = request(min_tokens=2, stop_token_ids=[9, 1])
    assert sample_spec(one).banned_ids.tolist() == [1, 9]
    one.append(7)
    assert sample_spec(one).banned_ids.tolist() == [1, 9]
    one.append(7)
    assert sample_spec(one).banned_ids is None
    assert sample_spec(request(min_tokens=2, stop_token_ids=[9], ignore_eos=True)).banned_ids.tolist() == [9]


def test_history_goes_along_only_where_a_penalty_reads_it():
    assert sample_spec(request()).history is None
    for penalty in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        one = request(**{penalty: 0.5})
        one.append(7)
        spec = sample_spec(one)
        assert (spec.history.tolist(), spec.prompt_len, spec.step) == ([3, 4, 5, 7], 3, 1)


def test_spec_takes_the_grammars_mask_and_normalised_values():
    one = request(temperature=1e-6, top_k=-1, logprobs=0)
    one.bitmask = lambda: np.array([5], np.int32)
    spec = sample_spec(one)
    assert (spec.temperature, spec.top_k, spec.logprobs, spec.bitmask.tolist()) == (0.0, 0, 0, [5])
