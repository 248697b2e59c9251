"""Incremental text: the same as decoding at once for any cut, whole characters, stop strings never shown in part."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from paraflash.engine.detokenizer import Detokenizer, StopStrings
from paraflash.engine.sampling_params import SamplingParams
from paraflash.engine.tokenizer import TokenizerError, load_tokenizer, token_bytes

NARROW = Path(__file__).parent.parent / "data" / "golden" / "narrow"
TOKENIZER = load_tokenizer(NARROW)
TOKENIZER.add_tokens([AddedToken("</think>", special=False), AddedToken("<｜tool｜>", special=False)])
THINK = TOKENIZER.token_to_id("</think>")
VOCAB = TOKENIZER.get_vocab_size()


def detokenizer(**fields: Any) -> Detokenizer:
    return Detokenizer(TOKENIZER, SamplingParams(**fields))


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def cut(items: list[int], places: list[int]) -> list[list[int]]:
    borders = [0, *sorted(p % (len(items) + 1) for p in places), len(items)]
    return [items[a:b] for a, b in itertools.pairwise(borders)]


def run(decoder: Detokenizer, pieces: list[list[int]], finish: str = "length") -> tuple[list[str], str | None]:
    shown = []
    for i, piece in enumerate(pieces):
        text, stop = decoder.feed(piece, finish if i == len(pieces) - 1 else None)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return shown, None


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, VOCAB + 20), max_size=30),
    places=st.lists(st.integers(0, 30), max_size=8),
    skip=st.booleans(),
)
def test_any_cut_of_any_ids_gives_the_text_of_decoding_at_once(ids: list[int], places: list[int], skip: bool) -> None:
    shown, _ = run(detokenizer(skip_special_tokens=skip), cut(ids, places))
    assert "".join(shown) == TOKENIZER.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20), places=st.lists(st.integers(0, 80), max_size=20))
def test_text_comes_back_in_whole_characters(text: str, places: list[int]) -> None:
    shown, _ = run(detokenizer(), cut(ids_of(text), places))
    assert "".join(shown) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in shown)


def test_a_character_of_several_tokens_appears_with_the_last_of_them() -> None:
    ids = ids_of("😀")
    assert len(ids) == 4
    decoder = detokenizer()
    assert [decoder.feed([i])[0] for i in ids] == ["", "", "", "😀"]


def test_a_character_cut_off_by_the_end_shows_as_a_replacement_mark() -> None:
    ids = ids_of("a😀")
    assert detokenizer().feed(ids[:-1], "length")[0] == "a\ufffd" == TOKENIZER.decode(ids[:-1])


def test_control_tokens_are_skipped_and_named_tokens_are_shown() -> None:
    ids = [0, *ids_of("a"), THINK, 1]
    assert detokenizer().feed(ids, "length")[0] == "a</think>"
    everything = detokenizer(skip_special_tokens=False).feed(ids, "length")[0]
    assert everything == "<｜begin▁of▁sentence｜>a</think><｜end▁of▁sentence｜>"
    assert Detokenizer(TOKENIZER, SamplingParams(), {THINK}).feed(ids, "length")[0] == "a"


def test_the_token_at_which_the_engine_stopped_is_not_shown_unless_asked_for() -> None:
    ids = ids_of("a") + ids_of("b")
    assert detokenizer().feed(ids, "stop")[0] == "a"
    assert detokenizer(include_stop_str_in_output=True).feed(ids, "stop")[0] == "ab"
    assert detokenizer().feed(ids, "length")[0] == "ab"


def reference_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first moment at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abé", max_size=25),
    stops=st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
    places=st.lists(st.integers(0, 80), max_size=20),
)
def test_the_first_complete_stop_string_ends_the_text_for_any_cut(
    text: str, stops: list[str], places: list[int]
) -> None:
    shown, stop = run(detokenizer(stop=stops), cut(ids_of(text), places))
    want, want_stop = reference_stop(text, stops)
    assert ("".join(shown), stop) == (want, want_stop)
    for i in range(len(shown)):  # what has been shown is never taken back
        assert want.startswith("".join(shown[: i + 1]))


def test_text_that_may_begin_a_stop_string_is_held_back_and_no_more() -> None:
    stops = StopStrings(["END", "\n\n"])
    assert stops.push("some E") == ("some ", None)
    assert stops.push("N") == ("", None)
    assert stops.push("ough\n") == ("ENough", None)
    assert stops.push("x") == ("\nx", None)
    assert stops.push("E") == ("", None)
    assert stops.release() == "E"


def test_the_stop_string_is_included_where_asked_for_and_what_follows_is_dropped() -> None:
    ids = ids_of("one STOP two")
    assert detokenizer(stop="STOP").feed(ids, "length") == ("one ", "STOP")
    assert detokenizer(stop="STOP", include_stop_str_in_output=True).feed(ids, "length") == ("one STOP", "STOP")


def test_tokens_after_the_stop_string_are_not_counted() -> None:
    ids = ids_of("a") + ids_of("b") + ids_of("c")
    decoder = detokenizer(stop="b")
    assert decoder.feed(ids) == ("a", "b") and decoder.num_tokens == 2
    assert decoder.feed(ids) == ("", "b") and decoder.num_tokens == 2


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    ids = [i for letter in "abab" for i in ids_of(letter)]
    assert detokenizer(stop="b", min_tokens=2).feed(ids) == ("aba", "b")
    assert detokenizer(stop="b", min_tokens=1).feed(ids) == ("a", "b")


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path) -> None:
    from tokenizers.models import WordLevel

    with pytest.raises(TokenizerError, match="byte-level"):
        token_bytes(Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(TokenizerError, match="does not exist"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot be read"):
        load_tokenizer(tmp_path)
