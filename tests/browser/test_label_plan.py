"""What the labelling page asks beside the choice, in a real browser: strength, reasons, flags, the guideline,
breaks and progress; how replies look; and what a labeller is not told."""

from __future__ import annotations

import json

import pytest

from rl_dialog.preferences.labels import NewQuery
from rl_dialog.preferences.segments import Reply
from tests.browser.test_label_page import Person, eventually, labels, sit_down  # noqa: F401  (fixtures)

pytestmark = pytest.mark.browser

GUIDELINE = """# Be *kind*

1. Correct
2. Short

```example
prompt: Is it open?
left: Yes, until **nine**.
right: <b>Who</b> knows.
answer: left
why: It answers.
```
"""


TIMED = """async (lines) => {
  const { markdown } = await import("./page/markdown.js");
  const began = performance.now();
  lines.forEach((line) => markdown(line));
  return performance.now() - began;
}"""
BLOCKS = """async (texts) => {
  const { markdown } = await import("./page/markdown.js");
  return texts.map((text) => markdown(text).map((made) => `${made.tagName} ${made.textContent}`).join());
}"""

BLOCKS_OF_A_MESSAGE = """async (texts) => {
  const { messageOf } = await import("./page/markdown.js");
  return texts.map((text) => messageOf(text).map((made) => `${made.tagName} ${made.textContent}`));
}"""


def ask_about(labels, left, right, context="Hello?", **given):  # noqa: F811
    talk = [{"role": "user", "content": context}] if isinstance(context, str) else context
    return labels.log.add_query(*(labels.segments.add(Reply(talk, text)) for text in (left, right)), **given)


def test_strength_reasons_and_a_flag_go_with_the_answer(labels, sit_down):  # noqa: F811
    labels.log.set_plan(strength=True, reasons=("correct", "short"))
    labels.ask(3)
    ann = sit_down("ann", labels.url())
    ann.button("correct").wait_for()
    ann.ready()
    ann.button("short").click()
    ann.press("1")
    ann.press("1")  # and away again
    ann.button("Flag").click()
    ann.page.get_by_label("Note").fill("too dark")
    ann.page.locator("#flag-set").click()
    ann.button("Flagged").wait_for()
    ann.answer("ArrowLeft")
    ann.ready()
    assert ann.button("short").get_attribute("aria-pressed") == "false", "each pair has reasons of its own"
    ann.button("Right is much better").click()
    ann.ready()
    ann.answer("e")
    ann.saved(3)
    told = [(one.choice, one.strength, one.reasons, one.flag) for one in labels.log.answers()]
    assert told == [("left", 1, ["short"], "too dark"), ("right", 2, None, None), ("tie", None, None, None)]


@pytest.mark.slow
def test_replies_are_markdown_and_their_differences_are_marked(labels, sit_down):  # noqa: F811
    one = "It costs **10 €**.\n\n- by card\n- in `cash`\n\n<i>no</i> [site](https://example.org)"
    one += " [bad](javascript:alert(1))"
    ask_about(labels, one, one.replace("10", "12").replace("cash", "coins"))
    ann = sit_down("ann", labels.url())
    left = ann.page.locator("#left .reply")
    left.locator("strong").wait_for()
    assert left.locator("li").all_inner_texts()[0] == "by card" and left.locator("i").count() == 0
    assert "<i>no</i>" in left.inner_text()
    assert left.locator("a").evaluate_all("all => all.map(one => one.href)") == ["https://example.org/"]
    marked = {side: ann.page.locator(f"#{side} mark").all_inner_texts() for side in ("left", "right")}
    assert sorted(marked.values()) == [["10", "cash"], ["12", "coins"]]
    ann.press("d")
    eventually(lambda: ann.page.locator("mark").count() == 0)
    ann.press("m")
    eventually(lambda: left.locator("strong").count() == 0)
    assert "**" in left.inner_text() and "- by card" in left.inner_text()


