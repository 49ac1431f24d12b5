"""Tokens to the text a client may see so far: whole characters, nothing behind a stop sequence, no white
space around the reply."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TextStream:
    """One reply as it grows. `text` is what may be shown; it only ever gets longer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop: tuple[str, ...] = ()) -> None:
        self.stop, self.stopped, self.text = stop, False, ""
        self._backend, self._stream = tokenizer.backend_tokenizer, DecodeStream(skip_special_tokens=True)
        self._whole = ""  # all characters that are complete

    def add(self, token: int) -> str:
        """Takes the next token; returns its own characters, none while a character needs more tokens."""
        piece = _plain(self._characters(token))
        self._take(piece)
        self.text = self._shown()
        return piece

    def end(self, whole: str) -> None:
        """No more tokens come; `whole` is the decoded reply. Shows what was held back."""
        whole = _plain(whole)
        if not self.stopped and whole.startswith(self._whole):
            self._take(whole[len(self._whole) :])  # tokens that never became a character
        self.text = self._whole.strip()

    def _characters(self, token: int) -> str:
        try:
            return self._stream.step(self._backend, token) or ""
        # Single bytes that are no character together take back one that was read: what was shown stays, and
        # it goes on from here.
        except Exception:
            self._stream = DecodeStream(ids=[token], skip_special_tokens=True)
            return "\ufffd" + self._backend.decode([token], skip_special_tokens=True)

    def _take(self, piece: str) -> None:
        """What was said grows by `piece`, up to the first stop sequence."""
        searched = max(0, len(self._whole) - max(map(len, self.stop), default=0))
        self._whole += piece
        found = [place for word in self.stop if (place := self._whole.find(word, searched)) >= 0]
        if found:
            self.stopped, self._whole = True, self._whole[: min(found)]

    def _shown(self) -> str:
        """Without what may turn out to be the beginning of a stop sequence or the end of the reply."""
        shown = self._whole
        if not self.stopped:
            held = max(
                (n for word in self.stop for n in range(1, len(word)) if shown.endswith(word[:n])), default=0
            )
            shown = shown[: len(shown) - held]
        return shown.strip()


def _plain(text: str) -> str:
    """Without NUL, which no database can hold."""
    return text.replace("\0", "\ufffd")
