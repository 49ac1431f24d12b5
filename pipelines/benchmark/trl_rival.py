"""What `benchmark online` runs by a Python that has TRL, and nothing of ours: a GRPO or RLOO trainer that
makes a step whenever a line comes on stdin, and then says how many tokens it drew.

    python trl_rival.py '{"model": FOLDER, "trainer": "grpo", ...}'        online.py has all the keys
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main(settings: dict[str, Any]) -> None:
    """Trains `steps` steps, each when it is told to."""
    said = os.fdopen(os.dup(1), "w", buffering=1)  # ours alone: whatever else is printed goes to stderr
    os.dup2(2, 1)

    import trl  # first: where it is missing, that is said
    from datasets import Dataset
    from transformers import TrainerCallback

    drawn: list[int] = []

    def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        drawn.append(sum(map(len, completion_ids)))
        return [float(completion[0]["content"].count("a")) for completion in completions]

    class Turns(TrainerCallback):
        """Waits before each step, tells after it."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            said.write(json.dumps({"trl": trl.__version__}) + "\n")

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not sys.stdin.readline():
                raise SystemExit

        def on_step_end(self, *_: Any, **__: Any) -> None:
            said.write(json.dumps({"tokens": sum(drawn)}) + "\n")
            drawn.clear()

    config_of = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig}[settings["trainer"]]
    trainer_of = {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer}[settings["trainer"]]
    episodes = settings["groups"] * settings["size"]
    prompts = [settings["prompts"][n % len(settings["prompts"])] for n in range(64 * settings["groups"])]
    trainer = trainer_of(
        model=settings["model"],
        reward_funcs=reward,
        args=config_of(
            output_dir=settings["folder"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=episodes,
            gradient_accumulation_steps=1,
            num_generations=settings["size"],
            max_completion_length=settings["new_tokens"],
            temperature=1.0,
            beta=settings["beta"],
            learning_rate=1e-6,
            max_steps=settings["steps"] + 1,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=settings["seed"],
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
        ),
        callbacks=[Turns()],
    )
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
