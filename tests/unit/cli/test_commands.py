import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from scripted_router import ScriptedRouter, eventually, last, piece

from splitserve.cli import main
from splitserve.cli.options import sampling_params
from splitserve.core.errors import ResourceExhaustedError
from splitserve.core.sampling import SamplingParams


@pytest.fixture
def run(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPLITSERVE_ROUTER", address)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str, stdin: bytes | None = None) -> Result:
        return CliRunner().invoke(main, arguments, input=stdin)

    return run


def test_help_names_every_command_and_loads_none_of_them() -> None:
    program = (
        "import sys; from splitserve.cli import main; main(['--help'], standalone_mode=False);"
        "print([m for m in ('grpc', 'rich', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    *help_lines, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    for name in ("abort", "demo", "generate", "model", "status"):
        assert any(line.strip().startswith(name) for line in help_lines)


@pytest.mark.parametrize("name", ["abort", "demo", "generate", "model", "status"])
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output


def test_generate_streams_the_text_and_nothing_else(router: ScriptedRouter, run) -> None:
    router.script = [piece("Hel"), piece("lo"), last()]
    result = run("generate", "hi")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Hello\n", "")
    assert router.requests[0].prompt == "hi"


def test_generate_passes_every_sampling_option(router: ScriptedRouter, run) -> None:
    router.script = [last()]
    options = (
        "--max-tokens 5 --temperature 0 --top-p 0.5 --top-k 3 --min-p 0.1 --seed 9 "
        "--stop END --stop . --stop-token-ids 7 --stop-token-ids 8 --ignore-eos "
        "--presence-penalty 1 --frequency-penalty -1 --repetition-penalty 1.5 "
        "--logprobs 2 --n 1 --request-id mine"
    )
    result = run("generate", "hi", *options.split())
    assert result.exit_code == 0, result.output
    sampling = router.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (5, 0.0, 0.5)
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (3, 0.1, 9)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["END", "."], [7, 8])
    assert (sampling.ignore_eos, sampling.logprobs, sampling.n) == (True, 2, 1)
    penalties = (
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
    assert penalties == (1.0, -1.0, 1.5)
    assert router.requests[0].request_id == "mine"


def test_every_sampling_parameter_has_its_option() -> None:
    [command] = [main.get_command(None, "generate")]  # type: ignore[arg-type]
    names = {parameter.name for parameter in command.params}  # type: ignore[union-attr]
    assert names.issuperset(SamplingParams.__dataclass_fields__)


def test_sampling_options_not_given_keep_their_defaults() -> None:
    given = dict.fromkeys(SamplingParams.__dataclass_fields__) | {"stop": (), "ignore_eos": False}
    assert sampling_params(given) == SamplingParams()


def test_chat_makes_the_prompt_a_users_message(router: ScriptedRouter, run) -> None:
    router.script = [last()]
    assert run("generate", "Hi", "--chat", "--system", "Be brief.").exit_code == 0
    turns = [(turn.role, turn.content) for turn in router.requests[0].chat.messages]
    assert turns == [("system", "Be brief."), ("user", "Hi")]


def test_a_dash_reads_the_prompt_from_standard_input(router: ScriptedRouter, run) -> None:
    router.script = [last()]
    assert run("generate", "-", stdin="lines\nof 灯塔\n".encode()).exit_code == 0
    assert router.requests[0].prompt == "lines\nof 灯塔\n"


def test_token_ids_are_read_from_the_command_line(router: ScriptedRouter, run) -> None:
    router.script = [last()]
    assert run("generate", "--token-ids", "1, 2,3").exit_code == 0
    assert list(router.requests[0].token_ids.ids) == [1, 2, 3]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("hi", "--token-ids", "1"),
        ("--token-ids", "1,x"),
        ("hi", "--system", "Be brief."),
        ("--token-ids", "1", "--chat"),
    ],
)
def test_options_that_contradict_each_other_are_a_usage_error(
    router: ScriptedRouter, run, arguments: tuple[str, ...]
) -> None:
    assert run("generate", *arguments).exit_code == 2
    assert not router.requests


def test_standard_input_that_is_not_utf8_is_a_usage_error(run) -> None:
    assert run("generate", "-", stdin=b"\xff\xfe").exit_code == 2


