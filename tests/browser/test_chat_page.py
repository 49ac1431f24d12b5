"""The chat page in a real browser, talking to the real application."""

import json
import re
import time

import pytest

pytestmark = pytest.mark.browser

MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"


class Chat:
    """A person at the page."""

    def __init__(self, page):
        self.page = page
        self.input = page.get_by_label("Your message")
        self.replies = page.locator(".reply")
        self.stop = self.button("Stop the reply")

    def button(self, name, nth=0):
        return self.page.get_by_role("button", name=name, exact=True).nth(nth)

    def focused(self, element):
        return element.evaluate("element => element === document.activeElement")

    def text(self, text):
        return self.page.get_by_text(text, exact=True)

    def begin(self):
        self.button("I agree, start the chat").click()
        self.page.get_by_role("heading", name="Say hello").wait_for()
        return self

    def send(self, text, *, wait=True):
        self.stop.wait_for(
            state="hidden"
        )  # nothing can be sent while a reply is written, and its text is there before its end is
        self.input.fill(text)
        self.input.press("Enter")
        if wait:
            self.stop.wait_for(state="hidden")

    def kept(self, name):
        return self.page.evaluate("name => localStorage.getItem('rl_dialog.' + name)", name)

    def bubbles(self):
        return [text.strip() for text in self.page.locator(".bubble").all_inner_texts()]


@pytest.fixture
def chat(served, open_page):
    """chat(**options): somebody with a key on the consent page."""

    def start(**options):
        return Chat(open_page(f"{served.url}/#key={served.key()}", **options))

    return start


