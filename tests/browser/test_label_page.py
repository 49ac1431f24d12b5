"""The labelling page in a real browser: real clips, a real log, several people, and a network that fails."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest

from rl_dialog.preferences.frames import draw_pixels
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.page.app import create_page
from rl_dialog.preferences.page.server import PageServer
from rl_dialog.preferences.segments import Clip, Conversation, Reply, Segments

pytestmark = pytest.mark.browser

MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"
KEYS = {
    "ArrowLeft": "left",
    "l": "left",
    "L": "left",
    "ArrowRight": "right",
    "R": "right",
    "ArrowUp": "tie",
    "e": "tie",
}
KEYS |= {"ArrowDown": "skip", " ": "skip", "Enter": "skip"}
KEPT = re.compile("answers? (is|are) kept here and sent again")
PIXEL = "canvas => [...canvas.getContext('2d').getImageData(3, canvas.height - 1, 1, 1).data].slice(0, 3)"
STATE = "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, 1).data.join()"


def eventually(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"it did not come true within {seconds} s"
        time.sleep(0.04)
    return found


class Labels:
    """A run's folder whose clips can be told apart by the colour of their ground."""

    def __init__(self, folder, log):
        self.folder, self.log, self.segments = folder, log, Segments(folder / "clips")
        self.colours, self.ahead = (
            {},
            0.0,
        )  # of a clip's ground -> its id; seconds that have passed at a stroke
        self.settings, self.servers = {}, []
        self.now = None  # where the clock stands, if it does: then it is only `ahead` that passes

    def clock(self):
        return (self.now or time.time()) + self.ahead

    def clip(self, steps=12):
        n = len(self.colours)
        colour = (40 + 5 * (n % 40), 60 + n // 40, 120)
        frames = np.full((12, 64, 48, 3), colour, np.uint8)
        for t in range(12):
            frames[t, :8, 4 * t : 4 * t + 4] = 255
        id = self.segments.add(Clip(frames, np.zeros(12, np.int64), np.zeros(12, np.float32), steps))
        self.colours[colour] = id
        return id

    def ask(self, number=1, task="Which one is greener?", **given):
        return [self.log.add_query(self.clip(), self.clip(), task=task, **given) for _ in range(number)]

    def url(self, **options):
        app = create_page(self.log, self.segments, draw=draw_pixels, run=self.folder, **options)
        self.servers.append(PageServer(app))
        return self.servers[-1].url


@pytest.fixture
def labels(tmp_path):
    log = LabelLog(f"sqlite:///{tmp_path}/labels.db", validation=0.0, clock=lambda: made.clock())
    made = Labels(tmp_path, log)
    yield made
    for server in made.servers:
        server.close()
    log.close()


class Person:
    """Somebody at the page."""

    def __init__(self, page, labels):
        self.page, self.labels = page, labels
        self.press = page.keyboard.press

    def button(self, name):
        return self.page.get_by_role("button", name=name, exact=True)

    def ready(self):
        """Waits until there is a pair to answer; (left, right) segments as they are seen, by their
        colours."""
        self.page.locator("#left canvas").wait_for()
        eventually(
            lambda: self.page.evaluate(
                "() => !document.querySelector('.choice').disabled && "
                "!document.querySelector('.choice.pressed')"
            )
        )
        return tuple(
            self.labels.colours[tuple(self.page.locator(f"#{side} canvas").evaluate(PIXEL))]
            for side in ("left", "right")
        )

    def answer(self, key):
        """What was seen, and the choice."""
        seen = self.ready()
        self.press(key)
        eventually(lambda: self.page.evaluate("() => !document.querySelector('.choice.pressed')"))
        return seen, KEYS[key]

    def saved(self, number):
        self.page.get_by_text(f"{number} saved", exact=True).wait_for()

    def says(self, text):
        self.page.get_by_text(text).first.wait_for()


@pytest.fixture
def sit_down(labels, open_page):
    """sit_down(name, url, scopes, **options of the browser): somebody with a token at the page."""

    def start(name, url, scopes=("labeller",), **options):
        token = labels.log.add_labeller(name, scopes=scopes)
        return Person(open_page(f"{url}/#token={token}", **options), labels)

    return start


def agrees(label, seen, choice):
    """Is this the label of what was seen and chosen?"""
    if choice in ("skip", "tie"):
        return {label.first, label.second} == set(seen) and label.preference == (
            None if choice == "skip" else 0.5
        )
    preferred = label.first if label.preference == 1 else label.second
    return (
        {label.first, label.second} == set(seen)
        and label.preference in (0, 1)
        and preferred == seen[("left", "right").index(choice)]
    )


@pytest.mark.slow
def test_two_people_label_thirty_pairs_by_keys_and_one_takes_one_back(labels, sit_down):
    labels.ask(30)
    url = labels.url()
    people = [sit_down("ann", url), sit_down("bob", url)]
    given = {}
    for n, key in enumerate([*KEYS, *KEYS, *KEYS][:30]):
        person = people[n % 2]
        seen, choice = person.answer(key)
        assert frozenset(seen) not in given, "nobody sees a pair that another one has, or that is answered"
        given[frozenset(seen)] = (seen, choice)
        if n == 10:
            person.press("u")
            person.says("Your last answer is taken back.")
            eventually(lambda: person.ready() == seen)  # noqa: B023  (it is called before the next round)
            given[frozenset(seen)] = person.answer("ArrowRight")
    for person in people:
        person.saved(15)
        person.says("Waiting for the next pair")
    standing = {frozenset((label.first, label.second)): label for label in labels.log.labels()}
    skips = [pair for pair, (_, choice) in given.items() if choice == "skip"]
    assert len(given) == 30 and len(standing) == 30 - len(skips) and len(skips) > 5
    assert all(agrees(standing[pair], *told) for pair, told in given.items() if pair in standing)
    counts = labels.log.counts()
    assert (counts["skipped"], counts["revoked"], counts["waiting"], counts["leased"]) == (
        len(skips),
        1,
        0,
        0,
    )
    assert {one["labels"] + one["skips"] for one in labels.log.labellers().values()} == {15}


def test_an_empty_page_waits_and_shows_a_pair_within_two_seconds(labels, sit_down):
    """It sleeps no longer between two questions for one; how long an answer takes is the machine's affair."""
    ann = sit_down("ann", labels.url())
    ann.page.evaluate(
        "() => { const real = setTimeout; window.asleep = [];"
        " window.setTimeout = (act, time, ...more) => (asleep.push(time), real(act, time, ...more)); }"
    )
    ann.says("Waiting for the next pair")
    assert not ann.page.locator("#notice").is_visible() and ann.button("Equal").is_disabled()
    ann.press("l")
    for _ in range(2):
        ann.page.evaluate("() => asleep.splice(0)")
        for _ in range(2):
            with ann.page.expect_response("**/v1/lease"):
                pass
        asleep = ann.page.evaluate("asleep")
        assert 0 < min(asleep) < 2000, asleep
        labels.ask(1)
        ann.answer("l")
    ann.says("Waiting for the next pair")
    assert len(labels.log.labels()) == 2


@pytest.mark.slow
def test_the_next_pair_is_there_when_the_last_is_answered(labels, sit_down):
    labels.ask(3)
    ann = sit_down("ann", labels.url())
    ann.ready()
    eventually(lambda: labels.log.counts()["leased"] == 2)
    ann.page.wait_for_load_state("networkidle")
    ann.page.context.set_offline(True)  # so that it can only be the one that was there
    first = ann.ready()
    ann.press("l")
    eventually(
        lambda: ann.page.evaluate("() => !document.querySelector('.choice.pressed')") and ann.ready() != first
    )
    ann.page.context.set_offline(False)
    ann.saved(1)
    eventually(lambda: labels.log.counts()["leased"] == 2)


@pytest.mark.slow
def test_a_lease_that_runs_out_goes_to_somebody_else(labels, sit_down, monkeypatch):
    """By a clock that goes on only once the page has said that somebody is there."""
    labels.ask(1)
    labels.now, renewed, renew = time.time(), [], labels.log.renew
    monkeypatch.setattr(labels.log, "renew", lambda *given: renewed.append(labels.clock()) or renew(*given))
    url = labels.url(lease=1.0, idle=600.0)
    ann, bob = sit_down("ann", url), sit_down("bob", url)
    pair = ann.ready()
    for _ in range(3):
        eventually(lambda: renewed and renewed[-1] == labels.clock())
        labels.ahead += 0.9
    bob.says("Waiting for the next pair")
    assert not bob.page.locator("#pair").is_visible(), "while somebody is there the lease goes on"
    ann.page.context.set_offline(True)
    while not bob.page.locator("#pair").is_visible():
        labels.ahead += 1.1
        bob.page.wait_for_timeout(500)
    assert set(bob.ready()) == set(pair)
    ann.page.context.set_offline(False)
    ann.says("The pair went to somebody else")
    assert not ann.page.locator("#pair").is_visible()
    bob.answer("l")
    bob.saved(1)
    assert [label.labeller for label in labels.log.labels()] == ["bob"]


@pytest.mark.slow
def test_who_goes_away_gives_the_pair_back(labels, sit_down):
    labels.ask(1)
    ann = sit_down("ann", labels.url(idle=30.0), clock=True)
    pair = set(ann.ready())
    ann.page.clock.fast_forward(31_000)  # so long does nobody touch anything
    ann.says("You were away")
    bob = sit_down("bob", labels.url())
    assert set(bob.ready()) == pair
    bob.page.close()  # the window, which gives back what it had
    ann.page.mouse.move(100, 100)
    assert set(ann.ready()) == pair


@pytest.mark.slow
def test_answers_survive_a_network_that_fails(labels, sit_down):
    labels.ask(4)
    ann = sit_down("ann", labels.url())
    first = ann.answer("ArrowLeft")
    ann.saved(1)
    eventually(lambda: labels.log.counts()["leased"] == 2)
    ann.page.wait_for_timeout(200)
    lost, seen = [], []

    def lose_the_reply(route):
        """The server gets the request, the page no answer, or only that of something between them."""
        if len(lost) < 2 or not seen:
            lost.append(route.fetch().status)
            if len(lost) == 2:
                route.fulfill(status=408, body="Request 7 timed out.")
            else:
                route.abort()
        else:
            route.continue_()

    ann.page.route("**/v1/answers", lose_the_reply)
    second = ann.answer("ArrowRight")
    third = ann.answer("ArrowUp")
    ann.says(KEPT)
    seen.append(True)
    ann.saved(3)
    assert set(lost) == {200} and not ann.page.get_by_text(KEPT).is_visible()
    assert labels.log.state() == (3, 0, 0), "sent again, counted once"

    ann.ready()
    ann.page.context.set_offline(True)
    fourth = ann.answer("l")
    ann.says(KEPT)
    ann.page.context.set_offline(False)
    ann.saved(4)
    for label, told in zip(labels.log.labels(), (first, second, third, fourth), strict=True):
        assert agrees(label, *told)


@pytest.mark.slow
def test_a_page_that_is_loaded_again_goes_on_where_it_was(labels, sit_down):
    labels.ask(5)
    ann = sit_down("ann", labels.url())
    ann.answer("l")
    ann.saved(1)
    pair = ann.ready()
    ann.button("2×").click()
    ann.page.reload()
    assert ann.ready() == pair and ann.button("2×").get_attribute("aria-pressed") == "true"
    assert "token" not in ann.page.url
    eventually(lambda: labels.log.counts()["leased"] == 2)
    ann.press("u")
    eventually(lambda: labels.log.counts()["revoked"] == 1 and ann.ready() != pair)
    ann.answer("R")
    ann.saved(1)
    assert ann.ready() == pair
    eventually(lambda: labels.log.counts()["leased"] == 2)
    (label,) = labels.log.labels()
    assert label.preference is not None


def test_who_answers_a_pair_in_two_windows_is_told_which_answer_stands(labels, sit_down):
    """A window that was duplicated has the pairs of the first one."""
    labels.log.set_plan(strength=True, reasons=("correct",))
    labels.ask(2)
    ann = sit_down("ann", labels.url(lease=6000.0))
    seen = ann.ready()
    with ann.page.expect_popup() as popup:  # with a copy of what the first window keeps
        ann.page.evaluate("() => { open(location.href); }")
    again = Person(popup.value, labels)
    assert again.ready() == seen
    ann.answer("ArrowLeft")
    ann.saved(1)
    again.button("correct").click()
    again.press("f")
    again.page.get_by_label("Note").fill("too dark")
    again.page.locator("#flag-set").click()
    again.press("Shift+ArrowRight")
    again.says("You had answered that pair in another window: “left is slightly better” stands, and ")
    again.says("“right is much better, correct, flag: too dark” was not kept.")
    assert again.page.locator("#saved").inner_text() == ""
    assert [one.choice for one in labels.log.answers()] == ["left"]
    other = ann.answer("e")[0]
    ann.saved(2)
    again.button("Take it back and answer anew").click()
    eventually(lambda: again.ready() == seen)
    again.answer("ArrowRight")
    again.saved(1)
    standing = [one for one in labels.log.answers() if one.revoked is None]
    assert [(one.choice, {one.first, one.second}) for one in standing] == [
        ("tie", set(other)),
        ("right", set(seen)),
    ]


@pytest.mark.slow
def test_a_window_is_told_of_a_pair_that_was_answered_in_another_one(labels, sit_down):
    labels.ask(2)
    ann = sit_down("ann", labels.url(lease=6000.0))
    seen = ann.ready()
    with ann.page.expect_popup() as popup:
        ann.page.evaluate("() => { open(location.href); }")
    again = Person(popup.value, labels)
    assert again.ready() == seen
    ann.answer("ArrowLeft")
    ann.saved(1)
    again.page.evaluate("() => dispatchEvent(new Event('online'))")  # as when it is looked at again
    again.says("You have answered this pair in another window.")
    eventually(lambda: again.ready() == ann.ready() != seen)


@pytest.mark.slow
def test_undo_in_a_hurry(labels, sit_down):
    """Whatever is pressed before the pair is back is not taken for an answer to another one."""
    labels.ask(4)
    ann = sit_down("ann", labels.url())
    pair, held = ann.ready(), []
    # held, or a slow machine would press when the pair is already back
    ann.page.route("**/v1/undo", lambda route: held.append(route))
    for key in ("l", "u"):
        ann.press(key)
    eventually(lambda: ann.page.wait_for_timeout(20) or held)
    for key in ("r", "r"):
        ann.press(key)
    held[0].continue_()
    eventually(lambda: labels.log.counts()["revoked"] == 1 and ann.ready() == pair)
    assert labels.log.state() == (1, 1, 0)
    ann.answer("R")
    ann.saved(1)
    (label,) = labels.log.labels()
    assert agrees(label, pair, "right")
    ann.ready()
    eventually(lambda: labels.log.counts()["leased"] == 2)


@pytest.mark.slow
def test_clips_loop_with_speed_pause_and_an_end(labels, sit_down):
    labels.log.add_query(labels.clip(), labels.clip(steps=5))
    ann = sit_down("ann", labels.url())
    ann.ready()
    canvas = ann.page.locator("#left canvas")
    seen = lambda: canvas.evaluate(STATE)  # noqa: E731
    before = seen()
    eventually(lambda: seen() != before)
    ann.press("p")
    assert ann.button("Play").is_visible()
    before = seen()
    ann.page.wait_for_timeout(300)
    assert seen() == before
    ann.button("Play").click()
    for key, speed in (
        ("-", "½×"),
        ("-", "¼×"),
        ("-", "¼×"),
        ("+", "½×"),
        ("+", "1×"),
        ("+", "2×"),
        ("+", "4×"),
        ("+", "4×"),
    ):
        ann.press(key)
        assert ann.button(speed).get_attribute("aria-pressed") == "true"
    assert len(eventually(lambda: len({seen() for _ in range(20)}) > 3 and "many frames")) > 0
    ann.button("¼×").click()
    says_so = (
        "() => [...document.querySelectorAll('h3')].map(name => getComputedStyle(name, "
        "'::after').content.includes('episode ends'))"
    )
    eventually(lambda: sorted(ann.page.evaluate(says_so)) == [False, True])


@pytest.mark.slow
def test_replies_are_text_and_nothing_else(labels, sit_down):
    context = [
        {"role": "user", "content": MARKUP},
        {"role": "assistant", "content": "Sure.\nWhich one?"},
        {"role": "user", "content": "word " * 900},
    ]
    one, other = (labels.segments.add(Reply(context, text)) for text in (f"{MARKUP} one", "other " * 600))
    labels.log.add_query(one, other, task=MARKUP)
    ann = sit_down("ann", labels.url())
    ann.page.get_by_role("heading", name=MARKUP).wait_for()
    assert (
        ann.page.locator("#context p").first.inner_text() == MARKUP
        and ann.page.locator("img:not(.mark), b").count() == 0
    )
    shown = {side: ann.page.locator(f"#{side} .reply") for side in ("left", "right")}
    texts = {side: found.inner_text() for side, found in shown.items()}
    assert {text.split()[-1] for text in texts.values()} == {"one", "other"}
    assert not ann.button("1×").is_visible(), "nothing to play"
    assert (
        ann.page.evaluate("document.documentElement.scrollHeight <= innerHeight")
        and ann.button("Equal").is_visible()
    )
    long = shown["left"] if texts["left"].startswith("other") else shown["right"]
    long.focus()
    ann.press("ArrowDown")
    eventually(lambda: long.evaluate("reply => reply.scrollTop") > 0)
    assert labels.log.state() == (0, 0, 0), "an arrow scrolls what has the focus"
    ann.press("r")
    ann.saved(1)
    (label,) = labels.log.labels()
    preferred = label.first if label.preference == 1 else label.second
    assert preferred == (one if texts["right"].endswith("one") else other)


@pytest.mark.slow
def test_conversations_are_read_side_by_side(labels, sit_down):
    """Who said what is told on both sides, above is what they have in common, and what people wrote stays
    text; a clip that follows is shown as ever."""
    opening = [{"role": "user", "content": "a table for two, please"}]
    short = [{"role": "assistant", "content": f"{MARKUP} done"}]
    long = [{"role": role, "content": f"turn {n}: {'word ' * 40}"}
            for n in range(6) for role in ("assistant", "user")]  # fmt: skip
    one, other = (labels.segments.add(Conversation(opening, talk)) for talk in (short, long))
    labels.log.add_query(one, other, task="In which conversation is the bot better?", priority=1.0)
    labels.ask(priority=0.0)
    ann = sit_down("ann", labels.url())
    ann.page.get_by_role("heading", name="In which conversation").wait_for()
    assert ann.page.locator("#context li").count() == 1
    sides = {name: ann.page.locator(f"#{name} .talk > li") for name in ("left", "right")}
    eventually(lambda: sorted(side.count() for side in sides.values()) == [1, 12])
    left = "one" if sides["left"].count() == 1 else "other"
    assert ann.page.locator(".talk .role").all_inner_texts().count("User") == 6
    assert ann.page.locator("img:not(.mark), b").count() == 0
    assert not ann.button("Differences").is_visible() and ann.button("Plain").is_visible()
    assert ann.page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    ann.button("Plain").click()
    assert sorted(side.count() for side in sides.values()) == [1, 12]
    ann.page.set_viewport_size({"width": 390, "height": 800})
    assert ann.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ann.press("l")
    ann.saved(1)
    (label,) = labels.log.labels()
    assert (label.preference == 1.0) == ((label.first == one) == (left == "one"))
    ann.ready()  # clips
    assert ann.page.locator(".talk").count() == 0 or not ann.page.locator(".talk").first.is_visible()


@pytest.mark.slow
def test_by_tab_and_by_mouse(labels, sit_down):
    labels.ask(5)
    ann = sit_down("ann", labels.url())
    ann.ready()
    ann.press("?")
    ann.page.get_by_role("heading", name="Keys").wait_for()
    ann.press("l")
    ann.press("Escape")
    assert labels.log.state() == (0, 0, 0), "keys of a dialog are its own"
    for _ in range(12):
        ann.press("Tab")
        if ann.button("Equal").evaluate(
            "button => button === document.activeElement && button.matches(':focus-visible')"
        ):
            break
    ann.press("Enter")
    ann.saved(1)
    assert labels.log.counts()["ties"] == 1, "Enter is the focused button's"
    ann.ready()
    ann.button("Left is better").click()
    ann.saved(2)
    ann.ready()
    ann.press(" ")
    ann.saved(3)
    assert labels.log.counts()["skipped"] == 1, "after a click Space means can't tell again"
    ann.press("Control+l")
    ann.page.evaluate("dispatchEvent(new KeyboardEvent('keydown', {key: 'l', repeat: true}))")
    ann.page.wait_for_timeout(100)
    assert labels.log.state() == (3, 0, 0), "a key that is held down is one answer"
    ann.button("You and your labels").click()
    ann.page.get_by_role("heading", name="ann").wait_for()
    numbers = ann.page.locator("#me-numbers").inner_text().split("\n")
    assert numbers[:6] == ["2", "labels", "1", "equal", "1", "can’t tell"] or numbers[:6] == [
        "labels",
        "2",
        "equal",
        "1",
        "can’t tell",
        "1",
    ]


@pytest.mark.slow
def test_a_wrong_token_is_asked_for_again(labels, open_page):
    labels.ask(1)
    token = labels.log.add_labeller("ann")
    page = open_page(labels.url())
    field = page.get_by_label("Token")
    field.fill("no token ä")
    field.press("Enter")
    page.get_by_text("A token has no spaces and no accents.").wait_for()
    field.fill("rl-wrong")
    field.press("Enter")
    page.get_by_text("The server does not know this token.").wait_for()
    page.keyboard.press("Escape")
    assert field.is_visible()
    field.fill(token)
    field.press("Enter")
    ann = Person(page, labels)
    ann.answer("l")
    ann.saved(1)
    assert page.evaluate("localStorage.length") == 0, "the token ends with the window"
    ann.button("You and your labels").click()
    ann.button("Leave").click()
    field.wait_for()
    assert page.evaluate("sessionStorage.getItem('rl_dialog.labels.token')") is None


def test_a_token_for_the_other_page_is_asked_for_another(labels, open_page):
    """The run's page leads to this one, where an operator's token was told for ever that it is tried
    again."""
    labels.ask(1)
    url = labels.url()
    operator = labels.log.keys.add("chief", scopes=("operator",))
    page = open_page(f"{url}/#token={operator}")
    page.get_by_text("expected a token of scope labeller, got one of scope operator").last.wait_for()
    field = page.get_by_label("Token")
    field.fill(labels.log.add_labeller("ann"))
    field.press("Enter")
    ann = Person(page, labels)
    ann.answer("l")
    ann.saved(1)
    page.goto(f"{url}/run")
    page.get_by_text("expected a token of scope operator or metrics, got one of").last.wait_for()
    field.fill(operator)
    field.press("Enter")
    page.get_by_role("cell", name="ann").wait_for()
    assert not page.locator("#trouble").is_visible()


def test_a_token_for_the_curves_shows_them_and_no_labellers(labels, open_page):
    labels.log.add_labeller("ann")
    (labels.folder / "metrics.jsonl").write_text('{"step": 3, "train/return": 5.0}\n')
    url = labels.url()
    token = labels.log.keys.add("screen", scopes=("metrics",))
    page, asked = open_page(f"{url}/"), []
    page.on("request", lambda request: asked.append(request.url.removeprefix(url).split("?")[0]))
    page.goto(f"{url}/run#token={token}")
    page.get_by_role("img", name="Return (true reward): 5 at step 3").wait_for()
    assert asked[asked.index("/v1/labellers") + 1] == "/v1/metrics", "it goes on in the same round"
    assert not page.locator("#trouble").is_visible() and not page.locator("#people").is_visible()


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 375])
def test_on_a_phone(labels, sit_down, width):
    labels.ask(2, task="Which of the two clips shows the greener one, all in all?")
    labels.log.add_query(
        *(
            labels.segments.add(Reply([{"role": "user", "content": "hi " * 80}], f"{n} " * 90))
            for n in range(2)
        ),
        priority=-1.0,
    )
    (labels.folder / "status.json").write_text('{"labels_wanted": 12, "label_budget": 100}')
    ann = sit_down("ann", labels.url(), width=width, height=640, is_mobile=True, has_touch=True)

    def check():
        assert (
            ann.page.evaluate("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)")
            <= width
        )
        boxes = """all => all.map(control => {
            const {left, right, bottom, width, height} = control.getBoundingClientRect();
            return [control.outerHTML.slice(0, 90), left, right, bottom, width, height];
        })"""
        for told, left, right, bottom, wide, high in ann.page.locator(
            "button:visible, a:visible"
        ).evaluate_all(boxes):
            assert wide >= 40 and high >= 40 and left >= 0 and right <= width + 0.5 and bottom <= 640.5, told

    ann.ready()
    check()
    for side in ("left", "right"):
        box = ann.page.locator(f"#{side} canvas").bounding_box()
        assert box["width"] > 120 and box["height"] > 120, "large enough to see"
    ann.button("Left is better").tap()
    ann.saved(1)
    ann.ready()
    ann.button("Can’t tell").tap()
    ann.page.locator(".replies #context").wait_for()
    check()
    for side in ("left", "right"):
        assert ann.page.locator(f"#{side} .reply").bounding_box()["height"] > 60
    ann.button("You and your labels").tap()
    ann.page.get_by_role("heading", name="ann").wait_for()
    assert ann.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_the_numbers_of_the_run(labels, sit_down):
    labels.ask(2)
    (labels.folder / "status.json").write_text('{"labels_wanted": 12, "label_budget": 4}')
    ann = sit_down("ann", labels.url(), scopes=("labeller", "operator"))
    ann.says("0 of 4 labels · 12 wanted now")
    ann.answer("l")
    ann.says("1 of 4 labels · 12 wanted now")
    bar = ann.page.get_by_role("progressbar")
    assert (bar.get_attribute("aria-valuenow"), bar.get_attribute("aria-valuemax")) == ("1", "4")


