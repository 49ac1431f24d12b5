"""The published corpora: their layouts in small files, and their counts in the real ones (marker
realdata)."""

import gzip
import json
import os
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from rl_dialog.data.readers import Bad, Dialog, find_logs, read_log

DATA = Path(os.environ.get("RL_DIALOG_DATA", Path(__file__).parents[2] / "../shared/data"))


def write(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def read(*paths: Path) -> tuple[list[Dialog], list[Bad]]:
    logs, bads, _ = find_logs([str(path) for path in paths])
    items = [item for log in logs for item in read_log(log)]
    dialogs = [item for item in items if isinstance(item, Dialog)]
    assert len({dialog.id for dialog in dialogs}) == len(dialogs)
    for dialog in dialogs[:50]:
        assert Dialog.from_json(dialog.to_json()) == dialog == Dialog.from_row(dialog.to_row())
    return dialogs, bads + [item for item in items if isinstance(item, Bad)]


def talk(dialog: Dialog) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in dialog.messages]


# --- ConvLab ------------------------------------------------------------------------------------------------


def unified(**change) -> dict:
    acts = {"binary": [{"intent": "greet"}], "categorical": [], "non-categorical": []}
    state = {"hotel": {"area": "east", "stars": ""}, "taxi": {"to": ""}}
    turns = [
        {
            "speaker": "user",
            "utterance": "hi",
            "utt_idx": 0,
            "dialogue_acts": acts,
            "state": state,
            "emotion": "happiness",
        },
        {
            "speaker": "system",
            "utterance": "hello",
            "utt_idx": 1,
            "dialogue_acts": {**acts, "binary": []},
            "db_results": {"x": 1},
        },
    ]
    row = {
        "dataset": "camrest",
        "data_split": "val",
        "dialogue_id": "camrest-1",
        "domains": ["restaurant"],
        "goal": {"inform": {}},
        "turns": turns,
    }
    return row | change


@pytest.mark.parametrize("layout", ["data.zip", "data/dialogues.json", "dummy_data.json"])
def test_convlab_layouts(tmp_path, layout):
    path = tmp_path / "camrest" / layout
    path.parent.mkdir(parents=True)
    if layout == "data.zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data/dialogues.json", json.dumps([unified()]))
            archive.writestr("data/ontology.json", json.dumps({"domains": {}}))
    else:
        write(path, [unified()])
    (dialog,), bads = read(tmp_path / "camrest")
    assert not bads and talk(dialog) == [("user", "hi"), ("assistant", "hello")]
    expected = {
        "emotion": "happiness",
        "dialogue_acts": {"binary": [{"intent": "greet"}]},
        "state": {"hotel": {"area": "east"}},
    }
    assert dialog.messages[0]["annotations"] == expected and "annotations" not in dialog.messages[1]
    assert (dialog.id, dialog.source, dialog.split) == ("camrest-1", "camrest", "validation")
    assert dialog.goal == {"inform": {}} and dialog.meta == {"domains": ["restaurant"]}


def test_convlab_samples_beside_the_whole_are_skipped(tmp_path):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/dialogues.json", json.dumps([unified(), unified(dialogue_id="camrest-2")]))
    write(tmp_path / "data/dialogues.json", [unified()])
    write(tmp_path / "dummy_data.json", [unified()])
    logs, _, skipped = find_logs([str(tmp_path)])
    assert [log.member for log in logs] == ["data/dialogues.json"] and len(skipped) == 2
    assert all(
        "repeats records of" in entry.reason and entry.reason.endswith("data.zip") for entry in skipped
    )


def test_convlab_turns_that_are_refused(tmp_path):
    rows = [
        unified(turns=[{"speaker": "wizard", "utterance": "x"}]),
        unified(dialogue_id="b", data_split="holdout"),
        unified(dialogue_id="c"),
    ]
    dialogs, bads = read(write(tmp_path / "dummy_data.json", rows))
    assert [dialog.id for dialog in dialogs] == ["c"]
    assert (
        "dialog 'camrest-1', turn 0" in bads[0].reason
        and "'wizard'" in bads[0].reason
        and "holdout" in bads[1].reason
    )


# --- MultiWOZ -----------------------------------------------------------------------------------------------


