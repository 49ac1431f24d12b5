"""A reward that is learned from what people prefer of a policy's conversations while it learns to have them:
the loop of Christiano et al. 2017 in text worlds, with online learning (training/online.py) for its policy.

    a round's episodes -> pairs of them -> label log -> people, or an oracle
                                              |
    the round's rewards <- reward model <- answers so far

A pair is two conversations of one group, which begin alike and have the same partner; or a reply and another
one that the policy might have given. The model scores each reply behind what was said before it, and a
conversation is worth the sum (reply_fitting.py); so each reply gets a reward of its own, and people need not
say which of them was the good one.

In the folder of the run:

    labels.db, clips/    the label log and what it compares, for `label --run` and `fit_reward --run`
    rewards/12/          the reward model that was fitted before round 12 was learned from, as `fit_reward`
                         writes one, normaliser.json, and figures.json of its fitting
    asked.jsonl          what was asked in which round
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rl_dialog.data.files import write_atomically, write_json, write_text_atomically
from rl_dialog.data.schema import ROLES, Dialog
from rl_dialog.errors import UserError
from rl_dialog.evaluation.episodes import Episode
from rl_dialog.evaluation.generation import Decoding, stream
from rl_dialog.evaluation.openings import WORLD
from rl_dialog.models.device import named_device
from rl_dialog.models.text_reward import TextReward
from rl_dialog.preferences.label_log import LabelLog
from rl_dialog.preferences.labelled_settings import LabelledRewardSettings
from rl_dialog.preferences.labellers import Oracle
from rl_dialog.preferences.labels import Answer, NewQuery, pair_id
from rl_dialog.preferences.played_pairs import Pair, pairs_of_groups, pairs_with_another_reply
from rl_dialog.preferences.reliability import UNTRUSTED, judgements
from rl_dialog.preferences.replies import (
    Preferences,
    ReplyPair,
    conversation_of,
    judged_in,
    pairs_of_labels,
    replies_of,
    split_of,
)
from rl_dialog.preferences.reply_fitting import fit, new_reward, score
from rl_dialog.preferences.reply_queries import value_of
from rl_dialog.preferences.run_files import RunFiles
from rl_dialog.preferences.schedule import AnnotationSchedule
from rl_dialog.preferences.segments import Segment, Segments

LEARNED = "labels"  # the component of a reply's rewards that is learned here
KEPT = 3  # versions of the reward, and what came after the latest checkpoint
LEAST = 20  # held-out pairs that say whether a reward is better than a coin
LOOK = 1.0  # seconds between two looks at the label log by who waits for answers
REMIND = 60.0  # seconds between two lines that say so
Asked = tuple[Pair, bool]  # and whether it is held out
TASKS = {"conversations": "In which conversation is the bot better?", "replies": "Which reply is better?"}


class LabelledReward:
    """Asks about what is played, learns from the answers, and judges.

    Args:
        folder: that of the run. What is there of later rounds than the one that comes is forgotten, so that a
            run that goes on from a checkpoint asks and learns as it did.
        total_rounds: of the run, over which labels are spread.
        group_size: episodes of a group.
        start: folder or hub name of the policy that learns.
        decoding: how the policy answers, where another reply is asked for.
        seed: of the choice of pairs, the reward's new weights and the oracle's coins.
        world_pays: is there a reward of the world's own, to be kept beside?
    """

    def __init__(
        self,
        settings: LabelledRewardSettings,
        folder: Path,
        *,
        total_rounds: int,
        group_size: int,
        start: str,
        decoding: Decoding,
        seed: int,
        world_pays: bool = True,
        device: str = "cpu",
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        self.settings, self.folder, self.group_size, self.decoding = settings, folder, group_size, decoding
        self.seed, self.world_pays, self.device, self.say = seed, world_pays, device, say
        self.base = settings.base_of(start)
        scale = settings.schedule_scale or max(1.0, total_rounds / 4)
        initial = min(settings.initial_labels, settings.budget)
        how = {"initial": initial, "kind": settings.schedule, "scale": scale}
        self.schedule = AnnotationSchedule(settings.budget, total_rounds, **how)
        self.segments = Segments(folder / "clips")
        self.asked = _read_asked(folder / "asked.jsonl")  # round -> the queries of it
        self.by_the_world = settings.labeller == "oracle" and not settings.answers
        self.oracle = self._oracle() if settings.labeller == "oracle" else None
        self.model: TextReward | None = None
        self.normaliser: dict[str, float] = {}
        self.figures: dict[str, float] = {}  # of labels
        self.fitted: dict[str, float] = {}  # of the model
        newest = max(_versions(folder / "rewards"), default=None)
        if newest is not None:
            self._load(newest)

    @cached_property
    def log(self) -> LabelLog:
        """Opened by the learner that asks, and by no other."""
        return LabelLog(RunFiles(self.folder).own_labels)

    # What is asked

    def meet(self, played: Sequence[Episode], policy: Any, tokenizer: Any, step: int) -> None:
        """Sees the episodes of round `step` before they are judged: asks about some of them, waits where too
        many labels are missing, and fits the reward anew where there are enough new ones."""
        self._forget_from(step)
        wanted = self.schedule.labels_wanted(step)
        missing = max(0, wanted - sum(map(len, self.asked.values())))
        pairs = self._pairs(played, policy, tokenizer, step, missing)
        if self.model is None and len(pairs) < missing:
            self.say(
                f"round {step}: asks about {len(pairs)} pairs in place of {missing}, because no more of what "
                "was played differ and can be compared: the others are asked about in later rounds"
            )
        self.asked[step] = self._ask(pairs, step)
        _write_asked(self.folder / "asked.jsonl", self.asked)
        if self.oracle is not None:
            self._answer()
        answers = self._answers(step)
        known, labels = int(self.normaliser.get("labels", 0)), _labels(answers)
        if self.model is None or (labels > known and labels >= known * (1 + self.settings.refit)):
            self._fit(answers, step)
        self.figures |= {"pref/labels_wanted": wanted, "pref/labels": labels}

    def _pairs(
        self, played: Sequence[Episode], policy: Any, tokenizer: Any, step: int, most: int
    ) -> list[Asked]:
        """At most so many new pairs of what was played in a round: half of them at random, and of the rest
        those of which the reward is least sure."""
        if not most:
            return []
        rng = np.random.default_rng((self.seed, step))
        if self.settings.about == "conversations":
            pairs = pairs_of_groups(played, self.group_size, rng, scored=self.by_the_world)
        else:
            how = {"most": 2 * most, "seed": stream(self.seed, step)}  # some say the same again
            pairs = pairs_with_another_reply(played, policy, tokenizer, self.decoding, rng, **how)
        known = {query for queries in self.asked.values() for query in queries}
        different = {pair_id(a.id, b.id): (a, b) for a, b in pairs if a.id != b.id}
        new = {id: pair for id, pair in different.items() if id not in known}
        sides = self.log.sides()
        if self.model is None:
            return self._on_one_side(new.values(), most, sides)
        drawn = self._on_one_side(new.values(), most - most // 2, sides)
        for (first, second), _ in drawn:
            del new[pair_id(first.id, second.id)]
        rest = list(new.values())
        scores = score(self.model, [spoken for pair in rest for spoken in pair])
        rest.sort(key=lambda pair: abs(scores[pair[0].id] - scores[pair[1].id]))
        return drawn + self._on_one_side(rest, most // 2, sides)

    def _on_one_side(self, pairs: Iterable[Pair], most: int, sides: dict[str, bool]) -> list[Asked]:
        """The first `most` that can be held out, or learned from, as a whole: what was said with several
        partners stays on the side where it was said first. `sides` tells it, and is told."""
        found = []
        for pair in pairs:
            told = {sides[spoken.id] for spoken in pair if spoken.id in sides}
            if len(found) == most or len(told) > 1:
                continue
            split = split_of(pair[0], validation=self.settings.validation, seed=self.seed)
            is_held_out = told.pop() if told else split == "validation"
            sides |= {spoken.id: is_held_out for spoken in pair}
            found.append((pair, is_held_out))
        return found

    def _ask(self, pairs: Sequence[Asked], step: int) -> list[str]:
        """Writes what is compared, then offers the queries; their ids."""
        task = self.settings.task or TASKS[self.settings.about]
        queries = []
        for number, (pair, is_held_out) in enumerate(pairs):
            first, second = (self.segments.add(spoken) for spoken in pair)
            priority = step - number / (len(pairs) + 1)  # what the policy does by now comes first
            role = pair[0].source.get("role", "")
            has_name = role and role not in ROLES  # who plays the user is the bot, and the other one the user
            told = f"{task} The bot's role is {role}." if has_name else task
            about = {"task": told, "priority": priority, "reward_version": step}
            queries.append(NewQuery(first, second, **about, validation=is_held_out))
        self.log.add_queries(queries)
        return [pair_id(query.first, query.second) for query in queries]

    # Who answers

    def _oracle(self) -> Oracle:
        settings = self.settings
        how = asdict(settings.oracle) | {"seed": self.seed}
        if not settings.answers:
            return Oracle(truth=_true_return, **how)
        reward = settings.reward_that_answers()
        return Oracle(truth=lambda spoken: value_of(spoken, reward), **how)

    def _answer(self) -> None:
        """The oracle's answers to all that is open."""
        self.log.release("oracle")
        while queries := self.log.lease_many("oracle", 500):
            choices = []
            for query in queries:
                sides = self.segments[query.left], self.segments[query.right]
                can_tell = all(self.oracle.truth(side) is not None for side in sides)
                choices.append((query, self.oracle.choice(*sides) if can_tell else "skip"))
            self.log.answer_many(choices, "oracle")

    def _answers(self, step: int) -> list[Answer]:
        """Those to what was asked up to this round. People who have not given enough are waited for; pairs
        that have become gold meanwhile, which get no labels any more, are not."""
        asked = {query for queries in self.asked.values() for query in queries}
        behind = self.settings.max_behind
        patient = self.model is None or behind >= 0
        may_lack = 0 if self.model is None else max(0, behind)
        told = float("-inf")
        while True:
            least = len(asked.difference(self.log.gold())) - may_lack if patient else 0
            answers = [each for each in self.log.answers() if each.query in asked or each.gold is not None]
            count = _labels(answers)
            if count >= least:
                return answers
            if time.monotonic() - told > REMIND:
                told = time.monotonic()
                where = f"python -m pipelines.label --run {self.folder} --page --open"
                self.say(f"round {step}: waiting for {least - count} of {least} labels: {where}")
            time.sleep(LOOK)

    # What is learned

    def _fit(self, answers: Sequence[Answer], step: int) -> None:
        """A new model of all answers, with what is held out beside it. Raises UserError where the first one
        has nothing to learn from."""
        settings, began = self.settings, time.perf_counter()
        said = [one for one in judgements(answers) if one.noise < UNTRUSTED]
        train, test = (
            pairs_of_labels([one for one in said if one.validation is held_out], self.segments)
            for held_out in (False, True)
        )
        if not any(pair.preference != 0.5 for pair in train):
            if self.model is None:
                raise UserError(
                    f"{self.folder}: expected labels that prefer one of two, got {len(train)} that do not: "
                    "nothing can be learned from them; set --preferences.initial_labels higher"
                )
            return
        shape = {name: getattr(settings, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
        sizes = shape, settings.max_length, "conversation"
        reward = new_reward(Preferences(train, []), self.base, *sizes, seed=self.seed)
        reward.to(named_device(self.device))
        fit(reward, train, settings=settings.fitting, seed=self.seed)
        self.model = reward.eval()
        self.normaliser = {"labels": _labels(answers), **_normaliser(reward, train)}
        self.fitted = {
            "pref/version": step,
            "pref/pairs": len(train),
            "pref/accuracy": _accuracy(reward, train),
            **({"pref/held_out_accuracy": _accuracy(reward, test)} if _decided(test) else {}),
            "pref/fitting_s": time.perf_counter() - began,
        }
        self._save(step)
        self._say_if_nothing_is_explained(test, step)

    def _say_if_nothing_is_explained(self, test: Sequence[ReplyPair], step: int) -> None:
        """A policy follows any reward, also one that was fitted to noise: then what people want may fall."""
        pairs = len(_decided(test))
        if pairs < LEAST:
            return
        accuracy = _accuracy(self.model, test)
        if accuracy - 1.64 * math.sqrt(0.25 / pairs) < 0.5:
            self.say(
                f"round {step}: the reward orders {accuracy:.0%} of {pairs} held-out pairs as they were "
                "labelled, which a coin may do as well: a policy that follows it learns nothing that people "
                "want before there are more labels, or clearer ones"
            )

    def __call__(self, dialog: Dialog) -> None:
        """Gives each reply its learned reward, with what the world paid beside it; none before there is a
        reward."""
        replies = [dialog.messages[i] for i in dialog.replies]
        for reply in replies:
            if self.world_pays and reply.get("reward") is not None:
                reply["rewards"] = {**reply.get("rewards", {}), WORLD: reply["reward"]}
            reply["reward"] = None
        if self.model is None:
            return
        judged = dict(replies_of(dialog, openings=True))
        scores = self.model.score(conversation_of(judged[i]) for i in dialog.replies)
        for reply, value in zip(replies, scores, strict=True):
            reward = (value - self.normaliser["mean"]) / self.normaliser["spread"]
            reply["rewards"] = {**reply.get("rewards", {}), LEARNED: reward}
            reply["reward"] = reward

    def figures_now(self) -> dict[str, float]:
        """How asking and learning stand, for the metrics of a round."""
        return self.figures | self.fitted

    # What stays

    def _forget_from(self, step: int) -> None:
        """What was asked and learned in this round and later ones, by a run that was killed."""
        later = [version for version in _versions(self.folder / "rewards") if version >= step]
        self.asked = {each: queries for each, queries in self.asked.items() if each < step}
        for version in later:
            shutil.rmtree(self.folder / "rewards" / str(version))
        if later:
            self.model, self.normaliser, self.fitted = None, {}, {}
            newest = max(_versions(self.folder / "rewards"), default=None)
            if newest is not None:
                self._load(newest)

    def _save(self, step: int) -> None:
        def fill(directory: Path) -> None:
            self.model.save_pretrained(directory)
            write_json(directory / "normaliser.json", self.normaliser)
            write_json(directory / "figures.json", self.fitted)

        write_atomically(self.folder / "rewards" / str(step), fill)
        for old in self._needless():
            shutil.rmtree(self.folder / "rewards" / str(old))

    def _needless(self) -> list[int]:
        """Versions that the run would not go on with from its latest checkpoint, the newest few left out."""
        latest = self.folder / "latest"
        if not latest.is_file():
            return []
        step = int(latest.read_text(encoding="utf-8").strip().rpartition("-")[2])
        return sorted(each for each in _versions(self.folder / "rewards") if each < step)[:-KEPT]

    def _load(self, version: int) -> None:
        place = self.folder / "rewards" / str(version)
        self.model = TextReward.from_pretrained(place).to(named_device(self.device))
        self.normaliser = json.loads((place / "normaliser.json").read_text(encoding="utf-8"))
        figures = place / "figures.json"  # which the first runs did not keep
        self.fitted = json.loads(figures.read_text(encoding="utf-8")) if figures.is_file() else {}


def _true_return(spoken: Segment) -> float:
    """What the world paid for a conversation; an episode that was not scored is worth nothing."""
    return float(spoken.source.get("return") or 0.0)


def _labels(answers: Sequence[Answer]) -> int:
    """Pairs that somebody has answered, gold ones left out."""
    return len({each.query for each in answers if each.gold is None and each.revoked is None})


def _normaliser(reward: TextReward, pairs: Sequence[ReplyPair]) -> dict[str, float]:
    """The spread of what a side of the pairs is worth: rewards of any model have the same size, so that c
    means the same for all. And the mean score of a reply, which is taken off where all sides have as many
    replies: then labels say nothing of the level. Where they have not, it says what a reply more is worth."""
    sides = {spoken.id: judged_in(spoken) for pair in pairs for spoken in (pair.first, pair.second)}
    values = iter(reward.score(conversation_of(reply) for replies in sides.values() for reply in replies))
    scores = [[next(values) for _ in replies] for replies in sides.values()]
    alike = len({len(side) for side in scores}) == 1
    mean = float(np.mean([value for side in scores for value in side])) if alike else 0.0
    spread = float(np.std([sum(side) for side in scores]))
    return {"mean": mean, "spread": spread or 1.0}


def _decided(pairs: Sequence[ReplyPair]) -> list[ReplyPair]:
    return [pair for pair in pairs if pair.preference != 0.5]


def _accuracy(reward: TextReward, pairs: Sequence[ReplyPair]) -> float:
    """The share of pairs that it orders as they were labelled, ties left out."""
    decided = _decided(pairs)
    scores = score(reward, [spoken for pair in decided for spoken in (pair.first, pair.second)])
    right = [(scores[pair.first.id] > scores[pair.second.id]) == (pair.preference > 0.5) for pair in decided]
    return float(np.mean(right))


def _versions(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.glob("*") if path.name.isdigit()]


def _read_asked(path: Path) -> dict[int, list[str]]:
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["round"]: line["queries"] for line in lines}


def _write_asked(path: Path, asked: Mapping[int, Sequence[str]]) -> None:
    lines = [json.dumps({"round": step, "queries": list(queries)}) + "\n" for step, queries in asked.items()]
    write_text_atomically(path, "".join(lines))
