"""`paraflash compare`: where two outputs part, the gap there, and the exit status."""

import json

import fake_openai
import pytest

from paraflash.bench.compare import Output, compare
from paraflash.cli import main


def output(tokens: str, *, ids: list[int] | None = None, logprobs: list[float] | None = None, **tops: dict) -> Output:
    """One letter a token; `t2={...}` gives the reported alternatives at position 2."""
    alternatives = [tops.get(f"t{i}", {t: -0.1}) for i, t in enumerate(tokens)]
    return Output(list(tokens), list(logprobs or [-0.1] * len(tokens)), alternatives, ids, "length")


def test_equal_outputs_report_the_largest_logprob_difference():
    r = compare(output("abc", logprobs=[-0.1, -0.2, -0.3]), output("abc", logprobs=[-0.1, -0.25, -0.31]))
    assert r.equal and r.length == 3 and r.max_logprob_difference == pytest.approx(0.05)


def test_first_difference_and_gaps_of_both_servers():
    a = output("abcd", t2={"c": -0.1, "x": -0.4})
    b = output("abxd", t2={"x": -0.1, "c": -0.2})
    r = compare(a, b)
    assert (r.equal, r.position, r.token_a, r.token_b, r.length) == (False, 2, "c", "x", 2)
    assert r.gap_a.nats == pytest.approx(0.3) and not r.gap_a.at_least
    assert r.gap_b.nats == pytest.approx(0.1) and str(r.gap_b) == "0.1000"


def test_a_gap_is_a_lower_bound_if_the_other_token_is_not_reported():
    r = compare(output("ab", t1={"b": -0.1, "c": -2.1}), output("ax", t1={"x": -0.1}))
    assert str(r.gap_a) == ">= 2.0000"


def test_an_output_that_ends_earlier_differs_at_its_end():
    r = compare(output("ab"), output("abc"))
    assert (r.equal, r.position, r.token_a, r.token_b, r.gap_a) == (False, 2, None, "c", None)


def test_ids_tell_tokens_of_equal_text_apart():
    assert compare(output("a?", ids=[1, 2]), output("a?", ids=[1, 3])).position == 1
    assert compare(output("a?", ids=[1, 2]), output("a?")).equal  # only one server gives ids


FLAGS = ("--vocab-size", "1000", "--num-prompts", "4", "--input-len", "9", "--max-tokens", "8")


def test_equal_servers_exit_with_0(url, script, capsys):
    assert main(["compare", url, url, *FLAGS]) == 0
    assert "Equal outputs: 4 of 4 (100.00 %)" in capsys.readouterr().out
    assert all(len(r["prompt"]) == 9 and r["temperature"] == 0.0 for r in script.requests)


def test_a_difference_is_located_and_fails_unless_allowed(url, tmp_path, capsys):
    out = tmp_path / "c.json"
    with fake_openai.running(fake_openai.Script(change_at=3)) as second:
        assert main(["compare", url, second, *FLAGS, "--output", str(out)]) == 1
        printed = capsys.readouterr().out
        assert main(["compare", url, second, *FLAGS, "--max-different", "3"]) == 1
        assert main(["compare", url, second, *FLAGS, "--max-different", "4"]) == 0
        assert main(["compare", url, second, *FLAGS, "--max-different", "99%"]) == 1
        assert main(["compare", url, second, *FLAGS, "--max-different", "100%"]) == 0
    assert "Equal outputs: 0 of 4 (0.00 %)" in printed and "Tokens before the first difference: 12" in printed
    assert "Largest gap at a first difference: 0.2500" in printed
    saved = json.loads(out.read_text())
    assert [c["position"] for c in saved] == [3] * 4
    assert saved[0]["token_a"].replace("w", "x") == saved[0]["token_b"]


def test_prompts_come_from_a_file(url, script, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one"}\n{"question": "two"}\n')
    assert main(["compare", url, url, "--prompts", str(path)]) == 0
    assert sorted({r["prompt"] for r in script.requests}) == ["one", "two"]
    path.write_text('{"prompt": "one"}\n{"x": 1}\n')
    assert main(["compare", url, url, "--prompts", str(path)]) == 2


def test_a_failed_request_counts_as_different_and_is_shown(url, capsys):
    with fake_openai.running(fake_openai.Script(fail_from=4)) as second:
        assert main(["compare", url, second, *FLAGS]) == 1
    printed = capsys.readouterr().out
    assert "Prompt 3: B: HTTP 400: max_tokens is wrong" in printed and "Equal outputs: 3 of 4" in printed


def test_no_server_is_one_clear_line(url, capsys):
    assert main(["compare", url, "http://127.0.0.1:9", *FLAGS]) == 2
    assert "http://127.0.0.1:9/v1/models" in capsys.readouterr().err
