import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from splitserve.text.stop import StopMatcher

# Few letters, so that stop strings overlap each other and themselves.
WORDS = st.text("abé", min_size=1, max_size=5)
STOPS = st.lists(WORDS, max_size=4).map(tuple)


def naive(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before the first stop string, found by reading one character at a time."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return None


def run(stops: tuple[str, ...], deltas: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    out = ""
    for delta in deltas:
        safe, stopped = matcher.push(delta)
        out += safe
        if stopped:
            return out + matcher.flush(), True
    return out + matcher.flush(), False


@given(stops=STOPS, deltas=st.lists(st.text("abéc", max_size=6), max_size=12))
@example(stops=("abcd", "bc"), deltas=["abcd"])
@example(stops=("bc", "abc"), deltas=["a", "b", "c"])
@example(stops=("aab",), deltas=["aa", "ab"])
def test_fault_34_any_chunks_are_cut_where_reading_by_character_cuts(
    stops: tuple[str, ...], deltas: list[str]
) -> None:
    text = "".join(deltas)
    expected = naive(text, stops)
    assert run(stops, deltas) == ((text, False) if expected is None else (expected, True))


@given(stops=STOPS, deltas=st.lists(st.text("abéc", max_size=6), max_size=12))
def test_fault_34_only_what_could_still_become_a_stop_string_is_held_back(
    stops: tuple[str, ...], deltas: list[str]
) -> None:
    matcher, text, out = StopMatcher(stops), "", ""
    for delta in deltas:
        safe, stopped = matcher.push(delta)
        text, out = text + delta, out + safe
        if stopped:
            return
        held = [n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])]
        assert out == text[: len(text) - max(held, default=0)]


def test_fault_34_stop_string_over_three_tokens_is_cut_exactly() -> None:
    matcher = StopMatcher(("\n\nUser:",))
    assert matcher.push("Yes.") == ("Yes.", False)
    assert matcher.push("\n") == ("", False)
    assert matcher.push("\nUs") == ("", False)
    assert matcher.push("er: hi") == ("", True)
    assert matcher.push("more") == ("", True)
    assert matcher.flush() == ""


def test_fault_34_text_that_only_began_a_stop_string_is_not_lost() -> None:
    matcher = StopMatcher(("</answer>",))
    assert matcher.push("1 <") == ("1 ", False)
    assert matcher.push("/a") == ("", False)
    assert matcher.push(" b") == ("</a b", False)
    assert matcher.push("</ans") == ("", False)
    assert matcher.flush() == "</ans"


@pytest.mark.parametrize("special", ["]", "^a", "\\", "a-z]", "[", "-"])
def test_fault_34_stop_strings_are_text_and_not_patterns(special: str) -> None:
    assert run((special,), ["xyz b", special, "tail"]) == ("xyz b", True)
    assert run((special,), ["xyz b"]) == ("xyz b", False)


def test_without_stop_strings_everything_passes() -> None:
    assert run((), ["a", "", "b"]) == ("ab", False)


def test_cost_of_a_character_does_not_grow_with_what_is_held_back() -> None:
    def seconds(length: int) -> float:
        matcher = StopMatcher(("a" * length + "b",))
        start = time.perf_counter()
        for _ in range(2_000):
            matcher.push("a")
        return time.perf_counter() - start

    short = min(seconds(10) for _ in range(5))
    long = min(seconds(999) for _ in range(5))
    assert long < 10 * short  # A rescan would cost a hundred times as much.
