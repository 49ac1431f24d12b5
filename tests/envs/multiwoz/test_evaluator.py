"""The evaluator: the golden values of the original, and what is counted differently by default."""

import pytest

from envs.multiwoz.evaluator import Evaluator, Record
from envs.multiwoz.options import Options
from envs.multiwoz.tracker import DialogState

BOOKED = {"people": "3", "day": "monday", "stay": "2"}
MENTION = ("Inform", "Hotel", "none", "none")


class Judged:
    """What an evaluator makes of system acts in a dialog with one goal."""

    def __init__(self, database, goal, *acts, unrequested="act_names", user=(MENTION,)):
        self.rule = Evaluator(database, Options(unrequested=unrequested))
        self.record = Record(goal)
        self.rule.user_said(self.record, user)
        self.rule.system_said(self.record, acts)

    @property
    def counts(self):
        found = self.rule.information(self.record)
        return found.true_positive, found.false_positive, found.false_negative

    @property
    def scores(self):
        return self.rule.information(self.record).scores

    @property
    def summary(self):
        """final goal, success, success of the hotel."""
        return (
            self.rule.final_goal(self.record),
            self.rule.success(self.record),
            self.rule.domain_success(self.record, "hotel"),
        )


def phone_goal(answer="?"):
    return {"hotel": {"info": {"area": "east"}, "reqt": {"phone": answer}}}


def book_goal():
    return {"hotel": {"info": {"area": "east", "stars": "4"}, "book": dict(BOOKED), "booked": "?"}}


def test_nothing_said(hotels):
    judged = Judged(hotels, phone_goal())
    assert judged.scores == (0, 0, 0) and judged.summary == (0, False, False)


def test_an_answer_that_the_user_has_not_noted(hotels):
    phone = ("Inform", "Hotel", "Phone", hotels["hotel"].rows[0]["phone"])
    judged = Judged(hotels, phone_goal(), phone)
    assert judged.scores == (1, 1, 1) and judged.summary == (0, False, True)


def test_superfluous_answers(hotels):
    phone, post = ("Inform", "Hotel", "Phone", "01223315702"), ("Inform", "Hotel", "Post", "cb12dp")
    internet = ("Inform", "Hotel", "Internet", "yes")
    area = ("Inform", "Hotel", "Area", "east")
    assert Judged(hotels, phone_goal(), phone, post).scores == (
        1,
        1,
        1,
    )  # the original does not see the postcode
    assert Judged(hotels, phone_goal(), phone, post, unrequested="goal_names").scores == (
        0.5,
        1,
        pytest.approx(2 / 3),
    )
    assert Judged(hotels, phone_goal(), phone, internet).scores == (0.5, 1, pytest.approx(2 / 3))
    assert Judged(hotels, phone_goal(), phone, area).scores == (
        1,
        1,
        1,
    )  # a constraint of the goal may be repeated
    assert Judged(hotels, phone_goal(), phone, internet, internet).counts == (
        1,
        1,
        0,
    )  # slots are counted, not acts


def test_invalid_answers(hotels):
    judged = Judged(hotels, phone_goal(), ("Inform", "Hotel", "Phone", "123"))
    assert judged.counts == (0, 1, 1) and judged.scores == (0, 0, 0)
    twice = Judged(
        hotels, phone_goal(), ("Inform", "Hotel", "Phone", "123"), ("Inform", "Hotel", "Phone", "123")
    )
    assert twice.counts == (0, 2, 1)  # acts are counted, not slots


def test_answers_that_the_user_noted_must_belong_to_a_row(hotels):
    phone = hotels["hotel"].rows[0]["phone"]
    said = ("Inform", "Hotel", "Phone", phone)
    assert Judged(hotels, phone_goal(phone), said).summary == (1, True, True)
    assert Judged(hotels, phone_goal("99999999999"), said).summary == (0, False, True)


def test_bookings(hotels):
    def booked(number, *, user=(MENTION,)):
        judged = Judged(hotels, book_goal(), ("Book", "Booking", "Ref", number), user=user)
        return judged.rule.book_rate(judged.record), *judged.summary

    assert booked("00000000") == (1, 1, True, True)
    assert booked("00000000", user=()) == (0, 1, False, False)  # of which domain is not known
    assert booked("00000001") == (0.5, 0, False, False)  # four stars, but in the north
    assert booked("99999999")[0] == booked("zero")[0] == booked("0")[0] == 0


