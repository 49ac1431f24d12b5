"""A preference run: its roles called in turn in one process, or as Ray actors of their own, which nobody
waits for.

    synchronous    learner, asker, labeller, teacher, learner, ...; the same settings give the same labels,
                   losses and weights
    asynchronous   each role in an actor; the supervisor gives each its next step when the last one is done

In the asynchronous run what passes between roles goes through Ray's object store: a version of the reward is
one immutable object, of which nobody ever sees half. Queues, by what may be lost: of clips there is one load
in flight, and what comes while the asker is busy is dropped and counted; labels go to the log, which
acknowledges none before it is on disk; the learner has one round in flight.

A role whose process dies, or does not answer for `HEARTBEAT` seconds, is reported in events.jsonl and on
stderr, and made again from what it keeps in the run's folder; after RESTARTS times without a step in between
the run ends with an error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch

from rl_dialog.data.files import write_json
from rl_dialog.errors import UserError

HEARTBEAT = 10.0  # seconds that a role which runs has to answer
RESTARTS = 3
IDLE = 0.1  # seconds before a role that had nothing to do is asked again
FRUITLESS = 1000  # rounds
STARTING = 120.0  # seconds that a new role has to find a place, import and load

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


def run_in_turn(plan: Plan, folder: Path, log: Log) -> None:
    """The synchronous run."""
    learner, asker, teacher = plan.learner(), plan.asker(), plan.teacher and plan.teacher()
    labellers = [make() for make in plan.labellers.values()]
    fruitless, asked, taught = 0, {}, {}
    while learner.steps < plan.steps:
        published = teacher.published() if teacher else None
        metrics, clips = learner.step(published)
        steps, due = int(metrics.pop("steps")), metrics.pop("due")
        asked = asker.step(clips, wanted=plan.wanted(steps), published=published)
        answered = sum(labeller.step()["answered"] for labeller in labellers)
        asked |= asker.log.counts()  # with these answers
        taught = teacher.step() if teacher else {}
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


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"health": 1})
class RoleActor:
    """One role in a process of its own."""

    def __init__(self, make: Callable[[], Any], threads: int) -> None:
        torch.set_num_threads(threads)
        self.role = make()

    @ray.method(concurrency_group="health")
    def pid(self) -> int:
        """Answered while a step is under way."""
        return os.getpid()

    def call(self, name: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self.role, name)(*arguments, **named)


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
    heard: float = 0.0  # when it last answered, of time.monotonic
    next: float = 0.0  # not before
    failures: int = 0  # since its last finished step
    restarts: int = 0
    silences: int = 0  # restarts because it did not answer
    state: dict[str, float] = field(default_factory=dict)  # what its last step said

    @property
    def patience(self) -> float:
        """Seconds without an answer after which it is made again; twice as many each time, because on a busy
        machine to be slow is not to be dead. A process that dies is known at once."""
        return (HEARTBEAT if self.pid else STARTING) * 2 ** min(self.silences, 4)


class Supervisor:
    """The asynchronous run, of the actors of one Plan. Raises UserError where a role cannot be kept alive,
    and what a role raised."""

    def __init__(self, plan: Plan, folder: Path, log: Log) -> None:
        self.plan, self.folder, self.log = plan, folder, log
        named = {"learner": plan.learner, "asker": plan.asker, "teacher": plan.teacher, **plan.labellers}
        self.roles = {name: Role(name, make) for name, make in named.items() if make}
        self.published: Any = None  # reference of (version, model)
        self.version, self.known = 0, 0  # newest version; labels that it has seen
        self.sent = 0  # the version that the learner has
        self.steps, self.clips, self.dropped = 0, None, 0
        self.worker_restarts = 0  # of the learner's env runners
        self.events: deque[dict[str, Any]] = deque(maxlen=20)
        self.over, self.told = False, 0.0
        self.rates: deque[tuple[float, int]] = deque(maxlen=60)

    def run(self) -> None:
        """Until the policy has learned from so many steps, or so many labels are gathered."""
        try:
            for role in self.roles.values():
                self._start(role)
            while not self.over:
                self._give_steps()
                waiting = {role.running: role for role in self.roles.values() if role.running is not None}
                ready, _ = ray.wait(list(waiting), timeout=0.05) if waiting else ([], [])
                if not waiting:
                    time.sleep(0.02)
                for reference in ready:
                    self._finish(waiting[reference])
                self._check_health()
                self._tell()
            if "learner" in self.roles:
                self._last(self.roles["learner"], "save")
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
            return self._restart(role, "its process died")
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, UserError | OSError) else error
            raise cause from error
        role.failures, role.heard = 0, time.monotonic()
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
            self._report("worker", 0, "the process of an env runner died", restarts)
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
            "pref/staleness": counts.get("labels", 0) - self.known,
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
            role.state, self.published = state, published
            self.version, self.known = int(state["version"]), int(state["all_labels"])
        else:
            role.next = time.monotonic() + IDLE

    def _last(self, role: Role, name: str) -> None:
        """A call that the run does not end without."""
        if role.running is not None:
            ray.wait([role.running], timeout=600)
        ray.get(role.actor.call.remote(name), timeout=600)

    def _rate(self, counts: Mapping[str, float]) -> float:
        """Labels per minute, over the last rounds."""
        self.rates.append((time.monotonic(), int(counts.get("labels", 0))))
        (then, before), (now, labels) = self.rates[0], self.rates[-1]
        return 60 * (labels - before) / (now - then) if now > then else 0.0

    # Health

    def _start(self, role: Role) -> None:
        gpus = self.plan.gpus if role.name in ("learner", "teacher") else 0
        role.actor = RoleActor.options(num_gpus=gpus).remote(role.make, 1)
        role.asked, role.heard, role.pid = role.actor.pid.remote(), time.monotonic(), 0
        role.running = role.rest = None
        role.next = 0.0

    def _restart(self, role: Role, why: str) -> None:
        role.failures += 1
        role.restarts += 1
        self._report(role.name, role.pid, why, role.restarts)
        if role.failures > RESTARTS:
            raise UserError(
                f"the role {role.name} died {role.failures} times without a step in between ({why}); "
                "RL_DIALOG_DEBUG=1 shows Ray's log"
            )
        ray.kill(role.actor)
        self._start(role)
        if role.name == "learner":
            self.sent = 0  # it starts without a reward

    def _check_health(self) -> None:
        now = time.monotonic()
        for role in self.roles.values():
            if role.asked is not None and ray.wait([role.asked], timeout=0)[0]:
                try:
                    role.pid = ray.get(role.asked)
                except ray.exceptions.RayActorError:
                    if role.running is None:  # otherwise the step says so
                        self._restart(role, "its process died")
                    continue
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from error
                role.asked, role.heard = None, now
            elif role.asked is None and now - role.heard > 1:
                role.asked = role.actor.pid.remote()
            elif now - role.heard > role.patience:
                silent = f"did not answer for {role.patience:.0f} s"
                role.silences += 1
                self._restart(role, f"it {silent}" if role.pid else f"it was started and {silent}")

    def _report(self, name: str, pid: int, what: str, restarts: int) -> None:
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
        now = time.monotonic()
        roles = {
            role.name: {
                "pid": role.pid,
                "restarts": role.restarts,
                "busy": role.running is not None,
                "silent": round(max(0.0, now - role.heard), 1),
            }
            for role in self.roles.values()
        }
        counts = self.roles["asker"].state
        pages = {name: role.state["url"] for name, role in self.roles.items() if "url" in role.state}
        more = {
            "pages": pages,
            "staleness": int(counts.get("labels", 0)) - self.known,
            "reward_version": self.version,
            "roles": roles,
            "events": list(self.events),
        }
        write_status(self.folder, self.plan, self.steps, counts | more, over=over)


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