def eventually(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true within {seconds} s"
        time.sleep(0.02)


def stored(served, chat):
    """The Dialogs of a chat, as training reads them."""
    return [dialog for dialog in served.store.dialogs() if dialog.id.split("#")[0] == chat.kept("chat")]


def rated(page):
    return [page.locator("#given").inner_text().split("\n")[n::2] for n in (0, 1)]


def test_consent_chat_votes_ratings_and_all_of_it_after_a_reload(served, chat):
    me = chat()
    me.page.get_by_role("heading", name="Everyday chat").wait_for()
    assert me.page.locator("#consent .consent-text").inner_text() == served.settings.consent
    assert served.store.counts()["chats"] == 0, "nothing is recorded before the agreement"
    assert "key" not in me.page.url and me.kept("key").startswith("sk-"), (
        "the key is not left in the address bar"
    )
    me.begin()
    served.script.say("I baked bread.")
    served.script.say("With butter, please.")
    me.send("Hello there")
    assert me.button("Rate chat").is_disabled() and me.page.get_by_text("1 more message until").is_visible()
    me.send("What on it?\nTell me")
    assert me.bubbles() == ["Hello there", "I baked bread.", "What on it?\nTell me", "With butter, please."]

    up, down = me.button("Good reply"), me.button("Bad reply", 1)
    up.click()
    down.click()
    assert [button.get_attribute("aria-pressed") for button in (up, down, me.button("Bad reply"))] == [
        "true",
        "true",
        "false",
    ]
    me.button("Better reply", 1).click()
    suggestion = me.page.get_by_role("textbox", name="What should it have said?")
    assert suggestion.input_value() == "With butter, please."
    me.button("Save").click()
    assert me.page.get_by_text("This is what the bot said.").is_visible(), "no suggestion without a change"
    suggestion.fill("Butter and salt.")
    me.button("Save").click()
    me.text("Butter and salt.").wait_for()

    me.button("Rate chat").click()
    me.page.get_by_role("radio", name="6", exact=True).first.check()
    me.button("Send my ratings").click()
    assert me.page.get_by_text("One answer is missing: How good was the bot's language?").is_visible()
    for group, value in zip(
        me.page.get_by_role("group").filter(has=me.page.get_by_role("radio")).all(),
        (5, 6, 7, 4, 3),
        strict=True,
    ):
        group.get_by_role("radio").nth(value - 1).check()
    me.page.get_by_label("Anything else?").fill("kind")
    me.button("Send my ratings").click()
    me.page.get_by_role("heading", name="Thank you!").wait_for()

    dialog, edited = stored(served, me)
    replies = [message for message in dialog.messages if message["role"] == "assistant"]
    assert [reply["feedback"] for reply in replies] == [{"vote": 1}, {"vote": -1, "edit": "Butter and salt."}]
    assert edited.messages[-1]["content"] == "Butter and salt."
    assert dialog.meta["ratings"] == {
        "quality": 5,
        "fluency": 6,
        "diversity": 7,
        "contingency": 4,
        "empathy": 3,
    }
    assert (dialog.meta["comments"], dialog.meta["consent"], dialog.meta["assigned"]) == (
        "kind",
        served.settings.consent,
        True,
    )
    assert dialog.meta["user"] == me.kept("user")

    me.page.reload()
    me.page.get_by_role("heading", name="Thank you!").wait_for()
    assert me.bubbles() == ["Hello there", "I baked bread.", "What on it?\nTell me", "With butter, please."]
    assert [button.get_attribute("aria-pressed") for button in (up, down, me.button("Bad reply"))] == [
        "true",
        "true",
        "false",
    ]
    assert me.text("Butter and salt.").is_visible() and me.text("kind").is_visible()
    assert rated(me.page) == [
        ["Quality", "Fluency", "Diversity", "Relevance", "Empathy"],
        [f"{n} of 7" for n in (5, 6, 7, 4, 3)],
    ]
    first = me.kept("chat")
    me.button("New chat").click()
    me.page.get_by_role("heading", name="Say hello").wait_for()
    assert me.kept("chat") != first and me.bubbles() == []


@pytest.mark.slow
def test_what_is_said_streams_and_can_be_stopped(served, chat):
    me = chat().begin()
    slow = served.script.say("one two three four", hold=2)
    me.send("count", wait=False)
    me.text("one two").wait_for()
    assert not me.button("Send").is_visible() and not me.button("Good reply").is_visible(), (
        "no votes on an unfinished reply"
    )
    me.stop.click()
    eventually(slow.cancelled.is_set)
    me.page.get_by_text("You stopped this reply.").wait_for()
    assert served.store.counts()["turns"] == 0 or not stored(served, me), "a stopped reply is not kept"
    assert me.page.evaluate("document.activeElement.id") == "input"
    served.script.say("one two three")
    me.button("Write it again").click()
    me.text("one two three").wait_for()
    assert me.bubbles() == ["count", "one two three"]

    silent = served.script.say("never said", hold=0)
    me.send("are you there?", wait=False)
    me.page.locator(".dots").last.wait_for()
    me.stop.click()
    eventually(silent.cancelled.is_set)
    assert me.input.input_value() == "are you there?" and me.bubbles() == [
        "count",
        "one two three",
    ], "the message is back in the field"

    served.script.say("this breaks off", hold=1)
    me.send("go on", wait=False)
    me.text("this").wait_for()
    me.stop.click()
    me.send("and now?")
    assert [said["content"] for said in stored(served, me)[-1].messages][-4:] == [
        "go on",
        "this",
        "and now?",
        "That sounds lovely.",
    ]


@pytest.mark.slow
def test_a_reload_while_the_bot_writes_keeps_the_message(served, chat):
    me = chat().begin()
    served.script.say("one two three", hold=1)
    me.send("a long thought", wait=False)
    me.text("one").wait_for()
    me.page.reload()
    me.page.get_by_role("heading", name="Say hello").wait_for()
    assert me.input.input_value() == "a long thought"
    me.send("a long thought")
    me.page.reload()
    me.text("That sounds lovely.").wait_for()
    assert me.input.input_value() == ""


@pytest.mark.slow
def test_values_colour_every_token(served, chat):
    me = chat().begin()
    me.send("hello")
    switch, detail = me.page.get_by_role("switch", name="Values"), me.page.get_by_role("tooltip")
    assert me.page.locator(".token").count() == 0
    switch.check(force=True)
    served.script.say("So you did")
    me.send("I baked")
    served.script.say("How did it taste ?")
    me.send("It was good")
    assert me.bubbles()[1::2] == ["That sounds lovely.", "So you did", "How did it taste ?"]
    tokens = me.replies.last.locator(".token")
    assert tokens.all_text_contents() == ["How", " did", " it", " taste", " ?", ""]
    signs = ["token better", "token worse", "token better", "token worse", "token better", "token"]
    assert tokens.evaluate_all("all => all.map(token => token.className)") == signs
    assert [me.page.locator(f"#legend-{end}").inner_text() for end in ("low", "high")] == ["−1", "+1"]
    colour = "token => getComputedStyle(token).backgroundColor"
    assert tokens.nth(2).evaluate(colour) == me.replies.nth(1).locator(".token").nth(2).evaluate(colour), (
        "one scale for the whole chat"
    )
    strengths = [float(tokens.nth(n).evaluate(colour).rstrip(")").split("/")[-1]) for n in (1, 2, 3, 4)]
    assert strengths == pytest.approx([0.62 * size for size in (0.25, 0.5, 0.75, 1)], abs=0.01)

    tokens.first.focus()
    told = lambda: " ".join(detail.inner_text().split())  # noqa: E731
    assert told() == "“How” Q 1 V 1 Q − V 0 log p −0.5"
    me.page.keyboard.press("ArrowRight")
    assert told() == "“ did” Q 0.75 V 1 Q − V −0.25 log p −0.5"
    assert tokens.nth(1).get_attribute("aria-label") == "did: Q 0.75, V 1, Q − V −0.25, log p −0.5"
    me.page.keyboard.press("End")
    assert told() == "end of the reply Q none V none Q − V none log p −0.1"
    me.page.keyboard.press("Tab")  # one stop for all tokens
    assert not detail.is_visible() and me.focused(me.button("Good reply", 2))
    tokens.nth(3).hover()
    detail.wait_for()
    me.page.keyboard.press("Escape")
    assert not detail.is_visible()
    switch.uncheck(force=True)
    assert not tokens.first.is_visible() and me.bubbles()[-1] == "How did it taste ?"


@pytest.mark.slow
def test_values_of_a_real_model(served, chat, monkeypatch):
    monkeypatch.setattr("rl_dialog.serving.completions.secrets.randbits", lambda bits: 5)  # the reply's seed
    served.use_the_model()
    me = chat().begin()
    me.page.get_by_role("switch", name="Values").check(force=True)
    me.send("hello there")
    answer = stored(served, me)[-1].messages[-1]["content"]
    assert me.replies.last.locator(".tokens").text_content().strip() == answer, "the tokens are the reply"
    assert me.replies.last.locator(".better, .worse").count() > 3


@pytest.mark.slow
def test_a_model_without_values_has_no_switch(served, chat):
    served.set(split={"bc": 1})
    me = chat().begin()
    assert not me.page.get_by_text("Values").is_visible()


@pytest.mark.slow
def test_by_keyboard_alone(served, chat):
    me = chat()
    press = me.page.keyboard.press

    def tab_to(name, key="Tab"):
        for _ in range(12):
            press(key)
            if me.button(name).evaluate(
                "button => button === document.activeElement && button.matches(':focus-visible')"
            ):
                return
        raise AssertionError(f"{key} does not lead to {name}")

    tab_to("I agree, start the chat")
    press("Enter")
    me.page.get_by_role("heading", name="Say hello").wait_for()
    me.page.keyboard.type("Hello")
    press("Shift+Enter")
    me.page.keyboard.type("you")
    press("Enter")
    me.button("Good reply").wait_for()
    assert me.bubbles()[0] == "Hello\nyou"
    tab_to("Good reply", "Shift+Tab")
    press("Space")
    assert me.button("Good reply").get_attribute("aria-pressed") == "true"
    tab_to("Better reply")
    press("Enter")
    me.page.keyboard.type("Better: ")
    press("Control+Enter")
    me.page.locator(".suggestion").wait_for()
    assert me.focused(me.button("Better reply"))
    press("Enter")
    press("Escape")
    assert me.focused(me.button("Better reply")), "Escape leaves the editor"
    me.send("And again")
    tab_to("Rate chat", "Shift+Tab")
    press("Enter")
    for value in (1, 2, 3, 4, 5):
        press("Tab")
        press("Space")
        for _ in range(value - 1):
            press("ArrowRight")
    press("Tab")
    me.page.keyboard.type("typed")
    tab_to("Send my ratings")
    press("Enter")
    me.page.get_by_role("heading", name="Thank you!").wait_for()
    assert rated(me.page)[1] == [f"{n} of 7" for n in (1, 2, 3, 4, 5)]
    eventually(lambda: stored(served, me)[0].messages[1].get("feedback", {}).get("vote") == 1)


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 375])
def test_on_a_phone(served, chat, width):
    me = chat(width=width, height=640, is_mobile=True, has_touch=True)

    def check():
        assert (
            me.page.evaluate("Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)")
            <= width
        )
        controls = me.page.locator("button:visible, input:visible, textarea:visible")
        boxes = """all => all.map(control => {
            const {left, right, width, height} = control.getBoundingClientRect();
            return [control.outerHTML.slice(0, 90), left, right, width, height];
        })"""
        for told, left, right, wide, high in controls.evaluate_all(boxes):
            assert wide >= 40 and high >= 40 and left >= 0 and right <= width + 0.5, told

    check()
    me.begin()
    served.script.say("averyveryverylongwordwithoutanyplacetobreakitanywhereatallinitswholelength " * 3)
    check()
    me.send("antidisestablishmentarianism" * 6)
    me.send("more")
    me.page.get_by_role("switch", name="Values").check(force=True)
    me.button("Better reply").tap()
    check()
    me.button("Cancel").tap()
    me.button("Menu").tap()
    check()
    me.page.keyboard.press("Escape")
    me.button("Rate chat").tap()
    check()
    for group in me.page.locator("fieldset").all():
        group.get_by_role("radio").last.check()
    me.button("Send my ratings").tap()
    me.page.get_by_role("heading", name="Thank you!").wait_for()
    check()


