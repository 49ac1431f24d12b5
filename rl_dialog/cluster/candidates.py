"""N scored replies to each context on two pools of actors, one shard of contexts at a time, each stage's
shards kept on disk.

    driver     data directory -> contexts/train-00000.parquet   what was said before a reply, and the
                                                                human's reply: a Dialog each
    Generator  contexts -> texts/train-00000.parquet            the human's reply and the policy's, distinct
                                                                (key: model, data, settings)
    Scorer     texts -> train-00000.parquet                     with a similarity to the human's reply
                                                                (key: texts, similarity)
                                                                and what a reward model says of it, if asked
                                                                (and the model)
    tasks      scores -> dialogs/train-00000.parquet            a Dialog per candidate, its reward
                                                                thresholded (not kept)

A shard is written whole or not at all and carries its key, so a killed run goes on with the missing shards,
another similarity scores the same texts, and another model finds nothing it may use. Texts depend on the
context and the seed alone: any number of workers writes the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rl_dialog.cluster.data import dataset, errors_of_workers, pool, rows_of, stream_tables
from rl_dialog.data.schema import ARROW_SCHEMA, SPLITS, Dialog, to_table
from rl_dialog.data.shards import read_dialogs, shard_name
from rl_dialog.data.tokenize import TEMPLATE_KEYS
from rl_dialog.rewards.similarity import similarity

if TYPE_CHECKING:  # importing it takes torch, which a scorer and the tasks can do without
    from rl_dialog.evaluation.generation import Decoding

CONTEXTS = ARROW_SCHEMA.append(
    pa.field("number", pa.int64())
)  # number: which reply of its split, counted from 0
TEXTS = pa.schema(
    [("context", pa.string()), ("candidate", pa.int32()), ("text", pa.string()), ("finished", pa.bool_())]
)
SCORES = TEXTS.append(pa.field("similarity", pa.float64())).append(
    pa.field("learned", pa.float64())
)  # learned: null without a reward model
KEY, SUMMARY = b"rl_dialog.key", b"rl_dialog.summary"  # in a shard's metadata

PLAN = pa.schema([("file", pa.string())])
DONE = pa.schema([("file", pa.string()), ("contexts", pa.int64())])


@dataclass(frozen=True)
class Drawing:
    """How candidates are drawn; plain values, so that it travels to the workers."""

    policy: str  # a checkpoint directory
    decoding: Decoding
    count: int
    tries: int
    seed: int
    batch_size: int
    device: str = "cpu"


@dataclass(frozen=True)
class Scoring:
    """How candidates are scored."""

    similarity: str
    path: str = ""  # of the similarity's model
    reward_model: str = (
        ""  # a directory that `fit_reward` wrote: what a reply earns, instead of its similarity
    )


@dataclass(frozen=True)
class Keys:
    """What the texts and the scores of a shard depend on, as hashes."""

    texts: str
    scores: str


def write_contexts(
    data: Path, split: str, directory: Path, *, limit: int, total: int, size: int, openings: bool
) -> tuple[list[dict[str, Any]], dict]:
    """Writes the contexts of a split, `size` a shard; returns the shards and how many contexts were left out,
    by reason.

    With a `limit` they are taken evenly among the split's `total` replies. `openings`: whether a reply with
    nothing before it has a context. A reply without text (a tool call) has no candidates.
    """
    shards: list[dict[str, Any]] = []
    skipped = {"openings": 0, "tool_calls": 0}
    pending: list[dict[str, Any]] = []
    for number, dialog, i in _chosen(data, split, limit, total):
        if not i and not openings:
            skipped["openings"] += 1
        elif not dialog.messages[i]["content"] and dialog.messages[i].get("tool_calls"):
            skipped["tool_calls"] += 1
        else:
            pending.append(_context(dialog, i, split).to_row() | {"number": number})
        if len(pending) == size:
            shards.append(_write_contexts(pending, directory, split, len(shards)))
            pending = []
    if pending:
        shards.append(_write_contexts(pending, directory, split, len(shards)))
    return shards, skipped


def generate_and_score(
    folder: Path,
    files: list[str],
    drawing: Drawing,
    keys: Keys,
    *,
    scoring: Scoring,
    generators: int | None = None,
    scorers: int | None = None,
    use_gpu: bool = False,
    progress: Callable[[int], Any] | None = None,
) -> int:
    """Makes those shards of `files` that `folder` does not hold under these keys yet. Returns how many
    contexts got new texts. Raises UserError."""
    missing = [file for file in files if not is_current(folder / "texts" / file, keys.texts)]
    waiting = [file for file in files if not is_current(folder / file, keys.scores)]
    if not waiting:
        return 0
    # One shard: a block is no more, but beside GPUs Ray Data wants it to be said. A generator and its share
    # of a scorer keep about one CPU busy.
    blocks = {"batch_size": 1, "batch_format": "pyarrow", "num_cpus": 0.5}
    shards = dataset([pa.table({"file": [file]}, PLAN) for file in waiting])
    if missing:
        actors = pool(generators, len(missing), kind="GPU" if use_gpu else "CPU")
        arguments = {"folder": str(folder), "drawing": drawing, "key": keys.texts}
        gpu = {"num_gpus": 1} if use_gpu else {}
        shards = shards.map_batches(
            Generator, compute=actors, fn_constructor_kwargs=arguments, **blocks, **gpu
        )
    actors = pool(scorers, len(waiting))
    arguments = {"folder": str(folder), "scoring": scoring, "keys": keys}
    shards = shards.map_batches(Scorer, compute=actors, fn_constructor_kwargs=arguments, **blocks)
    fresh = 0
    with errors_of_workers():
        for row in rows_of(stream_tables(shards)):
            fresh += row["contexts"] * (row["file"] in missing)
            if progress:
                progress(row["contexts"])
    return fresh


class Generator:
    """An actor that draws the candidates of a shard. The policy is loaded with the first shard that needs
    it."""

    def __init__(self, folder: str, drawing: Drawing, key: str) -> None:
        self.folder, self.drawing, self.key, self.policy, self.tokenizer = (
            Path(folder),
            drawing,
            key,
            None,
            None,
        )

    def __call__(self, table: pa.Table) -> pa.Table:
        [row] = table.to_pylist()
        if not is_current(self.folder / "texts" / row["file"], self.key):
            self._draw(row["file"])
        return table

    def _draw(self, file: str) -> None:
        from rl_dialog.evaluation.draws import Context, draw_replies

        self._load()
        d = self.drawing
        split = SPLITS.index(file.rpartition("-")[0])
        rows = pq.read_table(self.folder / "contexts" / file).to_pylist()
        dialogs = [Dialog.from_row(row) for row in rows]
        contexts = [
            Context((split, row["number"]), dialog.messages[:-1], dialog.messages[-1]["content"])
            for row, dialog in zip(rows, dialogs, strict=True)
        ]
        settings = {"count": d.count, "tries": d.tries, "seed": d.seed, "batch_size": d.batch_size}
        drawn = draw_replies(self.policy, self.tokenizer, contexts, d.decoding, **settings)
        texts = []
        for dialog, context, draws in zip(dialogs, contexts, drawn, strict=True):
            replies = [(context.human, True), *((reply.text, reply.finished) for reply in draws.replies)]
            texts += [
                {"context": dialog.id, "candidate": k, "text": text, "finished": finished}
                for k, (text, finished) in enumerate(replies)
            ]
        figures = {"contexts": len(contexts), "duplicates": sum(draws.duplicates for draws in drawn)}
        write_shard(pa.Table.from_pylist(texts, TEXTS), self.folder / "texts" / file, self.key, figures)

    def _load(self) -> None:
        if self.policy is not None:
            return
        import torch

        from rl_dialog.data.tokenize import load_tokenizer
        from rl_dialog.evaluation.generation import load_for_decoding
        from rl_dialog.models.device import named_device

        torch.set_num_threads(
            1
        )  # an actor per CPU; sums over several threads could differ in their last bits
        self.policy, self.tokenizer = (
            load_for_decoding(self.drawing.policy).to(named_device(self.drawing.device)),
            load_tokenizer(self.drawing.policy),
        )


class Scorer:
    """An actor that compares the candidates of a shard with the human's replies, and asks the reward
    model."""

    def __init__(self, folder: str, scoring: Scoring, keys: Keys) -> None:
        self.folder, self.keys, self.similarity, self.reward_model = (
            Path(folder),
            keys,
            similarity(scoring.similarity, path=scoring.path),
            None,
        )
        if scoring.path or scoring.reward_model:
            import torch

            torch.set_num_threads(1)
        if scoring.reward_model:
            from rl_dialog.rewards.fitted import load_reward_model

            self.reward_model = load_reward_model(scoring.reward_model)

    def __call__(self, table: pa.Table) -> pa.Table:
        [row] = table.to_pylist()
        texts = pq.read_table(self.folder / "texts" / row["file"])
        figures = json.loads(texts.schema.metadata[SUMMARY])
        rows = texts.to_pylist()
        humans = {r["context"]: r["text"] for r in rows if not r["candidate"]}
        generated = [r for r in rows if r["candidate"]]
        values = self.similarity([r["text"] for r in generated], [humans[r["context"]] for r in generated])
        for r in rows:
            r["similarity"], r["learned"] = 1.0, None  # the human's own
        for r, value in zip(generated, values, strict=True):
            r["similarity"] = value
        if self.reward_model:
            contexts = {
                c["id"]: Dialog.from_row(c).messages[:-1]
                for c in pq.read_table(self.folder / "contexts" / row["file"]).to_pylist()
            }
            whole = ([*contexts[r["context"]], {"role": "assistant", "content": r["text"]}] for r in rows)
            for r, value in zip(rows, self.reward_model.score(whole), strict=True):
                r["learned"] = value
        figures |= {
            "candidates": len(generated),
            "empty": sum(not r["text"] for r in generated),
            "unfinished": sum(not r["finished"] for r in generated),
            "similarity": sum(values),
            "learned": sum(r["learned"] for r in generated) if self.reward_model else None,
        }
        write_shard(pa.Table.from_pylist(rows, SCORES), self.folder / row["file"], self.keys.scores, figures)
        return pa.Table.from_pylist([{"file": row["file"], "contexts": figures["contexts"]}], DONE)


def write_dialogs(
    folder: Path, files: list[str], *, name: str, threshold: float | None, generator: str
) -> None:
    """Writes the shards' candidates as Dialogs under `folder`/dialogs, one file per shard."""
    (folder / "dialogs").mkdir(exist_ok=True)
    arguments = {"folder": str(folder), "name": name, "threshold": threshold, "generator": generator}
    shards = dataset([pa.table({"file": [file]}, PLAN) for file in files])
    with errors_of_workers():
        for _ in stream_tables(
            shards.map_batches(
                _dialogs_of_shard, batch_size=None, batch_format="pyarrow", fn_kwargs=arguments
            )
        ):
            pass


