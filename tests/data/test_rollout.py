"""What was sampled is what is trained: rows from ids, by where each came from."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rl_dialog.data.batch import collate
from rl_dialog.data.rollout import Spoken, rollout_rows

U, A, END = 90, 91, 92


def said(prompt, ids, first=0.0) -> Spoken:  # noqa: ANN001
    return Spoken(tuple(prompt), tuple(ids), tuple(first - k for k in range(len(ids))))


def test_replies_that_go_on_stand_in_one_row() -> None:
    """The drawn end of turn is trained; what the world said and what the template added is not."""
    one = said([U, 5, END, A], [1, 2, END])
    two = said([U, 5, END, A, 1, 2, END, U, 6, END, A], [3, END], first=-7)
    (row,), (logp,) = rollout_rows([one, two], [0.5, 2.0], truncated=False)
    assert row.input_ids.tolist() == [U, 5, END, A, 1, 2, END, U, 6, END, A, 3, END]
    assert np.flatnonzero(row.assistant).tolist() == [4, 5, 6, 11, 12]
    assert row.reply_ends.tolist() == [6, 12] and row.rewards.tolist() == [0.5, 2.0] and not row.truncated
    assert logp.tolist() == [0, -1, -2, -7, -8]
    batch = collate([row])
    assert batch.actions.tolist() == [1, 2, END, 3, END]
    assert batch.rewards.tolist() == [0, 0, 0.5, 0, 2.0]


def test_replies_keep_the_seeds_of_their_latents() -> None:
    """In whichever row they come to stand, beside others' rows, padded or not; rows without have none."""
    ids = [([U, 5, END, A], [1, 2, END]), ([U, 5, END, A, 1, 2, END, U, 6, END, A], [3, END])]
    ids.append(([U, 7, END, A], [4, END]))
    spoken = [replace(said(*each), latent_seed=2**62 + k) for k, each in enumerate(ids)]
    rows, _ = rollout_rows(spoken, [0.0, 1.0, 2.0], truncated=False)
    assert [row.latent_seeds.tolist() for row in rows] == [[2**62, 2**62 + 1], [2**62 + 2]]
    batch = collate([rows[1], rows[0]])
    assert batch.reply_noise.tolist() == [2**62 + 2, 2**62, 2**62 + 1]
    assert batch.rewards[batch.turn_end].tolist() == [2.0, 0.0, 1.0]
    plain, _ = rollout_rows([said(*each) for each in ids], [0.0, 1.0, 2.0], truncated=False)
    assert not any(len(row.latent_seeds) for row in plain) and collate(plain).reply_noise is None


def test_an_end_that_was_appended_is_read_and_not_trained() -> None:
    """The first reply was cut off; the template ends it before the user goes on."""
    one = said([U, A], [1, 2])
    two = said([U, A, 1, 2, END, U, A], [3, END])
    (row,), _ = rollout_rows([one, two], [0.0, 1.0], truncated=False)
    assert np.flatnonzero(row.assistant).tolist() == [2, 3, 7, 8]
    assert row.input_ids[4] == END and not row.assistant[4] and row.reply_ends.tolist() == [3, 8]


@pytest.mark.parametrize(
    "prompt",
    [
        [U, A, 1, END, U, A],  # the template left a thought (2) out of the past
        [U, A, 7, END, U, A],  # the text of 1 2 is rendered as another token
        [U, A],  # older messages did not fit any more
        [U, A, 1, 2],  # shorter than what was read and said
    ],
)
def test_a_rewritten_past_begins_a_row_of_its_own(prompt: list[int]) -> None:
    """What was really read stands there, and each token is trained once."""
    one, two = said([U, A], [1, 2, END]), said(prompt, [3, END])
    rows, logp = rollout_rows([one, two], [0.5, 1.0], truncated=False)
    assert [row.input_ids.tolist() for row in rows] == [[U, A, 1, 2, END], [*prompt, 3, END]]
    assert [row.input_ids[row.assistant].tolist() for row in rows] == [[1, 2, END], [3, END]]
    assert [row.truncated for row in rows] == [True, False]
    assert [row.rewards.tolist() for row in rows] == [[0.5], [1.0]]
    assert [len(each) for each in logp] == [3, 2]


def test_a_cut_off_episode_ends_in_what_would_have_been_read() -> None:
    one = said([U, A], [1, END])
    (row,), _ = rollout_rows([one], [1.0], truncated=True, next_prompt=[U, A, 1, END, U, 5, A])
    assert row.truncated and row.input_ids.tolist() == [U, A, 1, END, U, 5, A]
    assert np.flatnonzero(row.assistant).tolist() == [2, 3]
    batch = collate([row])
    assert batch.states.tolist() == [1, 2, 6]  # the two decisions, and the state that only bootstraps
    (row,), _ = rollout_rows([one], [1.0], truncated=True, next_prompt=[U, 9, 1, END, U, 5, A])
    assert row.input_ids.tolist() == [U, A, 1, END]  # rewritten: the state is read apart from the row
    assert collate([row], bootstraps=True).input_ids.tolist()[1] == [U, 9, 1, END, U, 5, A]
    (row,), _ = rollout_rows([one], [math.nan], truncated=False, next_prompt=[U, A, 1, END, U, 5, A])
    assert row.input_ids.tolist() == [U, A, 1, END] and math.isnan(row.rewards[0])


def test_an_episode_without_replies_has_no_rows() -> None:
    assert rollout_rows([], [], truncated=True, next_prompt=[U, A]) == ((), ())
