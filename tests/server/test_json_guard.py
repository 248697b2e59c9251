"""What is passed on plus what closes it is always one JSON object, and valid JSON passes unchanged."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paraflash.server.json_guard import JsonGuard

WHOLE = [
    '{"a": "x \\u00e9\\n\\\\", "b": [1, -2.5e3, {"c": null, "d": [true,false,"q"]}], "": {}}',
    "{}",
    '  { "k" : "\\"" }',
    '{"a":1.5,"b":-0,"c":10}',
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.mark.parametrize("text", WHOLE)
def test_every_cut_of_valid_json_is_kept_and_completed(text: str) -> None:
    for cut in range(len(text) + 1):
        guard = JsonGuard()
        passed = "".join(guard.feed(char) for char in text[:cut])
        assert passed == text[:cut]
        assert isinstance(json.loads(passed + guard.close()), dict)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("", "{}"),
        ("{", "{}"),
        ('{"a', '{"a":null}'),
        ('{"a": tr', '{"a": true}'),
        ('{"a": -', '{"a": -0}'),
        ('{"a": [1,', '{"a": [1,null]}'),
        ('{"a": 1,', '{"a": 1,"":null}'),
        ('{"a": "\\u12', '{"a": "\\u1200"}'),
        ('{"a": "\\', '{"a": "\\\\"}'),
        ('{"a": oops}', '{"a": null}'),
        ('{"a": {"k": oops, 1]]}', '{"a": {"k": null}}'),
        ("[1]", "{}"),
        ("{}{}", "{}"),
    ],
)
def test_what_completes_a_beginning(text: str, result: str) -> None:
    guard = JsonGuard()
    assert guard.feed(text) + guard.close() == result


@given(st.dictionaries(st.text(), VALUES), st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_object_passes_unchanged(value: dict, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    guard = JsonGuard()
    assert guard.feed(text) == text
    assert guard.complete
    assert guard.close() == ""


@given(st.text(alphabet='{}[]":,\\ua1-.eEtrufalsn \n0', max_size=20), st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_text_becomes_valid_json(text: str, inside: bool) -> None:
    guard = JsonGuard()
    text = '{"a":' + text if inside else text
    passed = guard.feed(text)
    assert text.startswith(passed)
    assert isinstance(json.loads(passed + guard.close()), dict)
    assert guard.close() == ""