def test_a_run_that_is_over_says_so_and_labels_that_came_after_it_are_counted(labels, sit_down):
    """Who labelled waited for ever, and the page of the run stood at the labels of its last status."""
    labels.ask(1)
    (labels.folder / "status.json").write_text(
        '{"over": true, "labels": 0, "waiting": 1, "labels_wanted": 0}'
    )
    ann = sit_down("ann", labels.url(), scopes=("labeller", "operator"))
    ann.answer("l")
    ann.says("The run is over. Thank you!")
    ann.page.get_by_role("link", name="The run").click()
    ann.page.get_by_role("cell", name="ann").wait_for()
    numbers = {"labels": "1", "pairs waiting": "0"}
    shown = "all => Object.fromEntries(all.map(one => [...one.children].map(part => part.textContent)))"
    told = ann.page.locator("#now > div").evaluate_all(shown)
    assert {name: told[name] for name in numbers} == numbers


@pytest.mark.slow
def test_the_live_page_of_the_run(labels, sit_down):
    def say(**status):
        (labels.folder / "status.json").write_text(
            json.dumps({"steps": 5, "roles": {"learner": {"pid": 7, "restarts": 1}}} | status)
        )

    def log_metrics(*lines, mode="a"):
        with (labels.folder / "metrics.jsonl").open(mode) as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    bob = sit_down("bob", labels.url())
    with bob.page.expect_response("**/v1/status"):
        pass
    assert not bob.page.get_by_role("link", name="The run").is_visible(), "what it learns is no labeller's"
    ann = sit_down("ann", labels.url(), scopes=["labeller", "operator"])
    ann.page.get_by_role("link", name="The run").click()
    ann.says("No metrics yet.")
    say()
    log_metrics(
        *({"step": n, "train/return": n / 10, "pref/labels": 2 * n, "own/thing": 3.0} for n in range(40))
    )
    chart = ann.page.get_by_role("img", name=re.compile("Return"))
    chart.wait_for()
    assert chart.get_attribute("aria-label") == "Return (true reward): 3.9 at step 39"
    assert len(chart.locator("polyline").get_attribute("points").split()) == 40
    titles = ann.page.locator("figcaption b").all_inner_texts()
    assert titles == [
        "Return (true reward)",
        "Labels",
        "Own thing",
    ], "what is known first, whatever else there is after it"
    ann.says("live")
    assert ann.page.locator("#parts table").inner_text().split() == ["pid", "restarts", "learner", "7", "1"]
    log_metrics({"step": 40, "train/return": 8.0, "eval/return": 9.0})
    ann.page.get_by_role("img", name="Return (true reward): training 8, greedy 9 at step 40").wait_for()
    chart.hover(position={"x": 60, "y": 40})
    eventually(lambda: "at step 40" not in chart.get_attribute("aria-label"))
    ann.page.mouse.move(1, 1)
    log_metrics({"step": 1, "train/return": 1.0}, mode="w")  # a resumed run
    ann.page.get_by_role("img", name="Return (true reward): 1 at step 1").wait_for()
    say(
        over=True,
        events=[
            {"time": time.time(), "role": "teacher", "pid": 3, "what": "its process died", "restarts": 1}
        ],
    )
    ann.says("over")
    ann.says("teacher: its process died")
    ann.page.set_viewport_size({"width": 320, "height": 640})
    assert ann.page.evaluate("document.documentElement.scrollWidth") <= 320