@pytest.mark.slow
def test_the_field_stays_above_a_phones_keyboard(served, chat):
    me = chat(width=375, height=740, is_mobile=True, has_touch=True).begin()
    for n in range(4):
        me.send(f"message {n}")
    me.page.set_viewport_size({"width": 375, "height": 400})  # what is left beside the keyboard
    me.page.wait_for_function("document.getElementById('composer').getBoundingClientRect().bottom <= 400")
    last = me.replies.last.locator(".bubble").bounding_box()
    assert last["y"] + last["height"] < me.input.bounding_box()["y"], "the newest reply is in view as well"


@pytest.mark.slow
def test_a_wrong_key_is_asked_for_again(served, open_page):
    me = Chat(open_page(f"{served.url}/#key=sk-rl-wrong"))
    me.button("I agree, start the chat").click()
    me.page.get_by_text("The server does not accept this key.").wait_for()
    key = me.page.get_by_label("Key", exact=True)
    key.fill("no key ä")
    me.button("Continue").click()
    assert me.page.get_by_text("A key has no spaces and no accents.").is_visible()
    key.fill("sk-rl-also-wrong")
    key.press("Enter")
    eventually(lambda: key.input_value() == "")
    me.button("Cancel").click()
    me.page.get_by_text("This needs an API key.").wait_for()
    me.button("I agree, start the chat").click()
    key.fill(served.key())
    key.press("Enter")
    me.page.get_by_role("heading", name="Say hello").wait_for()
    me.send("hello")
    served.store.keys.revoke(served.latest_key())
    me.send("still there?", wait=False)
    me.page.get_by_text("The server does not accept this key.").wait_for()
    me.page.keyboard.press("Escape")
    me.replies.get_by_text("This needs an API key.").wait_for()
    assert me.button("Try again").is_visible()


