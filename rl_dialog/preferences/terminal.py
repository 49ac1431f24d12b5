"""The labeller in a terminal: two clips side by side in half-block characters, or a conversation with two
replies; one key for an answer.

It works on the run's label log from a process of its own. The pair is leased while the person looks at it,
and given back when they take a break, leave, or the terminal goes away. What is asked beside the choice, how
long a session is and how far the goal are the run's plan, as on the page; a change holds from the next pair
on. Where the input is no terminal it is read line by line, for scripts; `f`, a blank and a note is a flag.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.align import Align
from rich.console import Console, Group, RenderableType
from rich.markdown import Markdown
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl_dialog.data.schema import harmless
from rl_dialog.errors import UserError
from rl_dialog.preferences.frames import Draw, drawn_frames
from rl_dialog.preferences.label_log import LabelLog, Query
from rl_dialog.preferences.labels import STRENGTHS, Remarks
from rl_dialog.preferences.plan import Plan
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.preferences.segments import Clip, Conversation, Segment, Segments
from rl_dialog.preferences.terminal_screen import (
    ASCII_SHADES,
    SHADES,
    Keyboard,
    Picture,
    Screen,
    half_blocks,
)

RATE = 15  # frames per second: what an agent that acts on every fourth frame sees at 60 Hz
HOLD = 7  # frames that the end is held before the next round
EMPTY = 0.5  # seconds between two questions for a pair while there is none
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0)
REASON_KEYS = "1234567890ab"
CHOICES = {"left": "left", "right": "right", "tie": "equal", "skip": "can't tell"}
NAMES = {"assistant": "bot"}  # of roles that the task speaks of by another name
HELP = ("L left", "R right", "E equal", "blank can't tell", "U undo", "P break", "+ - speed", "Q quit")
LONGEST_FLAG = 500  # characters


def in_words(choice: str, remarks: Remarks) -> str:
    """An answer, with what was said beside it."""
    said = f"{CHOICES[choice]}, {STRENGTHS[remarks.strength]}" if remarks.strength else CHOICES[choice]
    more = [*remarks.reasons, *([] if remarks.flag is None else ["flagged"])]
    return f"{said} ({', '.join(more)})" if more else said


class TerminalLabeller:
    """One sitting of one person.

    Args:
        draw: how observations look; needed for clips.
        files: the run, for the number of labels that it wants now.
        lease: seconds that a pair is kept after the last sign of life of this process.
        idle: seconds without a key after which the person counts as away and the pair goes back.
    """

    def __init__(self, log: LabelLog, segments: Segments, labeller: str, *, draw: Draw | None = None,
                 files: RunFiles | None = None, lease: float = 60.0, idle: float = 300.0,
                 console: Console | None = None) -> None:  # fmt: skip
        self.log, self.segments, self.labeller, self.draw, self.files = log, segments, labeller, draw, files
        self.seconds, self.idle, self.console = lease, idle, console or Console(highlight=False)
        self.pair: Query | None = None
        self.view: Callable[[float], RenderableType] = lambda _: Text()
        self.speed, self.paused, self.notice = 1.0, False, ""
        self.plan = Plan()
        self.reasons: list[str] = []
        self.flag: str | None = None
        self.note: str | None = None  # a flag that is being written
        self.reading = -1  # the page of the guideline that is on the screen; -1: none
        self.is_last_page = True
        self.answers = self.undone = self.since_break = self.own = 0
        self.session_began = 0.0
        self.renewed = self.active = self.asked = self.began = 0.0

    def run(self) -> dict[str, Any]:
        """Asks until the person leaves; what they did. The pair they hold goes back, however it ends.
        Raises UserError for a labeller who was revoked."""
        try:
            with Keyboard(sys.stdin) as keyboard, Screen(self.console) as screen:
                self.active = time.monotonic()
                self._look_up()
                self._read_first(keyboard, screen)
                while self._turn(keyboard, screen):
                    pass
        except PermissionError as error:  # an OSError, but none of the terminal's: the labeller was revoked
            self.pair = None  # it is theirs no more
            raise UserError(str(error)) from None
        except (
            KeyboardInterrupt,
            OSError,
        ):  # OSError: the terminal is gone; rich itself ends a program whose output nobody reads
            pass
        finally:
            try:
                self._give_back()
            except (
                KeyboardInterrupt
            ):  # the terminal's end may come twice, as the end of the input and as a signal
                self._give_back()
        return {
            "labeller": self.labeller,
            "answers": self.answers,
            "undone": self.undone,
            "labels": self.log.counts()["labels"],
        }

    def _turn(self, keyboard: Keyboard, screen: Screen) -> bool:
        """A frame, and what was typed meanwhile; False when the person wants to leave."""
        now = time.monotonic()
        if not self.paused and now - self.active > self.idle and keyboard.terminal:
            self._pause(f"No key for {self.idle:g} s: the pair went back for others.")
        if not self.paused:
            self._hold(now)
        frames = (now - self.began) * RATE * self.speed
        shown = self._page() if self.reading >= 0 else self.view(frames) if self.pair else Text()
        state = (self.paused, self.notice, tuple(self.reasons), self.flag, self.reading)
        screen.show(self._whole(shown), key=(self.pair and self.pair.id, *state))
        typed = keyboard.next(1 / RATE if self.pair and screen.live else EMPTY, raw=self.note is not None)
        if typed is None:
            return True
        self.active, self.notice = time.monotonic(), ""
        going_on = self._obey(typed)
        if self.plan.session and self.since_break >= self.plan.session and keyboard.terminal:
            self._propose_break()
        return going_on

    def _obey(self, typed: str) -> bool:
        choice = typed.removeprefix("much ")
        if typed == "quit":
            return False
        if self.note is not None:
            self._write_note(typed)
        elif self.paused:
            self.paused = False
        elif self.reading >= 0:
            self._turn_page(typed)
        elif choice in CHOICES and self.pair:
            self._answer(choice, much=choice != typed)
        elif typed == "undo":
            self._undo()
        elif self.pair and len(typed) == 1 and typed.lower() in REASON_KEYS[: len(self.plan.reasons)]:
            self._toggle(self.plan.reasons[REASON_KEYS.index(typed.lower())])
        elif self.pair and typed == "flag":
            self.note = self.flag or ""
        elif self.pair and typed[:2].lower() == "f ":  # a line
            self._set_flag(typed[2:])
        elif typed == "guideline" and self.plan.guideline:
            self.reading = 0
        elif typed == "pause":
            self._pause("A break: the pair went back for others.")
        elif typed in ("faster", "slower"):
            place = SPEEDS.index(self.speed) + (1 if typed == "faster" else -1)
            self.speed = SPEEDS[max(0, min(len(SPEEDS) - 1, place))]
            self.notice = f"Speed {self.speed:g}."
        elif choice not in CHOICES:
            self.notice = f"{typed!r} means nothing here. {self._help()}"
        return True

    def _answer(self, choice: str, *, much: bool) -> None:
        is_asked = self.plan.strength and choice in ("left", "right")
        strength = (2 if much else 1) if is_asked else None
        remarks, query = Remarks(strength, tuple(self.reasons), self.flag), self.pair.id
        self.log.answer(query, self.labeller, choice, remarks)
        stands = self.log.stands_instead(query, self.labeller, choice, remarks)
        if stands:
            earlier, now = in_words(stands.choice, stands.remarks), in_words(choice, remarks)
            self.notice = f'You had answered it elsewhere: "{earlier}" stands, and "{now}" was not kept.'
            self.pair = None
            return
        if not self.since_break:
            self.session_began = time.monotonic()
        self.answers, self.since_break, self.pair = self.answers + 1, self.since_break + 1, None
        self.own += 1
        self.notice = f"Saved: {in_words(choice, remarks)}."

    def _toggle(self, reason: str) -> None:
        if reason in self.reasons:
            self.reasons.remove(reason)
        else:
            self.reasons.append(reason)

    def _set_flag(self, note: str) -> None:
        self.flag = "".join(each for each in note if each.isprintable()).strip()[:LONGEST_FLAG]
        self.notice = f"Flagged{': ' + self.flag if self.flag else ''}. Now answer it."

    def _write_note(self, typed: str) -> None:
        """A key while the note of a flag is written: Enter ends it, Esc takes the flag away."""
        if typed in ("\r", "\n"):
            self._set_flag(self.note)
            self.note = None
        elif typed == "\x1b":
            self.note = self.flag = None
            self.notice = "Not flagged."
        elif typed in ("\x7f", "\b"):
            self.note = self.note[:-1]
        elif len(typed) == 1 and typed.isprintable():
            self.note += typed

    def _undo(self) -> None:
        self._give_back()
        pair = self.log.undo(self.labeller, self.seconds)
        self.notice = "Taken back." if pair else "There is no answer to take back."
        if pair:
            self.undone, self.own = self.undone + 1, self.own - 1
            self.since_break = max(0, self.since_break - 1)
            self._take(pair)

    def _pause(self, why: str) -> None:
        self._give_back()
        self.paused, self.notice = True, why

    def _propose_break(self) -> None:
        """After a session of answers, unless they were all that is wanted."""
        minutes = max(1, round((time.monotonic() - self.session_began) / 60))
        many = f"{self.since_break} answers in {minutes} minute{'' if minutes == 1 else 's'}"
        self.since_break = 0
        if not self._is_done():
            so_far = f"{self.own:,} of {self.plan.goal:,}" if self.plan.goal else f"{self.own:,} in all"
            self._pause(f"Time for a break: {many}, {so_far}.")

    def _is_done(self) -> bool:
        """Has the person given all answers that are asked of them?"""
        return 0 < self.plan.goal <= self.own

    def _look_up(self) -> None:
        """What the plan says by now, and how many answers the person has given."""
        self.plan, self.own = self.log.plan, self.log.own_counts(self.labeller)["answers"]

    # The guideline

    def _read_first(self, keyboard: Keyboard, screen: Screen) -> None:
        """Before the first pair; for a script it is printed and no key is waited for."""
        if self.plan.guideline and not (keyboard.terminal and screen.live):
            self.console.print(Markdown(self.plan.guideline))
        elif self.plan.guideline:
            self.reading = 0

    def _page(self) -> RenderableType:
        """So much of the guideline as fits the screen, from the page that is read."""
        lines = self.console.render_lines(Markdown(self.plan.guideline), pad=False)
        height = max(4, self.console.height - 8)
        if not self.console.is_terminal:
            height = len(lines)
        begin = self.reading * height
        self.is_last_page = begin + height >= len(lines)
        return Picture(lines[begin : begin + height], self.console.width)

    def _turn_page(self, typed: str) -> None:
        """A blank shows the next page; after the last one, and by any other key, the pairs come."""
        self.reading = -1 if typed != "skip" or self.is_last_page else self.reading + 1

    def _hold(self, now: float) -> None:
        """The pair stays ours while somebody looks at it; where there is none, the next one becomes ours as
        soon as it is there."""
        if self.pair and now - self.renewed > self.seconds / 3:
            self.renewed = now
            if not self.log.renew(self.pair.id, self.labeller, self.seconds):
                self.pair, self.notice = (
                    None,
                    "The pair went to somebody else, or was answered. Here is another one.",
                )
        if not self.pair and self.reading < 0 and now - self.asked > EMPTY / 2:
            self._look_up()
            pair = None if self._is_done() else self.log.lease(self.labeller, self.seconds)
            if pair:
                self._take(pair)
            else:
                self.asked = now

    def _take(self, pair: Query) -> None:
        self.pair = pair  # first: whatever comes now, it goes back
        self.reasons, self.flag, self.note = [], None, None
        left, right = self.segments[pair.left], self.segments[pair.right]
        self.view = self._clips(left, right) if isinstance(left, Clip) else self._replies(left, right)
        self.renewed, self.began, self.asked = time.monotonic(), time.monotonic(), 0.0

    def _give_back(self) -> None:
        if self.pair:
            self.log.renew(self.pair.id, self.labeller, 0.0)
            self.pair = None

    def _whole(self, middle: RenderableType) -> RenderableType:
        """Task, pair, and a line of what there is to know."""
        if self.paused:
            head, middle = "Press a key to go on, Q to leave.", Text()
        elif self.reading >= 0:
            head = "What to look at. A blank turns the page, any other key shows the pairs."
        elif self.pair:
            head = self.pair.task or "Which is better?"
        elif self._is_done():
            head = "You have given all your answers. Thank you! Q leaves."
        else:
            head = "Waiting for the next pair. It appears by itself."
        below = [Text(self.notice or self._help(), style="dim"), *self._progress()]
        return Group(Text(head, style="bold", justify="center"), middle, *self._remarks(), *below)

    def _remarks(self) -> list[RenderableType]:
        """What the person says beside the choice so far."""
        if not self.pair or self.paused or self.reading >= 0:
            return []
        lines = []
        if self.plan.reasons:
            line = Text("Why:")
            for key, reason in zip(REASON_KEYS, self.plan.reasons, strict=False):
                chosen = reason in self.reasons
                line.append(f"   {key} ")
                line.append(f"[{reason}]" if chosen else reason, style="bold" if chosen else "")
            lines.append(line)
        if self.note is not None:
            lines.append(Text(f"What is wrong? {self.note}_   (Enter flags the pair, Esc does not)"))
        elif self.flag is not None:
            lines.append(Text(f"Flagged: {self.flag}" if self.flag else "Flagged"))
        return lines

    def _help(self) -> str:
        """The keys, with those that the plan asks for, in lines that fit."""
        plan, last = self.plan, REASON_KEYS[max(0, len(self.plan.reasons) - 1)]
        more = ["capitals and Shift with an arrow: much better"] if plan.strength else []
        more += [f"1 to {last} reasons"] if plan.reasons else []
        more += ["F flag", *(["G guideline"] if plan.guideline else [])]
        lines = [""]
        for key in (*HELP, *more):
            line = f"{lines[-1]}   {key}".strip()
            if len(line) <= self.console.width:
                lines[-1] = line
            else:
                lines.append(key)
        return "\n".join(lines)

    def _progress(self) -> list[RenderableType]:
        """How far the person is, and when the next break comes."""
        wanted = self.files.status().get("labels_wanted") if self.files else None
        goal, session = self.plan.goal, self.plan.session
        parts = [f"{self.own:,} of {goal:,} answers" if goal else f"{self.answers - self.undone} answered"]
        if session:
            parts.append(f"break in {max(0, session - self.since_break)}")
        elif wanted is not None:
            parts.append(f"{wanted} wanted now")
        bar = [ProgressBar(total=goal, completed=min(self.own, goal), width=40)] if goal else []
        return [Text(", ".join(parts), style="dim"), *bar]

    def _clips(self, left: Segment, right: Segment) -> Callable[[float], RenderableType]:
        if self.draw is None:
            raise UserError(
                "expected a function that draws observations, TerminalLabeller(draw=...), to show clips"
            )
        around = 8 + self._help().count("\n") + 2 * bool(self.plan.reasons or self.plan.goal)
        width, height = (self.console.width - 6) // 2, max(4, self.console.height - around)
        blocks = self._shown(SHADES + "▀") == SHADES + "▀"
        style = {
            "colours": blocks and self.console.color_system is not None,
            "shades": SHADES if blocks else ASCII_SHADES,
        }
        clips = [
            [half_blocks(frame, width, height, **style) for frame in drawn_frames(clip, self.draw)]
            for clip in (left, right)
        ]
        longest = max(map(len, clips))

        def at(frame: float) -> RenderableType:
            n = int(frame) % (longest + HOLD)
            table = Table.grid(expand=True, padding=(0, 1))
            sides = []
            for name, pictures, clip in zip(("Left", "Right"), clips, (left, right), strict=True):
                place = min(n, len(pictures) - 1)
                ended = (
                    ", the episode ends"
                    if clip.steps < len(clip.actions) and place == len(pictures) - 1
                    else ""
                )
                sides.append(
                    Panel(
                        Align.center(pictures[place]),
                        title=name,
                        subtitle=f"{place + 1}/{len(pictures)}{ended}",
                        style="none",
                    )
                )
            table.add_row(*sides)
            return table

        return at

    def _replies(self, left: Segment, right: Segment) -> Callable[[float], RenderableType]:
        talk = Text(self._lines(left.context))
        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(ratio=1)
        table.add_column(ratio=1)
        sides = (("Left", left), ("Right", right))
        table.add_row(
            *(
                Panel(
                    Text(
                        self._lines(spoken.messages)
                        if isinstance(spoken, Conversation)
                        else self._shown(spoken.text) or "(an empty reply)"
                    ),
                    title=name,
                )
                for name, spoken in sides
            )
        )
        before = [Panel(talk, title="The conversation so far", border_style="dim")] if left.context else []
        view = Group(*before, table)
        return lambda _: view

    def _lines(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Each message behind who said it, as the page calls them."""
        return "\n".join(
            self._shown(f"{NAMES.get(message['role'], message['role'])}> {message['content']}")
            for message in messages
        )

    def _shown(self, text: str) -> str:
        """The text, harmless, with escapes also for what the terminal's encoding does not have, because two
        replies that differ must not look alike."""
        return harmless(text).encode(self.console.encoding, "backslashreplace").decode(self.console.encoding)
