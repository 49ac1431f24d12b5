"""A preference run: its roles called in turn in one process, or as Ray actors of their own, which nobody
waits for.

    synchronous    learner, asker, labeller, teacher, learner, ...; the same settings give the same labels,
                   losses and weights
    asynchronous   each role in an actor; the supervisor gives each its next step when the last one is done

In the asynchronous run what passes between roles goes through Ray's object store: a version of the reward is
one immutable object, of which nobody ever sees half. Queues, by what may be lost: of clips there is one load
in flight, and what comes while the asker is busy is dropped and counted; labels go to the log, which
acknowledges none before it is on disk; the learner has one round in flight.

A role whose process dies is made again by Ray, from what it keeps in the run's folder. What Ray does not see
is a process that is there and says nothing: roles are asked every BEAT seconds whether they live, which they
say also while they load or are at work (role_actor.py), and one that is silent for `Role.patience` is ended,
so that Ray makes it again. A slow start is no death: while its process answers it has LOADING seconds, and
twice as many each time. All this is reported in events.jsonl and on stderr; after RESTARTS times without a
step in between the run ends with an error.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from rl_dialog.cluster.role_actor import RoleActor
from rl_dialog.data.files import write_json
from rl_dialog.errors import UserError

BEAT = 1.0  # seconds between two questions whether a role lives
HEARTBEAT = 10.0  # seconds that a role which runs has to answer
STARTING = 120.0  # seconds that a new one has to find a place and to answer, or to answer while it loads
LOADING = 600.0  # seconds that a process which answers has to import and load its role
SAID = 60.0  # seconds after which it is said that a role still loads or works; then twice as long each time
RESTARTS = 3
LAST = 600.0  # seconds for the round that is under way at the end, and as many to save
IDLE = 0.1  # seconds before a role that had nothing to do is asked again
FRUITLESS = 1000  # rounds

Log = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True)
class Plan:
    """What a run is for. Roles are constructors, so that they can be made in other processes, and again."""

    learner: Callable[[], Any] | None  # None: nothing is played or learned, only what is there is taught
    asker: Callable[[], Any]
    teacher: Callable[[], Any] | None  # None: labels are gathered only
    labellers: Mapping[
        str, Callable[[], Any]
    ]  # oracles, and pages on which people answer; the synchronous run has oracles only
    wanted: Callable[[int], int]  # labels in all, after so many steps
    steps: int  # that the policy learns from
    budget: int
    clips: int = 1000  # at hand, of the policy as it begins: more are not played before there is a reward
    gather: int = 0  # stop when there are so many labels; 0: when the policy has learned
    # labels that the reward in use may not know yet before the learner waits for a new version; 0: it never
    # waits
    max_staleness: int = 0
    gpus: float = 0.0  # of the learner and of the teacher, each
    # labels come as fast as they are wanted: the learner waits for those that are wanted, not only for those
    # that are there
    paced: bool = False
    curious: bool = False  # where labels confirm nothing the policy looks for what is not known yet


def run_in_turn(plan: Plan, folder: Path, log: Log, *, stop: threading.Event | None = None) -> None:
    """The synchronous run, until `stop` is set: then it saves what the policy has learned."""
    learner, asker, teacher = plan.learner(), plan.asker(), plan.teacher and plan.teacher()
    labellers = [make() for make in plan.labellers.values()]
    fruitless, asked, taught, stop = 0, {}, {}, stop or threading.Event()
    doubt = Doubt(curious=plan.curious)
    while learner.steps < plan.steps and not stop.is_set():
        published = teacher.published() if teacher else None
        metrics, clips = learner.step(published)
        steps, due = int(metrics.pop("steps")), metrics.pop("due")
        asked = asker.step(clips, wanted=plan.wanted(steps), published=published)
        answered = sum(labeller.step()["answered"] for labeller in labellers)
        asked |= asker.log.counts()  # with these answers
        taught = teacher.step() if teacher else {}
        doubt.say(taught)
        log(steps, metrics | {f"pref/{name}": value for name, value in (asked | taught).items()})
        if due:
            learner.save()
            asker.forget()
        fruitless = 0 if answered or steps else fruitless + 1
        if fruitless == FRUITLESS:
            raise UserError(
                f"{FRUITLESS} rounds were played and no label came of them: {asked['clips']} different clips "
                "at hand"
            )
        if plan.gather and asked["labels"] >= plan.gather:
            break
    learner.save()
    write_status(folder, plan, learner.steps, asked | taught, over=True)


@dataclass
class Role:
    """An actor, and what is under way with it."""

    name: str
    make: Callable[[], Any]
    actor: Any = None
    pid: int = 0
    running: Any = None  # reference of the step's metrics
    rest: Any = None  # of what else it returns, if two things
    asked: Any = None  # reference of the heartbeat under way
    ask: float = 0.0  # not before
    silent: float = 0.0  # seconds since it last answered
    is_made: bool = False  # by the process that answered last
    loading: float = 0.0  # seconds that this process has been making it
    due: float = SAID  # of `loading`, to say so
    working: float = 0.0  # seconds that the step under way has taken
    slow: float = SAID  # of `working`, to say so
    next: float = 0.0  # no step before
    failures: int = 0  # since its last finished step
    restarts: int = 0
    silences: int = 0  # restarts because it did not answer, or load in time
    state: dict[str, float] = field(default_factory=dict)  # what its last step said

    @property
    def patience(self) -> float:
        """Seconds without an answer after which it is made again; twice as many each time, because on a busy
        machine to be slow is not to be dead."""
        return self.at_most(HEARTBEAT if self.is_made else STARTING)

    def at_most(self, seconds: float) -> float:
        return seconds * 2 ** min(self.silences, 4)


class Supervisor:
    """The asynchronous run, of the actors of one Plan. Raises UserError where a role cannot be kept alive,
    and what a role raised."""

    def __init__(self, plan: Plan, folder: Path, log: Log, *, stop: threading.Event | None = None) -> None:
        self.plan, self.folder, self.log = plan, folder, log
        self.stop, self.doubt = stop or threading.Event(), Doubt(curious=plan.curious)
        named = {"learner": plan.learner, "asker": plan.asker, "teacher": plan.teacher, **plan.labellers}
        self.roles = {name: Role(name, make) for name, make in named.items() if make}
        self.published: Any = None  # reference of (version, model)
        self.version, self.known = 0, 0  # newest version; labels that it has seen
        self.sent = 0  # the version that the learner has
        self.steps, self.clips, self.dropped = 0, None, 0
        self.worker_restarts = 0  # of the learner's env runners
        self.events: deque[dict[str, Any]] = deque(maxlen=20)
        self.over, self.told, self.looked = False, 0.0, time.monotonic()
        self.rates: deque[tuple[float, int]] = deque(maxlen=60)

    def run(self) -> None:
        """Until the policy has learned from so many steps, so many labels are gathered, or `stop` is set:
        then the round that is under way is saved."""
        try:
            for role in self.roles.values():
                self._start(role)
            while not (self.over or self.stop.is_set()):
                self._give_steps()
                waiting = {role.running: role for role in self.roles.values() if role.running is not None}
                ready, _ = ray.wait(list(waiting), timeout=0.05) if waiting else ([], [])
                if not waiting:
                    time.sleep(0.02)
                for reference in ready:
                    self._finish(waiting[reference])
                self._check_health()
                self._tell()
            if "learner" in self.roles and not (self.stop.is_set() and not self.steps):
                self._save(self.roles["learner"])
        finally:
            for role in self.roles.values():
                if role.actor is not None:
                    ray.kill(role.actor)
            self._tell(over=True)

    # Steps

    def _give_steps(self) -> None:
        now = time.monotonic()
        for role in self.roles.values():
            if role.running is None and now >= role.next:
                {"learner": self._give_learner, "asker": self._give_asker, "teacher": self._give_teacher}.get(
                    role.name, self._give
                )(role)

    def _give(self, role: Role) -> None:
        role.running = role.actor.call.remote("step")

    def _give_learner(self, role: Role) -> None:
        """A round, unless clips would only be thrown away, or the reward in use is too old."""
        counts = self.roles["asker"].state
        due = self.plan.wanted(self.steps) if self.plan.paced else counts.get("labels", 0)
        behind = due - self.known
        enough = self.version == 0 and counts.get("clips", 0) >= self.plan.clips
        if enough or (self.version and 0 < self.plan.max_staleness < behind):
            role.next = time.monotonic() + IDLE
            return
        published = self.published if self.version > self.sent else None
        self.sent = self.version
        role.running, role.rest = role.actor.call.options(num_returns=2).remote("step", published)

    def _give_asker(self, role: Role) -> None:
        clips, self.clips = self.clips, None
        label_goal = self.plan.wanted(self.steps)
        role.running = role.actor.call.remote(
            "step", clips if clips is not None else [], wanted=label_goal, published=self.published
        )

    def _give_teacher(self, role: Role) -> None:
        role.running, role.rest = role.actor.call.options(num_returns=2).remote("teach")

    def _finish(self, role: Role) -> None:
        """Takes what a step returned. What a role raised ends the run: made again it would raise it again."""
        reference, rest, role.running, role.rest = role.running, role.rest, None, None
        try:
            state = ray.get(reference)
        except ray.exceptions.RayActorError:
            return self._wait_for(role)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, UserError | OSError) else error
            raise cause from error
        role.failures = 0
        take = {"learner": self._take_learner, "asker": self._take_asker, "teacher": self._take_teacher}.get(
            role.name
        )
        if take:
            take(role, state, rest)
        else:
            if state.get("url") and state != role.state:
                print(f"label here: {state['url']}", file=sys.stderr, flush=True)
            role.state = state
            role.next = time.monotonic() + IDLE * (not state.get("answered"))

    def _take_learner(self, role: Role, state: dict[str, float], clips: Any) -> None:
        if isinstance(state, str):  # it has saved
            return
        self.steps, due = int(state.pop("steps")), state.pop("due")
        role.state = state
        restarts = int(state.get("train/worker_restarts", 0))
        if restarts > self.worker_restarts:
            self._tell_event("worker", 0, "the process of an env runner died", restarts)
        self.worker_restarts = restarts
        if self.clips is not None:
            self.dropped += 1
        self.clips = clips  # the newest load; the one before was not fetched in time
        counts, taught = (
            self.roles["asker"].state,
            self.roles["teacher"].state if "teacher" in self.roles else {},
        )
        role_metrics = {f"pref/{name}": value for name, value in (counts | taught).items()}
        newer = {
            "pref/staleness": unknown_labels(counts, self.known),
            "pref/loads_dropped": self.dropped,
            "pref/label_rate": self._rate(counts),
        }
        self.log(self.steps, state | role_metrics | newer)
        if self.steps >= self.plan.steps:
            self.over = True
        elif due:
            role.running = role.actor.call.remote("save")

    def _take_asker(self, role: Role, state: dict[str, float], _: Any) -> None:
        role.state = state
        role.next = time.monotonic() + (IDLE if self.clips is None else 0)
        if self.plan.gather and state["labels"] >= self.plan.gather:
            self.over = True

    def _take_teacher(self, role: Role, state: dict[str, float], published: Any) -> None:
        if state:
            self.doubt.say(state)
            role.state, self.published = state, published
            self.version, self.known = int(state["version"]), int(state["all_labels"])
        else:
            role.next = time.monotonic() + IDLE

    def _save(self, role: Role) -> None:
        """What the learner has learned, at the end, with the round that is under way. Raises UserError where
        it cannot."""
        while role.running is not None and ray.wait([role.running], timeout=LAST)[0]:
            self._finish(role)
        lost = "what it learned since its last checkpoint is lost. Go on by --resume"
        try:
            saved = ray.get(role.actor.call.remote("save"), timeout=LAST)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            died = isinstance(error, ray.exceptions.RayActorError)
            why = "its process died" if died else f"it did not answer for {LAST:.0f} s"
            raise UserError(f"the learner could not save: {why}; {lost}") from error
        if int(saved.rpartition("-")[2]) < self.steps:  # it was made again meanwhile
            raise UserError(f"the learner's process died before it could save; {lost}")

    def _rate(self, counts: Mapping[str, float]) -> float:
        """Labels per minute, over the last rounds."""
        self.rates.append((time.monotonic(), int(counts.get("labels", 0))))
        (then, before), (now, labels) = self.rates[0], self.rates[-1]
        return 60 * (labels - before) / (now - then) if now > then else 0.0

    # Health

    def _start(self, role: Role) -> None:
        gpus = self.plan.gpus if role.name in ("learner", "teacher") else 0
        role.actor = RoleActor.options(num_gpus=gpus).remote(ray.cloudpickle.dumps(role.make), 1)

    def _wait_for(self, role: Role) -> None:
        """What it was to do is lost; Ray makes it again, and the next heartbeat says so."""
        role.is_made, role.next = False, time.monotonic() + IDLE
        if role.name == "learner":
            self.sent = 0  # it starts with the reward of the folder

    def _check_health(self) -> None:
        now = time.monotonic()
        # A driver that was itself held up does not take that for the silence of others.
        passed, self.looked = min(now - self.looked, BEAT), now
        for role in self.roles.values():
            role.silent += passed
            if role.asked is None:
                if now >= role.ask:
                    role.asked, role.ask = role.actor.beat.remote(), now + BEAT
            elif ray.wait([role.asked], timeout=0)[0]:
                self._hear(role)
            if role.silent > role.patience:
                self._end(role, f"it did not answer for {role.patience:.0f} s")
            self._say_working(role, passed)

    def _say_working(self, role: Role, passed: float) -> None:
        """A first fit to pictures takes many minutes on a CPU, in which nobody else has anything to say."""
        if role.running is None or not role.is_made:
            role.working, role.slow = 0.0, SAID
            return
        role.working += passed
        if role.working > role.slow:
            role.slow *= 2
            print(
                f"{role.name} (process {role.pid}): still at work after {role.working:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    def _hear(self, role: Role) -> None:
        """Takes a heartbeat. Another process than before is one that Ray has made again."""
        asked, role.asked = role.asked, None
        try:
            pid, role.is_made = ray.get(asked)
        except ray.exceptions.RayActorError:
            return self._wait_for(role)
        if role.pid != pid:
            if role.pid:
                self._report(role, "its process died")
            role.pid, role.loading, role.due = pid, 0.0, SAID
        elif not role.is_made:
            self._say_loading(role)
        role.silent = 0.0

    def _say_loading(self, role: Role) -> None:
        role.loading += role.silent
        if role.loading > role.at_most(LOADING):
            self._end(role, f"it was not loaded in {role.at_most(LOADING):.0f} s")
        elif role.loading > role.due:
            role.due *= 2
            limit = f"it answers, and has {role.at_most(LOADING):.0f} s"
            print(
                f"{role.name} (process {role.pid}): still loading after {role.loading:.0f} s; {limit}",
                file=sys.stderr,
                flush=True,
            )

    def _end(self, role: Role, why: str) -> None:
        """Ends a process that is there, so that Ray makes it again."""
        role.silences += 1
        self._report(role, why)
        ray.kill(role.actor, no_restart=False)
        role.pid, role.is_made, role.silent = 0, False, 0.0

    def _report(self, role: Role, why: str) -> None:
        """A role that is made again. Raises UserError where that has happened too often."""
        role.failures += 1
        role.restarts += 1
        self._tell_event(role.name, role.pid, why, role.restarts)
        if role.failures > RESTARTS:
            raise UserError(
                f"the role {role.name} was lost {role.failures} times without a step in between (at last: "
                f"{why}); RL_DIALOG_DEBUG=1 shows Ray's log"
            )

    def _tell_event(self, name: str, pid: int, what: str, restarts: int) -> None:
        event = {"time": time.time(), "role": name, "pid": pid, "what": what, "restarts": restarts}
        self.events.append(event)
        print(f"{name} (process {pid or 'unknown'}): {what}; it is made again", file=sys.stderr, flush=True)
        with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def _tell(self, *, over: bool = False) -> None:
        """status.json, once a second."""
        if time.monotonic() - self.told < 1 and not over:
            return
        self.told = time.monotonic()
        roles = {
            role.name: {
                "pid": role.pid,
                "restarts": role.restarts,
                "busy": role.running is not None,
                "silent": round(role.silent, 1),
            }
            for role in self.roles.values()
        }
        counts = self.roles["asker"].state
        pages = {name: role.state["url"] for name, role in self.roles.items() if "url" in role.state}
        more = {
            "pages": pages,
            "staleness": unknown_labels(counts, self.known),
            "reward_version": self.version,
            "roles": roles,
            "events": list(self.events),
        }
        write_status(self.folder, self.plan, self.steps, counts | more, over=over)


def unknown_labels(counts: Mapping[str, float], known: int) -> int:
    """Labels that the newest reward does not know. The teacher may have seen some that the asker has not
    counted yet."""
    return max(0, int(counts.get("labels", 0)) - known)


class Doubt:
    """Says on stderr when the reward explains no more of the labels than knowing nothing does, and when it
    does so again."""

    def __init__(self, *, curious: bool) -> None:
        self.is_said, self.curious = False, curious

    def say(self, metrics: Mapping[str, float]) -> None:
        """`metrics`: of a version of the reward, or nothing."""
        if "confirmed" not in metrics or (metrics["confirmed"] == 0) == self.is_said:
            return
        self.is_said = not self.is_said
        what = "no" if self.is_said else "again some"
        instead = "looks for what is not known yet" if self.curious else "follows it as slowly as it may"
        then = f"the policy {instead if self.is_said else 'follows it'}"
        share = f"{metrics.get('validation_tie_share', 0):.0%} of the validation labels are ties"
        print(
            f"reward {metrics['version']:.0f}: the {metrics['unseen_labels']:.0f} labels that prefer "
            f"something and that it was not fitted to confirm {what} part of it, so {then} ({share})",
            file=sys.stderr,
            flush=True,
        )


def write_status(folder: Path, plan: Plan, steps: int, more: Mapping[str, Any], *, over: bool) -> None:
    """Replaces status.json."""
    labels_due = max(0, plan.wanted(steps) - int(more.get("labels", 0)))
    status = {
        "time": time.time(),
        "steps": steps,
        "total_steps": plan.steps,
        "label_budget": plan.budget,
        "over": over,
    }
    write_json(folder / "status.json", {**more, **status, "labels_wanted": 0 if over else labels_due})
