"""From a Dialog to token rows: the chat template is rendered prefix by prefix, so the mask is exact for any
template.

    messages      [user: "hi"]            [assistant: "hello"]
    rendered      <|user|> hi <|end|>     <|assistant|> hello <|end|>
    written by us    0      0    0             0          1      1        <- `assistant`: tokens the policy
                                                                            wrote, end of turn included

A template whose rendering of the first n messages is not a prefix of the rendering of n+1 messages cannot be
masked, and raises TemplateError.

Prefix by prefix, a long dialog takes time in the square of its length. There each message is rendered behind
the few before it, and what it adds is looked for in the one rendering of the whole; whole prefixes are
checked at the powers of two and at the end. Where what a message adds depends on messages further back, the
long way is taken.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import socket
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np

from rl_dialog.data.missing import to_go
from rl_dialog.data.schema import ROLES, Dialog
from rl_dialog.data.taught import Taught, in_rows
from rl_dialog.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END, PAD = "<|end|>", "<|pad|>"
ROLE_TOKENS = tuple(f"<|{role}|>" for role in ROLES)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

LONG_TOKEN = 8  # characters: a text has seldom so many for each of its tokens
LEAST_VOCABULARY = (
    256 + 2 + len(ROLE_TOKENS)
)  # every byte and the special tokens: then each character (of English) is a token
HUB_NAME = re.compile(r"\w(?:[\w.-]{0,94}\w)?", re.ASCII)  # of an owner or a model
NO_HUB_NAME = re.compile(
    r"--|\.\.|\.(?:bin|git|gz|jinja|jsonl?|model|parquet|pt|safetensors|txt|ya?ml|zip)$"
)  # what the hub takes from nobody, and what ends as files do
LONG_DIALOG = 24  # messages from which the quick way is shorter

TEMPLATE_KEYS = (
    "role",
    "content",
    "tool_calls",
    "tool_call_id",
    "name",
    "reasoning_content",
    "thinking",
)  # of a message; rewards are none of its business


class TemplateError(UserError):
    """The tokenizer's chat template cannot be used for training; the message says why and what to do."""


class Refused(TemplateError):
    """The template renders no such conversation, but may render others."""


@dataclass
class Row:
    """One window of a dialog as tokens: what `data/batch.py` collates. T tokens, R replies."""

    input_ids: np.ndarray  # (T,) int32
    assistant: np.ndarray  # (T,) bool: this token was written by the assistant and is trained on
    reply_ends: np.ndarray  # (R,) int32: index of the last token of each reply
    rewards: np.ndarray  # (R,) float64, once learned from float32: what each reply earned; NaN: missing
    truncated: bool  # the conversation goes on after this window: bootstrap from its last token
    # Of the K replies behind this window, where it was cut at max_length:
    later_rewards: np.ndarray = field(default_factory=lambda: np.empty(0))  # (K,); NaN as above
    later_tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # (K,) how long they are
    later_done: bool = False  # the conversation ended with them, so what followed this window is known
    # (P,) int32: the state that such a window leads to, as the window of the next reply begins with it and as
    # a policy will read it
    next_prompt: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    # Of a row that a policy with latents said: (R,) int64, the seed of each reply's latent
    latent_seeds: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    taught: Taught | None = None  # what teachers say of its messages, where `prepare` asked some

    @property
    def reply_starts(self) -> np.ndarray:
        """(R,) the index of the first token of each reply: the first one that was written behind the end of
        the one before, with which it may share a border."""
        written = np.flatnonzero(self.assistant)
        ends_before = np.concatenate([[-1], self.reply_ends])[: len(self.reply_ends)]
        return written[np.searchsorted(written, ends_before, side="right")]

    @property
    def returns(self) -> np.ndarray:
        """(R,) the sum of the known rewards from each reply to the end of the conversation; NaN where none is
        known."""
        return to_go(self.all_rewards)[: len(self.rewards)]

    @property
    def all_rewards(self) -> np.ndarray:
        """(R + K,) the rewards of this window and of what came behind it."""
        return np.concatenate([self.rewards, self.later_rewards])

    def with_rewards(self, change: Callable[[np.ndarray], np.ndarray]) -> Row:
        """The same row with other rewards: `change` takes (R + K,) float64 and gives as many, of any type."""
        changed = change(self.all_rewards.astype(np.float64))
        count = len(self.rewards)
        return replace(self, rewards=changed[:count], later_rewards=changed[count:])

    @classmethod
    def of_reply(cls, context: Sequence[int], reply: Sequence[int], *, reward: float = math.nan) -> Row:
        """One reply, its end of turn included, as the last and only one behind a context; both as ids."""
        ids = np.array([*context, *reply], dtype=np.int32)
        return cls(
            ids,
            np.arange(len(ids)) >= len(context),
            np.array([len(ids) - 1], np.int32),
            np.array([reward], np.float32),
            False,
        )


