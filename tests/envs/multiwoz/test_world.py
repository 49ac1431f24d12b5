"""Worlds from folders, the generated town, and folders that are none."""

import json
import pickle
import random
import shutil

import pytest

from envs.multiwoz.acts import GOAL_SLOT, checked, tokens
from envs.multiwoz.environment import Simulator
from envs.multiwoz.goals import Draw, GoalError
from envs.multiwoz.options import Options
from envs.multiwoz.rollout import play
from envs.multiwoz.rule_policy import RulePolicy
from envs.multiwoz.town import generate_town
from envs.multiwoz.world import TABLES, WorldError, load_world
from rl_dialog.errors import UserError


@pytest.fixture
def folder(town, tmp_path):
    """The generated town as files."""
    for name in ("db", "goal", "nlg"):
        (tmp_path / name).mkdir()
    for domain in TABLES:
        (tmp_path / f"db/{domain}_db.json").write_text(json.dumps(town.database[domain].rows))
    (tmp_path / "db/taxi_db.json").write_text(json.dumps({"taxi_types": town.database.taxi_types}))
    (tmp_path / "goal/new_goal_model.json").write_text(json.dumps(town.goals.model))
    values = {}
    for (domain, slot), known in town.values.by_slot.items():
        values.setdefault(domain, {})[slot] = list(known)
    (tmp_path / "value_dict.json").write_text(json.dumps(values))
    (tmp_path / "usr_da_voc.txt").write_text("\n".join(town.user_acts.tokens))
    (tmp_path / "sys_da_voc.txt").write_text("\n".join(town.system_acts.tokens))
    for side in ("user", "system"):
        (tmp_path / f"nlg/manual_{side}_template_nlg.json").write_text(json.dumps(town.templates[side]))
    return tmp_path


def transcripts(world):
    simulator = Simulator(world)
    return [
        each.turns
        for each in play(
            simulator, RulePolicy(world.database, simulator.options).respond, seed=0, episodes=20
        )
    ]


def test_a_folder_is_the_world_it_holds(town, folder):
    read = load_world(folder)
    assert transcripts(read) == transcripts(town)
    assert read.templates == town.templates and read.source == str(folder)


def test_worlds_can_be_pickled(town):
    assert transcripts(pickle.loads(pickle.dumps(town))) == transcripts(town)


BROKEN = {
    "db/hotel_db.json": {
        None: "hotel_db.json: expected a JSON file, found no such file",
        "{": "hotel_db.json: expected JSON in UTF-8, found Expecting",
        "{}": "hotel_db.json: expected a list at the top, found dict",
        "[]": "hotel_db.json: expected at least one row",
        "[3]": "hotel_db.json, row 0: expected an object, found 3",
        '[{"name": "x"}]': "hotel_db.json, row 0: expected text in 'area', found None",
    },
    "db/taxi_db.json": {"{}": "expected a list of makes under taxi_types, found the keys"},
    "goal/new_goal_model.json": {
        None: "new_goal_model.json: expected a JSON file",
        "{}": "new_goal_model.json: expected the key 'domain_ordering_dist'",
        '{"domain_ordering_dist": {"": 1}}': "expected at least one order of domains",
        '{"domain_ordering_dist": {"hostel": 1}}': "got 'hostel'. Did you mean hotel",
        '{"domain_ordering_dist": {"hotel": 1}}': "expected the key 'ind_slot_dist'",
        '{"domain_ordering_dist": 3}': "new_goal_model.json: ",
    },
    "value_dict.json": {
        "[]": "value_dict.json: expected an object at the top",
        '{"hotel": 3}': "value_dict.json: expected {domain: {slot",
    },
    "sys_da_voc.txt": {
        None: "sys_da_voc.txt: expected a vocabulary",
        "": "found an empty file",
        "Hotel Inform": "sys_da_voc.txt, line 1: expected Domain-",
    },
    "usr_da_voc.txt": {
        "a-b-c-1\na-b-c-1": "usr_da_voc.txt, line 2: 'a-b-c-1' stands there for the second time"
    },
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, cases in BROKEN.items() for text in cases])
def test_missing_and_broken_files_are_named(folder, name, text):
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(WorldError) as raised:
        load_world(folder)
    assert str(folder) in str(raised.value) and BROKEN[name][text] in str(raised.value)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (
            ("ind_slot_value_dist", "hotel", "info", "stars"),
            None,
            "expected 'stars' in ind_slot_value_dist/hotel/info, found ['area'",
        ),
        (
            ("ind_slot_dist", "train", "book", "people"),
            None,
            "expected 'people' in ind_slot_dist/train/book, found []",
        ),
        (
            ("ind_slot_dist", "hotel", "reqt", "adress"),
            0.5,
            "ind_slot_dist/hotel: expected slots out of type, parking",
        ),
        (
            ("ind_slot_value_dist", "hotel", "info", "area"),
            {},
            "expected choices with a positive weight, got {}",
        ),
        (
            ("ind_slot_value_dist", "hotel", "info", "area"),
            {"east": "often"},
            "could not convert string to float",
        ),
        (("slots_combination_dist", "hotel"), None, "expected the key 'hotel'"),
    ],
)
def test_goal_models_with_holes_are_refused(folder, path, value, told):
    """Found when the world is read, not in the middle of a run."""
    file = folder / "goal/new_goal_model.json"
    model = json.loads(file.read_text())
    inner = model
    for key in path[:-1]:
        inner = inner[key]
    inner.pop(path[-1], None)
    if value is not None:
        inner[path[-1]] = value
    file.write_text(json.dumps(model))
    with pytest.raises(WorldError) as raised:
        load_world(folder)
    assert told in str(raised.value)


