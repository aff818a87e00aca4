"""What members that behave for a while and then do harm cost a run, by the rules of the roster. No network, no time.

    python benchmarks/roster_attacks.py [--rounds 400] [--batch-s 0] [--json FILE]

Honest members make a step each STEP_S seconds; attackers join with so many identities. As guests they behave; as
members each harms whenever it can: it does not come to a round (absent), does not close its group when it leads
(leader), or stalls as a reducer (reducer). The attackers share one plan: they harm one after the other and not at
once, as that costs the run most. JSON: a list of `{harm, honest, attackers, step_s, share, lost_s_per_round, harms}`;
share is that of the steps which the run makes in the same time without them. A member is waited for as long as 1.25
batches at least, so give the seconds of a batch where it is long.
"""

from __future__ import annotations

from typing import Any

from _command_line import Parser, json_path, positive_int, run, write_json

from manyhands.averaging.config import AveragingConfig
from manyhands.averaging.matchmaking.patience import patience_s
from manyhands.averaging.messages import Late
from manyhands.averaging.roster import Attendance, Roster
from manyhands.base.identity import PeerId

STEP_S = (5.0, 30.0)
STALL_S = 10.0
"""Until the others give up a reducer that sends nothing, with full patience."""
EXCHANGE_SHARE = 0.2
"""Of a step: what an exchange costs that is made again."""
WAIT_S = AveragingConfig.matchmaking_time_s


def play(
    harm: str, num_honest: int, num_attackers: int, step_s: float, num_rounds: int, batch_s: float = 0.0
) -> dict[str, Any]:
    """Play the rounds of a run in which all honest members are founders."""
    honest = [PeerId(f"honest {number:03}") for number in range(num_honest)]
    attackers = [PeerId(f"attacker {number:03}") for number in range(num_attackers)]
    roster = Roster().after(Attendance(honest[0], dict.fromkeys(honest, True)))
    lost_s, num_harms, last_harm = 0.0, 0, ""
    for _ in range(num_rounds):
        believed = roster.voters if harm == "absent" else roster.members
        members = [peer_id for peer_id in attackers if peer_id in believed]
        leader = roster.leaders()[0]
        group = dict.fromkeys([*honest, *(one for one in attackers if not roster.barred_rounds(one))], True)
        accused: dict[PeerId, list[PeerId]] = {}
        late = Late.NOBODY
        if harm == "leader" and leader in members:
            attempt = next(number for number, one in enumerate(roster.leaders()) if one not in members)
            lost_s += sum(patience_s(WAIT_S, roster.num_troubled, failed, batch_s) for failed in range(attempt))
            num_harms += attempt
            leader, late = roster.leaders()[attempt], Late.MEMBERS
        elif members and harm in ("absent", "reducer"):
            able = [peer_id for peer_id in members if peer_id != last_harm] or members
            last_harm = harmful = able[0]
            num_harms += 1
            if leader == harmful:
                leader = next(one for one in roster.leaders() if one != harmful)
            if harm == "absent":
                lost_s += patience_s(WAIT_S, roster.num_troubled, batch_s=batch_s)
                del group[harmful]
                late = Late.MEMBERS
            else:
                lost_s += patience_s(STALL_S, roster.num_troubled) + EXCHANGE_SHARE * step_s
                accused[harmful] = honest[:2]
        roster = roster.after(Attendance(leader, group, accused=accused, late=late))
    return {
        "harm": harm,
        "honest": num_honest,
        "attackers": num_attackers,
        "step_s": step_s,
        "share": round(num_rounds * step_s / (num_rounds * step_s + lost_s), 3),
        "lost_s_per_round": round(lost_s / num_rounds, 2),
        "harms": num_harms,
    }


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--rounds", type=positive_int, default=400, help="of the run (default: 400)")
    parser.add_argument("--batch-s", type=float, default=0.0, help="seconds of a batch (default: 0)")
    parser.add_argument("--json", type=json_path, metavar="FILE", help="write the figures there, too")
    options = parser.parse_args()
    rows = [
        play(harm, num_honest, num_attackers, step_s, options.rounds, options.batch_s)
        for harm in ("absent", "leader", "reducer")
        for step_s in STEP_S
        for num_honest in (4, 8, 16)
        for num_attackers in (1, 4, 16, 100)
    ]
    for row in rows:
        print(
            f"{row['harm']:8} {row['honest']:3} honest, {row['attackers']:3} attackers, step {row['step_s']:2.0f} s: "
            f"{row['share']:.2f} of the steps, {row['lost_s_per_round']:.2f} s lost a round, {row['harms']} harms"
        )
    write_json(options.json, rows)


if __name__ == "__main__":
    run(main)
