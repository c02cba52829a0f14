"""The ownership law under random histories of prompts, prefixes, leases, readers and clocks."""

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
        self.growing: dict[str, tuple[list[bytes], list[int]]] = {}
        self.copying: dict[Reading, frozenset[int]] = {}
        # Prompts that run, with their keys and blocks; and what can be found in which block.
        self.prompts: list[tuple[list[bytes], list[int]]] = []
        self.content: dict[int, bytes] = {}

    @rule(target=owned, name=st.integers(0, 3), count=st.integers(0, NUM_BLOCKS))
    def begin_prompt(self, name: int, count: int):
        keys = [f"{name} {index}".encode() for index in range(count)]
        found = self.blocks.find(keys)
        assert found == self.known_blocks(keys)
        before = self.blocks.counts
        fits = self.blocks.fit(count, found)
        try:
            taken = self.blocks.allocate(count, found)
        except ResourceExhaustedError:
            assert not fits
            assert self.blocks.counts == before, "none was taken"
            return multiple()
        assert fits
        assert taken[: len(found)] == found
        fresh = set(taken[len(found) :])
        assert len(fresh) == count - len(found)
        assert not fresh & self.held(), "a block that somebody holds was given to another"
        if len(fresh) <= before.free:
            assert self.blocks.counts.cached == before.cached - len(set(found) - self.held())
        self.content = {b: key for b, key in self.content.items() if b not in fresh}
        self.prompts.append((keys, taken))
        return keys, taken

    @rule(prompt=owned, count=st.integers(0, NUM_BLOCKS))
    def fill(self, prompt, count: int):
        if prompt not in self.prompts:
            return
        for key, block_id in list(zip(*prompt, strict=True))[:count]:
            known = set(self.content.values())
            self.blocks.remember(key, block_id)
            if key not in known and block_id not in self.content:
                self.content[block_id] = key

    @rule(prompt=consumes(owned))
    def finish_prompt(self, prompt):
        if prompt in self.prompts:
            self.end(prompt)

    @rule(prompt=consumes(owned), owners=st.integers(1, 4))
    def share(self, prompt, owners: int):
        if prompt not in self.prompts:
            return
        counts = self.blocks.counts
        self.blocks.share(prompt[1], owners)
        for _ in range(owners - 1):
            self.blocks.free(prompt[1])
            assert self.blocks.counts == counts, "another owner still needs them"
        self.end(prompt)

    def end(self, prompt):
        self.prompts.remove(prompt)
        self.blocks.free(prompt[1])

    def held(self) -> set[int]:
        return set().union(
            *(block_ids for _, block_ids in self.prompts),
            *(blocks for blocks, _ in self.live.values()),
            *self.copying.values(),
        )

    def known_blocks(self, keys: list[bytes]) -> list[int]:
        where = {key: block for block, key in self.content.items()}
        found = [where.get(key) for key in keys]
        return found[: found.index(None)] if None in found else found

    @rule(target=tickets, prompt=consumes(owned))
    def grant(self, prompt):
        if prompt not in self.prompts:
            return multiple()
        self.prompts.remove(prompt)
        _, block_ids = prompt
        ticket = f"ticket-{self.next_ticket}"
        self.next_ticket += 1
        self.leases.grant(ticket, block_ids, num_tokens=4 * len(block_ids))
        self.live[ticket] = (frozenset(block_ids), self.now_s + TTL_S)
        return ticket

    @rule(target=tickets, prompt=owned)
    def grant_early(self, prompt):
        if prompt not in self.prompts or prompt in self.growing.values():
            return multiple()
        ticket = f"ticket-{self.next_ticket}"
        self.next_ticket += 1
        self.leases.grant_early(ticket, prompt[1], num_tokens=0)
        self.live[ticket] = (frozenset(prompt[1]), self.now_s + TTL_S)
        self.growing[ticket] = prompt
        return ticket

    @rule(ticket=tickets)
    def complete(self, ticket: str):
        prompt = self.growing.get(ticket)
        if prompt in self.prompts and ticket in self.live:
            self.leases.grow(ticket, 1)
            self.leases.grant(ticket, prompt[1], num_tokens=4 * len(prompt[1]))
            self.prompts.remove(prompt)
            del self.growing[ticket]

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
        complete = ticket in self.live and ticket not in self.growing
        assert self.leases.release(ticket, reading.reader_epoch) == complete
        if complete:
            del self.live[ticket]

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
    def the_five_states_add_up(self):
        self.blocks.check()
        counts = self.blocks.counts
        leased = set().union(*(blocks for blocks, _ in self.live.values()))
        copied = set().union(*self.copying.values())
        owned = set().union(*(block_ids for _, block_ids in self.prompts))
        cached = set(self.content) - leased - copied - owned
        assert counts.leased == len(leased)
        assert counts.quarantined == len(copied - leased)
        assert counts.owned == len(owned - copied - leased)
        assert counts.cached == len(cached)
        assert counts.free == NUM_BLOCKS - len(leased | copied | owned | cached)
        assert len(self.leases) == len(self.live)


Ownership.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestOwnership = Ownership.TestCase
