"""What a run with preferences tells of itself."""

from rl_dialog.cluster.preferences import unknown_labels


def test_a_reward_that_knows_more_labels_than_were_counted_is_not_ahead_of_them():
    """The teacher reads the log after the asker has counted: the curve of staleness fell below 0."""
    assert [unknown_labels({"labels": 20}, known) for known in (15, 20, 21)] == [5, 0, 0]
    assert unknown_labels({}, 0) == 0
