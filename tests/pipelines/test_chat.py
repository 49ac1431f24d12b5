"""The terminal chat as a user runs it: a real process with scripted input."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from unicodedata import category

import pytest
import torch

from pipelines.chat import ChatConfig, main
from rl_dialog.config import load_config
from rl_dialog.data.schema import harmless, read_jsonl
from rl_dialog.data.tokenize import train_tokenizer
from rl_dialog.errors import UserError
from rl_dialog.evaluation.generation import Decoding, Reply, recorded_replies, stream
from rl_dialog.methods import BC, CHAI, ILQL, UtteranceILQL
from rl_dialog.models.language_model import ModelConfig, load_lm
from rl_dialog.models.policy import Policy


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders of policies; `not_` before the name of one that acts by the values of whole replies: the same
    with the values' signs turned."""
    tokenizer = train_tokenizer(["hello there, how are you?", "thank you, that is all"] * 20, vocab_size=330)
    root = tmp_path_factory.mktemp("checkpoints")
    for name, method in (
        ("bc", BC()),
        ("ilql", ILQL()),
        ("utterance_ilql", UtteranceILQL()),
        ("chai", CHAI()),
    ):
        torch.manual_seed(0)
        config = ModelConfig(layers=1, attention_heads=2, width=16, context=128)
        policy = Policy(load_lm(config, tokenizer), method, config)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        policy.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
        if not method.heads.utterance_q:
            continue
        with torch.no_grad():
            for head in (*policy.heads.utterance_q, *policy.heads.utterance_q_target):
                head.out.weight.neg_()
                head.out.bias.neg_()
        policy.save_pretrained(root / f"not_{name}")
        tokenizer.save_pretrained(root / f"not_{name}")
    return root


def start(*arguments):
    command = [
        sys.executable,
        "-m",
        "pipelines.chat",
        "--max_new_tokens",
        "5",
        "--device",
        "cpu",
        *map(str, arguments),
    ]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def talk(*arguments, lines):
    process = start(*arguments)
    out, err = process.communicate("".join(line + "\n" for line in lines), timeout=400)
    assert process.returncode == 0, err
    return out.splitlines()


def bot(lines):
    return [line for line in lines if line.startswith("bot> ")]