def test_values_that_no_row_has_are_found_when_a_goal_is_drawn(folder):
    """A database and a goal model of different worlds: no restart helps, and the message says so."""
    file = folder / "db/hotel_db.json"
    file.write_text(
        json.dumps(
            [
                row | {"area": "elsewhere", "name": "x", "stars": "9", "type": "tent"}
                for row in json.loads(file.read_text())
            ]
        )
    )
    world = load_world(folder)
    world.goals.orders = Draw({("hotel",): 1.0})
    with pytest.raises(
        GoalError,
        match="expected a possible goal for hotel within 200 draws: the goal model's values do not fit",
    ):
        world.goals.sample(random.Random(0), Options())


def test_other_things_than_worlds(folder, tmp_path):
    with pytest.raises(WorldError, match="expected a folder with world files, found nothing"):
        load_world(tmp_path / "nowhere")
    with pytest.raises(WorldError, match="expected a folder with world files, found a file"):
        load_world(folder / "usr_da_voc.txt")
    shutil.move(folder / "goal/new_goal_model.json", folder / "goal/new_goal_model.pkl")
    with pytest.raises(WorldError, match="found new_goal_model.pkl, and pickles are not read: convert it"):
        load_world(folder)


def test_a_world_of_ones_own():
    """A function that returns one, here the town with users of other words; all else stays."""
    other, town = load_world("tests.worlds.other_words:town"), load_world()
    assert other.templates["system"] == town.templates["system"]
    said = [
        {text for slots in world.templates["user"].values() for texts in slots.values() for text in texts}
        for world in (other, town)
    ]
    assert len(said[0]) > 50 and not said[0] & said[1]
    goals = [world.goals.sample(random.Random(0), Options()) for world in (other, town)]
    assert goals[0] == goals[1]
    with pytest.raises(UserError, match="other_words:twon.*Did you mean town"):
        load_world("tests.worlds.other_words:twon")


def test_sentences_are_read_when_needed(folder):
    (folder / "nlg/manual_user_template_nlg.json").write_text('{"Hotel-Inform": {"Area": "no list"}}')
    world = load_world(folder)
    with pytest.raises(WorldError, match="manual_user_template_nlg.json, Hotel-Inform: expected"):
        _ = world.templates
    with pytest.raises(
        WorldError, match="auto_user_template_nlg.json: expected a JSON file, found no such file"
    ):
        _ = world.group_templates


def test_the_town_is_a_function_of_its_seed(town):
    again, other = generate_town(0), generate_town(1)
    assert [table.rows for table in again.database.tables.values()] == [
        table.rows for table in town.database.tables.values()
    ]
    assert other.database["hotel"].rows != town.database["hotel"].rows
    assert {domain: len(table.rows) for domain, table in town.database.tables.items()} == {
        "attraction": 40,
        "hotel": 30,
        "restaurant": 60,
        "train": 1008,
        "hospital": 10,
        "police": 1,
    }


def test_the_town_is_as_hard_as_it_should_be(town):
    """The rule policy mostly succeeds, the limit being references and answers about different rows, and its
    acts are in the town's vocabulary."""
    simulator = Simulator(town)
    played = list(play(simulator, RulePolicy(town.database, simulator.options).respond, seed=0, episodes=400))
    assert 0.92 < sum(each.outcome.success for each in played) / 400 < 0.99
    said = [(side, acts) for each in played for side, acts in each.turns]
    for side, vocabulary in (("user", town.user_acts), ("system", town.system_acts)):
        found = [token for speaker, acts in said if speaker == side for token in tokens(acts)]
        assert sum(token in vocabulary.index for token in found) / len(found) > 0.98


@pytest.mark.parametrize("world", ["town", pytest.param("multiwoz", marks=pytest.mark.realdata)])
def test_everything_that_is_said_is_well_formed(world, request):
    simulator = Simulator(request.getfixturevalue(world))
    for played in play(
        simulator, RulePolicy(simulator.world.database, simulator.options).respond, seed=0, episodes=400
    ):
        for side, acts in played.turns:
            assert checked(acts, side=side) == acts


def test_the_towns_vocabularies_speak_of_known_slots(town):
    for intent, domain, slot, _ in (*town.user_acts.parts, *town.system_acts.parts):
        assert domain == "general" or slot == "none" or slot in GOAL_SLOT[domain], (intent, domain, slot)
    assert list(town.system_acts.tokens) == sorted(town.system_acts.tokens)
