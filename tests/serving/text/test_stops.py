"""Streaming detection of stop strings gives what a search of the whole text gives."""

from hypothesis import example, given
from hypothesis import strategies as st

from gimbal_jax.serving.text.stops import OutputText, StopText, find_stop, length_held
from gimbal_jax.serving.text.tokenizer import load_tokenizer
from tests.serving.fake_server import write_model_folder

texts = st.text("ab", max_size=20)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def first_stop(text, start, stops):
    """Look at every end, from the left."""
    for end in range(start + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


@given(texts, st.integers(0, 20), stop_lists)
def test_find_stop_returns_the_stop_that_ends_first(text, start, stops):
    assert find_stop(text, min(start, len(text)), stops) == first_stop(text, min(start, len(text)), stops)


@given(texts, stop_lists)
def test_longest_beginning_of_a_stop_is_held_back(text, stops):
    beginnings = [stop[:length] for stop in stops for length in range(1, len(stop))]
    assert length_held(text, stops) == max((len(b) for b in beginnings if text.endswith(b)), default=0)


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.integers(0, 4), stop_lists, st.booleans())
@example(["a", "a", "b"], 0, ("aab",), False)
def test_pieces_release_the_text_up_to_the_first_stop(pieces, without, stops, include):
    """A stop string that ends within the first ``without`` pieces is ignored."""
    text, start = "".join(pieces), len("".join(pieces[:without]))
    expected = first_stop(text, start, stops)
    stop_text, released = StopText(stops, include), ""
    for number, piece in enumerate(pieces):
        released += stop_text.add(piece, may_stop=number >= without)
        if stop_text.matched is not None:
            break
    else:
        released += stop_text.rest()
    if expected is None:
        assert (released, stop_text.matched) == (text, None)
    else:
        begin, stop = expected
        assert (released, stop_text.matched) == (text[: begin + len(stop) if include else begin], stop)


def test_only_a_possible_stop_is_held_back():
    text = StopText(("</s>", "ab"), include=False)
    assert [text.add(piece) for piece in ("x<", "/", "y a", "c")] == ["x", "", "</y ", "ac"]
    assert text.add("</") == "" and text.rest() == "</" and text.rest() == ""


def tokens_of(folder):
    tokenizer = load_tokenizer(write_model_folder(folder))
    assert tokenizer is not None
    return tokenizer


def test_stop_string_cuts_text_and_tokens(tmp_path):
    tokenizer = tokens_of(tmp_path)
    text = OutputText(tokenizer.decoder(), ("🙂!",))
    tokens = tokenizer.encode("é🙂!?")  # a byte each
    assert [text.add([token]) for token in tokens[:6]] == [("", 1), ("é", 1), *[("", 1)] * 4]
    assert text.add(tokens[6:]) == ("", 1)  # the last token comes after the end
    assert text.matched == "🙂!"


def test_stop_within_min_tokens_is_ignored(tmp_path):
    tokenizer = tokens_of(tmp_path)
    for min_tokens, shown in ((0, ""), (1, ""), (2, "a"), (3, "aa"), (4, "aaaa")):
        text = OutputText(tokenizer.decoder(), ("aa",), min_tokens=min_tokens)
        assert text.add(tokenizer.encode("aaaa"))[0] + text.rest() == shown, min_tokens


@given(st.lists(st.integers(0, 2**31), max_size=30))
def test_unknown_token_ids_decode_without_error(tmp_path_factory, ids):
    decode = tokens_of(tmp_path_factory.mktemp("model")).decoder()
    decode(ids)