def rewards_of_dialogs(rows: Sequence[Row]) -> list[np.ndarray]:
    """(R,) the rewards of each dialog, once, of the rows of a split: the windows of a dialog stand behind one
    another, and the first one knows what all of its replies earned."""
    goes_on = [False, *(len(row.later_rewards) > 0 for row in rows)]
    return [row.all_rewards for row, is_later in zip(rows, goes_on, strict=False) if not is_later]


# English endings, words with at most one capital letter, words of scripts without case, single signs, spaces;
# a space belongs to what follows it.
WORDS = (
    r"'(?i:s|t|re|ve|m|ll|d)(?!\p{L})| ?\p{Lu}?[\p{Ll}\p{M}]+| ?[\p{Lo}\p{Lm}\p{M}]+| ?\p{L}| ?\p{N}|"
    r" ?[^\s\p{L}\p{N}]|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with our chat template, from an iterator over texts. Nothing is ever out of
    vocabulary.

    Tokens are made of words only: each digit, mark and capital letter without a word of its own is one token,
    so that the fifth place of `X..O.....` is always the fifth token. With LEAST_VOCABULARY each byte is one.
    Raises UserError for less: what has no token would be lost.
    """
    if vocab_size < LEAST_VOCABULARY:
        raise UserError(
            f"expected --vocab_size of at least {LEAST_VOCABULARY} (256 bytes and {LEAST_VOCABULARY - 256} "
            f"special tokens: each character is one), got {vocab_size}"
        )
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    special = [PAD, END, *ROLE_TOKENS]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=END, additional_special_tokens=list(ROLE_TOKENS)
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerFast:
    """A hub name or local path. One without a chat template gets ours (and its special tokens); one without a
    padding token gets one.

    Its end-of-sequence token becomes the one that ends a reply in its template: that is what a policy learns
    to write and where generation stops. Raises UserError when the name is neither a local directory nor a
    reachable hub name, or the tokenizer is not a fast one.
    """
    from transformers import AutoTokenizer

    require_hub_name_or_directory(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name_or_path))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"no tokenizer at {str(name_or_path)!r}: expected a hub name or a directory with tokenizer files "
            f"({error})"
        ) from error
    if not tokenizer.is_fast:
        raise UserError(
            f"{name_or_path}: expected a fast tokenizer (tokenizer.json), because masks need character "
            "offsets"
        )
    if tokenizer.chat_template is None:
        tokenizer.add_special_tokens({"additional_special_tokens": list(ROLE_TOKENS), "eos_token": END})
        tokenizer.chat_template = CHAT_TEMPLATE
    if tokenizer.pad_token_id is None:
        tokenizer.add_special_tokens({"pad_token": PAD})
    _stop_at_the_end_of_a_reply(tokenizer)
    return tokenizer


def require_hub_name_or_directory(name_or_path: str | Path) -> None:
    """Raises UserError for what is meant as a path and is no directory: a hub would be asked for it, and
    without network only after a minute. So it is for a name that nobody can be asked for."""
    name, place = str(name_or_path), Path(name_or_path)
    if place.is_dir():
        return
    owner, *rest = parts = name.split("/")
    hub_name = len(parts) < 3 and all(map(HUB_NAME.fullmatch, parts)) and not NO_HUB_NAME.search(name)
    if place.exists() or not hub_name or (rest and Path(owner).is_dir()):
        found = "a file: name its folder" if place.exists() else "nothing there"
        expected = "expected a directory with a model (or a hub name such as owner/model)"
        raise UserError(f"{name}: {expected}, found {found}")
    _require_hub(name)


@cache
def _require_hub(name: str) -> None:
    """Raises UserError where neither the hub nor a copy of what it has under this name is there. Behind a
    proxy it is left to huggingface_hub to find out."""
    from huggingface_hub import constants, try_to_load_from_cache

    copies = (try_to_load_from_cache(name, file) for file in ("config.json", "tokenizer_config.json"))
    if constants.HF_HUB_OFFLINE or getproxies() or any(isinstance(copy, str) for copy in copies):
        return
    hub = urlsplit(constants.ENDPOINT)
    try:
        port = hub.port or (80 if hub.scheme == "http" else 443)
        socket.create_connection((hub.hostname or "", port), timeout=10).close()
    except OSError as error:
        raise UserError(
            f"{name}: expected a directory with a model, found nothing there, and the hub that may have a "
            f"model of this name, {constants.ENDPOINT}, cannot be reached ({error})"
        ) from error


def message_ends(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The tokens by which the chat template ends the messages of user and assistant, for models that read a
    dialog message by message. Raises TemplateError for a template without such tokens."""
    marks = "\ue000", "\ue001"
    roles = zip(("user", "assistant"), marks, strict=True)
    text = _text(tokenizer, [{"role": role, "content": mark} for role, mark in roles])
    behind = text.partition(marks[0])[2].partition(marks[1])[::2]
    special = special_ids(tokenizer)
    ends = [next((token for token in _encode(tokenizer, part) if token in special), None) for part in behind]
    if None in ends:
        role = "user" if ends[0] is None else "assistant"
        raise TemplateError(
            "expected a chat template that ends every message with a special token, which a hierarchical "
            f"model needs, got none behind what the {role} says; take a tokenizer with such a template, or "
            "--model.family llama"
        )
    return sorted(set(ends))


def _stop_at_the_end_of_a_reply(tokenizer: PreTrainedTokenizerFast) -> None:
    """Some chat models end a turn with another token (<|im_end|>) than their tokenizer calls the end of a
    sequence (<|endoftext|>)."""
    marker = "\ue000"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": marker}]
    try:
        behind = _text(tokenizer, turns).partition(marker)[2]
    except (
        TemplateError
    ):  # a template for other roles; tokenize tells what is wrong with it, with the dialog at hand
        return
    special = special_ids(tokenizer)
    end = next((token for token in _encode(tokenizer, behind) if token in special), None)
    if end is not None and end != tokenizer.eos_token_id:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)


