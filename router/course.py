"""One request's way through the nodes: prefill, hand-over, decode, and again after a failure.

Sampling depends on nothing but seed and position, so a request goes on anywhere from its tokens
so far: after a failure they are prefilled once more, and the client notices nothing.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

from router.admission import Prompt
from router.answer import Answer
from router.attempts import Attempt
from router.dispatch import Dispatcher
from router.prefixes import PromptKeys
from router.session import NodeSession, migrated
from router.tracker import TrackedRequest
from splitserve.core.config import MAX_QUEUE_WAIT_S, RouterConfig
from splitserve.core.errors import (
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SplitserveError,
    UnavailableError,
    error_from_code,
)
from splitserve.core.lifetime import LifetimeEventKind
from splitserve.core.node import NodeKind
from splitserve.core.request import FinishReason
from splitserve.core.ticket import new_ticket
from splitserve.v1 import work_pb2

log = logging.getLogger(__name__)

MAX_PULLS = 2
"""Pulls of one prefilled prompt that may fail before it is computed again."""


class AttemptFailedError(Exception):
    """Nothing is left of this attempt; the request can start again from its tokens."""


class Course:
    """Drives answers that go one way. Tokens do not wait for it: they go straight into them.

    All answers of a request begin together: one prompt, one pull. After a failure their tokens
    differ, and each goes on by itself.

    Args:
        request: Whose way it is.
        prompt: What was asked.
        answers: Take the tokens; what they have so far is the same.
        dispatcher: Places them on nodes.
        config: Limits on retries and on the hand-over.
    """

    def __init__(
        self,
        request: TrackedRequest,
        prompt: Prompt,
        answers: Sequence[Answer],
        dispatcher: Dispatcher,
        config: RouterConfig,
    ) -> None:
        self._request = request
        self._prompt = prompt
        self._answers = {answer.index: answer for answer in answers}
        self._retries = 0
        self._dispatcher = dispatcher
        self._config = config
        self._held: list[Attempt] = []
        self._avoid: set[NodeSession] = set()
        self._failures: list[str] = []
        self._migrated = False
        self._assignment = work_pb2.Assignment()
        # A decode node's, which pulls the prompt while it is computed.
        self._early: Attempt | None = None
        # What callbacks tell the driving task: None is a phase's good end. One queue an attempt,
        # so that nothing is lost between two phases and nothing is left over from an attempt.
        self._news: asyncio.Queue[Exception | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Drives the answers within; nodes hold nothing of them once the request ends, or after."""
        if self._request.outcome is None:
            self._task = asyncio.create_task(self._run())
        try:
            with self._request.when_finished(self._release):
                yield
        finally:
            self._release()

    def on_progress(self, attempt: Attempt, progress: work_pb2.Progress) -> None:
        """Takes a node's news; a fault of ours ends this request and no other."""
        try:
            self._take(attempt, progress)
        except Exception as error:
            self._fail(error)

    def on_lost(self, attempt: Attempt, reason: str) -> None:
        """A node is gone with what it held."""
        self._held.remove(attempt)
        if attempt.early:
            return
        error = UnavailableError(f"lost: {reason}")
        self._note_failure(attempt, error)
        pulling = attempt.session.info.kind is NodeKind.DECODE and not self._migrated
        # While it was to be pulled, the KV still lies with the prefill node.
        self._news.put_nowait(error if pulling else AttemptFailedError())

    def _take(self, attempt: Attempt, progress: work_pb2.Progress) -> None:
        decoding = attempt.session.info.kind is NodeKind.DECODE
        for event in map(attempt.session.on_our_clock, progress.events):
            # Decoding ends with the last answer that still goes on.
            ends = self._request.answers_left == 1 and progress.index in attempt.open
            if ends or event.kind is not LifetimeEventKind.DECODE_END:
                self._request.lifetime.add(event)
        if decoding and not self._migrated and migrated(progress):
            self._take_over()
        if progress.HasField("error") and attempt.early:
            self._drop(attempt)  # The prompt is pulled when it is complete.
        elif progress.HasField("error"):
            self._refused(attempt, error_from_code(progress.error.code, progress.error.message))
        elif progress.index in attempt.open:  # Else late news of a cancelled answer.
            self._push(attempt, progress)
            if decoding or not attempt.open:
                return
            if not attempt.untold:
                self._news.put_nowait(None)
            elif not progress.token_ids and self._early is None:
                self._pull_early(attempt)

    def _push(self, attempt: Attempt, progress: work_pb2.Progress) -> None:
        """Tokens for an answer, and perhaps its end."""
        if progress.cached_tokens and not self._retries:
            self._request.cached_tokens = progress.cached_tokens
        answer = self._answers[progress.index]
        if progress.token_ids:
            attempt.untold.discard(progress.index)
            answer.push(progress.token_ids, progress.logprobs)
            self._request.wake()
            if attempt.session.info.kind is NodeKind.PREFILL and not progress.finish_reason:
                attempt.session.attempts.lease(attempt)
        if progress.finish_reason:
            answer.end(FinishReason(progress.finish_reason))
        if answer.finish_reason is not None:
            self._end(attempt, answer.index, told=bool(progress.finish_reason))
            self._request.end_answer(answer.finish_reason)

    def _end(self, attempt: Attempt, index: int, *, told: bool) -> None:
        """An answer is complete, as its node has told or a stop string."""
        attempt.open.remove(index)
        if attempt.open:
            if not told and not attempt.leased:
                attempt.session.cancel_answer(attempt, index)
        elif told and not attempt.leased:
            # Dropped, not cancelled: the node holds nothing any more.
            self._drop(attempt)
        else:
            self._held.remove(attempt)
            attempt.session.cancel(attempt)

    def _take_over(self) -> None:
        """The decode node holds the KV: the prefill node has been given its blocks back."""
        self._migrated = True
        for source in [attempt for attempt in self._held if attempt.leased]:
            self._drop(source)
        self._news.put_nowait(None)

    def _refused(self, attempt: Attempt, error: SplitserveError) -> None:
        self._held.remove(attempt)
        attempt.session.drop(attempt)
        if isinstance(error, ResourceExhaustedError) and not self._migrated:
            attempt.session.attempts.refuse()
        else:
            self._note_failure(attempt, error)
        self._news.put_nowait(error)

    def _note_failure(self, attempt: Attempt, error: SplitserveError) -> None:
        node = attempt.session.info.name
        self._avoid.add(attempt.session)
        self._failures.append(f"{node}: {error.message}")
        log.warning(
            "attempt failed",
            extra={"request_id": self._request.request_id, "node": node, "code": error.code},
        )

    def _drop(self, attempt: Attempt) -> None:
        self._held.remove(attempt)
        attempt.session.drop(attempt)

    async def _run(self) -> None:
        try:
            await self._serve()
        except SplitserveError as error:
            self._request.finish(error)
        except Exception as error:
            self._fail(error)

    async def _serve(self) -> None:
        """Returns once all answers have ended; a request that is complete cancels this task."""
        while True:
            try:
                await self._attempt()
            except AttemptFailedError:
                self._cancel_held()
                if not self._open:  # They ended just then; others of the request go on.
                    return
            except UnavailableError as error:
                raise UnavailableError("; ".join([error.message, *self._failures])) from None
            if self._retries == self._config.max_retries:
                raise UnavailableError("every attempt failed: " + "; ".join(self._failures))
            self._retries += 1
            self._request.note(LifetimeEventKind.RETRIED)
            if len(self._open) > 1 and any(answer.token_ids for answer in self._open):
                await self._part()

    async def _part(self) -> None:
        """Sends each answer its own way; until cancelled."""
        with ExitStack() as stack:
            for answer in self._open:
                course = Course(
                    self._request, self._prompt, [answer], self._dispatcher, self._config
                )
                course._retries = self._retries
                course._avoid = set(self._avoid)
                course._failures = list(self._failures)
                stack.enter_context(course.running())
            await asyncio.Event().wait()

    @property
    def _open(self) -> list[Answer]:
        """The answers that have not ended."""
        return [answer for answer in self._answers.values() if answer.finish_reason is None]

    async def _attempt(self) -> None:
        self._news = asyncio.Queue()
        self._migrated = False
        self._early = None
        self._assignment = self._assign()
        source = await self._prefill()
        await self._hand_over(source)
        await self._news.get()
        raise AttemptFailedError

    def _assign(self) -> work_pb2.Assignment:
        answers = self._open
        return work_pb2.Assignment(
            request_id=self._request.request_id,
            token_ids=[*self._prompt.token_ids, *answers[0].token_ids],
            prompt_length=len(self._prompt.token_ids),
            sampling=self._prompt.node_sampling,
            ticket=new_ticket(),
            indexes=[answer.index for answer in answers],
        )

    async def _prefill(self) -> Attempt:
        """Returns the hold on the prompt's KV."""
        start = work_pb2.PrefillStart(assignment=self._assignment)
        until_s = asyncio.get_running_loop().time() + MAX_QUEUE_WAIT_S
        what = f"no prefill node's queue had room within {MAX_QUEUE_WAIT_S:g} s"
        while True:
            async with _until(until_s, what):
                source = await self._place(NodeKind.PREFILL, start)
            error = await self._news.get()
            if error is None:
                return source
            if not isinstance(error, ResourceExhaustedError):
                raise _final(error)

    def _pull_early(self, source: Attempt) -> None:
        """The prompt takes more than one step: a decode node with room may pull it meanwhile."""
        prompt = PromptKeys(self._assignment.token_ids)
        if not self._config.overlapped_pull:
            return
        if session := self._dispatcher.pick_now(NodeKind.DECODE, prompt):
            self._early = session.start(self._decode_start(source), self, prompt)
            self._held.append(self._early)

    def _decode_start(self, source: Attempt) -> work_pb2.DecodeStart:
        info = source.session.info
        return work_pb2.DecodeStart(
            assignment=self._assignment, source_address=info.address, source_epoch=info.epoch
        )

    async def _hand_over(self, source: Attempt) -> None:
        """Returns once a decode node holds the KV."""
        goes_on = sorted(source.open)
        del self._assignment.indexes[:]
        self._assignment.indexes.extend(goes_on)
        tokens = {index: self._answers[index].token_ids[-1] for index in goes_on}
        start = self._decode_start(source)
        start.next_token_ids.extend(tokens.values())
        timeout_s = self._config.handover_timeout_s
        what = f"no decode node took the request within handover_timeout_s = {timeout_s:g}"
        until_s = asyncio.get_running_loop().time() + timeout_s
        failed_pulls = 0
        while True:
            async with _until(until_s, what):
                if self._early is not None and self._early in self._held:
                    self._early.session.first_tokens(self._early, tokens)
                    self._early = None
                else:
                    await self._place(NodeKind.DECODE, start, source)
                error = await self._news.get()
            if error is None:
                return
            if isinstance(error, (UnavailableError, InternalError)):
                failed_pulls += 1
                if failed_pulls == MAX_PULLS:
                    # Two decode nodes could not read from it.
                    self._avoid.add(source.session)
                    raise AttemptFailedError
                until_s = asyncio.get_running_loop().time() + timeout_s
            elif not isinstance(error, ResourceExhaustedError):
                raise _final(error)

    async def _place(self, kind: NodeKind, start: Any, source: Attempt | None = None) -> Attempt:
        prompt = PromptKeys(start.assignment.token_ids)

        def begin(session: NodeSession) -> Attempt:
            if source is not None and source not in self._held:
                raise AttemptFailedError  # Its node was lost while we waited in line.
            attempt = session.start(start, self, prompt)
            self._held.append(attempt)
            return attempt

        return await self._dispatcher.place(kind, prompt, begin, self._avoid)

    def _release(self) -> None:
        """The request has ended: nodes drop what they hold, and nobody waits for it."""
        self._cancel_held()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def _cancel_held(self) -> None:
        held, self._held = self._held, []
        for attempt in held:
            attempt.session.cancel(attempt)

    def _fail(self, error: Exception) -> None:
        log.error(
            "a fault of the router's",
            extra={"request_id": self._request.request_id},
            exc_info=error,
        )
        self._request.finish(InternalError("an internal error; the router's log has the details"))


def _final(error: Exception) -> Exception:
    """What ends an attempt: the client's mistake as it is, anything else to start again."""
    return error if isinstance(error, InvalidArgumentError) else AttemptFailedError()


@asynccontextmanager
async def _until(until_s: float, what: str) -> AsyncIterator[None]:
    """A limit in the loop's time. Running into it is overload: a later request may succeed."""
    try:
        async with asyncio.timeout_at(until_s):
            yield
    except TimeoutError:
        raise ResourceExhaustedError(what) from None