@pytest.mark.slow
def test_differences_in_any_script_behind_texts_that_nobody_wrote_for_a_page(labels, sit_down):  # noqa: F811
    """A vowel sign stays on its letter, Chinese has no spaces; 80,000 characters of stars took minutes, and a
    call with values 5,000 deep showed no pair at all."""
    deep = '{"name": "f", "arguments": ' + '{"a": ' * 5000 + "1" + "}" * 5001
    context = [{"role": "user", "content": "**a " * 20_000}, {"role": "tool", "content": deep}]
    ask_about(labels, "किताबें मेज़ पर है।\n\n包裹明天到", "किताब मेज़ पर है।\n\n包裹后天到", context)
    ann = sit_down("ann", labels.url())
    ann.page.locator("#left mark").first.wait_for()
    marked = {side: ann.page.locator(f"#{side} mark").all_inner_texts() for side in ("left", "right")}
    assert sorted(marked.values()) == [["किताब", "后"], ["किताबें", "明"]]
    # Lines that are nearly a heading, a table, code or an item of a list took a minute together.
    lines = ["# a" + "#" * 80_000 + "b", "# a" + " " * 80_000 + "b", "|\n" + " " * 80_000 + "x"]
    lines += ["|\n-" + " " * 80_000 + "x", "```" + " " * 80_000 + "`", "-" + " " * 80_000 + "a\u2028"]
    assert ann.page.evaluate(TIMED, lines) < 2000
    headings = ["#  a # b ##", "## C#", "# ", "# ###", "####### a"]
    tags = ["H4 a # b", "H5 C", "H4 ", "H4 ", "P ####### a"]
    assert ann.page.evaluate(BLOCKS, headings) == tags
    tables = ["a|b\n -|-", "|a|\n| :-: |", "a|\n---", "a|\n| - - |", "a|\n|"]
    assert [made[:3] for made in ann.page.evaluate(BLOCKS, tables)] == ["DIV", "DIV", "DIV", "P a", "P a"]


@pytest.mark.slow
def test_calls_of_tools_are_readable(labels, sit_down):  # noqa: F811
    call = {
        "type": "function",
        "function": {"name": "search", "arguments": json.dumps({"to": "LIS", "n": 2})},
    }
    context = [
        {"role": "user", "content": "A flight?"},
        {"role": "assistant", "content": json.dumps([call])},
        {"role": "tool", "content": json.dumps({"flights": [{"id": "TP 1", "price": 90}]})},
    ]
    ask_about(labels, json.dumps([call]), "There is TP 1.", context)
    ann = sit_down("ann", labels.url())
    card = ann.page.locator("#sides .call")
    card.wait_for()
    assert card.locator("code").first.inner_text() == "search"
    assert card.locator("dt, dd").all_inner_texts() == ["to", "LIS", "n", "2"]
    assert ann.page.locator("#context .tool td").all_inner_texts() == ["TP 1", "90"]
    assert ann.page.locator("mark").count() == 0, "they have nothing in common"
    both = "See [1] and [{}]:\n\n- **TP**" + json.dumps([call])
    made = ann.page.evaluate(BLOCKS_OF_A_MESSAGE, [both, "[1] " + json.dumps([{"name": "TP"}]), "a [{ b"])
    assert made[0] == ["P See [1] and [{}]:", "UL TP", "DIV calls search" + "toLISn2"]
    assert made[1:] == [['P [1] [{"name": "TP"}]'], ["P a [{ b"]]


