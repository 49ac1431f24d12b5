"""The usual calls with `llm` in a terminal: a line of JSON, call -> what came of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from outcomes import LONG, attempt

program = str(Path(sys.executable).parent / "llm")
settings = Path(os.environ["LLM_USER_PATH"])
settings.mkdir(exist_ok=True)
(settings / "extra-openai-models.yaml").write_text(f"""
- model_id: bc
  model_name: bc
  api_base: {os.environ["OPENAI_BASE_URL"]}
  api_key_name: rl_dialog
  supports_tools: true
""")


def ask(*flags, text="hello", key=os.environ["OPENAI_API_KEY"]):
    command = [program, "-m", "bc", "--key", key, *flags, text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return done.stdout.removesuffix("\n")


seeded = ("-o", "seed", "1")
said = ask("--no-stream", *seeded)
calls = {
    "chat": lambda: bool(said),
    "stream": lambda: ask(*seeded) == said,
    "stop": lambda: said[2] not in ask(*seeded, "-o", "stop", said[2]),
    "seed": lambda: ask(*seeded) == ask(*seeded) != ask("-o", "seed", "2"),
    "tools": lambda: ask("-T", "llm_time"),
    "wrong key": lambda: ask(key="sk-rl-nobody"),
    "too long": lambda: ask(text=LONG[0]["content"]),
}
print(json.dumps({name: attempt(call) for name, call in calls.items()}))