def _dialogs_of_shard(
    table: pa.Table, *, folder: str, name: str, threshold: float | None, generator: str
) -> pa.Table:
    [row] = table.to_pylist()
    contexts = {r["id"]: r for r in pq.read_table(Path(folder) / "contexts" / row["file"]).to_pylist()}
    path = Path(folder) / "dialogs" / row["file"]
    with pq.ParquetWriter(path, ARROW_SCHEMA, compression="zstd") as writer:
        for batch in pq.ParquetFile(Path(folder) / row["file"]).iter_batches(batch_size=1024):
            made = [
                candidate_dialog(
                    contexts[r["context"]], r, name=name, threshold=threshold, generator=generator
                )
                for r in batch.to_pylist()
            ]
            writer.write_table(to_table(made))
    return table


def candidate_dialog(
    context: dict[str, Any], candidate: dict[str, Any], *, name: str, threshold: float | None, generator: str
) -> Dialog:
    """A row of CONTEXTS and a row of SCORES to the Dialog that training reads: the context, never trained on,
    and the candidate with its reward."""
    dialog, k = Dialog.from_row(context), candidate["candidate"]
    rewards = {name: candidate["similarity"]} | (
        {} if candidate["learned"] is None else {"learned": candidate["learned"]}
    )
    reply = {
        "role": "assistant",
        "content": candidate["text"],
        "reward": reward_of(candidate, threshold),
        "rewards": rewards,
    }
    meta = dialog.meta | {"context": dialog.id, "candidate": k, "generator": generator if k else "human"}
    return Dialog(
        f"{dialog.id}:{k}",
        [*dialog.messages[:-1], reply],
        dialog.source,
        dialog.split,
        goal=dialog.goal,
        meta=meta,
    )


