"""The models of a server: loaded, drawn for new chats, and replaced while requests run."""

from __future__ import annotations

import hashlib
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_dialog.data.tokenize import load_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.models.checkpoint import lengths_of, method_name, resolve
from rl_dialog.models.policy import Lengths
from rl_dialog.serving.engine import Engine, load_engine
from rl_dialog.serving.process import EngineProcess
from rl_dialog.serving.settings import ServeSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SIZES = ("slots", "kept", "queue", "piece", "device")  # settings that an engine is made with
ASSIGNED = "assigned"  # the model name that asks for the one drawn for a chat


@dataclass(frozen=True)
class Served:
    """One model that answers."""

    name: str
    checkpoint: str
    method: str
    engine: Engine | EngineProcess
    tokenizer: PreTrainedTokenizerFast
    loaded: float  # when, in seconds since 1970
    written: int = 0  # when its files were, before it was loaded (`_written`)
    lengths: Lengths | None = None  # that it has learned to read, where that is less than its context

    @property
    def has_values(self) -> bool:
        """Are there Q and V for every token?"""
        heads = self.engine.method.heads
        return bool(heads.q and heads.v)

    @property
    def words(self) -> str:
        """Its tokenizer, to see whether another model's is the same."""
        return self.tokenizer.backend_tokenizer.to_str()

    def most_tokens(self, settings: ServeSettings) -> int:
        """The longest reply that a request may ask for."""
        return min(settings.most_tokens or self.engine.context, self.engine.context - 1)


class Models:
    """The models by name. `update` loads, replaces and removes them; a request keeps the one it began
    with."""

    def __init__(self, settings: ServeSettings, *, died: Callable[[], None] | None = None) -> None:
        """died: called when the process of an engine ends unasked."""
        if not settings.apart:
            if settings.threads:
                torch.set_num_threads(settings.threads)
            sys.setswitchinterval(
                0.0005
            )  # else each step of a request waits up to 5 ms until an engine's thread lets Python go
        self.settings, self.died = settings, died
        self.served = {
            name: self._load(name, checkpoint, settings) for name, checkpoint in settings.models.items()
        }
        self._updating = threading.Lock()

    def update(self, settings: ServeSettings) -> None:
        """Makes the models those of `settings`. New ones are loaded first, then take over at once; replaced
        ones finish what they have."""
        with self._updating:
            before = self.served
            same = all(getattr(settings, name) == getattr(self.settings, name) for name in SIZES)
            after: dict[str, Served] = {}
            try:
                for name, path in settings.models.items():
                    stays = same and name in before and _is_same(before[name], resolve(path))
                    after[name] = before[name] if stays else self._load(name, path, settings)
            except BaseException:
                for new in after.values():
                    if new not in before.values():
                        new.engine.close()
                raise
            self.served, self.settings = after, settings
        for old in before.values():
            if old not in after.values():
                threading.Thread(
                    target=old.engine.close,
                    kwargs={"drain": settings.drain},
                    name=f"drain {old.name}",
                    daemon=True,
                ).start()

    def draw(self, participant: str) -> tuple[str, float]:
        """The model that a participant gets, and the probability that it had: random among participants by
        the split's weights, and for each always the same one as long as models and split stay."""
        shares = self._shares()
        hashed = hashlib.sha256("\n".join([*shares, participant]).encode(errors="surrogatepass")).digest()
        drawn, sums = int.from_bytes(hashed[:8]) / 2**64, itertools.accumulate(shares.values())
        found = (name for name, upper in zip(shares, sums, strict=True) if drawn < upper)
        name = next(found, next(iter(shares)))
        return name, shares[name]

    def compared(self) -> list[Served]:
        """The models that may be drawn."""
        return [self.served[name] for name in self._shares()]

    def blind(self) -> bool:
        """Are models compared? Then nothing may tell which of them answers."""
        return len(self._shares()) > 1

    def shows_values(self, name: str, *, assigned: bool) -> bool:
        """Whether the page may offer the values of a chat with this model."""
        return name in self.served and self.served[name].has_values and not (assigned and self.blind())

    def _shares(self) -> dict[str, float]:
        """The probability of each model that may be drawn."""
        split = self.settings.split
        weights = {name: split.get(name, 0.0) if split else 1.0 for name in self.served}
        total = sum(weights.values())
        shares = {name: weight / total for name, weight in weights.items() if weight > 0}
        return shares or dict.fromkeys(list(self.served)[:1], 1.0)

    def healthy(self) -> bool:
        return all(model.engine.healthy() for model in self.served.values())

    def close(self) -> None:
        """Ends every engine; running requests have `drain` seconds."""
        threads = [
            threading.Thread(target=model.engine.close, kwargs={"drain": self.settings.drain})
            for model in self.served.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _load(self, name: str, checkpoint: str, settings: ServeSettings) -> Served:
        """A checkpoint with an engine of its own. Raises UserError for one that cannot be loaded or
        served."""
        if name == ASSIGNED:
            raise UserError(
                f"expected another name for a model than {ASSIGNED!r}, which asks for the model drawn for a "
                "chat"
            )
        place = resolve(checkpoint)
        written = _written(place)
        options = {name: getattr(settings, name) for name in SIZES}
        engine = (
            EngineProcess(place, threads=settings.threads, died=self.died, **options)
            if settings.apart
            else load_engine(place, **options)
        )
        method = method_name(engine.method)
        logging.getLogger(__name__).info("model %s: %s, %s", name, place, method)
        tokenizer, lengths = load_tokenizer(place), lengths_of(place)
        return Served(name, place, method, engine, tokenizer, time.time(), written, lengths)


def _is_same(model: Served, place: str) -> bool:
    """Is what is there now what was loaded? One whose files are gone stays."""
    return model.checkpoint == place and _written(place) in (model.written, 0)


def _written(place: str) -> int:
    """When the newest of a checkpoint's files was written, in nanoseconds since 1970; 0 without files."""
    files = Path(place).iterdir() if Path(place).is_dir() else ()
    return max((path.stat().st_mtime_ns for path in files), default=0)
