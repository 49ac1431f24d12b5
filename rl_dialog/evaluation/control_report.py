"""Episodes in an environment as files: films, plots, and a table of every step."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

from rl_dialog.evaluation.control_episodes import ControlEpisode
from rl_dialog.evaluation.control_plots import episode_plot, returns_plot
from rl_dialog.evaluation.films import action_text, film, save_gif, save_mp4


def write_episodes(
    out: Path,
    episodes: Sequence[ControlEpisode],
    *,
    films: int,
    format: str,
    fps: int,
    names: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """`episode-<i>.<format>` and `.png` of the first `films` episodes, `returns.png` and `steps.csv` of all.

    `names` are the actions'; `say` hears what is being drawn.
    """
    save = save_gif if format == "gif" else save_mp4
    for i, episode in enumerate(episodes[:films]):
        path = out / f"episode-{i}.{format}"
        say(f"drawing    {path}")
        save(path, film(episode, names), fps)
        path.with_suffix(".png").write_bytes(episode_plot(episode, f"episode {i}"))
    if episodes[0].predicted is not None:
        (out / "returns.png").write_bytes(returns_plot(episodes, f"{len(episodes)} episodes"))
    write_steps(out / "steps.csv", episodes, names)


def write_steps(path: Path, episodes: Sequence[ControlEpisode], names: Sequence[str]) -> None:
    """A line for every step of every episode: its action and both rewards."""
    columns = ["reward"] if episodes[0].predicted is None else ["reward", "predicted"]
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["episode", "step", "action", *columns])
        for i, episode in enumerate(episodes):
            values = [
                (episode.rewards if name == "reward" else episode.predicted).tolist() for name in columns
            ]
            for step, of_step in enumerate(zip(*values, strict=True)):
                rows.writerow([i, step + 1, action_text(episode.actions[step], names), *of_step])
