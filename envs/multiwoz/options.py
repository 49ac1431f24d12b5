"""Every choice of the simulator by name, the mistakes of ConvLab-2 among them.

The defaults are correct where the original is not; `ORIGINAL` repeats the original throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

from rl_dialog.errors import UserError

Reward = Literal["terminal", "terminal_domain", "per_turn", "user"]


@dataclass(frozen=True)
class Options:
    """How goals are drawn, how the user behaves, what is counted and rewarded. Raises UserError for a number
    out of its range."""

    reward: Reward = "terminal"
    """terminal: -1 a turn, at the end +80 for success, else -40. terminal_domain: and +5 the first time that
    a domain succeeds. per_turn (the original): after every turn 40 if the task is done so far, else 5 if the
    current domain is, else -1. user: -1 a turn, at the end +80 if the user got all it wanted, else -40"""
    act_penalty: float = 0.0
    """what each act of the system costs in the terminal modes, in place of the -1 a turn when it is not 0"""
    max_turn: int = 40
    """turns of both sides before the user gives up: 40 are at most 20 system turns"""
    max_initiative: int = 4
    """acts that the user says unasked"""
    coref_prob: float = 0.3
    """probability that the user says "the same day" instead of a value that an earlier domain has too"""
    noise: float = 0.0
    """probability of an error in each act on its way from the user to the system: dropped, another value,
    another slot, or one more act"""
    info_slots: Literal["combinations", "independent"] = "combinations"
    """constraints of a goal: combinations that occurred, or each slot by itself"""
    reqt_slots: Literal["combinations", "independent"] = "independent"
    """the same for requests"""
    book_dist: Literal["original", "conditional"] = "original"
    """probability of a booking: the model's book_dist, a share of all dialogs; or the share of the domain's
    dialogs that have one"""
    taxi_places: bool = False
    """the rule policy asks for a taxi's departure and destination; the original means to and never does"""
    set_booked: bool = True
    """a booking enters the belief state; in the original nothing ever does"""
    set_terminated: bool = True
    """the user's goodbye enters the dialog state; in the original nothing ever does"""
    not_book_after_offer: bool = False
    """the user answers the offer of a booking that it does not want with "no booking"; the original means to
    and never does"""
    unrequested: Literal["goal_names", "act_names"] = "goal_names"
    """which slots lower the precision when nobody asked for them: all that can be requested, or (the
    original) those named alike in acts and goals"""
    train_degree_bins: Literal["paper", "original"] = "paper"
    """how many trains fit, in the state vector. paper: bins up to 0, 2, 5, 10, 40 and above; original: 0 to 4
    and above, as elsewhere"""
    action_mask: Literal["convlab3", "none"] = "convlab3"
    """acts that make no sense are masked, or nothing is"""

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            allowed, value = get_args(kind), getattr(self, name)
            if allowed and value not in allowed:
                raise UserError(f"expected {name} to be one of {', '.join(allowed)}, got {value!r}")
        for name, least in (("max_turn", 2), ("max_initiative", 1)):
            if getattr(self, name) < least:
                raise UserError(f"expected {name} of at least {least}, got {getattr(self, name)}")
        for name in ("coref_prob", "noise"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"expected {name} between 0 and 1, got {getattr(self, name)}")


ORIGINAL = Options(
    reward="per_turn",
    set_booked=False,
    set_terminated=False,
    unrequested="act_names",
    train_degree_bins="original",
    action_mask="none",
)
