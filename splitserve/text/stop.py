"""Stop strings over a stream of text."""

import re
from collections import deque


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    The text is read as if character by character: the stop string that ends first counts, and
    of several that end there the longest, so the result does not depend on the pieces. This is
    the automaton of Aho and Corasick (1975); each character is looked at once, however many
    stop strings there are.

    Args:
        stops: None of them empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match = [0]  # Length of the longest stop string that ends in a state.
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._next)
        self._link()
        # Most text has nothing to do with any stop string; the scan jumps over it.
        firsts = "".join(map(re.escape, self._next[0]))
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._state = 0
        self._held = ""
        self._stopped = False

    def push(self, delta: str) -> tuple[str, bool]:
        """Takes more text.

        Returns:
            The text that is certainly not part of a stop string, and whether one was found.
            After that no more text comes out.
        """
        if self._stopped:
            return "", True
        text = self._held + delta
        index = len(self._held)
        while index < len(text):
            if self._state == 0:
                found = self._first.search(text, index) if self._first else None
                if found is None:
                    break
                index = found.start()
            self._step(text[index])
            index += 1
            if self._match[self._state]:
                self._stopped, self._held = True, ""
                return text[: index - self._match[self._state]], True
        # A state's depth is the longest end of the text that begins a stop string.
        safe = len(text) - self._depth[self._state]
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, char: str) -> None:
        state = self._state
        while state and char not in self._next[state]:
            state = self._fail[state]
        self._state = self._next[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = self._next[state][char]
        self._match[state] = len(stop)

    def _link(self) -> None:
        """Points each state to that of its longest end which is a state too."""
        queue = deque(self._next[0].values())
        while queue:
            parent = queue.popleft()
            for char, child in self._next[parent].items():
                fail = self._fail[parent]
                while fail and char not in self._next[fail]:
                    fail = self._fail[fail]
                self._fail[child] = self._next[fail].get(char, 0)
                self._match[child] = self._match[child] or self._match[self._fail[child]]
                queue.append(child)