def reward_of(candidate: dict[str, Any], threshold: float | None) -> float:
    """The similarity, or whether it is above the threshold (0 or 1); 1 for the human's reply, 0 for an empty
    one of the policy's.

    With a reward model what that says of a reply, or whether it is above the threshold: of the human's and of
    an empty one, too.
    """
    if candidate["learned"] is not None:
        return candidate["learned"] if threshold is None else float(candidate["learned"] > threshold)
    if not candidate["candidate"]:
        return 1.0
    if not candidate["text"]:
        return 0.0
    return candidate["similarity"] if threshold is None else float(candidate["similarity"] > threshold)


def write_shard(table: pa.Table, path: Path, key: str, figures: dict[str, Any]) -> None:
    """A shard under its key, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    pq.write_table(
        table.replace_schema_metadata({KEY: key, SUMMARY: json.dumps(figures)}), part, compression="zstd"
    )
    os.replace(part, path)


def is_current(path: Path, key: str) -> bool:
    """Is the shard there, under this key?"""
    try:
        return (pq.read_schema(path).metadata or {}).get(KEY) == key.encode()
    except (OSError, pa.ArrowInvalid):
        return False


def figures_of(path: Path) -> dict[str, Any]:
    """What a shard's writer counted."""
    return json.loads(pq.read_schema(path).metadata[SUMMARY])


