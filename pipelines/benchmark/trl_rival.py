"""What `benchmark online` and `benchmark reward_model` run by a Python that has TRL, and nothing of ours: it
answers each line on stdin, an order, with a line on stdout.

    python trl_rival.py '{"model": FOLDER, "trainer": "grpo", ...}'        online.py has all the keys
        {}                              a step of GRPO's or RLOO's trainer; how many tokens it drew
    python trl_rival.py '{"trainer": "reward", "train": FILE, "test": FILE, ...}'
        {"train": {"model": FOLDER, ...}}    learns a reward model; processor seconds of all steps but one
        {"score": FOLDER}                    scores of the chosen and the rejected replies of the test file
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO


def main(settings: dict[str, Any]) -> None:
    """Answers orders until stdin ends."""
    said = os.fdopen(os.dup(1), "w", buffering=1)  # ours alone: whatever else is printed goes to stderr
    os.dup2(2, 1)
    (rewards if settings["trainer"] == "reward" else steps)(settings, said)


def steps(settings: dict[str, Any], said: TextIO) -> None:
    """Trains `steps` steps, each when it is told to."""
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


def rewards(settings: dict[str, Any], said: TextIO) -> None:
    """Learns reward models from the pairs of `train`, and scores those of `test`."""
    import trl

    pairs = {
        name: [json.loads(line) for line in Path(settings[name]).read_text(encoding="utf-8").splitlines()]
        for name in ("train", "test")
    }
    said.write(json.dumps({"trl": trl.__version__}) + "\n")
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        if "train" in order:
            answer = {"seconds": learn(pairs["train"], **order["train"])}
        else:
            answer = {"scores": scores(pairs["test"], order["score"])}
        said.write(json.dumps(answer) + "\n")


def learn(
    pairs: list[dict[str, Any]],
    *,
    model: str,
    folder: str,
    seed: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    warmup: int,
    weight_decay: float,
    max_length: int,
) -> float:
    """Trains, and saves in `folder`; processor seconds from the end of the first step to that of the last."""
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback

    ends: list[float] = []

    class Clock(TrainerCallback):
        """Notes when steps end."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.process_time())

    trainer = trl.RewardTrainer(
        model=model,
        args=trl.RewardConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=1,
            learning_rate=learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=warmup,
            weight_decay=weight_decay,
            adam_beta2=0.95,
            max_steps=steps,
            max_length=max_length,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
        ),
        train_dataset=Dataset.from_list(pairs),
        callbacks=[Clock()],
    )
    trainer.train()
    trainer.save_model(folder)
    return ends[-1] - ends[0]


def scores(pairs: list[dict[str, Any]], folder: str) -> list[tuple[float, ...]]:
    """What transformers makes of a folder: (of the chosen reply, of the rejected one) for each pair."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()

    def of(conversation: list[dict[str, str]]) -> float:
        encoded = tokenizer.apply_chat_template(conversation, return_dict=True, return_tensors="pt")
        return model(**encoded).logits.item()

    with torch.inference_mode():
        return [tuple(of(pair["prompt"] + pair[side]) for side in ("chosen", "rejected")) for pair in pairs]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
