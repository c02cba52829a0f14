"""One answer as it grows: tokens in, deltas out."""

from collections.abc import Iterable, Sequence

from splitserve.text.detokenizer import Detokenizer
from splitserve.text.stop import StopMatcher
from splitserve.text.tokenizer import Tokenizer
from splitserve.v1 import common_pb2, router_pb2


class Answer:
    """Tokens of one request, their text, and what the client has not been handed yet.

    Deltas coalesce: `take` hands out all that came since the last, however long that was.

    Args:
        tokenizer: The model's.
        prompt_ids: What the answer follows.
        stops: Texts that end it.

    Attributes:
        token_ids: All tokens so far, in order.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: tuple[str, ...]
    ) -> None:
        self.token_ids: list[int] = []
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._stops = StopMatcher(stops) if stops else None
        self._stopped = False
        self._ended = False
        self._text = ""
        self._num_taken = 0
        self._logprobs: list[common_pb2.TokenLogprob] = []

    def push(
        self, token_ids: Iterable[int], logprobs: Sequence[common_pb2.TokenLogprob] = ()
    ) -> bool:
        """Takes sampled tokens, one log-probability for each or none.

        Tokens go in one by one: where a stop string ends the answer must not depend on how many
        steps a node put into one message.

        Returns:
            Whether a stop string has ended the answer; tokens behind it are dropped.
        """
        for index, token_id in enumerate(token_ids):
            if self._stopped:
                break
            self.token_ids.append(token_id)
            if logprobs:
                self._logprobs.append(logprobs[index])
            self._add_text(self._detokenizer.push((token_id,)))
        return self._stopped

    def end(self) -> bool:
        """No more tokens come: lets go of text that was held back.

        Returns:
            Whether a stop string has ended the answer.
        """
        if not self._ended and not self._stopped:
            self._ended = True
            self._add_text(self._detokenizer.flush())
            if self._stops is not None and not self._stopped:
                self._text += self._stops.flush()
        return self._stopped

    def take(self) -> router_pb2.GenerateResponse | None:
        """All that came since the last call; None if nothing did."""
        count = len(self.token_ids)
        if count == self._num_taken and not self._text:
            return None
        delta = router_pb2.GenerateResponse(
            text=self._text, token_ids=self.token_ids[self._num_taken :]
        )
        self._text, self._num_taken = "", count
        if self._logprobs:
            delta.logprobs.extend(self._logprobs)
            self._logprobs = []
        return delta

    def _add_text(self, text: str) -> None:
        if self._stops is not None:
            text, self._stopped = self._stops.push(text)
        self._text += text