def woz() -> dict:
    metadata = {
        "hotel": {"semi": {"area": "east", "stars": "not mentioned"}, "book": {"booked": []}},
        "taxi": {"semi": {"to": ""}},
    }
    log = [
        {
            "text": "a hotel",
            "metadata": {},
            "dialog_act": {"Hotel-Inform": [["none", "none"]]},
            "span_info": [],
        },
        {"text": "which ?", "metadata": metadata, "dialog_act": {}, "span_info": []},
    ]
    return {"goal": {"hotel": {"info": {}}}, "log": log}


@pytest.mark.parametrize(
    ("name", "split"),
    [("val.json", "validation"), ("test.json", "test"), ("train.json", "train"), ("all.json", None)],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_multiwoz_21(tmp_path, name, split, indent):
    path = write(tmp_path / name, json.dumps({"SNG0073.json": woz(), "PMUL1": woz()}, indent=indent))
    dialogs, bads = read(path)
    assert not bads and [dialog.id for dialog in dialogs] == ["SNG0073", "PMUL1"]
    assert talk(dialogs[0]) == [("user", "a hotel"), ("assistant", "which ?")]
    assert dialogs[0].messages[1]["annotations"] == {"state": {"hotel": {"semi": {"area": "east"}}}}
    assert (dialogs[0].source, dialogs[0].split, dialogs[0].goal) == ("multiwoz21", split, woz()["goal"])


@pytest.mark.parametrize("packed", [False, True])
def test_multiwoz_21_as_released_takes_its_splits_from_the_lists(tmp_path, packed):
    files = {
        "data.json": json.dumps({f"SNG{i}.json": woz() for i in range(3)}),
        "valListFile.json": "SNG1.json\n",
        "testListFile.json": "SNG2.json\n",
    }
    if packed:
        with zipfile.ZipFile(tmp_path / "MultiWOZ_2.1.zip", "w") as archive:
            for name, text in files.items():
                archive.writestr(f"MultiWOZ_2.1/{name}", text)
    else:
        for name, text in files.items():
            write(tmp_path / name, text)
    dialogs, bads = read(tmp_path)
    assert not bads and [dialog.split for dialog in dialogs] == ["train", "validation", "test"]


def test_a_list_of_a_split_begins_with_its_first_name(tmp_path):
    """Windows writes a mark of the encoding before it."""
    write(tmp_path / "data.json", {f"SNG{i}.json": woz() for i in range(3)})
    (tmp_path / "testListFile.txt").write_bytes(b"\xef\xbb\xbfSNG1.json\r\nSNG2.json\r\n")
    dialogs, bads = read(tmp_path)
    assert not bads and [dialog.split for dialog in dialogs] == ["train", "test", "test"]


def test_the_split_of_a_folder_is_known_inside_it(tmp_path, monkeypatch):
    turns = [{"speaker": "USER", "utterance": "a"}, {"speaker": "SYSTEM", "utterance": "b"}]
    rows = [{"dialogue_id": "1_0", "services": [], "turns": turns}]
    write(tmp_path / "dev" / "dialogues_001.json", rows)
    monkeypatch.chdir(tmp_path / "dev")
    (dialog,), _ = read(Path("dialogues_001.json"))
    assert dialog.split == "validation"


def test_multiwoz_21_dialogs_that_are_refused(tmp_path):
    broken = woz() | {"log": [{"metadata": {}}]}
    dialogs, bads = read(
        write(tmp_path / "val.json", {"SNG1": woz(), "SNG2": broken, "SNG3": 5, "SNG4": woz()})
    )
    assert [dialog.id for dialog in dialogs] == ["SNG1", "SNG4"] and [bad.where for bad in bads] == [
        "SNG2",
        "SNG3",
    ]
    assert "dialog 'SNG2', turn 0: expected an object with the key `text`" in bads[0].reason


def test_multiwoz_22_folders(tmp_path):
    frame = {
        "service": "hotel",
        "state": {"slot_values": {"hotel-area": ["east"]}, "active_intent": "find_hotel"},
        "slots": [],
        "actions": [],
    }
    turns = [
        {
            "speaker": "USER",
            "turn_id": "0",
            "utterance": "a hotel",
            "frames": [frame, {"service": "taxi", "state": {"slot_values": {}}}],
        },
        {"speaker": "SYSTEM", "turn_id": "1", "utterance": "which ?", "frames": []},
    ]
    for split in ("train", "dev", "test"):
        write(
            tmp_path / split / "dialogues_001.json",
            [{"dialogue_id": f"PMUL{split}.json", "services": ["hotel"], "turns": turns}],
        )
    write(tmp_path / "schema.json", [{"service_name": "hotel"}])
    write(tmp_path / "dialog_acts.json", {"PMUL1.json": {}})
    dialogs, bads = read(tmp_path)
    assert not bads and [dialog.split for dialog in dialogs] == ["validation", "test", "train"]
    assert (
        talk(dialogs[0]) == [("user", "a hotel"), ("assistant", "which ?")]
        and dialogs[0].source == "multiwoz22"
    )
    assert dialogs[0].messages[0]["annotations"] == {"state": {"hotel": {"hotel-area": ["east"]}}}
    bad_turn = [{"dialogue_id": "x", "services": [], "turns": [turns[0], {"speaker": 2, "utterance": "x"}]}]
    assert "dialog 'x', turn 1" in read(write(tmp_path / "other/dialogues_9.json", bad_turn))[1][0].reason


# --- Taskmaster ---------------------------------------------------------------------------------------------


def rated(context: object, generation: object, reward: object = 1.0, name: str = "dlg-1") -> dict:
    texts = [value if isinstance(value, str) else json.dumps(value) for value in (context, generation)]
    return {"conversation_id": name, "context": texts[0], "generation": texts[1], "reward": reward}


CONTEXT = [
    {"role": "agent", "text": "Welcome to the Coffee Bar"},
    {"role": "user", "text": "espresso"},
    {"role": "agent", "api": {"get_menu_items": {"query": "espresso"}}},
    {"role": "api", "response": {"get_menu_items": {"items": ["é"]}}},
]


def test_taskmaster_rated_replies(tmp_path):
    rows = [
        rated(CONTEXT, {"role": "agent", "api": {"add": {"n": 1}}}),
        rated([], {"role": "agent", "text": "hi"}, 0),
        rated(CONTEXT, {"role": "agent", "text": "ok"}),
    ]
    dialogs, bads = read(write(tmp_path / "reward_00.json", rows))
    assert not bads
    assert talk(dialogs[0]) == [
        ("assistant", "Welcome to the Coffee Bar"),
        ("user", "espresso"),
        ("assistant", '{"api": {"get_menu_items": {"query": "espresso"}}}'),
        ("tool", '{"get_menu_items": {"items": ["é"]}}'),
        ("assistant", '{"api": {"add": {"n": 1}}}'),
    ]
    assert dialogs[0].replies == [4] and dialogs[0].messages[4]["reward"] == 1.0
    assert talk(dialogs[1]) == [("assistant", "hi")] and dialogs[1].messages[0]["reward"] == 0
    assert dialogs[0].meta == dialogs[2].meta == {"conversation_id": "dlg-1", "group": "espresso"}
    assert dialogs[0].source == "taskmaster4-reward"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (rated("[{", {"role": "agent", "text": "x"}), "JSON inside the string"),
        (rated([{"role": "robot", "text": "x"}], {"role": "agent", "text": "x"}), "context turn 0"),
        (rated([], {"role": "user", "text": "x"}), "a turn of the agent"),
        (rated([], {"role": "agent", "text": "x"}, None), "a number as `reward`"),
        (rated([], {"role": "agent", "text": "x"}, "good"), "a finite number or null as `reward`"),
        (rated([], {"role": "agent", "text": "x"}, float("nan")), "NaN"),
        (rated([], {"role": "agent", "text": ["x"]}), "a string as `content`"),
    ],
)
def test_taskmaster_rows_that_are_refused(tmp_path, row, said):
    good = rated(CONTEXT, {"role": "agent", "text": "x"})
    dialogs, bads = read(write(tmp_path / "reward_00.json", [good, row, good | {"reward": 0}]))
    assert len(dialogs) == 2 and len(bads) == 1 and said in bads[0].reason and bads[0].where == "item 2"