@pytest.mark.slow
def test_no_key_at_all_is_asked_for(served, open_page):
    me = Chat(open_page(served.url))
    me.button("I agree, start the chat").click()
    me.page.get_by_text("This server answers with a key only.").wait_for()
    served.set(needs_key=False)
    me.page.reload()
    me.begin().send("hello")
    assert me.bubbles() == ["hello", "That sounds lovely."]


@pytest.mark.slow
def test_too_many_requests_count_down(served, open_page):
    served.stands_at.append(time.monotonic())
    me = Chat(open_page(f"{served.url}/#key={served.key(requests_per_minute=2)}", clock=True)).begin()
    me.send("one")
    me.page.clock.pause_at(time.time() + 3600)
    me.send("two")
    again = me.page.get_by_role("button", name=re.compile("Try again"))
    assert again.inner_text() == "Try again in 30 s" and again.is_disabled()
    me.input.fill("three")
    assert me.button("Send").is_disabled()
    me.page.clock.run_for(10_000)
    assert again.inner_text() == "Try again in 20 s"
    me.page.clock.run_for(21_000)
    assert again.inner_text() == "Try again" and again.is_enabled() and me.button("Send").is_enabled()
    me.button("Good reply").click()
    me.page.get_by_text("Your vote was not saved").wait_for()
    assert me.button("Good reply").get_attribute("aria-pressed") == "false", "what is not saved is not shown"