def talk_here(monkeypatch, capsys, *arguments, lines):
    """The same without a process of its own."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    result = main(
        load_config(ChatConfig, ["--max_new_tokens", "5", "--device", "cpu", "--quiet", *map(str, arguments)])
    )
    return capsys.readouterr().out.splitlines(), result


@pytest.mark.slow
def test_beams_commands_and_transcript(checkpoints, tmp_path):
    saved = tmp_path / "logs" / "chats.jsonl"
    lines = [
        "hello",
        "how are you",
        "/undo",
        "/nonsense",
        "",
        "thank you",
        "/reset",
        "hello",
        "/reset",
        "/undo",
        "QUIT",
        "never read",
    ]
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
    assert f"bot> {harmless(first.messages[2]['content'])}" == bot(out)[0]
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
        # a reply may have characters that end lines, too
        assert "\n".join(harmless(message["content"]).splitlines()) in "\n".join(out)
    assert not any("/help" in line for line in out)


@pytest.mark.parametrize("how", [(), ("--beams_by_rank", 1, "--debug")], ids=["streamed", "beams"])
def test_a_terminal_obeys_nothing_that_is_said(checkpoints, tmp_path, monkeypatch, capsys, how):
    said = "a\x1b[2J \x1b]0;title\x07\x9b1m\r b\tनमस्ते क्‍ष 👩‍👩‍👧\nend"

    def streamed(policy, tokenizer, messages, decoding, *, seed, streamer):
        streamer.put(torch.tensor([[0]]))  # the prompt
        for token in tokenizer.encode(said, add_special_tokens=False):
            streamer.put(torch.tensor([token]))
        streamer.end()
        return Reply(said, (), True)

    monkeypatch.setattr("rl_dialog.serving.sitting.stream_reply", streamed)
    monkeypatch.setattr("rl_dialog.serving.sitting.beam_replies", lambda *given: [Reply(said, (), True, 0.0)])
    saved = tmp_path / "chats.jsonl"
    how = ["--prime", "\x1bc", "\x1bc", "--save", saved, *how]
    out, _ = talk_here(monkeypatch, capsys, "--checkpoint", checkpoints / "bc", *how, lines=["hello"])
    shown = "\n".join(out)
    assert "a\\x1b[2J \\x1b]0;title\\x07\\x9b1m\\r b\tनमस्ते क्‍ष 👩‍👩‍👧\nend" in shown
    assert not any(category(c) == "Cc" for c in shown.replace("\n", "").replace("\t", ""))
    (dialog,) = read_jsonl(saved)
    assert [message["content"] for message in dialog.messages] == ["\x1bc", "\x1bc", "hello", said]


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=str)
def test_an_interrupted_chat_is_saved(checkpoints, tmp_path, sent):
    saved = tmp_path / "chats.jsonl"
    process = start("--checkpoint", checkpoints / "bc", "--no_do_sample", "--save", saved)
    process.stdin.write("hello\n/nonsense\n")
    process.stdin.flush()
    shown = [""]
    while "unknown command" not in shown[-1]:  # so the reply before is said and kept
        assert process.poll() is None, process.stderr.read()
        shown.append(process.stdout.readline())
    assert any(line.startswith("bot> ") for line in shown)
    process.send_signal(sent)
    out, err = process.communicate(timeout=240)
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
        (("--checkpoint", "{root}/bc", "--beams_by_rank", "-1"), "expected --beams_by_rank of at least 0"),
        (("--checkpoint", "{root}/bc", "--seed", "-1"), "expected --seed of at least 0, got -1"),
        (("--checkpoint", "{root}/bc", "--save", "{root}"), "{root}: expected a file to append to, got: Is"),
    ],
)
def test_errors_are_one_paragraph(checkpoints, arguments, message):
    config = load_config(ChatConfig, [str(a).format(root=checkpoints) for a in arguments])
    with pytest.raises(UserError) as error:
        main(config)
    assert message.format(root=checkpoints) in str(error.value)
    assert "\n\n" not in str(error.value)


@pytest.mark.parametrize("name", ["utterance_ilql", "chai"])
def test_the_critic_decides_what_is_said(checkpoints, monkeypatch, capsys, name):
    """With the signs of all values turned other replies are said, of the same that were drawn; --debug shows
    the Q of each."""
    said, drawn = {}, {}
    for place in (name, f"not_{name}"):
        out, _ = talk_here(
            monkeypatch,
            capsys,
            "--checkpoint",
            checkpoints / place,
            lines=["hello", "/reset", "how are you", "/reset", "thank you"],
        )
        said[place] = bot(out)
        out, _ = talk_here(
            monkeypatch, capsys, "--checkpoint", checkpoints / place, "--debug", lines=["hello"]
        )
        told = [line.split() for line in out if line.startswith("reply ")]
        assert len(told) == 8 and all(line[line.index("utterance") + 1] == "Q" for line in told)
        scores = [float(line[line.index("score") + 1]) for line in told]
        assert [("*" in line[2]) for line in told].index(True) == scores.index(max(scores))
        drawn[place] = [line[line.index("score") + 2 :] for line in told]
        assert bot(out) == said[place][:1]
    assert len(said[name]) == 3 and said[name] != said[f"not_{name}"]
    assert drawn[name] == drawn[f"not_{name}"]


@pytest.mark.parametrize("family", ["vhred", "vhcr"])
def test_the_table_reads_the_latents_that_a_reply_was_said_with(tmp_path, monkeypatch, capsys, family):
    """Each token is as likely there as it was when it was drawn: not as with the latents' means."""
    tokenizer = train_tokenizer(["hello there, how are you?", "thank you, that is all"] * 20, vocab_size=330)
    torch.manual_seed(0)
    config = ModelConfig(family=family, width=16, latent_size=4, context=128)
    policy = Policy(load_lm(config, tokenizer), BC(), config).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    policy.save_pretrained(tmp_path / family)
    tokenizer.save_pretrained(tmp_path / family)
    out, _ = talk_here(
        monkeypatch, capsys, "--checkpoint", tmp_path / family, "--debug", lines=["hello", "and you?"]
    )
    table = [float(line.split()[-1]) for line in out if " -  " in line]
    messages, drawn = [], []
    for number, said in enumerate(["hello", "and you?"]):
        messages.append({"role": "user", "content": said})
        how = {"seeds": [stream(0, number)], "batch_size": 1}
        (reply,) = recorded_replies(policy, tokenizer, [messages], Decoding(max_new_tokens=5), **how)
        messages.append({"role": "assistant", "content": reply.text})
        drawn += reply.spoken.logp
    assert len(table) == len(drawn) > 5 and table == pytest.approx(drawn, abs=2e-4)


def test_a_primed_conversation(checkpoints, monkeypatch, capsys, tmp_path):
    """What primes is shown, read by the policy, not taken back, and never learned as its reply; without a
    word more nothing is saved."""
    how = [
        "--checkpoint",
        checkpoints / "bc",
        "--prime",
        "hi",
        "hello, how are you?",
        "--save",
        tmp_path / "chats.jsonl",
    ]
    lines = ["/undo", "thank you", "hello", "/undo", "/reset", "/reset", "how are you"]
    out, result = talk_here(monkeypatch, capsys, *how, "--debug", lines=lines)
    assert out[:2] == ["you> hi", "bot> hello, how are you?"] and out.count("you> hi") == 3
    assert "There is nothing to take back." in out
    assert (
        "<|user|>hi<|end|><|assistant|>hello, how are you?<|end|><|user|>thank you<|end|><|assistant|>"
        in "\n".join(out)
    )
    assert result["dialogs_saved"] == 2
    dialogs = list(read_jsonl(tmp_path / "chats.jsonl"))
    for dialog, asked in zip(dialogs, ("thank you", "how are you"), strict=True):
        assert [message["content"] for message in dialog.messages[:3]] == ["hi", "hello, how are you?", asked]
        assert len(dialog.messages) == 4 and dialog.replies == [3]


