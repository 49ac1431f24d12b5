"""The settings of a hierarchical model (hierarchical.py), as they stand in a checkpoint's config.json."""

from __future__ import annotations

from typing import Any, Literal

from transformers import PretrainedConfig

from rl_dialog.errors import UserError

Latent = Literal["none", "message", "conversation"]


class HierarchicalConfig(PretrainedConfig):
    """H hidden numbers in `num_hidden_layers` GRUs each of encoder and decoder; `latent` says which of the
    three models it is: none (HRED), message (VHRED), conversation (VHCR); `decoder_reads_context` whether its
    decoder has context and latents at each word, as new ones do, or at its start alone; `output_bias` whether
    each word has a level of its own among the logits. Older checkpoints, whose config.json names neither,
    have neither."""

    model_type = "hierarchical"

    def __init__(
        self,
        vocab_size: int = 258,
        hidden_size: int = 128,
        num_hidden_layers: int = 1,
        message_end_ids: tuple[int, ...] = (1,),
        latent: Latent = "none",
        latent_size: int = 32,
        decoder_reads_context: bool = False,
        output_bias: bool = False,
        dropout: float = 0.0,
        word_drop: float = 0.0,
        sentence_drop: float = 0.0,
        kl_annealing: float = 0.0,
        free_bits: float = 0.0,
        bow_weight: float = 0.0,
        emotion_weight: float = 0.0,
        embedding_weight: float = 0.0,
        teachers: dict[str, dict[str, Any]] | None = None,
        initializer_range: float = 1.0,
        max_position_embeddings: int = 1024,
        **options: Any,
    ) -> None:
        options.setdefault("tie_word_embeddings", False)
        super().__init__(**options)
        if not message_end_ids or latent not in ("none", "message", "conversation"):
            raise UserError(
                "expected ids of tokens that end a message, and latent none, message or conversation, got "
                f"{list(message_end_ids)} and {latent!r}"
            )
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.message_end_ids, self.latent, self.latent_size = list(message_end_ids), latent, latent_size
        self.decoder_reads_context, self.output_bias = decoder_reads_context, output_bias
        self.dropout, self.word_drop, self.sentence_drop = dropout, word_drop, sentence_drop
        self.kl_annealing, self.free_bits, self.bow_weight = kl_annealing, free_bits, bow_weight
        self.emotion_weight, self.embedding_weight = emotion_weight, embedding_weight
        self.teachers = dict(teachers or {})  # whose predictions those weigh, as the data's manifest has them
        self.initializer_range, self.max_position_embeddings = initializer_range, max_position_embeddings
        self.use_cache = True

    @property
    def message_latent(self) -> int:
        """Numbers in the latent of a message."""
        return 0 if self.latent == "none" else self.latent_size

    @property
    def conversation_latent(self) -> int:
        """Numbers in the latent of a conversation."""
        return self.latent_size if self.latent == "conversation" else 0