@pytest.mark.slow
def test_errors_can_be_tried_again(served, chat):
    me = chat().begin()
    served.script.say("one two three", fail=2)
    me.send("first")
    me.page.get_by_text("the model failed").wait_for()
    assert me.bubbles() == ["first", "one two"]
    me.button("Try again").click()
    me.text("That sounds lovely.").wait_for()
    me.page.context.set_offline(True)
    me.send("second")
    me.page.get_by_text("The server cannot be reached.").wait_for()
    me.page.context.set_offline(False)
    me.send("third")
    assert me.bubbles() == [
        "first",
        "That sounds lovely.",
        "second\nthird",
        "That sounds lovely.",
    ], "the unanswered message goes with the next one"
    me.input.fill("x" * 1030)
    assert me.page.get_by_text("6 characters too many").is_visible() and me.button("Send").is_disabled()
    me.input.fill("word " * 200)
    me.input.press("Enter")
    me.button("Change my message").click()
    assert me.input.input_value() == ("word " * 200).strip() and len(me.bubbles()) == 4


@pytest.mark.slow
def test_votes_are_taken_back_and_kept_in_order(served, chat):
    me = chat().begin()
    me.send("hello")
    for name in ("Good reply", "Bad reply", "Bad reply"):
        me.button(name).click()
    eventually(lambda: stored(served, me)[0].messages[1].get("feedback", {}).get("vote") == 0)
    for name in ("Good reply", "Bad reply", "Good reply"):
        me.button(name).click()
    eventually(lambda: stored(served, me)[0].messages[1]["feedback"]["vote"] == 1)
    me.button("Better reply").click()
    me.page.get_by_role("textbox", name="What should it have said?").fill("Hi!")
    me.button("Save").click()
    me.text("Hi!").wait_for()
    me.button("Better reply").click()
    me.button("Remove").click()
    me.text("Hi!").wait_for(state="detached" if me.text("Hi!").count() == 0 else "hidden")
    assert "edit" not in stored(served, me)[0].messages[1]["feedback"] and len(stored(served, me)) == 1


@pytest.mark.slow
def test_markup_stays_text(served, chat):
    served.set(title=MARKUP, consent=MARKUP)
    served.script.say(MARKUP)
    me = chat()
    me.page.get_by_role("heading", name=MARKUP).wait_for()
    assert me.page.title() == MARKUP and me.page.locator(".consent-text").first.inner_text() == MARKUP
    me.begin()
    me.send(MARKUP)
    assert me.bubbles() == [MARKUP, MARKUP]
    me.button("Better reply").click()
    me.page.get_by_role("textbox", name="What should it have said?").fill(f"{MARKUP}!")
    me.button("Save").click()
    me.text(f"{MARKUP}!").wait_for()
    me.page.reload()
    me.text(f"{MARKUP}!").wait_for()
    assert me.bubbles() == [MARKUP, MARKUP] and me.page.locator("img:not(.mark), b").count() == 0


@pytest.mark.slow
def test_deleting_ones_data(served, chat):
    me = chat().begin()
    me.send("a secret")
    user, before = me.kept("user"), served.store.counts()["chats"]
    me.button("Menu").click()
    me.button("Delete my data").click()
    me.button("Keep it").click()
    assert served.store.counts()["chats"] == before
    me.button("Menu").click()
    me.button("Delete my data").click()
    me.button("Delete everything").click()
    me.text("Deleted: 1 chat.").wait_for()
    assert (
        served.store.counts()["chats"] == before - 1 and me.kept("user") is None and me.kept("chat") is None
    )
    me.begin()
    assert me.kept("user") != user and me.bubbles() == []


@pytest.mark.slow
def test_a_chat_that_is_gone_and_one_page_in_two_tabs(served, chat):
    me = chat().begin()
    me.send("hello")
    other = Chat(me.page.context.new_page())
    other.page.goto(served.url)
    other.text("That sounds lovely.").wait_for()
    served.store.delete_user(me.kept("user"), key=served.latest_key())
    me.send("are you there?")
    me.button("New chat").click()
    me.page.get_by_role("heading", name="Say hello").wait_for()
    served.store.delete_user(me.kept("user"), key=served.latest_key())
    other.page.reload()
    other.page.get_by_text("Your earlier chat is not on this server any more.").wait_for()


