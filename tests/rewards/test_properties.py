"""What holds for every reward, whatever was said."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from rl_dialog.data.schema import Dialog
from rl_dialog.rewards import REWARDS, apply_rewards, choose_rewards
from rl_dialog.rewards.compat_2019 import COMPAT
from rl_dialog.rewards.scorers import BUILT_IN, in_batches

SAID = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["", " ", "?!", "haha you", "我喜欢狗", "not happy", "🙂", "I'm fine", "\n\n"]),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "assistant", "tool"]), "content": SAID},
    optional={
        "feedback": st.fixed_dictionaries({"vote": st.sampled_from([-1, 0, 1])}),
        "reward": st.floats(-10, 10),
        "weight": st.sampled_from([0, 1]),
    },
)
DIALOGS = st.lists(st.lists(MESSAGE, min_size=1, max_size=8), min_size=1, max_size=5)


def talks(drawn):
    allowed = {"assistant": {"role", "content", "feedback", "reward", "weight"}}
    strip = lambda m: {k: v for k, v in m.items() if k in allowed.get(m["role"], {"role", "content"})}  # noqa: E731
    return [
        Dialog(
            id=f"d{n}", messages=[strip(message) for message in messages], meta={"ratings": {"quality": n}}
        )
        for n, messages in enumerate(drawn)
    ]


@given(DIALOGS)
@settings(max_examples=200, deadline=None)
def test_one_finite_number_or_none_per_reply(drawn):
    for dialog in talks(drawn):
        for name, reward in {
            **REWARDS,
            **{
                f"{compat} {n}": function
                for compat, known in COMPAT.items()
                for n, (function, _) in known.items()
            },
        }.items():
            values = reward(dialog)
            assert len(values) == len(dialog.replies), name
            assert all(value is None or math.isfinite(value) for value in values), (name, values)


@given(DIALOGS, st.randoms())
@settings(max_examples=100, deadline=None)
def test_neither_the_order_of_the_dialogs_nor_how_they_are_grouped_matters(drawn, random):
    weights = dict.fromkeys(REWARDS, 1.0)
    rewards = choose_rewards(weights)
    alone = {dialog.id: apply_rewards(dialog, rewards, weights).tolist() for dialog in talks(drawn)}
    shuffled = talks(drawn)
    random.shuffle(shuffled)
    together = in_batches(shuffled, list(rewards.values()), list(BUILT_IN.values()))
    found = {dialog.id: apply_rewards(dialog, rewards, weights).tolist() for dialog in together}
    assert str(found) == str(
        {dialog.id: alone[dialog.id] for dialog in shuffled}
    )  # as text, because NaN is not itself
