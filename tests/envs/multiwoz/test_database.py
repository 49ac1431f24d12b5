"""Queries: known answers, bounds, wildcards, and agreement with a plain scan."""

import random

import pytest

from envs.multiwoz.database import ANYTHING, Database, Table, each, first, likeness, minutes, nth, reference

ROWS = [
    {"name": "Ali", "area": "centre", "leaveAt": "09:00", "price": {"double": "70"}},
    {"name": "bea", "area": "?", "leaveAt": "10:30"},
    {"name": "cid", "area": "east", "leaveAt": "24:10"},
    {"name": "dov", "leaveAt": "10:30", "area": "east"},
]


def found(*constraints):
    return list(each(Table(ROWS).match(constraints)))


def test_equality_ignores_case_and_blanks_and_unknown_values():
    assert found(("name", " aLI ")) == [0]
    assert found(("area", "east")) == [1, 2, 3]  # row 1 does not know its area
    assert found(("area", "center")) == [0, 1]
    assert found(("area", "mars")) == [1]
    assert found(("price", "cheap")) == [0, 1, 2, 3]  # row 0 has no text there, the others nothing
    assert found(("food", "thai")) == [0, 1, 2, 3]
    assert found() == [0, 1, 2, 3]


@pytest.mark.parametrize("anything", sorted(ANYTHING))
def test_constraints_that_mean_anything_are_dropped(anything):
    assert found(("area", anything), ("name", "cid")) == [2]


def test_times_are_bounds():
    table = Table([{"leaveAt": time, "arriveBy": time} for time in ("09:00", "10:30", "24:10", "10:30")])
    assert list(each(table.match([("leaveAt", "10:30")]))) == [1, 2, 3]
    assert list(each(table.match([("leaveAt", "10:31")]))) == [2]
    assert list(each(table.match([("arriveBy", "10:30")]))) == [0, 1, 3]
    assert list(each(table.match([("arriveBy", "08:00")]))) == []
    assert list(each(table.match([("arriveBy", "soonest")]))) == [0, 1, 2, 3]


def test_row_sets():
    assert (first(0b1100), list(each(0b1101)), nth(0b1101, 1), reference(7)) == (2, [0, 2, 3], 2, "00000007")
    with pytest.raises(IndexError, match="expected more than 3 rows, got 3"):
        nth(0b1101, 3)
    assert (minutes("17:45"), minutes(" 9:05 "), minutes("noon"), minutes("a:b"), minutes(None)) == (
        1745,
        905,
        None,
        None,
        None,
    )


def test_likeness_is_the_best_place_of_the_shorter_text():
    assert likeness("abcd", "abcd") == 100
    assert likeness("bc", "abcd") == 100
    assert likeness("abxd", "abcd") == 75  # three of four characters: 2 * 3 / 8
    assert likeness("?", "cb12dp") == 0
    assert likeness("", "a") == 0


def test_answers_resemble_rows():
    table = Table([{"phone": "01223315702", "postcode": "?"}])
    assert (
        table.resembles(0, "phone", "01223315702")
        and table.resembles(0, "postcode", "cb11aa")
        and table.resembles(0, "address", "x")
    )
    assert not table.resembles(0, "phone", "99999999999") and not table.resembles(0, "phone", "?")


def test_taxis_come_by_chance():
    database = Database({}, taxi_types=["saloon", "estate"])
    taxis = [database.taxi(random.Random(i)) for i in range(50)]
    assert {taxi["car type"] for taxi in taxis} == {"saloon", "estate"}
    assert all(
        len(taxi["phone"]) == 11 and "0" not in taxi["phone"] and taxi["phone"].isdecimal() for taxi in taxis
    )


def scan(table, constraints):
    """The same query row by row, as the definition says."""
    hits = []
    for number, row in enumerate(table.rows):
        for slot, value in constraints:
            own = row.get(slot)
            if value in ANYTHING or not isinstance(own, str) or own == "?":
                continue
            if slot in ("leaveAt", "arriveBy"):
                late = int(own.replace(":", "")) >= int(value.replace(":", ""))
                early = int(own.replace(":", "")) <= int(value.replace(":", ""))
                if not (late if slot == "leaveAt" else early):
                    break
            elif own.strip().lower() != value.strip().lower():
                break
        else:
            hits.append(number)
    return hits


def agrees_with_a_scan(world, queries):
    rng = random.Random(0)
    for _ in range(queries):
        domain = rng.choice(list(world.database.tables))
        table = world.database[domain]
        row = rng.choice(table.rows)
        slots = rng.sample([slot for slot in row if isinstance(row[slot], str)], 2)
        constraints = [
            (slot, rng.choice((row, rng.choice(table.rows))).get(slot, "dontcare")) for slot in slots
        ]
        constraints = [(slot, value if isinstance(value, str) else "dontcare") for slot, value in constraints]
        assert list(each(table.match(constraints))) == scan(table, constraints), (domain, constraints)


def test_queries_agree_with_a_scan(town):
    agrees_with_a_scan(town, 300)


@pytest.mark.realdata
def test_queries_agree_with_a_scan_of_the_published_files(multiwoz):
    agrees_with_a_scan(multiwoz, 300)


@pytest.mark.realdata
def test_published_sizes_and_counts(multiwoz):
    database = multiwoz.database
    sizes = {"attraction": 79, "hotel": 33, "restaurant": 110, "train": 2828, "hospital": 66, "police": 1}
    assert {domain: len(table.rows) for domain, table in database.tables.items()} == sizes

    def count(domain, **constraints):
        return database[domain].match(constraints.items()).bit_count()

    assert count("hotel", area="east", stars="4") == 6
    assert count("restaurant", food="indian", area="centre") == 9
    assert (
        count("restaurant", food="indian"),
        count("restaurant", food="welsh"),
        count("attraction", type="museum"),
    ) == (22, 0, 23)
    trains = database["train"].match(
        {
            "departure": "cambridge",
            "destination": "peterborough",
            "day": "tuesday",
            "arriveBy": "11:15",
        }.items()
    )
    found = [database["train"].rows[row] for row in each(trains)]
    assert len(found) == 11
    assert {("TR1391", "05:56"), ("TR6834", "10:56")} <= {(row["trainID"], row["arriveBy"]) for row in found}
    assert reference(first(database["hotel"].match([("name", "a and b guest house")]))) == "00000000"
    assert all(database["train"].match([("day", day)]).bit_count() == 404 for day in ("monday", "sunday"))
