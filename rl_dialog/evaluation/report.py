"""What the report of an evaluation says, section by section (`document.py` writes it)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_dialog.data.files import write_json
from rl_dialog.data.schema import Dialog
from rl_dialog.evaluation import plots
from rl_dialog.evaluation.document import Column, Sample, Section, Table, print_tables, write_document
from rl_dialog.evaluation.episodes import Episode
from rl_dialog.evaluation.intervals import Estimate
from rl_dialog.evaluation.metrics import CLICK
from rl_dialog.evaluation.scoring import WAYS
from rl_dialog.evaluation.summary import FIGURES, Figure, Group, RunResult, figure_of, shown


@dataclass
class Evaluation:
    """Everything a report tells."""

    title: str
    about: list[str]
    groups: list[Group]
    comparisons: dict[str, tuple[str, dict[str, Estimate]]]  # label -> baseline's label, differences
    references: dict[str, Estimate]
    trained: list[str] | None  # rewards with a weight in the training data; None when that is not known
    folders: dict[str, list[Path]]  # group name -> run folders
    samples: int = 3


RETURNS = ("return", "return_greedy", "return_best_of")
TEXTS = ("distinct_1", "distinct_2", "words", "tokens", "replies", "repeated", "rep_3", "empty", "unfinished")
FROM_LOGS = (
    "ope/logged",
    "ope/fqe",
    "ope/dm",
    "ope/wis",
    "ope/pdwis",
    "ope/n_eff",
    "ope/weight",
    "ope/outside",
    "ope/fqe_td",
)
LANGUAGE = ("perplexity", "lm_perplexity", "kl", "kl_per_reply", "kl_per_message", "active_units")
COMPARED = (
    "return",
    "return_greedy",
    "return_best_of",
    "perplexity",
    "kl",
    "critic",
    "distinct_2",
    "words",
    "repeated",
)
OVERVIEW = (*COMPARED, "empty")


def sections(evaluation: Evaluation) -> list[Section]:
    """The whole report, without what was not measured."""
    optional = [
        _overview(evaluation),
        _returns(evaluation),
        _comparison(evaluation),
        *_rewards(evaluation),
        _figures(evaluation, "Language of the logs", LANGUAGE, LANGUAGE_TEXT),
        _answers(evaluation),
        _trade_off(evaluation),
        _critic(evaluation),
        _candidates(evaluation),
        _ranked(evaluation),
        _from_logs(evaluation),
        _figures(evaluation, "Generated text", TEXTS, TEXTS_TEXT),
        _curves(evaluation),
        _runs(evaluation),
        _samples(evaluation),
    ]
    return [section for section in optional if section is not None]


LANGUAGE_TEXT = (
    "On the held-out logs: exp of the mean negative log-probability per decision token under what the policy "
    "samples from, and under its plain LM; KL(policy || prior) is exact over the vocabulary at every logged "
    "state. Perplexities compare between policies with the same tokenizer only."
)
ANSWERS_TEXT = (
    "Of the answers to held-out contexts: mean similarity to the reply that the log has there, 1 being "
    "the same; by vectors of words, and by what a classifier of emotions says of both. The log's reply is "
    "one good answer among many, so words are far from 1; emotions are near 1 where most replies are "
    "neutral. They compare policies that decode alike."
)
FROM_LOGS_TEXT = (
    (
        "What a policy would earn per dialog, sampled at temperature 1, from held-out logs and without "
        "letting it talk. Fitted Q evaluation learns Q of the policy on the training dialogs; the direct "
        "method asks the policy's own critic; weighted importance sampling reweighs logged returns by how "
        "much likelier the policy is to say what was said than the behaviour policy."
    ),
    (
        "None of them knows what happens after words that the logs do not hold. Intervals are over held-out "
        "dialogs (and runs) and leave out the error of the fit and of the behaviour policy, which can be "
        "larger. Trust an estimate less the further the policy is from the logs."
    ),
    (
        "Mean weight: of importance weights before they are normalised; it should be 1. Mass outside the "
        "logs: the share of the policy's conversations with words that the behaviour policy never says, or "
        "less than once in so many dialogs; importance sampling knows nothing of these."
    ),
)
TEXTS_TEXT = (
    "Of the generated replies. distinct-n: different n-grams of words / all of them. Repeated: the same as an"
    " earlier reply of the policy in the dialog, or nearly. Cut: no end of turn within the token limit."
)


def _overview(evaluation: Evaluation) -> Section:
    names = [name for name in OVERVIEW if _known(evaluation, name)]
    intro = [
        *evaluation.about,
        (
            "Figures are means over runs with 95 % bootstrap intervals over runs and conversations; with one "
            "run the interval covers conversations only."
        ),
    ]
    return Section(
        "Overview", intro, _table(evaluation.groups, names, runs=True), _missing(evaluation.groups, names)
    )


def _returns(evaluation: Evaluation) -> Section | None:
    png = plots.interval_plot(
        evaluation.groups, "return", title="Return per dialog", references=evaluation.references
    )
    if png is None:
        return None
    text = [
        "Undiscounted sum of the environment's rewards. Every policy meets the same conversation partners. "
        "Small dots are single runs."
    ]
    return Section("Return", text, _table_of_returns(evaluation), plot=("return.png", png))


def _table_of_returns(evaluation: Evaluation) -> Table:
    names = [name for name in RETURNS if _known(evaluation, name)]
    table = _table(evaluation.groups, names)
    table.rows += [
        [label, shown(value, FIGURES["return"]), *["-"] * (len(names) - 1)]
        for label, value in evaluation.references.items()
    ]
    return table


def print_overview(evaluation: Evaluation) -> None:
    """In the terminal: the returns, or without an environment the report's first table; then what is measured
    only where it was asked for, candidates and estimates from logs."""
    returns = Section("Return", [], _table_of_returns(evaluation))
    measured = any("return" in group.estimates for group in evaluation.groups)
    first = returns if measured else _overview(evaluation)
    shown_here = [first, *filter(None, (_candidates(evaluation), _from_logs(evaluation)))]
    titles = [section.title for section in shown_here]
    print_tables(shown_here, titles, wrapped=[title for title in titles if title != returns.title])


def _comparison(evaluation: Evaluation) -> Section | None:
    if not evaluation.comparisons:
        return None
    rewards = [name for group in evaluation.groups for name in group.estimates if name.startswith("reward/")]
    measured = {name for _, changes in evaluation.comparisons.values() for name in changes}
    names = [name for name in dict.fromkeys((*COMPARED, *rewards)) if name in measured]
    rows = []
    for label, (baseline, changes) in evaluation.comparisons.items():
        cells = [shown(changes.get(name), figure_of(name), signed=True) for name in names]
        rows.append([f"{label} - {baseline}", *cells])
    of_seeds = min(len(group.runs) for group in evaluation.groups) > 1
    text = (
        "Differences with 95 % intervals, paired by conversation. Where the interval leaves out 0, other "
        f"{'seeds' if of_seeds else 'conversations'} would most likely agree"
        + ("." if of_seeds else "; one run says nothing about other seeds.")
    )
    return Section(
        "Against the baseline",
        [text],
        Table(["difference", *(_title(name, evaluation) for name in names)], rows),
    )


def _rewards(evaluation: Evaluation) -> list[Section]:
    names = list(
        dict.fromkeys(
            name for group in evaluation.groups for name in group.estimates if name.startswith("reward/")
        )
    )
    notes = _missing(evaluation.groups, _noted_rewards(evaluation.groups))
    if not names:
        return [Section("Rewards of generated dialogs", [], notes=notes)] if notes else []
    trained = [
        name
        for name in names
        if evaluation.trained is not None and name.removeprefix("reward/") in evaluation.trained
    ]
    held_out = [name for name in names if name not in trained]
    text = ["Mean per generated reply that the reward applies to."]
    if evaluation.trained is None:
        text.append("Which of them the policies were trained on is not known without their data (--data).")
    else:
        text.append("A trained-on reward that rises while held-out ones fall is over-optimisation.")
    table = _table(evaluation.groups, trained + held_out)
    table.columns[1:] = [_title(name, evaluation) for name in trained + held_out]
    png = plots.panels(evaluation.groups, {name: _title(name, evaluation) for name in trained + held_out})
    return [
        Section(
            "Rewards of generated dialogs", text, table, notes, None if png is None else ("rewards.png", png)
        )
    ]


def _figures(evaluation: Evaluation, title: str, figures: Sequence[str], text: str) -> Section | None:
    names = [name for name in figures if _known(evaluation, name)]
    if not any(name in group.estimates for group in evaluation.groups for name in names):
        return None
    return Section(title, [text], _table(evaluation.groups, names), _missing(evaluation.groups, names))


def _answers(evaluation: Evaluation) -> Section | None:
    names = [name for group in evaluation.groups for name in group.estimates if name.startswith("answer/")]
    names = list(dict.fromkeys(names))
    if not names:
        return None
    table = _table(evaluation.groups, names)
    for label, (baseline, changes) in evaluation.comparisons.items():
        cells = [shown(changes.get(name), figure_of(name), signed=True) for name in names]
        table.rows.append([f"{label} - {baseline}", *cells])
    return Section("Answers against the log", [ANSWERS_TEXT], table)


def _trade_off(evaluation: Evaluation) -> Section | None:
    png = plots.trade_off(evaluation.groups)
    return (
        None if png is None else Section("What the distance to the prior buys", plot=("kl_return.png", png))
    )


def _critic(evaluation: Evaluation) -> Section | None:
    having = [group for group in evaluation.groups if "critic" in group.estimates]
    if not having:
        return None
    ways = [f"critic/{way}" for way in WAYS if any(f"critic/{way}" in group.estimates for group in having)]
    contexts = having[0].estimates["critic"].units
    pairs = int(having[0].runs[0].measures["critic"].denominator.sum())
    text = [
        f"Share of {pairs} pairs of logged replies to the same context ({contexts} contexts) whose better one"
        " gets the higher score; guessing gives 50 %. Better means more reward from the reply to the end of "
        "its dialog. The first column is the critic's own way to rank: mean Q over the reply's tokens, or "
        "mean log-probability where a method has no Q."
    ]
    table = _table(having, ["critic", *ways])
    chance = {"chance": Estimate(0.5, None, None, 0, 0)}
    png = plots.interval_plot(having, "critic", title="Pairs that the critic orders right", references=chance)
    return Section("Critic", text, table, plot=None if png is None else ("critic.png", png))


def _candidates(evaluation: Evaluation) -> Section | None:
    groups = [group for group in evaluation.groups if group.runs[0].candidates]
    if not groups:
        return None
    candidates = groups[0].runs[0].candidates
    metrics = [*candidates.similarity, CLICK]
    names = [f"top/{metric}@{k}" for metric in metrics for k in dict.fromkeys((1, candidates.count))]
    text = [
        (
            f"{candidates.count} replies to each of {len(candidates.contexts)} held-out contexts, against "
            "the logged one. top-k: the best of the first k. click: the share of contexts in which one of "
            f"the first k has a {metrics[0]} above {candidates.click_threshold:g}. In the plot, solid lines "
            "are in the order of generation and dashed ones in that of the policy's own critic; both end in "
            "the best of all."
        ),
    ]
    rows = []
    for label, (baseline, changes) in evaluation.comparisons.items():
        if any(name in changes for name in names):
            rows.append(
                [
                    f"{label} - {baseline}",
                    *(shown(changes.get(name), figure_of(name), signed=True) for name in names),
                ]
            )
    table = _table(groups, [*names, "candidates_different"])
    table.rows += [[*row, "-"] for row in rows]
    return Section(
        "Candidates",
        text,
        table,
        plot=("candidates.png", plots.top_k_curves(groups, metrics, candidates.count)),
    )


def _ranked(evaluation: Evaluation) -> Section | None:
    groups = [
        group
        for group in evaluation.groups
        if group.runs[0].candidates and group.runs[0].candidates.count > 1
    ]
    if not groups:
        return None
    candidates = groups[0].runs[0].candidates
    metrics = [*candidates.similarity, CLICK]
    rows = []
    for group in groups:
        ways = group.runs[0].candidates.critic
        for way in ways:
            gains = [
                shown(
                    group.estimates.get(f"gain/{way}/{metric}@1"),
                    figure_of(f"gain/{way}/{metric}@1"),
                    signed=True,
                )
                for metric in metrics
            ]
            rows.append(
                [group.label, f"{way} (its own)" if way == group.runs[0].candidates.own_way else way, *gains]
            )
    text = [
        "How much nearer to the logged reply the first candidate is once a critic has put the same candidates"
        " in order: top-1 in its order minus top-1 in the order of generation, paired by context. An order at"
        " random earns 0 where replies are sampled; without sampling the first candidate is the greedy one, "
        "already the likeliest step by step."
    ]
    return Section("The critic as ranker", text, Table(["policy", "ordered by", *metrics], rows))


def _from_logs(evaluation: Evaluation) -> Section | None:
    names = [name for name in FROM_LOGS if _known(evaluation, name)]
    if not names:
        return None
    text = [*FROM_LOGS_TEXT]
    if _known(evaluation, "return"):
        names.append("return")
        text.append(
            "The return per dialog beside them was measured in the environment, with replies drawn as said at"
            " the top."
        )
    estimators = {
        name: figure_of(name).title
        for name in ("ope/fqe", "ope/dm", "ope/wis", "ope/pdwis", "return")
        if name in names
    }
    png = plots.panels(evaluation.groups, estimators, same_scale=True)
    plot = None if png is None else ("from_logs.png", png)
    return Section(
        "Return estimated from the logs",
        text,
        _table(evaluation.groups, names),
        _missing(evaluation.groups, names),
        plot,
    )


def _curves(evaluation: Evaluation) -> Section | None:
    png = plots.learning_curves(evaluation.folders)
    return (
        None
        if png is None
        else Section("Learning curves", ["From each run's metrics.jsonl."], plot=("curves.png", png))
    )


def _runs(evaluation: Evaluation) -> Section:
    names = [name for name in OVERVIEW if any(name in group.estimates for group in evaluation.groups)]
    rows = []
    for group in evaluation.groups:
        for run in group.runs:
            cells = [shown(_point(run, name), FIGURES[name]) for name in names]
            rows.append([group.label, run.run, run.method, *cells, run.directory])
    columns = ["policy", "run", "method", *(FIGURES[name].title for name in names), "checkpoint"]
    return Section("Runs", [], Table(columns, rows), _missing(evaluation.groups, ["beta"]))


def _point(run: RunResult, name: str) -> Estimate | None:
    measure = run.measures.get(name)
    return (
        None
        if measure is None or measure.value != measure.value
        else Estimate(measure.value, None, None, 1, len(measure.numerator))
    )


def _told_return(episode: Episode) -> str:
    return episode.end if episode.total is None else f"return {episode.total:g}"


def _samples(evaluation: Evaluation) -> Section | None:
    same: dict[str, list[Group]] = {}
    for group in evaluation.groups:  # the best checkpoint is often the last one too
        same.setdefault(group.runs[0].directory, []).append(group)
    firsts = [
        (", ".join(group.label for group in groups), directory, groups[0].runs[0])
        for directory, groups in same.items()
    ]
    samples = []
    for number in range(evaluation.samples):
        episodes = _numbered(number, [(label, place, run.episodes) for label, place, run in firsts])
        if episodes:
            columns = [
                Column(f"{label}: {_told_return(e)}", _lines(e.dialog), place) for label, place, e in episodes
            ]
            samples.append(Sample(f"Episode {episodes[0][2].index}", columns))
    for number in range(evaluation.samples):
        answers = _numbered(number, [(label, place, run.answers) for label, place, run in firsts])
        if answers:
            first = answers[0][2]
            columns = [Column("context", _lines(first.dialog)[:-1])]
            columns += [Column("the log", [("assistant", first.logged, "")])]
            columns += [Column(label, _lines(answer.dialog)[-1:], place) for label, place, answer in answers]
            samples.append(Sample(f"Held-out context {first.context}", columns))
    text = ["The first run of each policy, the same conversation partners and contexts."]
    return Section("Samples", text, samples=samples) if samples else None


def _numbered(number: int, rows: Sequence[tuple[str, str, Sequence[Any]]]) -> list[tuple[str, str, Any]]:
    """What has this number in each row that is so long, behind the row's label and place."""
    return [(label, place, values[number]) for label, place, values in rows if number < len(values)]


