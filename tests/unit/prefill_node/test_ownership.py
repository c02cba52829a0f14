"""The ownership law under random histories of prompts, leases, readers and clocks."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from prefill_node.leases import Leases, Reading
from splitserve.core.errors import NotFoundError, ResourceExhaustedError
from splitserve.kv.blocks import BlockManager

NUM_BLOCKS = 12
TTL_S = 10.0


class Ownership(RuleBasedStateMachine):
    owned = Bundle("owned")
    tickets = Bundle("tickets")
    readings = Bundle("readings")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.blocks = BlockManager(NUM_BLOCKS, block_size=4)
        self.leases = Leases(self.blocks, TTL_S, clock=lambda: self.now_s)
        self.next_ticket = 0
        # The model: what each live lease holds and until when, and who copies from which blocks.
        self.live: dict[str, tuple[frozenset[int], float]] = {}
        self.copying: dict[Reading, frozenset[int]] = {}

    @rule(target=owned, count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int):
        free = self.blocks.num_free
        try:
            taken = self.blocks.allocate(count)
        except ResourceExhaustedError:
            assert count > free
            assert self.blocks.num_free == free
            return multiple()
        assert count <= free
        held = set().union(*(blocks for blocks, _ in self.live.values()), *self.copying.values())
        assert not held & set(taken), "a block that is leased or being read was given away"
        return taken

    @rule(block_ids=consumes(owned))
    def finish_prompt(self, block_ids: list[int]):
        self.blocks.free(block_ids)

    @rule(block_ids=consumes(owned), owners=st.integers(1, 4))
    def share(self, block_ids: list[int], owners: int):
        free = self.blocks.num_free
        self.blocks.share(block_ids, owners)
        for _ in range(owners - 1):
            self.blocks.free(block_ids)
            assert self.blocks.num_free == free, "another owner still needs them"
        self.blocks.free(block_ids)
        assert self.blocks.num_free == free + len(block_ids)

    @rule(target=tickets, block_ids=consumes(owned))
    def grant(self, block_ids: list[int]):
        ticket = f"ticket-{self.next_ticket}"
        self.next_ticket += 1
        self.leases.grant(ticket, block_ids, num_tokens=4 * len(block_ids))
        self.live[ticket] = (frozenset(block_ids), self.now_s + TTL_S)
        return ticket

    @rule(target=readings, ticket=tickets, reader=st.sampled_from(["decode-1", "decode-2"]))
    def open_lease(self, ticket: str, reader: str):
        if ticket not in self.live:
            try:
                self.leases.open(ticket, reader)
            except NotFoundError:
                return multiple()
            raise AssertionError("an ended lease was opened")
        reading = self.leases.open(ticket, reader)
        assert frozenset(reading.lease.block_ids) == self.live[ticket][0]
        self.copying[reading] = self.live[ticket][0]
        return reading

    @rule(reading=consumes(readings))
    def close(self, reading: Reading):
        self.leases.close(reading)
        del self.copying[reading]

    @rule(reading=readings)
    def release(self, reading: Reading):
        if reading not in self.copying:
            return
        ticket = reading.lease.ticket
        assert self.leases.release(ticket, reading.reader_epoch) == (ticket in self.live)
        self.live.pop(ticket, None)

    @rule(ticket=tickets)
    def release_without_having_opened(self, ticket: str):
        assert not self.leases.release(ticket, "stranger")

    @rule(ticket=tickets)
    def cancel(self, ticket: str):
        self.leases.cancel(ticket)
        self.live.pop(ticket, None)

    @rule(ticket=tickets)
    def renew(self, ticket: str):
        self.leases.renew([ticket])
        if ticket in self.live:
            self.live[ticket] = (self.live[ticket][0], self.now_s + TTL_S)

    @rule(seconds=st.floats(0, 2 * TTL_S))
    def let_time_pass(self, seconds: float):
        self.now_s += seconds
        due = {ticket for ticket, (_, expiry) in self.live.items() if expiry <= self.now_s}
        assert set(self.leases.expire()) == due, "expiry ends all that is due, not the first"
        for ticket in due:
            del self.live[ticket]

    @invariant()
    def the_four_states_add_up(self):
        self.blocks.check()
        counts = self.blocks.counts
        assert counts.free + counts.owned + counts.leased + counts.quarantined == NUM_BLOCKS
        leased = set().union(*(blocks for blocks, _ in self.live.values()))
        assert counts.leased == len(leased)
        assert counts.quarantined == len(set().union(*self.copying.values()) - leased)
        assert len(self.leases) == len(self.live)


Ownership.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestOwnership = Ownership.TestCase
