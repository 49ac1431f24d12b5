"""What a hierarchical model (hierarchical.py) computes of a flat row of tokens, message by message:

    u_m = the encoder GRU's state behind message m
    c_m = the context GRU's state behind u_0 .. u_m (VHCR: behind [u, z_conv] of each)
    z_m ~ N(mu(c_m-1), sigma^2(c_m-1))        VHRED and VHCR; VHCR's also knows z_conv ~ N(0, I)
    d_m = tanh(W [c_m-1, z_m, z_conv])        the decoder GRU's start in message m
    e_t + W' [c_m-1, z_m, z_conv]             what it reads at each word e_t of it

Read at its start alone, as in the code of 2019, a context is soon forgotten: the decoder learns what is said
anywhere first, and then no gradient asks what was said before. Serban et al.'s decoder has it at each word.

The state in which a message's end was read is the first one of the next message; the decoder's first input
there is the end of the message before.

Latents are drawn from the prior with noise that follows from `noise` (B,), a seed for each row, and the
message's number; without seeds they are the prior's mean. In training they come from the posterior (`learn`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from rl_dialog.data.taught import sizes
from rl_dialog.errors import UserError
from rl_dialog.models.hierarchical_config import HierarchicalConfig
from rl_dialog.models.latents import Gaussian, LatentTerms, Normal, noise_of
from rl_dialog.models.message_chunk import Chunk
from rl_dialog.models.message_heads import MessageHeads
from rl_dialog.models.recurrent_state import MessageStates, State, StateSlots

OF_CONVERSATION = -1  # the number of z_conv among a row's latents
# How loud latents are to a new decoder, beside the context: as loud, their noise drowns it, and a posterior
# that has read the message saves the decoder from asking what was said before it.
LATENTS_HEARD = 0.1


@dataclass
class Drawn:
    """The latents of a chunk's messages."""

    message: Tensor  # (B, K + 1, Z)
    conversation: Tensor  # (B, C)
    terms: LatentTerms | None = None  # of a pass that draws from the posterior
    of_replies: Tensor | None = None  # (R, Z) the latents of Replies
    logp: Tensor | None = None  # (R,) their log-density under the prior; no gradient through them


@dataclass
class Learning:
    """What a pass learns from: targets (B, T), true where the next token counts."""

    targets: Tensor
    messages: Tensor | None = None  # (M,) int64: flat positions behind messages that teachers speak of


@dataclass
class Replies:
    """Replies in the rows of a pass that have latents of their own; other messages' are their means."""

    starts: Tensor  # (R,) int64: the flat position b*T + t of the state in which each one begins
    noise: Tensor | None  # (R,) int64: the seed of each latent
    # (R, Z): the latents whose density is asked for, and without noise those that words are said with
    latents: Tensor | None


class HierarchicalPreTrained(PreTrainedModel):
    """How the weights begin: orthogonal inside the GRUs, whose gates lean to keeping what they hold; small
    where the decoder reads latents."""

    config_class = HierarchicalConfig
    base_model_prefix = "model"
    _supports_sdpa = True  # it has no attention; a loader that asks for this one may have it

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.GRU):
            for name, parameter in module.named_parameters():
                if "weight_hh" in name:
                    for gate in parameter.chunk(3):
                        nn.init.orthogonal_(gate)
                elif "weight" in name:
                    nn.init.xavier_uniform_(parameter)
                else:
                    nn.init.zeros_(parameter)
                    if "bias_hh" in name:
                        parameter.chunk(3)[1].fill_(1.0)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if isinstance(module, Known):
                module.weight[:, self.config.hidden_size :] *= LATENTS_HEARD
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, Blank):
            nn.init.normal_(module.vector, std=self.config.initializer_range)


class Blank(nn.Module):
    """A learned vector that stands where something was dropped."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(size))

    def forward(self, values: Tensor, rate: float) -> Tensor:
        """values (..., H), each vector of them replaced by a coin of its own."""
        if not rate:
            return values
        dropped = torch.rand(values.shape[:-1], device=values.device) < rate
        return torch.where(dropped[..., None], self.vector, values)


class Known(nn.Linear):
    """Of what a decoder knows of its message: the context's H numbers, then the latents."""


