"""Language understanding: a turn in words to dialogue acts, by a transformer encoder with two heads (BERTNLU
of ConvLab-2 is of this kind).

    encoder(side and context [SEP] text)  ->  h_t of each token of the text
    whole       g = max over all tokens of tanh(G h_t)
    tags        W [h_t, g]: outside, or the beginning or inside of a value of (intent, domain, slot)
                "in the [east]"
    sentence    U [max over the text of tanh(M h_t), g]: one sigmoid for each act without a value in the text
                "what is the phone number?"

The directory of a saved model is the encoder's `from_pretrained` directory (config.json, model.safetensors,
tokenizer); beside it stand `nlu.json` (labels, settings) and `heads.safetensors`. The encoder is any that
`AutoModel` loads, or a small one made here, with its own tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rl_dialog.data.by_length import batches
from rl_dialog.data.labelled import SIDES, Act, LabelledTurn, Tag
from rl_dialog.data.letters import SPACED
from rl_dialog.data.tokenize import END, ROLE_TOKENS, train_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.models.small_encoder import small_encoder
from rl_dialog.models.weights import (
    load_strictly,
    of_trunk,
    positions_of,
    require_readable,
    require_weights,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

FORMAT = 1
BATCH = 64
WORD = re.compile(SPACED)


@dataclass(frozen=True)
class Labels:
    """What can be understood of either side."""

    tags: tuple[Tag, ...]
    acts: tuple[Act, ...]
    tag_sides: tuple[tuple[bool, ...], ...]  # for each tag: does the user use it, does the system
    act_sides: tuple[tuple[bool, ...], ...]
    context: int = 1  # how many turns before the text are read
    max_length: int = 128  # tokens of context and text; the context loses its beginning


@dataclass(frozen=True)
class Encoded:
    """A batch of turns. B turns, T tokens."""

    inputs: dict[str, Tensor]  # (B, T) each
    text: Tensor  # (B, T) bool: tokens of the text itself
    offsets: list[list[tuple[int, int]]]  # characters of each token in its text


class Nlu(nn.Module):
    """The model. `understand` reads turns, `reader` is the function of one side that dialog agents take."""

    def __init__(self, encoder: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, labels: Labels) -> None:
        super().__init__()
        size = encoder.config.hidden_size
        self.encoder, self.tokenizer, self.labels = encoder, tokenizer, labels
        self.whole, self.part = nn.Linear(size, size), nn.Linear(size, size)
        self.tagger = nn.Linear(
            2 * size, 1 + 2 * len(labels.tags)
        )  # outside; beginning and inside of each tag
        self.sentence = nn.Linear(2 * size, len(labels.acts))
        self.dropout = nn.Dropout(0.1)
        sides = torch.tensor(
            [[True, *(used[side] for used in labels.tag_sides for _ in "BI")] for side in range(len(SIDES))]
        )
        self.register_buffer("tag_mask", sides, persistent=False)  # (sides, tags)
        sides = torch.tensor(
            [[used[side] for used in labels.act_sides] for side in range(len(SIDES))], dtype=torch.bool
        )
        self.register_buffer("act_mask", sides, persistent=False)  # (sides, acts)

    def encode(self, turns: Sequence[tuple[str, Sequence[str], str]]) -> Encoded:
        """(text, context, side) of each turn as tokens."""
        before = [
            f"{side}: {' '.join(context[max(0, len(context) - self.labels.context) :])}"
            for _, context, side in turns
        ]
        encoded = self.tokenizer(
            [" ".join(line.split()) for line in before],
            [text for text, _, _ in turns],
            padding=True,
            truncation="longest_first",
            max_length=self.labels.max_length,
            return_offsets_mapping=True,
            return_tensors="pt",
        )
        text = torch.tensor([[part == 1 for part in encoded.sequence_ids(i)] for i in range(len(turns))])
        names = [name for name in self.tokenizer.model_input_names if name in encoded]
        return Encoded({name: encoded[name] for name in names}, text, encoded["offset_mapping"].tolist())

    def forward(self, inputs: dict[str, Tensor], text: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the tags # (B, T, 1 + 2 tags), and of the acts about the whole sentence # (B, acts)."""
        states = self.dropout(self.encoder(**inputs).last_hidden_state)  # (B, T, H)
        everything = _pooled(self.whole(states), inputs["attention_mask"].bool())  # (B, H)
        pooled = torch.cat([_pooled(self.part(states), text), everything], -1)
        return self.tagger(torch.cat([states, everything[:, None].expand_as(states)], -1)), self.sentence(
            self.dropout(pooled)
        )

    @torch.inference_mode()
    def understand(self, turns: Sequence[tuple[str, Sequence[str], str]]) -> list[list[Act]]:
        """The acts of each (text, context, side); nothing in an empty text. Raises UserError for an unknown
        side."""
        self.eval()
        for _, _, side in turns:
            if side not in SIDES:
                raise UserError(f"expected the side {' or '.join(SIDES)}, got {side!r}")
        turn_acts: list[list[Act]] = [[] for _ in turns]
        worded = [i for i, turn in enumerate(turns) if turn[0].strip()]
        for places in batches([len(turns[i][0]) for i in worded], BATCH):
            part = [worded[place] for place in places]
            batch = self.encode([turns[i] for i in part])
            sides = torch.tensor([SIDES.index(turns[i][2]) for i in part])
            tags, acts = self(batch.inputs, batch.text)
            best = tags.masked_fill(~self.tag_mask[sides][:, None], -torch.inf).argmax(-1)  # (B, T)
            active = (acts > 0) & self.act_mask[sides]
            for row, i in enumerate(part):
                spans = self._spans(
                    turns[i][0], best[row].tolist(), batch.text[row].tolist(), batch.offsets[row]
                )
                turn_acts[i] = list(
                    dict.fromkeys(
                        [*spans, *(self.labels.acts[k] for k in active[row].nonzero()[:, 0].tolist())]
                    )
                )
        return turn_acts

    def reader(self, side: str) -> partial:
        """(text, context) -> acts of that side."""
        if side not in SIDES:
            raise UserError(f"expected the side {' or '.join(SIDES)}, got {side!r}")
        return partial(self._read, side)

    def save(self, directory: str | Path) -> None:
        """Writes the directory that `load_nlu` reads."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.encoder.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        save_file(
            {
                name: value.contiguous()
                for name, value in self.state_dict().items()
                if not name.startswith("encoder.")
            },
            directory / "heads.safetensors",
        )
        (directory / "nlu.json").write_text(
            json.dumps({"format": FORMAT, **asdict(self.labels)}, indent=1) + "\n", encoding="utf-8"
        )

    def _read(self, side: str, text: str, context: Sequence[str] = ()) -> list[Act]:
        return self.understand([(text, context, side)])[0]

    def _spans(self, text: str, tags: list[int], inside: list[bool], offsets: list[list[int]]) -> list[Act]:
        """The values that a row of tags marks, widened to whole words."""
        acts: list[Act] = []
        current, span_start, span_end = -1, 0, 0
        for tag, mine, (start, end) in [*zip(tags, inside, offsets, strict=True), (0, True, (0, 0))]:
            if not mine or (tag and current == (tag - 1) // 2 and tag % 2 == 0):
                span_end = end if mine else span_end
                continue
            if current >= 0:
                acts.append((*self.labels.tags[current], _words(text, span_start, span_end)))
            current, span_start, span_end = (tag - 1) // 2 if tag else -1, start, end
        return [act for act in acts if act[3]]


def load_nlu(directory: str | Path) -> Nlu:
    """A saved model in eval mode. Raises UserError where there is none, or one whose files do not fit
    together."""
    from transformers import AutoModel, AutoTokenizer

    path = Path(directory) / "nlu.json"
    if not path.is_file():
        raise UserError(
            f"{directory}: expected a folder that `python -m pipelines.fit_nlu` wrote, found no nlu.json "
            "in it"
        )
    require_readable(directory)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format", None) != FORMAT:
            raise UserError(f"expected format {FORMAT}")
        labels = Labels(**{name: _tuples(value) for name, value in values.items()})
        encoder, lacking = load_strictly(AutoModel, directory)
        nlu = Nlu(encoder, AutoTokenizer.from_pretrained(directory), labels)
        state = load_file(Path(directory) / "heads.safetensors")
        missing, unexpected = nlu.load_state_dict(state, strict=False)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError, RuntimeError) as error:
        raise UserError(
            f"{directory}: expected a model that `python -m pipelines.fit_nlu` wrote, got one that cannot be "
            f"loaded: {error}"
        ) from error
    require_weights(encoder, of_trunk(encoder, lacking), str(directory))
    if missing := [name for name in missing if not name.startswith("encoder.")] or unexpected:
        raise UserError(
            f"{directory}/heads.safetensors: expected the heads of nlu.json, these do not fit: {missing[:3]}"
        )
    return nlu.eval()


def new_nlu(turns: Iterable[LabelledTurn], labels: Labels, *, encoder: str = "", hidden_size: int = 64,
            num_hidden_layers: int = 2, vocab_size: int = 4096) -> Nlu:  # fmt: skip
    """An untrained model: a small encoder and a tokenizer made from the turns' texts, or a pretrained
    encoder.

    Raises UserError for an encoder that cannot be loaded.
    """
    if encoder:
        model, tokenizer = _pretrained(encoder)
        most = positions_of(model) or labels.max_length
        labels = replace(labels, max_length=min(labels.max_length, most))
    else:
        from transformers import ModernBertModel

        tokenizer = _tokenizer([turn.text for turn in turns], vocab_size)
        size = {"hidden_size": hidden_size, "num_hidden_layers": num_hidden_layers}
        model = ModernBertModel(small_encoder(tokenizer, **size, max_length=labels.max_length))
    tokenizer.truncation_side = "left"  # of the context; the latest words count
    return Nlu(model, tokenizer, labels)


def _pretrained(encoder: str) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder or hub name. Raises UserError for what cannot be loaded or used."""
    from transformers import AutoModel, AutoTokenizer

    require_readable(encoder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(encoder)
        model, lacking = load_strictly(AutoModel, encoder)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"--model_name_or_path {encoder}: expected a folder with config.json and weights, or a hub "
            f"name ({error})"
        ) from error
    require_weights(model, of_trunk(model, lacking), f"--model_name_or_path {encoder}")
    if not tokenizer.is_fast:
        raise UserError(
            f"--model_name_or_path {encoder}: expected a fast tokenizer (tokenizer.json), because values "
            "are cut out by character offsets"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def _pooled(states: Tensor, mask: Tensor) -> Tensor:
    """The largest tanh of each feature over the tokens of the mask # (B, T, H), (B, T) -> (B, H)."""
    return torch.tanh(states).masked_fill(~mask[..., None], -1.0).amax(1)


def _tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of lower-case text; a pair is `<|user|> first <|end|> second <|end|>`."""
    from tokenizers import normalizers, processors

    tokenizer = train_tokenizer((text.lower() for text in texts), vocab_size=vocab_size)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    start = ROLE_TOKENS[1]
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (start, END)]
    pair = f"{start}:0 $A:0 {END}:0 $B:1 {END}:1"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {END}", pair=pair, special_tokens=ids
    )
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


def _words(text: str, start: int, end: int) -> str:
    """text[start:end] without blanks around it, widened to the words at its ends."""
    for word in WORD.finditer(text):
        if word.start() < start < word.end():
            start = word.start()
        if word.start() < end < word.end():
            end = word.end()
    return text[start:end].strip(" ,.?!;").lower()


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