@pytest.mark.parametrize(
    ("name", "row", "source"),
    [
        ("TM-3-2020/data/data_00.json", {"vertical": "Movie Tickets"}, "taskmaster3"),
        ("anywhere/data_00.json", {"vertical": "Movie Tickets"}, "taskmaster3"),
        ("anywhere/data_01.json", {"vertical": "Coffee"}, "taskmaster4"),
        ("anywhere/self-dialogs.json", {"instruction_id": "pizza-1"}, "taskmaster1"),
        ("TM-2-2020/hotels.json", {"instruction_id": "hotels-1"}, "taskmaster2"),
        ("anywhere/x.json", {}, "taskmaster"),
        ("atm4/x.json", {}, "taskmaster"),
    ],
)
def test_taskmaster_dialogs_and_their_source(tmp_path, name, row, source):
    turns = [
        {"index": 0, "speaker": "USER", "text": "hi", "segments": [], "annotations": []},
        {
            "index": 1,
            "speaker": "assistant",
            "text": "hello",
            "annotations": [{"name": "api_call", "value": "menu"}],
        },
    ]
    (dialog,), bads = read(write(tmp_path / name, [{"conversation_id": "dlg-1", **row, "utterances": turns}]))
    assert not bads and talk(dialog) == [("user", "hi"), ("assistant", "hello")] and dialog.source == source
    assert "annotations" not in dialog.messages[0] and dialog.messages[1]["annotations"] == {
        "api": [{"name": "api_call", "value": "menu"}]
    }