def _chosen(data: Path, split: str, limit: int, total: int) -> Iterator[tuple[int, Dialog, int]]:
    """(number, dialog, index of the reply): all replies of the split, or `limit` of the `total` at even
    distances."""
    number = 0
    for dialog in read_dialogs(data, split):
        for i in dialog.replies:
            if not limit or number * limit % total < limit:
                yield number, dialog, i
            number += 1


def _context(dialog: Dialog, i: int, split: str) -> Dialog:
    """What was said before message i, which is the last one here; of earlier rewards and votes nothing is
    left."""
    before = [
        {key: m[key] for key in TEMPLATE_KEYS if key in m}
        | ({"weight": 0} if m["role"] == "assistant" else {})
        for m in dialog.messages[:i]
    ]
    reply = {"role": "assistant", "content": dialog.messages[i]["content"]}
    meta = {"group": dialog.meta["group"]} if "group" in dialog.meta else {}
    return Dialog(f"{dialog.id}:{i}", [*before, reply], dialog.source, split, goal=dialog.goal, meta=meta)


def _write_contexts(rows: list[dict[str, Any]], directory: Path, split: str, number: int) -> dict[str, Any]:
    file = shard_name(split, number)
    write_shard(pa.Table.from_pylist(rows, CONTEXTS), directory / file, "", {})
    return {"file": file, "contexts": len(rows)}


def describe_drawing(drawing: Drawing) -> dict[str, Any]:
    """The settings that change a text: not where the policy lies, how many replies share a batch, or on which
    device."""
    return {
        name: value
        for name, value in asdict(drawing).items()
        if name not in ("policy", "batch_size", "device")
    }