def test_values_in_thousandths_have_their_digits(checkpoints, monkeypatch, capsys):
    """Rewards may be as small, and 0.0007 - 0.0006 says nothing of 0.0001."""
    rows = [
        {"token": 1, "q": 0.00012346, "v": 12345.678, "advantage": None, "prior": -0.5, "lm": 0, "policy": 0}
    ]
    monkeypatch.setattr("rl_dialog.serving.sitting.token_table", lambda *given, **how: rows)
    out, _ = talk_here(monkeypatch, capsys, "--checkpoint", checkpoints / "ilql", "--debug", lines=["hello"])
    assert any(
        line.split()[-6:] == ["0.0001235", "12345.6780", "-", "-0.5000", "0.0000", "0.0000"] for line in out
    )


@pytest.mark.parametrize("before", [None, "", "kept\n"])
def test_where_nobody_speaks_the_file_is_as_it_was(checkpoints, monkeypatch, capsys, tmp_path, before):
    saved = tmp_path / "logs" / "chats.jsonl"
    if before is not None:
        saved.parent.mkdir()
        saved.write_text(before)
    what = ["--checkpoint", checkpoints / "bc", "--save", saved]
    _, result = talk_here(monkeypatch, capsys, *what, lines=["/help", "/quit"])
    assert result["dialogs_saved"] == 0
    assert (saved.read_text() if saved.exists() else None) == before


def sitting(encoding, arguments, lines):
    """A chat in a pseudo terminal of this encoding, "" for the locale C, into which the lines (bytes) are
    typed."""
    pid, terminal = pty.fork()
    if not pid:
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("LC_", "PYTHONIO", "PYTHONUTF8"))
        }
        env |= (
            {"PYTHONIOENCODING": f"{encoding}:strict", "LC_ALL": "C.UTF-8"} if encoding else {"LC_ALL": "C"}
        )
        os.execve(
            sys.executable,
            [sys.executable, "-m", "pipelines.chat", *arguments],
            env | {"OMP_NUM_THREADS": "1"},
        )  # noqa: S606
    seen, left = b"", [*lines, b"/quit"]
    while select.select([terminal], [], [], 240)[0]:
        try:
            seen += os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if (
            left and seen.count(b"you> ") > 1 + len(lines) - len(left) + 1
        ):  # one more is what the conversation is primed with
            os.write(terminal, left.pop(0) + b"\n")
    os.close(terminal)
    os.waitpid(pid, 0)
    return seen


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "encoding", ["utf-8", *(pytest.param(other, marks=SLOW) for other in ("latin-1", "ascii", ""))]
)
def test_no_terminal_loses_a_turn(checkpoints, tmp_path, encoding):
    """Whatever characters the replies have and whatever bytes are typed."""
    saved = tmp_path / "Gespr\u00e4che.jsonl"
    how = [
        "--checkpoint",
        str(checkpoints / "bc"),
        "--max_new_tokens",
        "12",
        "--device",
        "cpu",
        "--save",
        str(saved),
    ]
    typed = ["gr\u00fc\u00df".encode(encoding if encoding == "latin-1" else "utf-8"), b"hello"]
    typed += (
        [] if encoding else ["gr\u00fc\u00df".encode("latin-1")]
    )  # in the locale C nobody knows what the terminal sends
    seen = sitting(encoding, [*how, "--prime", "hi", "\u201eH\u00f6?\u201c \U0001f600"], typed)
    shown = seen.decode(encoding or "utf-8", "replace")  # the terminal itself shows what is typed
    (dialog,) = read_jsonl(saved)
    as_typed = ["gr\u00fc\u00df", "hello", "gr\u00fc\u00df"][: len(typed)]
    assert [m["content"] for m in dialog.messages if m["role"] == "user"] == ["hi", *as_typed], shown
    assert len(dialog.replies) == len(typed)
    assert any(not dialog.messages[i]["content"].isascii() for i in dialog.replies)
    assert json.loads(shown[shown.rindex("{") :]) == {
        "replies": len(typed),
        "dialogs_saved": 1,
        "saved": str(saved),
    }
    if encoding == "latin-1":
        assert "bot> \\u201eH\u00f6?\\u201c \\U0001f600" in shown
