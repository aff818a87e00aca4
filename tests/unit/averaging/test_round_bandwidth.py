"""What rounds show of an uplink in which somebody was too slow."""

from __future__ import annotations

from manyhands.averaging.allreduce.bandwidth import UNTESTED, RoundBandwidth, Send

VECTOR = 1_000_000
ROUND_S = 30.0


def after(num_due: int, num_sent: int, seconds: float, *, declared: float | None = None) -> RoundBandwidth:
    """After the exchange of a round, as bytes and seconds."""
    bandwidth = RoundBandwidth(declared)
    bandwidth.begin_round(ROUND_S)
    bandwidth.add_exchange(VECTOR, num_due, num_sent, seconds)
    bandwidth.add_exchange(1, 1, 1, 1.0)  # of what was reduced again
    return bandwidth


def test_who_was_too_slow_can_send_at_most_what_would_have_been_enough() -> None:
    """All that it had to send was in the buffers, long before it had gone."""
    bandwidth = after(1_500_000, 1_500_000, 15.2)
    assert bandwidth.lose_round() == ""
    assert bandwidth.bandwidth == 50_000


def test_or_what_it_sent_if_that_is_less() -> None:
    bandwidth = after(1_500_000, 152_000, 15.2, declared=1e6)
    assert bandwidth.lose_round() == ""
    assert bandwidth.bandwidth == 10_000


def test_who_reduced_nothing_and_was_too_slow_is_told_what_would_help() -> None:
    assert "too much for the 30 s that the round had" in after(1_000_000, 152_000, 15.2).lose_round()


def test_who_was_lost_sooner_was_not_too_slow() -> None:
    bandwidth = after(1_000_000, 152_000, 8.0, declared=1e6)
    assert bandwidth.lose_round() == ""
    assert bandwidth.bandwidth == 1_000_000


def test_the_others_sent_all_of_theirs_meanwhile() -> None:
    """So they know that they are faster, also if this is their first round."""
    bandwidth = after(1_500_000, 1_500_000, 15.0)
    bandwidth.end_round(16.0, is_whole=False)
    assert bandwidth.bandwidth == UNTESTED * 100_000
    faster = after(1_500_000, 1_500_000, 15.0, declared=1e6)
    faster.end_round(16.0, is_whole=False)
    assert faster.bandwidth == 1_000_000


def test_a_round_in_which_somebody_died_shows_nothing() -> None:
    bandwidth = after(1_500_000, 1_500_000, 2.0)
    bandwidth.end_round(8.0, is_whole=False)
    assert bandwidth.bandwidth == 0


def test_a_group_that_formed_when_the_time_was_over_shows_nothing() -> None:
    bandwidth = RoundBandwidth(1e6)
    bandwidth.begin_round(-0.1)
    bandwidth.add_exchange(VECTOR, 1_000_000, 0, 0.1)
    assert bandwidth.lose_round() == ""
    assert bandwidth.bandwidth == 1_000_000


def test_what_the_system_tells_is_believed_rather_than_how_long_sends_took() -> None:
    sends = [Send(to, 0.1 * number, 0.1 * (number + 1), 1_000_000) for number in range(50) for to in range(2)]
    for told, expected in [((), 20_000_000), ((12e6,), 12_000_000), ((None,), UNTESTED * 100_000_000 / 5.0)]:
        bandwidth = RoundBandwidth(None)
        bandwidth.begin_round(ROUND_S)
        bandwidth.sends += sends
        for rate in told:
            bandwidth.tell_rate(rate)
        bandwidth.end_round(5.0, is_whole=True)
        assert bandwidth.bandwidth == expected, told
        bandwidth.begin_round(ROUND_S)
        bandwidth.sends += sends
        bandwidth.end_round(5.0, is_whole=True)
        assert bandwidth.bandwidth == max(20_000_000, expected), "what was told was of the round before"
