"""Streamed pieces put together are the text of all ids, and no piece has half a character."""

from __future__ import annotations

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from evener.frontend.detokenize import WindowDetokenizer
from evener.frontend.tokenizer import Tokenizer

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
SEEDS = st.lists(st.integers(0, 10_000), max_size=60)


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@given(seeds=SEEDS, skip=st.booleans())
def test_pieces_of_random_ids_are_the_librarys_text_with_a_byte_level_decoder(
    byte_level: Tokenizer, byte_level_library: tokenizers.Tokenizer, seeds: list[int], skip: bool
) -> None:
    ids = [seed % (byte_level.vocab_size + 3) for seed in seeds]  # some do not exist
    assert "".join(pieces(byte_level, ids, skip)) == byte_level_library.decode(ids, skip_special_tokens=skip)


@given(seeds=SEEDS, skip=st.booleans())
def test_pieces_of_random_ids_are_the_librarys_text_with_byte_fallback_where_the_bytes_are_text(
    byte_fallback: Tokenizer, byte_fallback_library: tokenizers.Tokenizer, seeds: list[int], skip: bool
) -> None:
    ids = [seed % byte_fallback.vocab_size for seed in seeds]
    streamed = "".join(pieces(byte_fallback, ids, skip))
    expected = byte_fallback_library.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in expected:
        assert streamed == expected
    else:
        # The library replaces every byte of a run of byte tokens that is not text as a whole. A stream cannot wait for
        # the end of a run: it replaces only what is wrong.
        assert streamed == by_runs(byte_fallback_library, ids, skip)


def by_runs(library: tokenizers.Tokenizer, ids: list[int], skip: bool) -> str:
    text, run = "", b""
    for token in [*ids, None]:
        if token is not None and 3 <= token < 259:
            run += bytes([token - 3])
            continue
        if token in (0, 1, 2) and skip:
            continue
        text, run = text + run.decode("utf-8", "replace"), b""
        if token is not None:
            text += (library.id_to_token(token) or "").replace("▁", " ")
    return text.removeprefix(" ")


@given(text=UNICODE)
def test_any_text_survives_a_byte_level_round_trip(byte_level: Tokenizer, text: str) -> None:
    assert "".join(pieces(byte_level, byte_level.encode(text), skip=False)) == text


@given(text=UNICODE.filter(lambda text: "<" not in text and "▁" not in text))
def test_any_text_survives_a_byte_fallback_round_trip(byte_fallback: Tokenizer, text: str) -> None:
    assert "".join(pieces(byte_fallback, byte_fallback.encode(text))) == text


@given(seeds=SEEDS, skip=st.booleans())
def test_pieces_of_random_ids_are_the_librarys_text_with_any_other_decoder(
    wordpiece: Tokenizer, wordpiece_library: tokenizers.Tokenizer, seeds: list[int], skip: bool
) -> None:
    ids = [seed % wordpiece.vocab_size for seed in seeds]
    assert "".join(pieces(wordpiece, ids, skip)) == wordpiece_library.decode(ids, skip_special_tokens=skip)


# Hypothesis draws strings out of our own modules, too, and some of those spell special tokens: "</s>" is no text.
@given(text=UNICODE.filter(lambda text: "<" not in text))
def test_any_text_survives_a_tokenizer_without_a_fast_form(slow: Tokenizer, text: str) -> None:
    assert "".join(pieces(slow, slow.encode(text, add_special_tokens=False))) == text


def test_a_tokenizer_without_a_fast_form_skips_special_tokens_and_knows_its_eos(slow: Tokenizer) -> None:
    ids = slow.encode("é")
    assert ids[-1] == slow.eos_id
    assert (slow.decode(ids), slow.decode(ids, skip_special_tokens=False)) == ("é", "é</s>")
    assert slow.token_bytes(slow.encode("a")[0]) == b"a"
    assert slow.token_bytes(10**6) == b""


def test_a_character_split_over_tokens_comes_whole(byte_level: Tokenizer) -> None:
    emoji = [byte_level.encode(chr(byte))[-1] for byte in b"a"]
    assert pieces(byte_level, emoji)[0] == "a"
    for tokens in (byte_level.encode("🦙"), byte_level.encode("ऄ")):
        assert len(tokens) > 1
        assert all("\ufffd" not in piece for piece in pieces(byte_level, tokens))
        assert pieces(byte_level, tokens)[-2] in "🦙ऄ"


def test_a_byte_fallback_character_comes_with_its_last_byte(byte_fallback: Tokenizer) -> None:
    ids = [3 + byte for byte in "🦙".encode()]
    assert pieces(byte_fallback, [*ids, 3 + 0x41]) == ["", "", "", "🦙", "A", ""]


def test_an_incomplete_character_is_shown_only_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("🦙")[:-1]
    *before, last = pieces(byte_level, ids)
    assert "".join(before) == ""
    assert set(last) == {"\ufffd"}


def test_invalid_utf8_bytes_do_not_stall_the_stream(byte_fallback: Tokenizer) -> None:
    ids = [3 + 0xFF] * 50
    assert pieces(byte_fallback, ids)[:-1] == ["\ufffd"] * 50


def test_only_the_first_space_is_taken_away(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode("the the")
    assert "".join(pieces(byte_fallback, ids)) == "the the"
    assert "".join(pieces(byte_fallback, byte_fallback.encode("  x"))) == "  x"


def test_special_tokens_are_left_out_or_shown(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("a"), *byte_level.encode("<eos>"), *byte_level.encode("<tool call>")]
    assert byte_level.decode(ids) == "a<tool call>"
    assert byte_level.decode(ids, skip_special_tokens=False) == "a<eos><tool call>"


def test_decoding_a_token_costs_the_same_however_much_came_before(wordpiece: Tokenizer) -> None:
    sizes: list[int] = []

    def decode(ids: list[int]) -> str:
        sizes.append(len(ids))
        return wordpiece.decode(ids)

    detokenizer = WindowDetokenizer(decode, lambda token: True)
    for _ in range(300):
        detokenizer.push(5)
    assert max(sizes) <= 8
