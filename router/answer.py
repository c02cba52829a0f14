"""One answer as it grows: tokens in, deltas out."""

from collections.abc import Iterable, Sequence

from splitserve.core.request import FinishReason
from splitserve.rpc.convert import finish_reason_to_proto
from splitserve.text.detokenizer import Detokenizer
from splitserve.text.stop import StopMatcher
from splitserve.text.tokenizer import Tokenizer
from splitserve.v1 import common_pb2, router_pb2


class Answer:
    """Tokens of one answer, their text, and what the client has not been handed yet.

    Deltas coalesce: `take` hands out all that came since the last, however long that was.

    Args:
        tokenizer: The model's.
        prompt_ids: What the answer follows.
        stops: Texts that end it.
        index: Which of its request's answers it is.

    Attributes:
        index: Which of its request's answers it is.
        token_ids: All tokens so far, in order.
        finish_reason: Why it ended; None while it grows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: tuple[str, ...],
        index: int = 0,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._stops = StopMatcher(stops) if stops else None
        self._text = ""
        self._told_end = False
        self._num_taken = 0
        self._logprobs: list[common_pb2.TokenLogprob] = []

    def push(
        self, token_ids: Iterable[int], logprobs: Sequence[common_pb2.TokenLogprob] = ()
    ) -> None:
        """Takes sampled tokens, one log-probability for each or none.

        Tokens go in one by one: where a stop string ends the answer must not depend on how many
        steps a node put into one message. Tokens behind its end are dropped.
        """
        for index, token_id in enumerate(token_ids):
            if self.finish_reason is not None:
                return
            self.token_ids.append(token_id)
            if logprobs:
                self._logprobs.append(logprobs[index])
            self._add_text(self._detokenizer.push((token_id,)))

    def end(self, reason: FinishReason) -> None:
        """No more tokens come: lets go of text that was held back.

        Args:
            reason: Why, unless it has ended already or a stop string is in what was held back.
        """
        if self.finish_reason is None:
            self._add_text(self._detokenizer.flush())
        if self.finish_reason is None:
            self.finish_reason = reason
            if self._stops is not None:
                self._text += self._stops.flush()

    def take(self) -> router_pb2.GenerateResponse | None:
        """All that came since the last call, its end too; None if nothing did."""
        count, ended = len(self.token_ids), self.finish_reason is not None
        if count == self._num_taken and not self._text and ended == self._told_end:
            return None
        delta = router_pb2.GenerateResponse(
            index=self.index,
            text=self._text,
            token_ids=self.token_ids[self._num_taken :],
            finish_reason=finish_reason_to_proto(self.finish_reason),
        )
        self._text, self._num_taken, self._told_end = "", count, ended
        if self._logprobs:
            delta.logprobs.extend(self._logprobs)
            self._logprobs = []
        return delta

    def _add_text(self, text: str) -> None:
        if self._stops is not None:
            text, stopped = self._stops.push(text)
            if stopped:
                self.finish_reason = FinishReason.STOP
        self._text += text