@pytest.mark.slow
def test_a_phone_shows_the_context_where_the_replies_leave_room(labels, sit_down):  # noqa: F811
    """It had three tenths of the screen, and behind what a tool gave the question was out of sight."""
    context = [{"role": "user", "content": "Which one is open?"}]
    context += [
        {"role": "tool", "content": json.dumps([{"name": f"no. {n}", "open": n > 2} for n in range(4)])}
    ]
    ask_about(labels, "The third.", "None of them.", context, priority=1.0)
    ask_about(labels, "so long " * 400, "as long " * 400, context)
    ann = sit_down("ann", labels.url(), width=390, height=800, has_touch=True)
    heights = "one => [one.clientHeight, one.scrollHeight, one.parentElement.clientHeight]"
    ann.page.get_by_text("None of them.").wait_for()
    seen, whole, _ = ann.page.locator("#context").evaluate(heights)
    assert seen == whole
    ann.press("l")
    ann.page.get_by_text("so long").wait_for()
    seen, whole, room = ann.page.locator("#context").evaluate(heights)
    assert abs(seen - 0.3 * room) < 2 and seen < whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "size",
    [pytest.param({"width": 1000}, marks=pytest.mark.slow), {"width": 320, "height": 640, "has_touch": True}],
)
def test_the_guideline_is_read_first_and_one_tap_away(labels, sit_down, size):  # noqa: F811
    labels.log.set_plan(guideline=GUIDELINE)
    labels.ask(2)
    url = labels.url()
    ann = sit_down("ann", url, **size)
    guide = ann.page.locator("#guide-dialog")
    guide.get_by_role("heading", name="Be kind").wait_for()
    example = guide.locator(".example")
    assert example.locator(".better").inner_text().split() == ["Left", "Yes,", "until", "nine."]
    assert "Left is better – It answers." in example.inner_text() and "<b>Who</b>" in example.inner_text()
    assert ann.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    ann.press("l")
    assert labels.log.state() == (0, 0, 0), "keys are the dialog's"
    ann.button("To the pairs").click()
    ann.ready()
    ann.button("Guideline").click()
    guide.get_by_role("heading", name="Be kind").wait_for()
    ann.button("To the pairs").click()
    ann.page.reload()
    ann.ready()
    assert not guide.is_visible(), "it opens by itself only once"
    ann.answer("l")
    ann.saved(1)


@pytest.mark.slow
def test_a_break_after_a_session_and_the_end_of_all(labels, sit_down):  # noqa: F811
    labels.log.set_plan(session=2, goal=3)
    labels.ask(6)
    ann = sit_down("ann", labels.url())
    ann.says("0 of 3 answers · break in 2")
    ann.answer("l")
    ann.answer("ArrowDown")
    ann.page.get_by_role("heading", name="Time for a break").wait_for()
    ann.says("You have given 2 of 3.")
    eventually(lambda: labels.log.counts()["leased"] == 0)
    ann.page.mouse.move(200, 200)  # somebody is there, but resting
    ann.page.wait_for_timeout(300)
    assert labels.log.counts()["leased"] == 0
    ann.button("Go on").click()
    ann.answer("R")
    ann.says("You have given all your answers. Thank you!")
    assert ann.page.get_by_role("progressbar").get_attribute("aria-valuenow") == "3"
    assert len(labels.log.answers()) == 3 and labels.log.counts()["leased"] == 0


@pytest.mark.slow
def test_nothing_tells_a_labeller_which_pairs_are_gold_or_what_others_said(labels, sit_down):  # noqa: F811
    """Everything that the server sends is the same for both kinds but for what is compared, and their own
    counts rise with every answer."""
    labels.log.set_plan(overlap=2)
    labels.ask(12)
    labels.log.add_gold(
        NewQuery(labels.clip(), labels.clip(), f"{n:032x}", "Which one is greener?", gold=1.0)
        for n in range(12)
    )
    labels.log.set_plan(gold_share=0.5)
    sent = []

    def watch(request, response):
        if "/v1/" in request.url and ".png" not in request.url and response.status == 200:
            sent.append((request.url.rsplit("/", 1)[1], response.json()))

    url = labels.url()
    bob = sit_down("bob", url)
    for _ in range(10):
        bob.answer("R")
    bob.saved(10)
    ann = sit_down("ann", url, watch=watch)
    for n in range(10):
        ann.answer("l")
        ann.says(f"{n + 1} answer")
    ann.saved(10)
    ann.button("You and your labels").click()
    ann.page.get_by_role("heading", name="ann").wait_for()
    gold = set(labels.log.gold())
    kinds = {answer.query in gold for answer in labels.log.answers() if answer.labeller == "ann"}
    assert kinds == {True, False}, "both kinds were shown"
    shapes = {
        (query["id"] in gold, len(query["id"]), query["task"], *sorted(query), *sorted(query["left"]))
        for name, told in sent
        if name == "lease" and (query := told["query"])
    }
    assert len({shape[1:] for shape in shapes}) == 1, "a pair's fields do not depend on it"
    for name, told in sent:
        text = json.dumps(told)
        assert not any(
            word in text
            for word in ("gold", "agree", "shared", "noise", "waiting", "second_opinions", "late")
        ), name
        assert "bob" not in text
    assert not ann.page.get_by_text("agreement").is_visible()