class HierarchicalModel(HierarchicalPreTrained):
    """Encoder, context and decoder. Hidden states (B, T, H) are those of the decoder."""

    def __init__(self, config: HierarchicalConfig) -> None:
        super().__init__(config)
        hidden, layers, drop = config.hidden_size, config.num_hidden_layers, config.dropout
        message, conversation = config.message_latent, config.conversation_latent
        between = {"num_layers": layers, "dropout": drop if layers > 1 else 0.0, "batch_first": True}
        self.embedding = nn.Embedding(config.vocab_size, hidden)
        self.dropout = nn.Dropout(drop)
        self.encoder = nn.GRU(hidden, hidden, **between)
        self.context = nn.GRU(hidden + conversation, hidden, batch_first=True)
        self.decoder = nn.GRU(hidden, hidden, **between)
        self.start = Known(hidden + message + conversation, layers * hidden)
        reads = config.decoder_reads_context
        self.reminder = Known(hidden + message + conversation, hidden) if reads else None
        self.unknown_word = Blank(hidden) if config.word_drop else None
        self.unknown_message = Blank(hidden) if config.sentence_drop else None
        if message:
            self.prior = Gaussian(hidden + conversation, hidden, message)
            self.posterior = Gaussian(2 * hidden + conversation, hidden, message)
            self.words = nn.Linear(message, hidden) if config.bow_weight else None
        if conversation:
            self.first_context = nn.Linear(conversation, hidden)
            self.overview = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
            self.conversation_posterior = Gaussian(2 * hidden, hidden, conversation)
        self.message_heads = MessageHeads(hidden, *sizes(config.teachers)) if config.teachers else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: MessageStates | StateSlots | None = None,
        use_cache: bool | None = None,
        noise: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states behind tokens (B, T), latents from the prior.

        attention_mask (B, T or more, of which the last T count): padding, on either side, is passed over;
        noise (B,) int64: see above.
        """
        cache = past_key_values
        wanted = self.config.use_cache if use_cache is None else use_cache
        if not isinstance(cache, StateSlots) and (wanted or cache is not None):
            cache = MessageStates.around(cache, 0)
        state = cache.load() if cache is not None else None
        hidden, state, _ = self._run(input_ids, attention_mask, state, noise, None)
        if cache is not None:
            cache.keep(state, input_ids.shape[1])
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache)

    def learn(
        self, input_ids: Tensor, attention_mask: Tensor, noise: Tensor, learning: Learning
    ) -> tuple[Tensor, LatentTerms]:
        """The hidden states of whole rows (B, T), with latents from the posterior, and what the bound takes
        off for them in the messages that are learned. In training mode words and messages are dropped."""
        hidden, _, drawn = self._run(input_ids, attention_mask, None, noise, learning)
        return hidden, drawn.terms

    def said(
        self, input_ids: Tensor, attention_mask: Tensor, replies: Replies
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The hidden states of whole rows (B, T, H) in which each reply has its own latent, as when it was
        said; the latents (R, Z), and their log-density under the prior (R,), whose gradient does not go
        through them. Raises UserError for latents of conversations, which no two replies of a row share."""
        if self.config.latent != "message":
            raise UserError(f"expected latents of messages, got latent {self.config.latent}")
        hidden, _, drawn = self._run(input_ids, attention_mask, None, None, None, replies)
        return hidden, drawn.of_replies, drawn.logp

    def empty(self, rows: int) -> State:
        """The state of so many conversations that have not begun."""
        config, like = self.config, self.embedding.weight
        layers = like.new_zeros(rows, config.num_hidden_layers, config.hidden_size)
        return State(
            layers,
            like.new_zeros(rows, config.hidden_size),
            layers.clone(),
            like.new_zeros(rows, config.hidden_size if config.decoder_reads_context else 0),
            like.new_zeros(rows, config.conversation_latent),
            torch.zeros(rows, dtype=torch.int64, device=like.device),
            torch.zeros(rows, dtype=torch.bool, device=like.device),
        )

    def new_slots(self, slots: int, context: int, others: tuple[StateSlots, ...] = ()) -> StateSlots:
        """Room for the states of so many conversations. One whose latent follows from the noise of its first
        turn cannot go on with other noise."""
        resumes = not self.config.conversation_latent
        return StateSlots(
            self.empty(slots), context, self.config.message_end_ids, resumes=resumes, others=others
        )

    def _run(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        state: State | None,
        noise: Tensor | None,
        learning: Learning | None,
        replies: Replies | None = None,
    ) -> tuple[Tensor, State, Drawn]:
        """In float32 also under autocast: a state is a sum over many tokens."""
        width = input_ids.shape[1]
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -width:]
        state = self.empty(len(input_ids)) if state is None else state
        ends = torch.tensor(self.config.message_end_ids, device=input_ids.device)
        chunk = Chunk.of(input_ids, real.bool(), ends)
        kernels = self.training or not torch.is_grad_enabled()  # cuDNN has gradients in training mode only
        with torch.autocast(input_ids.device.type, enabled=False), _cudnn(kernels):
            return self._read(input_ids, chunk, state, noise, learning, replies)

    def _read(
        self,
        input_ids: Tensor,
        chunk: Chunk,
        state: State,
        noise: Tensor | None,
        learning: Learning | None,
        replies: Replies | None,
    ) -> tuple[Tensor, State, Drawn]:
        rows = torch.arange(len(input_ids), device=input_ids.device)
        words = self.dropout(self.embedding(input_ids[chunk.real]))  # (N, H)
        encoded = self._encode(chunk, words, state)  # (B, K + 1, L, H)
        messages = encoded[:, :, -1]
        conversation, of_conversation = self._conversation(chunk, messages, state, noise, learning)
        contexts = self._contexts(chunk, messages, state, conversation, learning)  # (B, K + 1, H)
        drawn = self._draw(chunk, contexts, messages, conversation, state, noise, learning, replies)
        if learning and drawn.terms and of_conversation is not None:
            drawn.terms = _with_conversation(drawn.terms, of_conversation)
        if learning and learning.messages is not None:
            drawn.terms = replace(drawn.terms, contexts=_behind(learning.messages, chunk, contexts))
        hidden, decoder, reminder = self._decode(chunk, words, contexts, drawn, state, learning)
        after = State(
            encoded[rows, chunk.ends],
            contexts[rows, chunk.ends],
            decoder,
            reminder,
            conversation,
            state.message + chunk.ends,
            torch.ones_like(state.begun),
        )
        return hidden, after.where(chunk.real.any(1), state), drawn

    def _encode(self, chunk: Chunk, words: Tensor, state: State) -> Tensor:
        """(B, K + 1, L, H) the encoder's state at the end of each message, of the one that goes on last;
        zeros where none has begun."""
        pieces = chunk.pieces(chunk.read_in)
        goes_on = pieces.keys % chunk.width == 0
        starts = state.encoder[pieces.keys // chunk.width] * goes_on[:, None, None]
        _, last = pieces.run(self.encoder, words, starts)
        every = last.new_zeros(len(chunk.real) * chunk.width, *last.shape[1:])
        return every.index_copy(0, pieces.keys, last).unflatten(0, (len(chunk.real), chunk.width))

    def _conversation(
        self,
        chunk: Chunk,
        messages: Tensor,
        state: State,
        noise: Tensor | None,
        learning: Learning | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """z_conv (B, C), and of a posterior its KL and log p(z) - log q(z), each (B,)."""
        size = self.config.conversation_latent
        if not size:
            return state.conversation, None
        number = torch.full((len(messages), 1), OF_CONVERSATION, device=messages.device)
        unit = Normal(torch.zeros_like(state.conversation), torch.ones_like(state.conversation))
        draw = noise_of(noise, number, size)
        draw = None if draw is None else draw[:, 0]
        if learning is None:
            return torch.where(state.begun[:, None], state.conversation, unit.at(draw)), None
        lengths = _read_messages(chunk)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.dropout(messages), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, last = self.overview(packed)
        q = self.conversation_posterior(last.transpose(0, 1).flatten(1))
        z = q.at(draw)
        return z, (q.kl(unit), unit.logp(z) - q.logp(z))

    def _contexts(
        self,
        chunk: Chunk,
        messages: Tensor,
        state: State,
        conversation: Tensor,
        learning: Learning | None,
    ) -> Tensor:
        """(B, K + 1, H) the context in which each message is said."""
        first = state.context
        if self.config.conversation_latent:
            first = torch.where(state.begun[:, None], first, self.first_context(conversation).tanh())
        if chunk.width == 1:
            return first[:, None]
        inputs = self.dropout(messages[:, :-1])
        if learning and self.training and self.unknown_message is not None:
            inputs = self.unknown_message(inputs, self.config.sentence_drop)
        beside = conversation[:, None].expand(-1, chunk.width - 1, -1)
        states, _ = self.context(torch.cat([inputs, beside], 2), first[None].contiguous())
        return torch.cat([first[:, None], states], 1)

    def _draw(
        self,
        chunk: Chunk,
        contexts: Tensor,
        messages: Tensor,
        conversation: Tensor,
        state: State,
        noise: Tensor | None,
        learning: Learning | None,
        replies: Replies | None,
    ) -> Drawn:
        """The latent of each message."""
        size = self.config.message_latent
        if not size:
            terms = LatentTerms(contexts.new_zeros(0)) if learning else None
            return Drawn(contexts.new_zeros(*contexts.shape[:2], 0), conversation, terms)
        numbers = state.message[:, None] + chunk.numbers
        draw = noise_of(noise, numbers, size)
        beside = conversation[:, None].expand(-1, chunk.width, -1)
        prior = self.prior(contexts, beside)
        if replies is not None:
            return _drawn_for(replies, prior, chunk, numbers, conversation)
        if learning is None:
            return Drawn(prior.at(draw), conversation)
        posterior = self.posterior(contexts, messages, beside)
        z = posterior.at(draw)
        learned = _messages_with(learning.targets, chunk)
        importance = (prior.logp(z) - posterior.logp(z))[learned]
        words = None
        if self.words is not None:
            words = self.words(z).tanh().gather(1, _across(chunk.said_from, self.config.hidden_size))
        rows = learned.nonzero()[:, 0]
        kl, means = posterior.kl(prior)[learned], posterior.mean[learned]
        return Drawn(z, conversation, LatentTerms(kl, means, rows, None, words, importance))

    def _decode(
        self,
        chunk: Chunk,
        words: Tensor,
        contexts: Tensor,
        drawn: Drawn,
        state: State,
        learning: Learning | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The decoder's states (B, T, H) behind every token, zeros at padding, all its layers' at the end
        (B, L, H), and what it reads beside the words of the message that goes on there (B, H)."""
        beside = drawn.conversation[:, None].expand(-1, chunk.width, -1)
        known = torch.cat([contexts, drawn.message, beside], 2)
        starts = self.start(known).tanh()
        starts = starts.unflatten(2, (self.config.num_hidden_layers, -1))  # (B, K + 1, L, H)
        going_on = torch.where(state.begun[:, None, None], state.decoder, starts[:, 0])
        starts = torch.cat([going_on[:, None], starts[:, 1:]], 1).flatten(0, 1)
        if learning and self.training and self.unknown_word is not None:
            words = self.unknown_word(words, self.config.word_drop)
        reminders = state.reminder[:, None].expand(-1, chunk.width, -1)
        if self.reminder is not None:
            reminders = self.reminder(known)  # (B, K + 1, H)
            going_on = torch.where(state.begun[:, None], state.reminder, reminders[:, 0])
            reminders = torch.cat([going_on[:, None], reminders[:, 1:]], 1)
            words = words + reminders[chunk.real.nonzero()[:, 0], chunk.said_from[chunk.real]]
        pieces = chunk.pieces(chunk.said_from)
        said, last = pieces.run(self.decoder, words, starts[pieces.keys])
        hidden = said.new_zeros(*chunk.real.shape, said.shape[1])
        hidden[chunk.real] = self.dropout(said)
        every = starts.index_copy(0, pieces.keys, last).unflatten(0, (len(chunk.real), chunk.width))
        at_end = torch.arange(len(every), device=every.device), chunk.ends
        return hidden, every[at_end], reminders[at_end]


def _drawn_for(replies: Replies, prior: Normal, chunk: Chunk, numbers: Tensor, conversation: Tensor) -> Drawn:
    """Latents of the messages that are replies as those have them. numbers (B, K + 1)."""
    message = chunk.said_from.flatten()[replies.starts]
    place = replies.starts // chunk.said_from.shape[1], message
    own = Normal(prior.mean[place], prior.variance[place])
    said = asked = replies.latents
    if replies.noise is not None:
        draw = noise_of(replies.noise, numbers[place][:, None], own.mean.shape[1])
        said = own.at(draw[:, 0])
        asked = said.detach() if asked is None else asked
    others = prior.mean.detach()  # no word of theirs is learned from
    return Drawn(others.index_put(place, said), conversation, None, asked, own.logp(asked))


def _with_conversation(terms: LatentTerms, of_conversation: tuple[Tensor, Tensor]) -> LatentTerms:
    kl, importance = of_conversation
    return replace(terms, conversation_kl=kl, conversation_importance=importance)


def _read_messages(chunk: Chunk) -> Tensor:
    """(B,) how many messages a row has begun to read, at least one."""
    return torch.where(chunk.real, chunk.read_in, 0).amax(1) + 1


def _messages_with(targets: Tensor, chunk: Chunk) -> Tensor:
    """(B, K + 1) bool: the messages said in states that are in `targets` (B, T)."""
    counts = torch.zeros(len(targets), chunk.width, device=targets.device)
    return counts.scatter_add(1, chunk.said_from, targets.float()) > 0


def _behind(positions: Tensor, chunk: Chunk, contexts: Tensor) -> Tensor:
    """(M, H) the context's state behind each flat position (M,), of contexts (B, K + 1, H)."""
    message = chunk.said_from.flatten()[positions]
    return contexts[positions // chunk.said_from.shape[1], message]


def _across(index: Tensor, size: int) -> Tensor:
    return index[..., None].expand(*index.shape, size)


def _cudnn(enabled: bool) -> AbstractContextManager[None]:
    return nullcontext() if enabled else torch.backends.cudnn.flags(enabled=False)
