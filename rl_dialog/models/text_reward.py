"""A reward model over text: a transformer with one output reads a conversation and scores its last message,
the reply.

    score(context, reply) = w . h(<|user|> ... <|end|><|assistant|> reply <|end|>)     h: the last token's
                                                                                       state of an LM, an
                                                                                       encoder's pooled one

The directory of a saved model is a `from_pretrained` directory of `AutoModelForSequenceClassification` with
num_labels 1, as TRL's reward trainer writes it, so its models load here and ours there. Scores have no zero:
preferences within a context fix differences only (Bradley and Terry 1952). Ratings of replies fix it, and
then sigmoid(score) is the probability of a good one: its config says `rated`. A model that `reads` replies
alone is one of single texts. rl_dialog/preferences/reply_fitting.py fits them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rl_dialog.data.by_length import batches
from rl_dialog.data.schema import said
from rl_dialog.data.tokenize import (
    encode_conversation,
    load_tokenizer,
    require_hub_name_or_directory,
    train_tokenizer,
)
from rl_dialog.errors import UserError
from rl_dialog.models.causal_lm import base_of_adapter, config_of, open_causal_lm
from rl_dialog.models.checkpoint import resolve, start_of
from rl_dialog.models.language_model import set_apart
from rl_dialog.models.small_encoder import small_encoder
from rl_dialog.models.weights import (
    Lacking,
    in_words,
    load_strictly,
    of_trunk,
    positions_of,
    require_readable,
    require_weights,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

BATCH = 64
MAX_TOKENS = 4096  # for models that name no limit of their own

Reads = Literal["conversation", "reply"]
Conversation = Sequence[Mapping[str, Any]]  # messages with role and content; the last one is the reply
Chain = tuple[Sequence[int], list[int]]  # tokens, and after how many of them a score is wanted


class TextReward:
    """A model with one output, its tokenizer with its chat template, and the longest input in tokens."""

    known: int | None = None  # tokens of the base, where it was given more and learned nothing yet

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, max_length: int | None = None
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        positions = positions_of(model) or MAX_TOKENS
        self.max_length = min(max_length or MAX_TOKENS, tokenizer.model_max_length, positions)

    @property
    def reads(self) -> Reads:
        """What a score depends on: the reply behind its context, or the reply alone."""
        return getattr(self.model.config, "reads", "conversation")

    @property
    def rated(self) -> bool:
        """Was it fitted to good and bad replies, so that its scores have a zero?"""
        return getattr(self.model.config, "rated", False)

    @property
    def pretrained(self) -> bool:
        """Did it begin from a model that was trained elsewhere, which long steps would make forget?"""
        return getattr(self.model.config, "pretrained", False)

    @property
    def size(self) -> int:
        """How many weights there are."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def encode(self, conversation: Conversation) -> list[int]:
        """The rendered conversation as tokens. Of a longer one the oldest messages are left out, the system
        prompt stays. Raises TemplateError."""
        messages = conversation if self.reads == "conversation" else conversation[-1:]
        plain = [{"role": message["role"], "content": said(message)} for message in messages]
        return encode_conversation(plain, self.tokenizer, max_length=self.max_length)

    def __call__(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Scores of B encoded conversations # (B,)"""
        ids, mask = self._padded_rows(rows)
        return self.model(input_ids=ids, attention_mask=mask).logits.squeeze(-1).float()

    def _padded_rows(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Tokens and mask # (B, T), (B, T). Padding is on the right, but for models as XLNet that score the
        last position whatever stands there."""
        ids = torch.full((len(rows), max(map(len, rows))), self.model.config.pad_token_id)
        mask = torch.zeros_like(ids)
        scores_last = hasattr(self.model, "sequence_summary") and self.model.config.summary_type == "last"
        for i, row in enumerate(rows):
            place = slice(-len(row), None) if scores_last else slice(len(row))
            ids[i, place], mask[i, place] = torch.tensor(row), 1
        return ids.to(self.model.device), mask.to(self.model.device)

    def chains(self, rows: Sequence[Sequence[int]]) -> list[Chain]:
        """The rows in their order, those that go on from the one before as one: a language model reads from
        left to right, so that one pass over a conversation scores each of its replies."""
        chains: list[Chain] = []
        for row in rows:
            if self._is_causal and chains and _goes_on(row, chains[-1][0]):
                chains[-1] = row, [*chains[-1][1], len(row)]
            else:
                chains.append((row, [len(row)]))
        return chains

    def along(self, chains: Sequence[Chain]) -> Tensor:
        """The E scores of all chains, one after the other # (E,)"""
        if all(ends == [len(row)] for row, ends in chains):
            return self([row for row, _ in chains])
        ids, mask = self._padded_rows([row for row, _ in chains])
        states = self.model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        owner = torch.tensor([i for i, (_, ends) in enumerate(chains) for _ in ends], device=ids.device)
        place = [self._scored(row, end) for row, ends in chains for end in ends]
        place = torch.tensor(place, device=ids.device)
        return self.model.score(states[owner, place]).squeeze(-1).float()

    def _scored(self, row: Sequence[int], end: int) -> int:
        """Where transformers reads the score of so many tokens: at the last one that is no padding, which
        TRL's models take for the end of a turn, too."""
        padding, place = self.model.config.pad_token_id, end - 1
        while place and row[place] == padding:
            place -= 1
        return place

    @property
    def _is_causal(self) -> bool:
        """Is it a language model with a head on the state of every token?"""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

        plain = isinstance(self.model, PreTrainedModel) and hasattr(self.model, "score")
        return plain and type(self.model.config) in MODEL_FOR_CAUSAL_LM_MAPPING

    @torch.inference_mode()
    def score(self, conversations: Iterable[Conversation]) -> list[float]:
        """The score of each conversation's last message, in eval mode. Conversations of similar length share
        a batch."""
        self.model.eval()
        chains = self.chains([self.encode(conversation) for conversation in conversations])
        scores: list[list[float]] = [[] for _ in chains]
        for part in batches([len(row) for row, _ in chains], BATCH):
            values = iter(self.along([chains[i] for i in part]).tolist())
            for i in part:
                scores[i] = [next(values) for _ in chains[i][1]]
        return [value for of_chain in scores for value in of_chain]

    def probabilities(self, texts: Sequence[str]) -> list[float]:
        """How likely each text, as a reply alone, is a good one, of a model that was fitted to ratings; 0 for
        an empty text."""
        places = [i for i, text in enumerate(texts) if text.strip()]
        probabilities = [0.0] * len(texts)
        scores = torch.tensor(self.score([{"role": "assistant", "content": texts[i]}] for i in places))
        for i, value in zip(places, scores.sigmoid().tolist(), strict=True):
            probabilities[i] = value
        return probabilities

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes what `from_pretrained` reads; the longest input is the tokenizer's `model_max_length`."""
        self.tokenizer.model_max_length = self.max_length
        self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> TextReward:
        """A trained reward model, ours or TRL's, in eval mode. Raises UserError for anything else."""
        from safetensors import SafetensorError
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        require_readable(path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path))
            if base_of_adapter(str(path)):
                return cls(_padded(_with_adapters_of(str(path), tokenizer), tokenizer), tokenizer).eval()
            model, lacking = load_strictly(AutoModelForSequenceClassification, str(path))
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise UserError(
                f"{path}: expected a reward model (config.json, weights, tokenizer), or a hub name of one "
                f"({error})"
            ) from error
        if lacking or model.config.num_labels != 1:
            outputs = f"there are {model.config.num_labels} outputs"
            why = f"the files have {in_words(lacking)}" if lacking else outputs
            raise UserError(
                f"{path}: expected a trained reward model with one output, got a model of which {why}: fit "
                "one with pipelines.fit_reward"
            )
        if tokenizer.chat_template is None:
            raise UserError(
                f"{path}: expected a tokenizer with a chat template, which renders context and reply as the "
                "model was trained on them"
            )
        _check_kind(model.config, str(path))
        return cls(_padded(model, tokenizer), tokenizer).eval()

    @classmethod
    def from_base(cls, base: str, *, max_length: int, reads: Reads = "conversation") -> TextReward:
        """A pretrained encoder or language model (a hub name or folder, a checkpoint of ours too) with a new
        head. Raises UserError.

        A tokenizer without a chat template gets ours. Where `base` is a reward model itself, its head goes on
        learning.
        """
        from safetensors import SafetensorError

        require_readable(base)
        tokenizer = load_tokenizer(base)
        try:
            model, lacking = _with_a_score(base)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise UserError(
                f"--model_name_or_path {base}: expected an encoder or a language model that transformers can "
                f"give a scalar head ({error})"
            ) from error
        require_weights(model, of_trunk(model, lacking), f"--model_name_or_path {base}")
        _check_kind(model.config, f"--model_name_or_path {base}")
        known = model.get_input_embeddings().num_embeddings
        _make_room(model, tokenizer)
        if not hasattr(model.config, "pretrained"):  # a reward model of ours knows
            model.config.pretrained = start_of(base) == "pretrained"
        model.config.reads, model.config.rated = reads, False
        reward = cls(_padded(model, tokenizer), tokenizer, max_length=max_length)
        reward.known = known if len(tokenizer) > known else None
        return reward

    @classmethod
    def new(
        cls,
        texts: Iterable[str],
        *,
        hidden_size: int = 64,
        num_hidden_layers: int = 2,
        vocab_size: int = 4096,
        max_length: int = 256,
        reads: Reads = "conversation",
    ) -> TextReward:
        """A small untrained encoder (ModernBERT) with a byte-level tokenizer made from the texts."""
        from transformers import ModernBertForSequenceClassification

        tokenizer = train_tokenizer(texts, vocab_size=vocab_size)
        size = {"hidden_size": hidden_size, "num_hidden_layers": num_hidden_layers}
        config = small_encoder(tokenizer, **size, max_length=max_length)
        config.classifier_pooling, config.num_labels = "mean", 1
        config.reads, config.rated, config.pretrained = reads, False, False
        return cls(ModernBertForSequenceClassification(config), tokenizer, max_length=max_length)

    def divide(self, temperature: float) -> None:
        """Divides all scores, by the weights of the head; `divided_by` of the config says by how much, over
        all times."""
        with torch.no_grad():
            for parameter in self._head().parameters():
                parameter /= temperature
        config = self.model.config  # transformers saves none with a "temperature": that is one of generation
        config.divided_by = temperature * getattr(config, "divided_by", 1.0)

    def _head(self) -> torch.nn.Linear:
        """The layer that gives the score: the last linear one with one output."""
        layers = [
            layer
            for layer in self.model.modules()
            if isinstance(layer, torch.nn.Linear) and layer.out_features == 1
        ]
        if not layers:
            expected = "expected a model with a linear layer for its score"
            raise UserError(f"--fitting.calibration: {expected}, got a {type(self.model).__name__}")
        return layers[-1]

    def eval(self) -> TextReward:
        """Without dropout; itself."""
        self.model.eval()
        return self

    def to(self, device: Any) -> TextReward:
        """On another device; itself."""
        self.model.to(device)
        return self


def check_base(base: str) -> None:
    """Raises UserError for a folder or hub name whose model cannot get a head that scores, without loading
    it."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    require_hub_name_or_directory(base)
    config = config_of(resolve(base) if Path(base).is_dir() else base)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(
            f"{base}: expected an encoder or a language model that transformers can give a scalar head, got "
            f"a {config.model_type}"
        )
    _check_kind(config, base)


def _check_kind(config: PretrainedConfig, name: str) -> None:
    """Raises UserError for an encoder with a decoder (T5, BART): transformers takes none of those batches in
    which one conversation has more turns, and so more ends of a sequence, than another."""
    if config.is_encoder_decoder:
        raise UserError(
            f"{name}: expected an encoder or a language model, got a {config.model_type}, an encoder "
            "with a decoder"
        )


def _goes_on(row: Sequence[int], before: Sequence[int]) -> bool:
    return len(row) > len(before) and list(row[: len(before)]) == list(before)


def _with_a_score(base: str) -> tuple[PreTrainedModel, Lacking]:
    """A model with a head for one number, and what its files lack; of a policy's LoRA adapters the model that
    they make."""
    from transformers import AutoModelForSequenceClassification

    if not base_of_adapter(base):
        return load_strictly(AutoModelForSequenceClassification, base, num_labels=1)
    lm = open_causal_lm(base)
    config = copy.deepcopy(lm.config)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    model.base_model.load_state_dict(lm.base_model.state_dict())
    return model, {}


def _with_adapters_of(path: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The reward model that LoRA adapters, with a head of their own, make of the model that they belong to:
    what TRL's reward trainer saves with `use_peft`."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    base = base_of_adapter(path)
    require_readable(base)
    model, lacking = load_strictly(AutoModelForSequenceClassification, base, num_labels=1)
    require_weights(model, of_trunk(model, lacking), base)
    _make_room(model, tokenizer)
    return PeftModel.from_pretrained(model, path).merge_and_unload().requires_grad_(True)


def _make_room(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Every token of the tokenizer has a row in the model."""
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))


