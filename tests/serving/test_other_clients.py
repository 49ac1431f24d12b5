"""Programs that people have, as their registries give them, each in an environment of its own: a call works,
or is refused in words that the client shows.

`RL_DIALOG_CLIENTS` is a folder with a virtual environment for each (`python -m venv FOLDER/litellm`, then
`FOLDER/litellm/bin/pip install litellm`; so `openai`, `langchain-openai` and `llm`) and `npm install openai`
in `FOLDER/npm`. `transformers chat` is in test_clients.py.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parent / "clients"
PROGRAMS = {
    "openai": "with_openai.py",
    "litellm": "with_litellm.py",
    "langchain-openai": "with_langchain.py",
    "llm": "with_llm.py",
    "npm": "with_openai.mjs",
}
REFUSED = {
    "tools": "tools is not supported",
    "wrong key": "not known or was revoked",
    "too long": "expected at most",
}


def program(client):
    """What runs the client's script. Skips where it is not installed."""
    folder = os.environ.get("RL_DIALOG_CLIENTS", "")
    place = Path(folder) / client
    found = shutil.which("node") if client == "npm" else str(place / "bin" / "python")
    if not folder or not place.exists() or not found:
        pytest.skip(f"no {client} here: RL_DIALOG_CLIENTS is a folder with it (see the top of this file)")
    return found


@pytest.mark.parametrize("client", PROGRAMS)
def test_the_usual_calls(client, serve, tmp_path, capsys):
    with serve(needs_key=True, max_tokens=12) as (url, _, store):
        key = store.keys.add("ann", requests_per_minute=1000)
        environment = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "LLM_USER_PATH": str(tmp_path / "llm"),
        }
        command = [program(client), str(SCRIPTS / PROGRAMS[client])]
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    with capsys.disabled():
        print(f"\n{client}: {json.dumps(outcomes, indent=1)}")
    assert {"chat", "stream", "stop", "seed", *REFUSED} <= set(outcomes)
    for call, outcome in outcomes.items():
        assert outcome == "yes" if call not in REFUSED else REFUSED[call] in outcome, (call, outcome)