def special_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """All special tokens."""
    return {*tokenizer.convert_tokens_to_ids(list(_special_words(tokenizer)))}


def _special_words(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """What they are written as. Those of roles and ends many chat models only mark as special in their
    vocabulary; the tokenizer itself names a few, such as the end of a sequence."""
    marked = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple(dict.fromkeys((*tokenizer.all_special_tokens, *marked)))


@dataclass
class _Rendered:
    """A whole dialog as tokens, with the token spans of its replies."""

    input_ids: np.ndarray  # (T,)
    starts: list[int]  # first token of every message, its header included; empty unless asked for
    actions: dict[int, int]  # reply -> the first token the assistant wrote in it
    action_ends: dict[int, int]  # reply -> one past the last token it wrote (end of turn included)


def tokenize(
    dialog: Dialog,
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_length: int = 1024,
    taught: Taught | None = None,
) -> list[Row]:
    """The rows of a dialog: one, or several windows when it is longer than `max_length` tokens.

    Each reply is trained on in exactly one row, with up to half a window of whole messages before the first
    one (of a longer message what leaves room for the reply) and the system prompt in front unless it takes a
    quarter of the window. A row that the conversation outlasts ends before the next reply, or where that one
    would stand in the window's last eighth (`longest_prompt`), and knows what the replies behind it earned,
    and how the window of the next one begins. A reply that alone is too long loses its tail (`cut_replies`
    counts it). What teachers say of its messages (`taught`) is in the rows too.

    A reward that is null or absent is NaN. Raises TemplateError, Refused where the template itself does.
    """
    replies = dialog.replies
    if not replies:
        return []
    rendered = _render(dialog, replies, tokenizer, every=taught is not None)
    logged = {i: dialog.messages[i].get("reward") for i in replies}
    rewards = {i: math.nan if reward is None else float(reward) for i, reward in logged.items()}
    if len(rendered.input_ids) <= max_length:
        rows = [_window(dialog, rendered, 0, 0, replies, rewards, max_length=max_length, later=None)]
        return _with_teachers(rows, rendered, [(0, 0)], taught, tokenizer)
    rendered = rendered if rendered.starts else _render(dialog, replies, tokenizer, every=True)
    # A row need not hold what follows its last reply: else only the last replies of conversations would stand
    # behind as much as fits, and nowhere else.
    asked, ends = [rendered.actions[i] for i in replies], [rendered.action_ends[i] for i in replies]
    rows, begins, firsts, done = [], [], [], 0
    while done < len(replies):
        system, start = _context_start(dialog, rendered, replies[done], max_length)
        whole = bisect_right(ends, start + max_length - system)
        with_room = bisect_right(asked, start + longest_prompt(max_length) - system)
        window_replies = replies[done : max(done + 1, min(whole, with_room))]
        firsts.append(window_replies[0])
        done += len(window_replies)
        later = replies[done] if done < len(replies) else None
        rows.append(
            _window(
                dialog, rendered, system, start, window_replies, rewards, max_length=max_length, later=later
            )
        )
        begins.append((system, start))
    prompts = [
        np.concatenate([rendered.input_ids[:system], rendered.input_ids[start : rendered.actions[reply]]])
        for (system, start), reply in zip(begins[1:], firsts[1:], strict=True)
    ]
    if dialog.truncated and dialog.messages[-1]["role"] != "assistant":
        system, start = _context_start(dialog, rendered, len(dialog.messages), max_length)
        prompts.append(np.concatenate([rendered.input_ids[:system], rendered.input_ids[start:]]))
    rows[: len(prompts)] = [replace(row, next_prompt=ids) for row, ids in zip(rows, prompts, strict=False)]
    return _with_teachers(rows, rendered, begins, taught, tokenizer)


def longest_prompt(length: int) -> int:
    """How much of a window of `length` tokens a reply's context takes, at most, where conversations are
    longer. Behind a fuller one only short replies would fit, and a policy would learn to say these there."""
    return length - length // 8


def _with_teachers(
    rows: list[Row],
    r: _Rendered,
    begins: list[tuple[int, int]],
    taught: Taught | None,
    tokenizer: PreTrainedTokenizerFast,
) -> list[Row]:
    """The rows with what teachers say; begins: the tokens in front of each, and the first one behind them."""
    if taught is None:
        return rows
    windows = [(*begin, len(row.input_ids)) for begin, row in zip(begins, rows, strict=True)]
    each = in_rows(taught, r.starts, _read_by(r, message_ends(tokenizer)), windows)
    return [replace(row, taught=mine) for row, mine in zip(rows, each, strict=True)]


def _read_by(r: _Rendered, ends: Sequence[int]) -> list[int]:
    """Of each message one past the token that ends it: the last such one in it, or where the template ends it
    with the header of the next one, the first behind it; past all tokens where none does."""
    length = len(r.input_ids)
    places = [*np.flatnonzero(np.isin(r.input_ids, ends)).tolist(), length]
    read = []
    for start, stop in itertools.pairwise([*r.starts, length]):
        behind = bisect_left(places, stop)
        inside = behind and places[behind - 1] >= start
        read.append(places[behind - 1 if inside else behind] + 1)
    return read


def cut_replies(dialog: Dialog, tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> int:
    """How many replies of these rows lost their tail because they alone were longer than a window."""
    eos = tokenizer.eos_token_id
    return sum(
        1
        for row in rows
        for end in row.reply_ends
        if row.truncated and end == len(row.input_ids) - 1 and row.input_ids[end] != eos
        if len(row.reply_ends) == 1
    )


def encode_prompt(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_length: int,
    usual: int | None = None,
) -> list[int]:
    """Token ids a policy continues: the rendered messages and the generation prompt, at most `max_length` of
    them.

    When they are longer, or than is `usual` where the policy learned, the system prompt and the latest whole
    messages stay (the rule of `tokenize`: a policy acts on what it was trained on), and of the last message
    what fits `max_length`. Without messages, the assistant is to open the conversation.
    Raises TemplateError where the template cannot ask for that.
    """
    if not messages:  # transformers renders no empty conversation
        opening = {"role": "assistant", "content": "\ue000"}
        return _encode(tokenizer, _opening(_text(tokenizer, [opening]), opening, tokenizer))[-max_length:]
    return _latest(messages, tokenizer, max_length=max_length, usual=usual or max_length, prompt=True)


def encode_conversation(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, *, max_length: int
) -> list[int]:
    """Token ids of messages as they stand, the last one's end of turn included, cut by the rule of
    `encode_prompt`. Raises TemplateError."""
    return _latest(messages, tokenizer, max_length=max_length, usual=max_length, prompt=False)


def _latest(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerFast,
    *,
    max_length: int,
    usual: int,
    prompt: bool,
) -> list[int]:
    usual = min(usual, max_length)
    lead = next((n for n, m in enumerate(messages) if m["role"] != "system"), len(messages))

    @lru_cache
    def without(drop: int) -> list[int]:
        kept = messages[:lead] + messages[lead + drop :]
        return _encode_as_trained(tokenizer, kept) if prompt else _encode(tokenizer, _text(tokenizer, kept))

    drops = range(
        max(1, len(messages) - lead)
    )  # 0 to all but the last message; the more are left out, the shorter the prompt
    least, characters = drops[-1], 0
    while (
        least and characters < LONG_TOKEN * usual
    ):  # rendering all of a conversation at every turn would take time in the square of its turns
        least -= 1
        characters += len(
            str(messages[lead + least].get("content") or messages[lead + least].get("tool_calls"))
        )
    least = least if least and len(without(least)) > usual else 0
    fits = not least and len(without(0)) <= usual
    drop_count = (
        0 if fits else bisect_left(drops, True, lo=least, key=lambda drop: len(without(drop)) <= usual)
    )
    return without(min(drop_count, drops[-1]))[-max_length:]


def _encode_as_trained(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> list[int]:
    """The tokens of a prompt as a row has them, which cuts the text behind the prompts of earlier replies too
    (`_tokens`). Where these end is only asked if a token may reach across."""
    final = _text(tokenizer, messages, prompt=True)
    uncut = _encode(tokenizer, final)
    reaching = any(token.rstrip for token in tokenizer.added_tokens_decoder.values())  # over spaces behind it
    if final.endswith(_special_words(tokenizer)) and not reaching:
        return uncut
    text = _text(tokenizer, messages)
    asks = final.removeprefix(text)
    ends = [match.end() for match in re.finditer(re.escape(asks), text)] if asks else []
    if _tokens(tokenizer, final, ends)[0].tolist() == uncut:
        return uncut
    replies = [n for n, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight", 1) != 0]
    messages = _defused(messages, _any_of(_special_words(tokenizer)))
    is_long = replies and len(messages) >= LONG_DIALOG
    lengths = _lengths(messages, replies, text, tokenizer) if is_long else None
    try:
        _, prompts = lengths or _lengths_by_prefixes(messages, replies, text, tokenizer, "", every=False)
    except TemplateError:  # of a history that no row could have
        return uncut
    return _tokens(tokenizer, final, sorted(prompts.values()))[0].tolist()


def _render(
    dialog: Dialog, replies: list[int], tokenizer: PreTrainedTokenizerFast, *, every: bool = False
) -> _Rendered:
    """`every` asks for the starts of all messages (a dialog that must be cut needs them); of a long dialog
    they are known anyway."""
    messages = _defused(dialog.messages, _any_of(_special_words(tokenizer)))
    text = _text(tokenizer, messages)
    lengths = _lengths(messages, replies, text, tokenizer) if len(messages) >= LONG_DIALOG else None
    ends, prompts = lengths or _lengths_by_prefixes(
        messages, replies, text, tokenizer, dialog.id, every=every
    )
    final = (
        _text(tokenizer, messages, prompt=True)
        if dialog.truncated and messages[-1]["role"] != "assistant"
        else text
    )
    ids, token_starts = _tokens(tokenizer, final, sorted(prompts.values()))

    def positions(characters: dict[int, int]) -> dict[int, int]:
        return dict(
            zip(
                characters,
                np.searchsorted(token_starts, list(characters.values()), side="left").tolist(),
                strict=True,
            )
        )

    stops, actions = positions(ends), positions(prompts)
    action_ends = {
        n: _end_of_turn(ids, start, stops[n], tokenizer.eos_token_id) for n, start in actions.items()
    }
    if empty := [n for n, start in actions.items() if action_ends[n] <= start]:
        raise TemplateError(
            f"dialog {dialog.id!r}, message {empty[0]}: expected a chat template that ends every reply with "
            f"a token, got no token at all for the reply {messages[empty[0]]['content']!r}; set "
            "`tokenizer.chat_template` to one that writes the end-of-sequence token behind a reply"
        )
    starts = [0, *(stops[n] for n in range(len(messages) - 1))] if every or lengths else []
    return _Rendered(ids, starts, actions, action_ends)


def _tokens(
    tokenizer: PreTrainedTokenizerFast, text: str, prompts: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """(T,) ids and the characters at which they begin. A token that would reach across the end of one of the
    `prompts` (" hello" behind "BOT: ") is none that a policy could write there: the text is cut in its
    middle."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    starts, ends = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    before = np.searchsorted(starts, prompts, side="left") - 1
    cuts = [
        end for end, token in zip(prompts, before.tolist(), strict=True) if token >= 0 and ends[token] > end
    ]
    if not cuts:
        return ids, starts
    borders = [0, *cuts, len(text)]
    pieces = [_tokens(tokenizer, text[start:stop], []) for start, stop in itertools.pairwise(borders)]
    shifted = [piece + start for (_, piece), start in zip(pieces, borders, strict=False)]
    return np.concatenate([piece for piece, _ in pieces]), np.concatenate(shifted)


Lengths = tuple[
    dict[int, int], dict[int, int]
]  # message -> characters up to and including it; reply -> characters of the prompt that it continues


def _lengths_by_prefixes(
    messages: list[dict[str, Any]],
    replies: list[int],
    full: str,
    tokenizer: PreTrainedTokenizerFast,
    dialog: str,
    *,
    every: bool,
) -> Lengths:
    """Renders the prefixes that end at a trained reply or begin one; with `every`, those of all messages.
    Raises TemplateError."""
    ends: dict[int, int] = {}
    prompts: dict[int, int] = {}
    trained, previous = set(replies), ""
    for n in range(len(messages)):
        if n not in trained and not every and n < len(messages) - 1:
            continue
        text = _text(tokenizer, messages[: n + 1]) if n < len(messages) - 1 else full
        if n in trained:
            prompt = (
                _text(tokenizer, messages[:n], prompt=True) if n else _opening(text, messages[n], tokenizer)
            )
            _require_prefix(prompt, text, n, dialog)
            prompts[n] = len(prompt)
        _require_prefix(previous, text, n, dialog)
        ends[n], previous = len(text), text
    return ends, prompts


def _lengths(
    messages: list[dict[str, Any]], replies: list[int], full: str, tokenizer: PreTrainedTokenizerFast
) -> Lengths | None:
    """The same of every message, in linear time; None where the template needs the long way (which may find
    that it cannot be masked).

    What message n adds is its text behind the assistant message before it, the user message before that and
    the leading system messages (roles that alternate go on alternating), less the text without it. `full`
    must be these pieces and nothing else, each reply's piece must begin with the generation prompt behind the
    same messages, and prefixes as they are must end there too at the powers of two and at the last reply.
    """
    near = _contexts(messages)
    trained = [n for n in replies if n]
    try:
        behind = _texts(
            tokenizer, [[*context, message] for context, message in zip(near, messages, strict=True)]
        )
        alone = ["", *_texts(tokenizer, near[1:])]
        reply_prompts = dict(
            zip(trained, _texts(tokenizer, [near[n] for n in trained], prompt=True), strict=True)
        )
        ends, prompts, position = {}, {}, 0
        for n, (context_text, text) in enumerate(zip(alone, behind, strict=True)):
            prompt = reply_prompts.get(n, context_text)
            if not (
                text.startswith(prompt)
                and prompt.startswith(context_text)
                and full.startswith(text[len(context_text) :], position)
            ):
                return None
            prompts |= {n: position + len(prompt) - len(context_text)} if n in reply_prompts else {}
            position = ends[n] = position + len(text) - len(context_text)
        if 0 in replies:
            prompts[0] = len(_opening(behind[0], messages[0], tokenizer))
        checked = {2**k for k in range(len(messages).bit_length())} | {replies[-1]}
        agrees = position == len(full) and all(
            _text(tokenizer, messages[: n + 1]) == full[: ends[n]] for n in checked if n < len(messages)
        )
        agrees = agrees and all(
            _text(tokenizer, messages[:n], prompt=True) == full[: prompts[n]] for n in checked & set(trained)
        )
    except TemplateError:  # of a few messages on their own; all of them together it may render
        return None
    return (ends, prompts) if agrees else None


def _contexts(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Of each message the few before it that decide what it adds: see `_lengths`. The first messages have all
    of them."""
    lead = next((n for n, m in enumerate(messages) if m["role"] != "system"), len(messages))
    contexts: list[list[dict[str, Any]]] = []
    user, asked, spoke = (
        lead,
        lead,
        lead,
    )  # the latest user message; that before the latest assistant message; the latter
    for n, message in enumerate(messages):
        contexts.append(
            [
                *messages[: min(n, lead)],
                *(messages[asked : asked + 1] if asked < spoke else ()),
                *messages[spoke:n],
            ]
        )
        if message["role"] == "user":
            user = n
        elif message["role"] == "assistant":
            asked, spoke = user, n
    return contexts


def _window(
    dialog: Dialog,
    r: _Rendered,
    system: int,
    start: int,
    replies: list[int],
    rewards: dict[int, float],
    *,
    max_length: int,
    later: int | None,
) -> Row:
    """Tokens `start`..(state before the reply `later`, the next after the last of `replies`), behind the
    first `system` tokens."""
    stop = len(r.input_ids) if later is None else r.actions[later]
    ends_here = later is None and not dialog.truncated
    shift = system - start
    stop = min(
        stop, max(r.action_ends[replies[-1]], start + max_length - system)
    )  # a long user turn after the last reply may not fit
    window = np.concatenate([r.input_ids[:system], r.input_ids[start:stop]])
    ids = window[:max_length]
    assistant = np.zeros(len(ids), dtype=bool)
    for i in replies:
        assistant[r.actions[i] + shift : r.action_ends[i] + shift] = True
    reply_ends = np.asarray([min(r.action_ends[i] + shift, len(ids)) - 1 for i in replies], dtype=np.int32)
    behind = [i for i in rewards if i > replies[-1]]
    return Row(
        ids,
        assistant,
        reply_ends,
        np.asarray([rewards[i] for i in replies], dtype=np.float64),
        len(window) > len(ids) or not ends_here,
        np.asarray([rewards[i] for i in behind], dtype=np.float64),
        np.asarray([r.action_ends[i] - r.actions[i] for i in behind], dtype=np.int32),
        not dialog.truncated,
    )


def _context_start(dialog: Dialog, r: _Rendered, reply: int, max_length: int) -> tuple[int, int]:
    """(tokens of the leading system messages, first token kept behind them): the whole messages before
    `reply`, or all of them, that fit half a window; of one message that does not, what leaves room for the
    reply."""
    budget, end = max_length // 2, r.actions.get(reply, len(r.input_ids))
    lead = next((n for n, m in enumerate(dialog.messages) if m["role"] != "system"), 0)
    system = r.starts[lead] if r.starts[lead] <= budget // 2 else 0
    first = reply
    while first > lead and end - r.starts[first - 1] + system <= budget:
        first -= 1
    if first == reply > lead:
        room = max(budget, max_length - (r.action_ends.get(reply, end) - end)) - system
        return system, max(r.starts[reply - 1], end - room)
    return system, r.starts[first]


def _opening(text: str, message: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> str:
    """The generation prompt of a dialog that the assistant opens: what does not depend on the reply (not
    every template renders an empty list)."""
    other = "\ue000" if not (message["content"] or "").startswith("\ue000") else "\ue001"
    return os.path.commonprefix([text, _text(tokenizer, [{**message, "content": other}])])


def _end_of_turn(ids: np.ndarray, start: int, end: int, eos: int | None) -> int:
    """One past the last end-of-turn token in ids[start:end]; what follows it (a newline in ChatML) is the
    template's, not the policy's."""
    ends = np.flatnonzero(ids[start:end] == eos) if eos is not None else ()
    return start + int(ends[-1]) + 1 if len(ends) else end


def _require_prefix(prefix: str, text: str, number: int, dialog: str) -> None:
    if not text.startswith(prefix):
        at = next(
            (i for i, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b),
            min(len(prefix), len(text)),
        )
        raise TemplateError(
            f"dialog {dialog!r}: the chat template changes earlier text when message {number} is added: "
            f"expected {prefix[at : at + 40]!r} at character {at}, got {text[at : at + 40]!r}. Training "
            "masks need a template that only appends; set `tokenizer.chat_template` to one that does "
            "(rl_dialog.data.tokenize.CHAT_TEMPLATE is such a template)."
        )


def _text(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
    return _texts(tokenizer, [_defused(messages, _any_of(_special_words(tokenizer)))], prompt=prompt)[0]


def _texts(
    tokenizer: PreTrainedTokenizerFast, conversations: list[list[dict[str, Any]]], *, prompt: bool = False
) -> list[str]:
    """The rendering of each."""
    from jinja2 import TemplateError as JinjaError

    renderable = [
        [{key: m[key] for key in TEMPLATE_KEYS if key in m} for m in messages] for messages in conversations
    ]
    if CHAT_TEMPLATE not in tokenizer.chat_template:  # a model's own takes arguments of tools for objects
        renderable = [[_with_arguments(message) for message in messages] for messages in renderable]
    try:
        return (
            tokenizer.apply_chat_template(renderable, tokenize=False, add_generation_prompt=prompt)
            if renderable
            else []
        )
    except (JinjaError, TypeError) as error:
        roles = ", ".join(dict.fromkeys(m["role"] for m in conversations[0]))
        raise Refused(
            f"expected a chat template that renders messages of the roles {roles}, got its error: {error}"
        ) from error


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """With what its tools are called with as objects, which logs and OpenAI's API have as JSON in a text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    given = function.get("arguments") if isinstance(function, dict) else None
    try:
        arguments = json.loads(given) if isinstance(given, str) else None
    except ValueError:
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


@lru_cache
def _any_of(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)")


def _defused(value: Any, special: re.Pattern[str]) -> Any:
    """`value` with a word joiner (invisible) inside whatever would become a special token: someone who types
    <|end|> must not end the turn."""
    if isinstance(value, str):
        return (
            special.sub(lambda match: f"{match[0][0]}\u2060{match[0][1:]}", value)
            if special.search(value)
            else value
        )
    if isinstance(value, dict):
        return {key: _defused(item, special) for key, item in value.items()}
    return [_defused(item, special) for item in value] if isinstance(value, list | tuple) else value


def _encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
