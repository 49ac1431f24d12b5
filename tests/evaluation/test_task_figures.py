"""Figures of played task-oriented dialogs."""

from types import SimpleNamespace

from rl_dialog.evaluation.task_figures import headline, table, task_figures


def outcome(success, domains, *, book_rate=None):
    shares = {
        "success_strict": success,
        "complete": True,
        "inform_precision": 0.5,
        "inform_f1": 0.6,
        "turns": 4,
        "total": 20.0,
    }
    return SimpleNamespace(success=success, domains=domains, book_rate=book_rate, **shares)


def test_what_does_not_apply_is_left_out_of_a_mean():
    """Two dialogs, of which one has a hotel in its goal and one asked for something."""
    found = task_figures(
        [outcome(True, {"hotel": True}), outcome(False, {"train": False})], [(1.0, 0.5, 2 / 3), None]
    )
    assert found["success"]["value"] == 0.5 and found["success"]["dialogs"] == 2
    assert found["inform_recall"] == {"value": 0.5, "low": None, "high": None, "dialogs": 1}
    assert found["book_rate"] == {"value": None, "low": None, "high": None, "dialogs": 0}
    assert found["success/hotel"]["value"] == 1.0 and found["success/train"]["value"] == 0.0
    assert "success/hotel" not in headline(found) and headline(found)["turns"] == 4.0


def test_the_table_leaves_out_what_does_not_apply():
    shown = table(
        {
            "success": {"value": 1.0, "low": None, "high": None, "dialogs": 2},
            "book_rate": {"value": None, "low": None, "high": None, "dialogs": 0},
        }
    )
    assert "success" in shown and "book_rate" not in shown
