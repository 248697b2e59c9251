"""`paraflash eval`: reading, extraction, scoring, and the comparison of topologies answer by answer."""

import json
from decimal import Decimal
from pathlib import Path

import fake_openai
import pytest

from paraflash.bench.eval import Answer, differing, final_number, read_records, score
from paraflash.bench.eval_cli import parse_urls
from paraflash.cli import main

QUESTIONS = [
    ("apples", "2 + 3 = <<2+3=5>>5\n#### 5"),
    ("pears", "#### 1,200"),
    ("plums", "#### -7"),
    ("figs", "#### 0.5"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps({"question": f"How many {q}?", "answer": a}) + "\n" for q, a in QUESTIONS))
    return path


@pytest.fixture
def knowing(script: fake_openai.Script) -> fake_openai.Script:
    """Two right answers, one wrong, one that is too long for the limit of 12 tokens."""
    script.answers = {
        "apples?": "So it is #### 5",
        "pears?": "That makes $1,200.00",
        "plums?": "#### 7",
        "figs?": "well " * 40,
    }
    return script


def evaluate(file: Path, *flags: str) -> int:
    return main(["eval", str(file), "--num-shots", "0", "--max-tokens", "12", *flags])


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_table_has_accuracy_errors_and_length_finishes(file, url, knowing, capsys, endpoint):
    assert evaluate(file, "--url", f"tp2={url}", "--endpoint", endpoint) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| tp2 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == ["2 / 4", "50.00 %"] and cells[4:] == ["0", "1"]
    assert float(cells[3]) > 0


def test_answers_that_differ_between_topologies_are_named(file, url, knowing, capsys, tmp_path):
    other = fake_openai.Script(answers=knowing.answers | {"plums?": "#### -7", "apples?": "it is 5.0"})
    with fake_openai.running(other) as second:
        out = tmp_path / "out.json"
        assert evaluate(file, "--url", f"tp2={url}", "--url", f"pcp2={second}", "--output", str(out)) == 0
    printed = capsys.readouterr().out
    assert "| tp2 | 2 / 4" in printed and "| pcp2 | 3 / 4" in printed
    assert "Answers that differ between topologies: 1 (ids 2)" in printed  # 5 and 5.0 are the same number
    saved = json.loads(out.read_text())
    assert saved["differing"] == [2] and saved["scores"]["pcp2"]["correct"] == 3
    assert [a["number"] for a in saved["answers"]["tp2"]] == ["5", "1200.00", "7", None]


def test_api_errors_count_as_wrong_and_are_shown(file, url, knowing, capsys):
    knowing.fail_from = 3
    assert evaluate(file, "--url", f"tp2={url}", "--concurrency", "1") == 0
    printed = capsys.readouterr().out
    assert "| tp2 | 2 / 4 | 50.00 % |" in printed and "| 2 | 0 |" in printed
    assert "tp2: 2 x HTTP 400: max_tokens is wrong" in printed


def test_exit_status_says_that_every_request_failed(file, url, script):
    script.fail_from = 0
    assert evaluate(file, "--url", url) == 1


def test_examples_from_the_file_itself_are_not_asked(file, url, knowing, capsys):
    assert main(["eval", str(file), "--url", url, "--num-shots", "1", "--max-tokens", "12"]) == 0
    assert "3 records, 1 worked examples" in capsys.readouterr().out
    prompts = [r["messages"][0]["content"] for r in knowing.requests]
    shown = {p.split("Question: ")[1].split("\n")[0] for p in prompts}
    asked = {p.split("Question: ")[2].split("\n")[0] for p in prompts}
    assert len(shown) == 1 and len(asked) == 3 and not shown & asked


def test_examples_of_a_shots_file_come_without_calculator_notes(file, url, knowing, tmp_path):
    shots = tmp_path / "train.jsonl"
    shots.write_text(json.dumps({"question": "One?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}))
    flags = ("--num-shots", "1", "--shots-file", str(shots), "--endpoint", "completions", "--max-tokens", "12")
    assert main(["eval", str(file), "--url", url, "--limit", "1", *flags]) == 0
    (request,) = knowing.requests
    assert request["prompt"] == "Question: One?\nAnswer: 1 + 1 = 2\n#### 2\n\nQuestion: How many apples?\nAnswer:"
    assert request["stop"] == ["\nQuestion:"] and request["temperature"] == 0.0 and request["seed"] == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", "7"),
        ("#### 7\nQuestion: 8", "7"),
        ("first #### 3 then\n#### 4", "4"),
        ("#### **$1,234.50**", "1234.50"),
        ("#### \u22125", "-5"),
        ("#### $-5", "-5"),
        ("#### -$5", "-5"),
        ("the answer is \\boxed{18} apples of 20", "18"),
        ("\\boxed{x = -3}", "-3"),
        ("The total is 18.", "18"),
        ("He has 10-5", "5"),
        ("It costs $.50", "0.50"),
        ("1,200, then", "1200"),
        ("#### none", None),
        ("no number", None),
        ("", None),
    ],
)
def test_the_final_number_of_a_reply(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


def answer(id: int, number: str | None, *, error: str | None = None, tokens: int = 10, seconds: float = 2.0) -> Answer:
    value = None if number is None else Decimal(number)
    return Answer(id, value, number == "1", "", tokens, seconds, "stop", error)


def test_mean_output_rate_is_over_replies():
    answers = [answer(0, "1"), answer(1, "2", tokens=30), answer(2, None, error="x", tokens=0, seconds=0.0)]
    result = score(answers)
    assert (result.correct, result.total, result.api_errors, result.output_rate) == (1, 3, 1, 10.0)


def test_a_failed_request_is_not_a_differing_answer():
    a = [answer(0, "1"), answer(1, None), answer(2, "3")]
    b = [answer(0, None, error="x"), answer(1, "2"), answer(2, "3.0")]
    assert list(differing({"a": a, "b": b})) == [1]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[1]",
        '{"question": "x"}',
        '{"question": "x", "answer": "no mark 5"}',
        '{"question": "x", "answer": "#### nan"}',
    ],
)
def test_a_bad_record_is_named_by_its_line(tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "q", "answer": "#### 1"}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:2"):
        read_records(path)


def test_a_line_separator_within_a_question_does_not_end_the_record(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "a\u2028b\x85c", "answer": "#### 1"}\n', encoding="utf-8")
    assert [r.question for r in read_records(path)] == ["a\u2028b\x85c"]


def test_more_examples_than_records_are_refused(file, url, capsys):
    assert main(["eval", str(file), "--url", url, "--num-shots", "9"]) == 2
    assert "num-shots is 9" in capsys.readouterr().err
    assert main(["eval", str(file), "--url", url, "--num-shots", "4"]) == 2
    assert "leaves no record" in capsys.readouterr().err


def test_servers_have_names_or_are_called_by_address():
    assert parse_urls(["a=http://h:1/v1", "http://h:2/"]) == {"a": "http://h:1", "h:2": "http://h:2"}
    for bad in (["a=http://h:1", "a=http://h:2"], ["ftp://h"]):
        with pytest.raises(ValueError, match="url"):
            parse_urls(bad)