# --- ABCD ---------------------------------------------------------------------------------------------------


def abcd(number: int, *more: list) -> dict:
    rows = [
        ["agent", "Hi!"],
        ["customer", "hello"],
        ["action", "Account has been pulled up."],
        ["agent", "done"],
        *more,
    ]
    return {
        "convo_id": number,
        "scenario": {"flow": "x"},
        "original": rows,
        "delexed": [{"speaker": "agent", "text": "hi!"}],
    }


@pytest.mark.parametrize("packed", [False, True])
def test_abcd_whole_file(tmp_path, packed):
    text = json.dumps({"train": [abcd(1), abcd(2, ["bot", "x"])], "dev": [abcd(3)], "test": [abcd(4)]})
    path = tmp_path / ("abcd_v1.1.json" + ".gz" * packed)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    dialogs, bads = read(path)
    assert [(dialog.id, dialog.split) for dialog in dialogs] == [
        ("abcd-1", "train"),
        ("abcd-3", "validation"),
        ("abcd-4", "test"),
    ]
    assert talk(dialogs[0]) == [
        ("assistant", "Hi!"),
        ("user", "hello"),
        ("tool", "Account has been pulled up."),
        ("assistant", "done"),
    ]
    assert dialogs[0].goal == {"flow": "x"} and dialogs[0].source == "abcd"
    assert (
        len(bads) == 1
        and "dialog 2, turn 4" in bads[0].reason
        and "bot" in bads[0].reason
        and bads[0].where == "train item 2"
    )


