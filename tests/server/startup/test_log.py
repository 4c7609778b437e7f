"""The log must hold neither the clients' texts nor their keys."""

import json
import os

import httpx

from tests.server.fuzz.breakable import AUTHORIZED, FAIL, KEY
from tests.server.load.soak_watch import wait_for
from tests.servers.processes import Server

PROMPT, SALT = "marker-in-a-prompt", "salt-of-a-client"
_FAILING = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "cache_salt": SALT}
_SCHEMA = {"type": "string", "pattern": f"({PROMPT}"}
_CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "cache_salt": SALT}
GOOD = [
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "cache_salt": SALT, "user": PROMPT}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 3}),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "stream": True, "stop": PROMPT}),
    ("/v1/chat/completions", _CHAT),
    ("/v1/chat/completions", {**_CHAT, "stream": True}),
    ("/tokenize", {"prompt": PROMPT}),
]
BAD = [
    ("/v1/completions", {"prompt": PROMPT, PROMPT: PROMPT}),
    ("/v1/completions", {"prompt": PROMPT, "model": PROMPT}),
    ("/v1/completions", {"prompt": PROMPT, "cache_salt": SALT * 100}),
    ("/v1/completions", {"prompt": PROMPT * 5000, "cache_salt": SALT}),
    ("/v1/completions", {"prompt": {PROMPT: SALT}}),
    ("/v1/completions", {"prompt": PROMPT, "rope": {"rope_type": SALT}}),
    ("/v1/completions", {"prompt": PROMPT, "temperature": PROMPT}),
    ("/v1/chat/completions", {**_CHAT, "messages": [{"role": PROMPT, "content": PROMPT}]}),
    ("/v1/chat/completions", {**_CHAT, "chat_template_kwargs": {PROMPT: PROMPT}}),
    (
        "/v1/completions",
        {
            "prompt": PROMPT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": _SCHEMA},
            },
        },
    ),
    ("/tokenize", {"prompt": PROMPT, PROMPT: SALT}),
]


def test_the_log_holds_neither_prompts_nor_keys_nor_salts(breakable: Server) -> None:
    """The logged requests are answered, refused, unreadable or failed, or have a wrong key."""
    first = len(breakable.log)
    with httpx.Client(base_url=breakable.url, headers=AUTHORIZED, timeout=60) as client:
        for path, body in GOOD:
            assert client.post(path, json=body).status_code == 200, body
        for path, body in BAD:
            assert client.post(path, json=body).status_code in (400, 404), body
        cut = json.dumps({"prompt": PROMPT, "cache_salt": SALT})[:-1].encode()
        kind = {"Content-Type": "application/json"}
        assert client.post("/v1/completions", content=cut, headers=kind).status_code == 400
        wrong = {"Authorization": f"Bearer {KEY}{PROMPT}"}
        refused = client.post("/v1/completions", json=GOOD[0][1], headers=wrong)
        assert refused.status_code == 401
        with client.stream("POST", "/v1/completions", json={**_FAILING, "stream": True}) as failed:
            lines = failed.iter_lines()
            assert next(line for line in lines if line.startswith("data: "))
            os.kill(breakable.pid, FAIL)
            assert any('"error"' in line for line in lines)
    assert wait_for(lambda: any("out of chalk" in line for line in breakable.log))
    log = "".join(breakable.log[first:])
    # Else it would prove nothing: each request has its line, the failure its traceback.
    assert log.count(r"\"POST /v1/completions HTTP/1.1\" 200") == 4
    assert log.count(r"\"POST /v1/completions HTTP/1.1\" 4") == 10
    assert "step_failed" in log
    assert "Traceback" in log
    for secret in (KEY, PROMPT, SALT):
        assert not [line[:300] for line in breakable.log if secret in line]