def test_json_is_one_object_per_delta_and_the_last_tells_the_whole_story(
    router: ScriptedRouter, run
) -> None:
    router.script = [piece("Hé", 5), last("llo", 6)]
    result = run("generate", "hi", "--json", "--lifetime")
    first, final = [json.loads(line) for line in result.stdout.splitlines()]
    assert (first["text"], first["token_ids"], first["finish_reason"]) == ("Hé", [5], None)
    assert (final["finish_reason"], final["usage"]["prompt_tokens"]) == ("STOP", 3)
    assert final["lifetime"]["events"][0]["kind"] == "ISSUED"
    assert final["lifetime"]["events"][4]["transfer"]["transport"] == "shm"
    assert "PREFILL_BEGIN" in result.stderr  # the picture stays out of the JSON


def test_lifetime_is_drawn_below_the_answer(router: ScriptedRouter, run) -> None:
    router.script = [last("Hello")]
    lines = run("generate", "hi", "--lifetime").stdout.splitlines()
    assert lines[0] == "Hello"
    assert any("KV moved over shm" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("generate", "hi"), "splitserve: RESOURCE_EXHAUSTED: the queue is full\n"),
        (
            ("generate", "hi", "--temperature", "-1"),
            "splitserve: INVALID_ARGUMENT: temperature: -1.0 is not allowed; "
            "allowed: a number in [0, 100]\n",
        ),
        (("abort", "r2"), "splitserve: NOT_FOUND: request_id: 'r2' is not running\n"),
    ],
)
def test_a_failure_is_one_line_and_exit_code_1(
    router: ScriptedRouter, run, arguments: tuple[str, ...], said: str
) -> None:
    router.script = [ResourceExhaustedError("the queue is full")]
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (1, said)


def test_a_failure_in_the_middle_keeps_what_was_streamed(router: ScriptedRouter, run) -> None:
    router.script = [piece("half"), ResourceExhaustedError("no more")]
    result = run("generate", "hi")
    assert (result.exit_code, result.stdout) == (1, "half\n")


def test_ctrl_c_ends_the_request_and_the_command(
    router: ScriptedRouter, address: str, tmp_path: Path
) -> None:
    router.script = [piece("thinking"), "hang"]
    arguments = [sys.executable, "-m", "splitserve.cli", "generate", "hi", "--router", address]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as command:
        assert command.stdout is not None
        assert os.read(command.stdout.fileno(), 8) == b"thinking"
        command.send_signal(signal.SIGINT)
        _, stderr = command.communicate(timeout=10)
    assert (command.returncode, stderr) == (130, b"")
    eventually(lambda: router.cancelled == 1, "the request was cancelled")


def test_abort_ends_the_request_by_name(router: ScriptedRouter, run) -> None:
    result = run("abort", "r1")
    assert (result.exit_code, result.stdout) == (0, "aborted r1\n")
    assert router.requests[0].request_id == "r1"


def test_status_shows_the_router_and_its_nodes(run) -> None:
    result = run("status")
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert " ".join(lines[0]).endswith("model tiny: 1 queued, 2 running, finished: 7 stop")
    assert ["prefill", "127.0.0.1:1", "tiny", "shm,", "tcp", "yes"] in lines
    assert ["127.0.0.1:1", "10", "4", "1", "2", "2", "1", "3", "4", "0"] in lines
    assert lines[-2:] == [
        ["127.0.0.1:1", "0", "134.5", "MB", "2.0", "MB"],
        ["127.0.0.1:1", "1", "61.0", "kB", "2.0", "MB"],
    ]


def test_status_without_nodes_says_so(router: ScriptedRouter, run) -> None:
    router.nodes = []
    assert "no node has joined" in run("status").stdout


def test_status_as_json_has_every_field(run) -> None:
    status = json.loads(run("status", "--json").stdout)
    assert status["finished"] == {"stop": 7}
    assert status["nodes"][0]["info"]["kind"] == "PREFILL"
    assert status["nodes"][0]["blocks_quarantined"] == 1
    assert status["nodes"][0]["info"]["ranks"][1]["weight_bytes"] == 61_000