def test_abcd_whole_file_cut_off(tmp_path):
    text = json.dumps({"train": [abcd(i) for i in range(5)]})
    dialogs, bads = read(write(tmp_path / "abcd.json", text[: len(text) // 2]))
    assert len(dialogs) == 2 and len(bads) == 1


# --- deal or no deal ----------------------------------------------------------------------------------------

TALK = "1 0 4 2 1 2 YOU: i would like 4 hats <eos> THEM: deal <eos> "
ENDINGS = {
    "agree": ("YOU: <selection> item0=0 item1=4 item2=0 <eos> reward=8 agree 1 4 4 1 1 2", 8.0, "agree"),
    "disagree": (
        "THEM: <selection> item0=1 item1=4 item2=1 <eos> reward=10 disagree 1 4 4 1 1 2",
        0.0,
        "disagree",
    ),
    "no agreement": (
        "YOU: <selection> no agreement <eos> reward=no agreement agree 1 4 4 1 1 2",
        0.0,
        "no agreement",
    ),
    "no agreement of one": (
        "YOU: <selection> no agreement <eos> reward=no agreement disagree 1 4 4 1 1 2",
        0.0,
        "no agreement",
    ),
    "disconnect": (
        "THEM: <selection> disconnect <eos> reward=disconnect agree 1 4 4 1 1 2",
        0.0,
        "disconnect",
    ),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_deal_or_not_outcomes(tmp_path, name):
    ending, outcome, how = ENDINGS[name]
    (dialog,), bads = read(write(tmp_path / "data.txt", TALK + ending + "\n"))
    speaker = {"YOU": "assistant", "THEM": "user"}[ending.split(":")[0]]
    assert not bads
    assert talk(dialog) == [
        ("system", "book: 1 worth 0; hat: 4 worth 2; ball: 1 worth 2"),
        ("assistant", "i would like 4 hats"),
        ("user", "deal"),
        (speaker, "<selection>"),
    ]
    assert (dialog.meta["outcome"], dialog.meta["agreement"], dialog.meta["ending"]) == (
        outcome,
        name == "agree",
        how,
    )
    rewards = [message.get("reward") for message in dialog.messages]
    assert rewards == ([None, None, None, outcome] if speaker == "assistant" else [None, outcome, None, None])


def test_both_sides_of_a_negotiation_share_their_group(tmp_path):
    other = (
        "1 4 4 1 1 2 THEM: i would like 4 hats <eos> YOU: deal <eos> THEM: <selection> item0=1 item1=0 "
        "item2=1 <eos> reward=6 agree 1 0 4 2 1 2\n"
    )
    (one, two), _ = read(write(tmp_path / "data.txt", TALK + ENDINGS["agree"][0] + "\n" + other))
    assert one.meta["group"] == two.meta["group"] == "i would like 4 hats" and two.meta["outcome"] == 6.0


def test_deal_or_not_without_data_txt(tmp_path):
    talk = "THEM: all hats <eos> YOU: ok <eos> YOU: <selection>"
    form = (
        f"<input> 1 4 4 1 1 2 </input> <dialogue> {talk} </dialogue> <output> {{}} </output> <partner_input> "
        "1 0 4 2 1 2 </partner_input>\n"
    )
    outputs = [
        "item0=1 item1=0 item2=1 item0=0 item1=4 item2=0",
        *(" ".join([f"<{word}>"] * 6) for word in ("disagree", "no_agreement", "disconnect")),
        "soon",
    ]
    write(tmp_path / "val.txt", "".join(form.format(output) for output in outputs))
    dialogs, bads = read(tmp_path)
    assert [dialog.meta["outcome"] for dialog in dialogs] == [6.0, 0.0, 0.0, 0.0]
    assert [dialog.meta["ending"] for dialog in dialogs] == [
        "agree",
        "disagree",
        "no agreement",
        "disconnect",
    ]
    assert {dialog.split for dialog in dialogs} == {"validation"} and dialogs[0].messages[-1]["reward"] == 6.0
    assert len(bads) == 1 and bads[0].where == "line 5" and "soon" in bads[0].reason
    write(tmp_path / "data.txt", TALK + ENDINGS["agree"][0])
    write(tmp_path / "selfplay.txt", "1 0 1 1 3 3\n1 1 1 0 3 3\n")
    logs, _, skipped = find_logs([str(tmp_path)])
    assert [Path(log.path).name for log in logs] == ["data.txt"] and [
        Path(entry.file).name for entry in skipped
    ] == ["selfplay.txt", "val.txt"]


# --- the real files -----------------------------------------------------------------------------------------

KNOWN = {  # folder or file: (source, dialogs, user and assistant messages, replies)
    "dailydialog": ("dailydialog", 13_118, 102_979, 49_188),
    "multiwoz": ("multiwoz21", 999, 14_730, 7_365),
    "deal_or_not": ("deal_or_not", 12_234, 73_191, 36_596),
    "convlab3_samples/tm1": ("tm1", 10, 222, 110),
    "convlab3_samples/tm2": ("tm2", 10, 199, 100),
    "convlab3_samples/tm3": ("tm3", 10, 164, 82),
    "convlab3_samples/sgd": ("sgd", 10, 200, 100),
    "convlab3_samples/multiwoz21": ("multiwoz21", 10, 120, 60),
    "abcd": ("abcd", 3, 63, 32),
    "taskmaster1": ("taskmaster1", 1, 20, 10),
    "taskmaster3/reward": ("taskmaster3-reward", 3_000, 44_167, 3_000),
    "taskmaster4/reward": ("taskmaster4-reward", 2_500, 12_657, 2_500),
}


@cache
def read_real(name: str) -> tuple[list[Dialog], list[Bad]]:
    return read(real(name))


def real(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is absent; set RL_DIALOG_DATA to a folder with the public corpora")
    return path


@pytest.mark.realdata
@pytest.mark.parametrize("name", KNOWN)
def test_known_counts(name):
    dialogs, bads = read_real(name)
    source, count, turns, replies = KNOWN[name]
    assert not bads and {dialog.source for dialog in dialogs} == {source}
    assert len(dialogs) == count
    assert (
        sum(message["role"] in ("user", "assistant") for dialog in dialogs for message in dialog.messages)
        == turns
    )
    assert sum(len(dialog.replies) for dialog in dialogs) == replies


@pytest.mark.realdata
def test_splits_of_dailydialog():
    dialogs, _ = read_real("dailydialog")
    assert Counter(dialog.split for dialog in dialogs) == {
        "train": 11_118,
        "validation": 1_000,
        "test": 1_000,
    }


@pytest.mark.realdata
def test_outcomes_of_deal_or_not():
    dialogs, _ = read_real("deal_or_not")
    agreed = [dialog.meta["outcome"] for dialog in dialogs if dialog.meta["agreement"]]
    assert len(agreed) == 9_531 and sum(agreed) / len(agreed) == pytest.approx(7.4706, abs=5e-5)
    assert Counter(dialog.meta["ending"] for dialog in dialogs) == {
        "agree": 9_531,
        "disagree": 1_310,
        "no agreement": 1_314,
        "disconnect": 79,
    }
    rewards = [
        [message["reward"] for message in dialog.messages if "reward" in message] for dialog in dialogs
    ]
    assert rewards == [[dialog.meta["outcome"]] for dialog in dialogs]
    assert max(Counter(dialog.meta["group"] for dialog in dialogs).values()) == 233


@pytest.mark.realdata
def test_deal_or_not_agrees_with_its_tagged_copy(tmp_path):
    with zipfile.ZipFile(real("deal_or_not/deal_or_not.zip")) as archive:
        archive.extract("train.txt", tmp_path)
    plain = {(tuple(talk(d)), d.meta["outcome"]) for d in read_real("deal_or_not")[0]}
    tagged, bads = read(tmp_path)
    assert len(tagged) == 10_095 and not bads
    assert sum((tuple(talk(d)), d.meta["outcome"]) not in plain for d in tagged) <= 10


@pytest.mark.realdata
@pytest.mark.parametrize(("number", "ones"), [(3, 479), (4, 2_057)])
def test_human_rewards_of_taskmaster(number, ones):
    folder = real(f"taskmaster{number}/reward")
    counts = Counter(dialog.messages[dialog.replies[0]]["reward"] for dialog in read(folder)[0])
    raw = Counter(row["reward"] for path in folder.glob("*.json") for row in json.loads(path.read_text()))
    assert counts == raw and counts[1.0] == ones


@pytest.mark.realdata
def test_taskmaster_4_dialogs():
    for path in sorted(real("taskmaster4").glob("data_*.json")):
        dialogs, bads = read(path)
        assert len(dialogs) == 500 and not bads and dialogs[0].source == "taskmaster4"
        for dialog in dialogs:
            assert [message["role"] for message in dialog.messages[:2]] == ["user", "assistant"]


@pytest.mark.realdata
def test_abcd_sample():
    dialogs, _ = read_real("abcd")
    assert sum(message["role"] == "tool" for dialog in dialogs for message in dialog.messages) == 9
    assert [len(dialog.replies) for dialog in dialogs] == [12, 9, 11]
    assert dialogs[0].messages[dialogs[0].replies[2]]["content"] == "sure, may I have your name please?"


@pytest.mark.realdata
def test_everything_beside_the_dialogs_is_skipped():
    corpora = [
        "README.md",
        "abcd",
        "convlab3_samples",
        "dailydialog",
        "deal_or_not",
        "multiwoz",
        "taskmaster1",
        "taskmaster3",
        "taskmaster4",
    ]
    logs, bads, skipped = find_logs([str(real(corpus)) for corpus in corpora])
    assert len(logs) == 27 and not bads and len(skipped) == 31
    assert sum(log.reader == "taskmaster" for log in logs) == 18
