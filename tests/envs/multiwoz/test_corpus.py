"""A corpus as the simulated world would have written it."""

from envs.multiwoz import Simulator, load_world
from envs.multiwoz.corpus import delexicalised, with_placeholders
from rl_dialog.data.labelled import located
from rl_dialog.data.schema import Dialog


def message(role, text, acts):
    return {"role": role, "content": text, "annotations": {"dialogue_acts": acts}}


TALK = [
    message("user", "A hotel in the east please", {"Hotel-Inform": [["Area", "east"]]}),
    message(
        "assistant",
        "The lamb , 01223 , in the east . 2 in all",
        {"Hotel-Inform": [["Name", "The lamb"], ["Phone", "01223"], ["Choice", "2"]]},
    ),
    message("user", "Book it", {}),
    message("assistant", "Done , XY12", {"Booking-Book": [["Ref", "XY12"]]}),
]


def converted(goal, talk=TALK):
    return delexicalised(Dialog("a", talk, goal=goal), Simulator(load_world()), located)


def test_a_dialog_as_a_text_model_would_have_met_it():
    found = converted(
        {"hotel": {"info": {"area": "east"}, "reqt": ["phone"], "book": {"day": "monday"}}, "taxi": {}}
    )
    assert [m["role"] for m in found.messages] == ["user", "system", "assistant"] * 2
    assert found.messages[1]["content"].startswith("hotel: ") and found.messages[1]["content"].endswith(
        "Area east"
    )
    assert [found.messages[i]["content"] for i in found.replies] == [
        "[hotel_name] , [hotel_phone] , in the east . [hotel_choice] in all",
        "Done , [booking_ref]",
    ]
    assert [found.messages[i]["reward"] for i in found.replies] == [-1.0, 80.0] and found.meta["outcome"] == {
        "success": True
    }


def test_what_was_not_told_is_no_success():
    for goal in (
        {"hotel": {"reqt": ["postcode"]}},
        {"restaurant": {"reqt": ["phone"]}},
        {"train": {"book": {"people": "2"}}},
    ):
        assert converted(goal).messages[-1]["reward"] == -40.0
    assert (
        converted(None) is None
        and converted({"hotel": {"reqt": ["phone"]}}, [{"role": "user", "content": "x"}]) is None
    )


def test_placeholders_are_numbered():
    acts = [
        ("Inform", "Hotel", "Name", "a inn"),
        ("Inform", "Hotel", "Name", "b inn"),
        ("Inform", "Hotel", "Addr", "1 x st"),
        ("Inform", "Hotel", "Addr", "y park"),
    ]
    assert (
        with_placeholders("b inn or a inn , 1 x st , y park", tuple(acts), located)
        == "[hotel_name] or [hotel_name_2] , [hotel_addr]"
    )