def test_the_first_booking_counts(hotels):
    judged = Judged(
        hotels, book_goal(), ("Book", "Booking", "Ref", "00000001"), ("Book", "Booking", "Ref", "00000000")
    )
    assert judged.record.booked == {"hotel": 1}


def test_a_goal_without_questions_and_bookings_cannot_succeed(hotels):
    assert Judged(hotels, {"hotel": {"info": {"area": "east"}}}).summary == (1, False, False)


def test_trains_and_taxis(town):
    rows = town.database["train"].rows
    info = {slot: rows[3][slot] for slot in ("departure", "destination", "day", "leaveAt")}
    goal = {
        "train": {"info": info, "book": {"people": "2"}, "booked": "?"},
        "taxi": {"info": {"leaveAt": "10:00"}, "reqt": {"phone": "?"}},
    }
    judged = Judged(
        town.database,
        goal,
        ("Inform", "Taxi", "Car", "saloon"),
        ("Inform", "Train", "Ref", "00000003"),
        ("Inform", "Taxi", "Phone", "1" * 11),
    )
    assert judged.record.booked == {"taxi": -1, "train": 3}
    assert judged.rule.book_rate(judged.record) == 1 and judged.rule.success(judged.record)
    later = Judged(town.database, goal, ("OfferBooked", "Train", "Ref", "00000000"))  # two hours too early
    assert later.rule.book_rate(later.record) == 0.5  # the day fits; the two places are not counted


def test_strict_success_compares_what_the_system_believed(hotels):
    for known, strict in ((BOOKED, True), (BOOKED | {"people": "4"}, False), ({}, False)):
        rule, record = Evaluator(hotels, Options()), Record(book_goal(), domain="hotel")
        rule.system_said(
            record, [("Book", "Booking", "Ref", "00000000")], DialogState(book={"hotel": dict(known)})
        )
        assert rule.success(record) and record.strict is strict


VALID = {
    ("hotel", "area"): (("east", "Centre"), ("atlantis",)),
    ("train", "leaveAt"): (("09:15", "24:10"), ("25:00", "9.15", "noon")),
    ("train", "day"): (("monday",), ("today",)),
    ("train", "duration"): (("51 minutes",), ("51",)),
    ("train", "price"): (("23.60 pounds",), ("23.60",)),
    ("train", "trainID"): (("TR1234",), ("1234",)),
    ("hotel", "internet"): (("yes", "no", "none"), ("maybe",)),
    ("hotel", "phone"): (("01223315702",), ("0122331570", "phone")),
    ("restaurant", "phone"): (("unknown",), ()),
    ("hotel", "postcode"): (("cb12dp", "pe296fl", "cb259aq"), ("12345",)),
    ("hotel", "pricerange"): (("cheap",), ("dear",)),
    ("attraction", "pricerange"): (("dear",), ()),
    ("hotel", "stars"): (("4",), ("four", "10")),
    ("hotel", "address"): (("anything at all",), ()),
}


@pytest.mark.parametrize(("domain", "slot"), VALID)
def test_forms_of_values(town, domain, slot):
    rule = Evaluator(town.database, Options())
    good, bad = VALID[domain, slot]
    assert [rule.is_valid(domain, slot, value) for value in (*good, *bad)] == [True] * len(good) + [
        False
    ] * len(bad)


def test_figures_of_one_domain(hotels):
    """Hotel: the phone told and a superfluous postcode, P 1/2, R 1, F1 2/3; of the other domain nothing is
    told. All: P 1/2, R 1/2."""
    goal = phone_goal() | {"attraction": {"info": {}, "reqt": {"phone": "?"}}}
    told = ("Inform", "Hotel", "Phone", "01223315702"), ("Inform", "Hotel", "Post", "cb12dp")
    judged = Judged(hotels, goal, *told, unrequested="goal_names")
    assert judged.rule.figures(judged.record, "hotel") == {
        "book_rate": None, "inform_precision": 0.5, "inform_recall": 1, "inform_f1": pytest.approx(2 / 3)
    }  # fmt: skip
    assert judged.rule.figures(judged.record, "attraction") == {
        "book_rate": None,
        "inform_precision": 0,
        "inform_recall": 0,
        "inform_f1": 0,
    }
    assert judged.scores == (0.5, 0.5, 0.5)