def _lines(dialog: Dialog) -> list[tuple[str, str, str]]:
    lines = []
    for message in dialog.messages:
        reward, vote = message.get("reward"), message.get("feedback", {}).get("vote")
        notes = ([f"{reward:+g}"] if reward is not None else []) + (
            [f"vote {vote:+d}"] if vote is not None else []
        )
        lines.append((message["role"], message["content"] or "", ", ".join(notes)))
    return lines


def _table(groups: Sequence[Group], names: Sequence[str], *, runs: bool = False) -> Table:
    columns = ["policy", *(["runs"] if runs else []), *(figure_of(name).title for name in names)]
    rows = [
        [
            group.label,
            *([str(len(group.runs))] if runs else []),
            *(shown(group.estimates.get(name), figure_of(name)) for name in names),
        ]
        for group in groups
    ]
    return Table(columns, rows)


def _missing(groups: Sequence[Group], names: Sequence[str]) -> list[str]:
    """Why cells hold a dash, and what else to know about the figures."""
    notes: dict[str, list[str]] = {}
    for group in groups:
        for name in names:
            if text := group.note(name):
                labels = notes.setdefault(f"{figure_of(name).title if name in FIGURES else name}: {text}", [])
                labels.append(group.label)
    return [f"{text} ({', '.join(dict.fromkeys(labels))})" for text, labels in notes.items()]


def _noted_rewards(groups: Sequence[Group]) -> list[str]:
    """The rewards whose figure is missing for a reason."""
    noted = (name for group in groups for run in group.runs for name in run.notes)
    return [name for name in dict.fromkeys(noted) if name.startswith("reward/")]


def _known(evaluation: Evaluation, name: str) -> bool:
    """Measured for one of the groups at least, or missing for a reason."""
    return any(name in group.estimates or group.note(name) for group in evaluation.groups)


def _title(name: str, evaluation: Evaluation) -> str:
    figure: Figure = figure_of(name)
    if not name.startswith("reward/") or evaluation.trained is None:
        return figure.title
    return f"{'trained on' if figure.title in evaluation.trained else 'held out'}: {figure.title}"


def write_report(evaluation: Evaluation, directory: Path) -> tuple[Path, Path]:
    """report.md with plots/*.png, report.html, and its samples as samples.json for pages that show some of
    them."""
    report_sections = sections(evaluation)
    write_json(
        directory / "samples.json",
        [asdict(sample) for section in report_sections for sample in section.samples],
    )
    return write_document(evaluation.title, report_sections, directory)