@contextmanager
def adapters(reward: TextReward, rank: int, alpha: int) -> Iterator[None]:
    """While the block lasts only LoRA adapters of all linear layers and the head learn; in the end they are
    added to the weights. With rank 0 everything learns as it is."""
    known, reward.known = reward.known, None
    if not rank:
        yield
        return
    from peft import LoraConfig, get_peft_model

    plain = reward.model
    if known is not None:
        set_apart(plain, known)
    # The head learns as a whole; DistilBERT's has a part of its own, `pre_classifier`.
    layers = {"target_modules": "all-linear", "exclude_modules": ".*classifier"}
    config = LoraConfig(task_type="SEQ_CLS", r=rank, lora_alpha=alpha, **layers)
    reward.model = get_peft_model(plain, config)
    try:
        yield
    finally:
        reward.model = reward.model.merge_and_unload().requires_grad_(True)


def half_precision(reward: TextReward, *, on: bool) -> AbstractContextManager[Any]:
    """Computes in bfloat16 inside the block where it is `on`."""
    return torch.autocast(reward.model.device.type, torch.bfloat16, enabled=on)


def _padded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """With a padding token: language models find the last token of a reply by it."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None or model.config.pad_token_id < 0:  # -1 is none of early LLaMAs
        model.config.pad_token_id = tokenizer.pad_token_id
    return model
