"""The terminal chat as a user runs it: a real process with scripted input."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from pipelines.chat import ChatConfig, main
from rl_dialog.config import load_config
from rl_dialog.data.schema import read_jsonl
from rl_dialog.methods import BC, ILQL


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders of a bc and an ilql policy."""
    import torch

    from rl_dialog.data.tokenize import train_tokenizer
    from rl_dialog.models.policy import ModelConfig, Policy, load_lm

    tokenizer = train_tokenizer(["hello there, how are you?", "thank you, that is all"] * 20, vocab_size=330)
    root = tmp_path_factory.mktemp("checkpoints")
    for name, method in (("bc", BC()), ("ilql", ILQL())):
        torch.manual_seed(0)
        config = ModelConfig(layers=1, attention_heads=2, width=16, context=128)
        policy = Policy(load_lm(config, tokenizer), method, config)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        policy.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


def start(*arguments):
    command = [sys.executable, "-m", "pipelines.chat", "--max_new_tokens", "5", "--device", "cpu", *map(str, arguments)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def talk(*arguments, lines):
    process = start(*arguments)
    out, err = process.communicate("".join(line + "\n" for line in lines), timeout=120)
    assert process.returncode == 0, err
    return out.splitlines()


def bot(lines):
    return [line for line in lines if line.startswith("bot> ")]


def test_beams_commands_and_transcript(checkpoints, tmp_path):
    saved = tmp_path / "logs" / "chats.jsonl"
    lines = ["hello", "how are you", "/undo", "/nonsense", "", "thank you", "/reset", "hello", "/reset", "/undo", "QUIT", "never read"]
    how = ["--beams_by_rank", 5, "--system", "Be kind.", "--save", saved, "--debug"]
    out = talk("--checkpoint", checkpoints / "ilql", *how, lines=lines)
    assert len(bot(out)) == 4
    assert json.loads(out[-1]) == {"replies": 4, "dialogs_saved": 2, "saved": str(saved)}
    assert "unknown command /nonsense" in out
    assert out.count("Taken back.") == out.count("There is nothing to take back.") == 1
    assert "context (" in out[1]
    assert "<|system|>Be kind.<|end|><|user|>hello<|end|><|assistant|>" in out[1]
    beams = [line for line in out if line.startswith("beam ")]
    assert len(beams) == 20
    assert sum(" * " in line for line in beams) == 4
    header = next(line for line in out if line.startswith("token"))
    assert header.split() == ["token", "Q", "V", "Q", "-", "V", "log", "prior", "log", "LM", "log", "policy"]
    first, second = read_jsonl(saved)
    assert [m["content"] for m in first.messages if m["role"] == "user"] == ["hello", "thank you"]
    assert first.messages[0] == {"role": "system", "content": "Be kind."}
    assert f"bot> {first.messages[2]['content']}" == bot(out)[0]
    assert len(second.messages) == 3
    assert first.id != second.id
    assert (first.source, first.meta["method"]) == ("chat", "ilql")
    assert first.meta["decoding"]["beams_by_rank"] == 5


def test_sampling_streams_and_is_repeatable(checkpoints, tmp_path, monkeypatch, capsys):
    saved = tmp_path / "chats.jsonl"
    arguments = ["--checkpoint", checkpoints / "bc", "--top_k", "50", "--top_p", "0.95", "--seed", "3"]
    arguments += ["--temperature", "0.9", "--save", saved, "--quiet"]
    out = talk(*arguments, lines=["hello", "hello"])  # ends with the input
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nhello\n"))
    main(load_config(ChatConfig, [*map(str, arguments), "--max_new_tokens", "5", "--device", "cpu"]))
    once, again = read_jsonl(saved)
    assert once.messages == again.messages
    assert capsys.readouterr().out.splitlines() == out[:-1]  # the command adds its line of JSON
    for message in once.messages[1::2]:
        assert "\n".join(message["content"].splitlines()) in "\n".join(out)
    assert not any("/help" in line for line in out)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
def test_an_interrupted_chat_is_saved(checkpoints, tmp_path, sent):
    saved = tmp_path / "chats.jsonl"
    process = start("--checkpoint", checkpoints / "bc", "--no_do_sample", "--save", saved)
    process.stdin.write("hello\n")
    process.stdin.flush()
    while not process.stdout.readline().startswith("bot> "):
        assert process.poll() is None, process.stderr.read()
    time.sleep(0.3)
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["dialogs_saved"] == 1
    assert [m["role"] for m in next(read_jsonl(saved)).messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected --checkpoint"),
        (("--checkpoint", "{root}/bd"), "no such checkpoint: {root}/bd."),
        (("--checkpoint", "{root}"), "expected a checkpoint (config.json) or a run folder"),
        (("--checkpoint", "{root}/bc", "--beta", "2"), "was trained with bc, which has no beta to set"),
        (("--checkpoint", "{root}/bc", "--num_beams", "0"), "num_beams of at least 1"),
        (("--checkpoint", "{root}/bc", "--beams_by_rank", "-1"), "--beams_by_rank: expected a number"),
    ],
)
def test_errors_are_one_paragraph(checkpoints, arguments, message):
    config = load_config(ChatConfig, [str(a).format(root=checkpoints) for a in arguments])
    with pytest.raises(ValueError) as error:
        main(config)
    assert message.format(root=checkpoints) in str(error.value)
    assert "\n\n" not in str(error.value)