@pytest.mark.slow
def test_a_screen_reader_hears_replies_once_and_whole(served, chat):
    me = chat().begin()
    me.page.evaluate(
        """() => {
            window.heard = [];
            const region = document.getElementById('announcer');
            new MutationObserver(() => window.heard.push(region.textContent)).observe("""
        """region, {childList: true, characterData: true, subtree: true});
        }"""
    )
    me.send("hello")
    eventually(lambda: me.page.evaluate("heard") == ["The bot is writing.", "The bot: That sounds lovely."])
    live = me.page.locator("[aria-live], [role=status], [role=alert], [role=log]")
    assert not any(region.locator(".bubble").count() for region in live.all()), (
        "nothing that streams is a live region"
    )


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
def test_events_are_read_wherever_the_network_cuts_them(served, open_page, end):
    page = open_page(served.url)
    stream = [
        ": a comment",
        'data: {"text": "grüße 👋"}',
        "",
        "data:one",
        "data: two",
        "",
        "event: x",
        "data: [DONE]",
        "",
        "data: never finished",
    ]
    found = page.evaluate(
        """async (text) => {
            const {events} = await import('/page/api.js');
            const bytes = new TextEncoder().encode(text);
            const read = async (...cuts) => {
                const ends = [0, ...cuts, bytes.length];
                const stream = new ReadableStream({start(to) {
                    for (let n = 1; n < ends.length; n++) to.enqueue(bytes.slice(ends[n - 1], ends[n]));
                    to.close();
                }});
                const found = [];
                for await (const data of events(stream)) found.push(data);
                return JSON.stringify(found);
            };
            const every = new Set([await read(...bytes.keys())]);
            for (let cut = 0; cut <= bytes.length; cut++) every.add(await read(cut));
            return [...every].map(JSON.parse);
        }""",
        end.join(stream) + end,
    )
    assert found == [['{"text": "grüße 👋"}', "one\ntwo", "[DONE]"]]


IDS = re.compile(r"(chat|chatcmpl|user)-[0-9a-f]{24}|\b1\d{9}\b|sk-rl-[\w-]+")


def shape(value):
    """A JSON value without its numbers and ids: names, kinds and texts stay."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value]
    return IDS.sub("ID", value) if isinstance(value, str) else type(value).__name__


def traffic(request, response):
    """All of a request and its response but for ids, numbers and when it came."""
    dated = ("date", "content-length", "authorization", "last-modified", "etag")
    sent, got = (
        sorted((name, IDS.sub("ID", value)) for name, value in headers.items() if name not in dated)
        for headers in (request.headers, response.headers)
    )
    body = response.text()
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")]
    shapes = {str(shape(json.loads(event))) for event in events}  # how many pieces a text comes in is timing
    kind = response.headers.get("content-type", "")
    told = shapes if events else shape(json.loads(body)) if kind == "application/json" else body
    asked = shape(json.loads(request.post_data)) if request.post_data else None
    return request.method, IDS.sub("ID", request.url), sent, asked, response.status, got, told


@pytest.mark.slow
def test_no_arm_of_a_comparison_can_be_told_from_another(served, open_page):
    """Somebody with each of the two, who does all there is to do: the same page and the same traffic."""
    served.set(split={"bc": 1, "ilql": 1})
    seen = {}
    while len(seen) < 2:
        key = served.key()
        arm, _ = served.models.draw(served.latest_key())
        if arm in seen:
            continue
        served.script.lines.clear()
        for text in ("A", "B"):  # of one piece each: where a longer one is cut is timing
            served.script.say(text)
        found = []
        page = open_page(f"{served.url}/#key={key}", watch=lambda *both, to=found: to.append(traffic(*both)))
        me = Chat(page).begin()
        assert not page.locator("#values-bar").is_visible()
        me.send("Hello there")
        me.send("And you?")
        me.button("Good reply").click()
        me.button("Better reply", 1).click()
        page.get_by_role("textbox", name="What should it have said?").fill("Well.")
        me.button("Save").click()
        me.text("Well.").wait_for()
        page.reload()
        me.text("Well.").wait_for()
        page.wait_for_load_state("networkidle")
        names, html = sorted(page.evaluate("Object.keys(localStorage)")), IDS.sub("ID", page.content())
        assert served.store.chat(me.kept("chat"), key=served.latest_key())["model"] == arm
        seen[arm] = html, sorted(found, key=str), names  # files come as they come
    assert len(seen["bc"][1]) > 12 and any(event for *_, event in seen["bc"][1] if "assigned" in str(event))
    for one, other in zip(seen["bc"][1], seen["ilql"][1], strict=True):
        assert one == other
    assert seen["bc"] == seen["ilql"]
