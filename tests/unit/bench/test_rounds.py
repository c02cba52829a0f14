"""What a comparison promises, whatever the figures are."""

from bench.rounds import Rounds, take_turns


def test_the_ratio_is_the_median_round_s_not_the_ratio_of_medians():
    # The machine halved its speed after the first round, in the middle of the second.
    rounds = Rounds(ours=[200.0, 100.0, 100.0], peers=[100.0, 100.0, 50.0])
    assert rounds.ratio == 2.0
    assert (rounds.our_median, rounds.peer_median) == (100.0, 100.0)


async def test_both_sides_take_turns_and_change_who_begins():
    order = []

    async def ours(number: int) -> float:
        order.append(("ours", number))
        return 2.0

    async def peers(number: int) -> float:
        order.append(("peers", number))
        return 1.0

    rounds = await take_turns(ours, peers, 3)
    assert order == [
        ("ours", 0), ("peers", 0), ("peers", 1), ("ours", 1), ("ours", 2), ("peers", 2)
    ]  # fmt: skip
    assert rounds == Rounds([2.0] * 3, [1.0] * 3)
