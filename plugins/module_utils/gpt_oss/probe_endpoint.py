#!/usr/bin/env python3
"""Ask an OpenAI-compatible endpoint whether it is ready, serves the model, and answers as it should.

    probe_endpoint.py --url http://127.0.0.1:8000 --model openai/gpt-oss-120b --wait 2400

prints one JSON object with the checks, and ends with status 1 when one of them failed. Progress goes to stderr. An API
key is taken from OPENAI_API_KEY. Standard library only, Python 3.8 and later: it runs on hosts and in any Python image.

    probe_endpoint.py --place=kubernetes --report=line --url http://gpt-oss-agg-frontend:8000 --model …

asks a frontend of Dynamo from a pod. A frontend is up long before its workers are, and says so with status 503 or with
a list of models that lacks ours: there, ready means that the model is listed. The JSON object is the last line.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

PROBES = ("health", "model", "completion", "stream", "reasoning", "tool_call")
POLL_SECONDS = 0.5
# TensorRT-LLM and vLLM refuse connections while they load. One that answers 503 was up, and is not any more.
UNHEALTHY_SECONDS = 60.0
EXCERPT = 120
MARKERS = ("<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
TITLES = {
    "health": "The server is ready",
    "model": "It serves the planned model",
    "completion": "It completes a chat",
    "stream": "It streams a chat",
    "reasoning": "It thinks apart from its answer",
    "tool_call": "It calls a tool and uses the result",
}
REPORTED = 200  # characters of what was seen: all checks fit the 2048 bytes that Kubernetes keeps of a log's end
# What to do, by where the endpoint runs.
REMEDIES = {
    "host": {
        "dead": "The engine behind the server is gone: see docs/runbooks/503-for-ever.md",
        "hangs": "A worker may hang although /health says 200: see docs/runbooks/503-for-ever.md",
        "rank died": "A rank has died and the server stays: see docs/runbooks/503-for-ever.md",
        "loading": "It may still be loading, or stuck: see docs/runbooks/slow-or-stuck-load.md",
        "output": "see docs/runbooks/bad-output.md",
        "log": "See the server's journal for the request",
        "cut": "The connection was cut: See the server's journal for the request",
        "key": "Give endpoint_check_api_key the key that the server was started with",
        "path": "The server does not know this path or model; compare the plan with what runs: playbooks/serve.yml",
        "model": "Another model is served on this port; run playbooks/serve.yml to serve the planned one",
        "other server": "Another server answers on this port",
        "port in use": "Another server answers on this port: docs/runbooks/port-in-use.md",
        "vocabulary": (
            "Harmony's vocabularies are missing: run playbooks/weights.yml, and check TIKTOKEN_ENCODINGS_BASE"
        ),
        "no stream": "Something between here and the engine does not stream: ask the engine's own port",
    },
    "kubernetes": {
        "dead": "No worker answers behind the frontend: see docs/runbooks/kubernetes-not-ready.md",
        "hangs": "A worker hangs, or keys and values are not handed over: see docs/runbooks/kubernetes-kv-transfer.md",
        "rank died": "No worker is ready: see docs/runbooks/kubernetes-not-ready.md",
        "loading": "No worker is ready yet, or found: see docs/runbooks/kubernetes-workers-not-discovered.md",
        "output": "see docs/runbooks/bad-output.md; the workers need the parsers gpt_oss and harmony",
        "log": "See the logs of the frontend and the workers for the request",
        "cut": "The connection was cut: see the logs of the frontend and the workers",
        "key": "Something before the frontend asks for a key: set OPENAI_API_KEY, or ask the Service itself",
        "path": "The frontend does not know this path or model: see which models /v1/models lists",
        "model": "Workers not found, or of another model: see docs/runbooks/kubernetes-workers-not-discovered.md",
        "other server": "Something else answers under this Service's name",
        "port in use": "Something else answers under this Service's name",
        "vocabulary": "Harmony's vocabularies are missing from the volume: see docs/runbooks/kubernetes-download.md",
        "no stream": "Something between here and the frontend does not stream: ask the Service itself",
    },
}
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_temperature",
        "description": "Current temperature in a city, in degrees Celsius.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}


class ProbeError(Exception):
    """An answer that is not what was asked for: what was seen, and what to do (a key of REMEDIES)."""

    def __init__(self, seen: str, remedy: str) -> None:
        super().__init__(seen)
        self.seen = seen
        self.remedy = remedy


class Endpoint(NamedTuple):
    """One server: where it is, and what it should serve."""

    name: str
    url: str
    model: str
    health_path: str = "/health"
    ready_within_seconds: float = 2400
    answer_seconds: float = 300
    api_key: str = ""
    place: str = "host"

    @property
    def behind_frontend(self) -> bool:
        """Whether a frontend answers here that is up before its workers are."""
        return self.place == "kubernetes"


class Health(NamedTuple):
    """What one look at the health path found. `status` is None where nothing answered."""

    status: int | None
    seen: str


# -- asking ------------------------------------------------------------------------------------------------------


def request(
    endpoint: Endpoint, method: str, path: str, body: Any = None, timeout: float | None = None
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Send a request; the response is still to be read, and the connection to be closed."""
    parts = urlsplit(endpoint.url)
    seconds = endpoint.answer_seconds if timeout is None else timeout
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(
            host, parts.port, timeout=seconds, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=seconds)
    headers = {"Accept": "application/json, text/event-stream"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    if endpoint.api_key:
        headers["Authorization"] = "Bearer " + endpoint.api_key
    try:
        connection.request(
            method, parts.path.rstrip("/") + path, json.dumps(body) if body is not None else None, headers
        )
        return connection, connection.getresponse()
    except BaseException:
        connection.close()
        raise


def ask(endpoint: Endpoint, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """The answer as an object, or ProbeError."""
    what = f"{method} {path}"
    try:
        connection, response = request(endpoint, method, path, body)
        try:
            text = response.read().decode("utf-8", "replace")
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        raise unanswered(endpoint, what, error) from None
    if response.status != 200:
        raise ProbeError(f"{what}: status {response.status}: {excerpt(text)}", refused(response.status, text))
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ProbeError(f"{what}: not a JSON object: {excerpt(text)}", "other server")
    return answer


def unanswered(endpoint: Endpoint, what: str, error: Exception) -> ProbeError:
    if isinstance(error, TimeoutError):
        return ProbeError(f"{what}: no answer within {endpoint.answer_seconds:g} s", "hangs")
    return ProbeError(f"{what}: {reason(error)}", "log")


def refused(status: int, text: str) -> str:
    """What to do about an answer that is an error."""
    if "vocab" in text:
        return "vocabulary"
    if status in (401, 403):
        return "key"
    if status == 404:
        return "path"
    return "dead" if status in (500, 503) else "log"


def reason(error: Exception) -> str:
    """The operating system's word for it, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


def excerpt(text: Any, length: int = EXCERPT) -> str:
    flat = " ".join(str(text).split())
    return flat if len(flat) <= length else flat[:length].rstrip() + "…"


def health(endpoint: Endpoint, timeout: float = 10) -> Health:
    """One look."""
    try:
        connection, response = request(endpoint, "GET", endpoint.health_path, timeout=timeout)
    except TimeoutError:
        return Health(None, f"no answer within {timeout:g} s")
    except (OSError, http.client.HTTPException) as error:
        return Health(None, reason(error))
    connection.close()
    return Health(response.status, f"status {response.status}")


# -- judging -----------------------------------------------------------------------------------------------------


def check(
    endpoint: Endpoint, probe: str, ok: bool | None, seen: str, expected: str, remedy: str = ""
) -> dict[str, Any]:
    """One thing that was looked at, in the form of serving_catalog.checks."""
    return {
        "id": f"endpoint.{endpoint.name}.{probe}",
        "title": f"{TITLES[probe]} (process {endpoint.name})",
        "ok": ok,
        "seen": seen,
        "expected": expected,
        "remedy": REMEDIES[endpoint.place].get(remedy or "log", remedy) if ok is False else "",
    }


def expectation(endpoint: Endpoint, probe: str) -> str:
    return {
        "health": f"200 from {endpoint.url}{endpoint.health_path} within {endpoint.ready_within_seconds:g} s",
        "model": f"{endpoint.model} in /v1/models",
        "completion": "an answer with text in it",
        "stream": "text in several events, the last one [DONE]",
        "reasoning": "391 as the answer, reasoning in a field of its own, no Harmony tokens",
        "tool_call": "a call of get_temperature, then an answer with its result",
    }[probe]


def ready_check(endpoint: Endpoint, after: float | None) -> dict[str, Any]:
    """The server answered. `after` is how long that took, where it was waited for."""
    seen = "status 200" if after is None else f"status 200 after {after:.0f} s"
    return check(endpoint, "health", True, seen, expectation(endpoint, "health"))


def not_ready_check(endpoint: Endpoint, seen: str, remedy: str) -> dict[str, Any]:
    return check(endpoint, "health", False, seen, expectation(endpoint, "health"), remedy)


def not_ready_remedy(last: Health) -> str:
    if last.status is None:
        return "loading"
    if last.status == 503:
        return "rank died"
    return "loading" if last.status == 200 else "port in use"


def run_probes(endpoint: Endpoint, probes: list[str]) -> list[dict[str, Any]]:
    """The probes of a server that is ready, `health` left out. One that fails does not stop the next."""
    table: dict[str, Callable[[Endpoint], str]] = {
        "model": probe_model,
        "completion": probe_completion,
        "stream": probe_stream,
        "reasoning": probe_reasoning,
        "tool_call": probe_tool_call,
    }
    checks = []
    for probe in PROBES:
        if probe not in probes or probe == "health":
            continue
        expected = expectation(endpoint, probe)
        try:
            checks.append(check(endpoint, probe, True, table[probe](endpoint), expected))
        except ProbeError as error:
            checks.append(check(endpoint, probe, False, error.seen, expected, error.remedy))
    return checks


def skipped(endpoint: Endpoint, probes: list[str], why: str) -> list[dict[str, Any]]:
    """Probes that could not be made."""
    return [
        check(endpoint, probe, None, why, expectation(endpoint, probe))
        for probe in PROBES
        if probe in probes and probe != "health"
    ]


# -- the probes --------------------------------------------------------------------------------------------------


def models(endpoint: Endpoint) -> list[str]:
    """The ids that the server lists."""
    data = ask(endpoint, "GET", "/v1/models").get("data")
    return [str(entry.get("id")) for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []


def probe_model(endpoint: Endpoint) -> str:
    names = models(endpoint)
    seen = ", ".join(names) or "no model"
    if endpoint.model not in names:
        raise ProbeError(seen, "model")
    return seen


def question(endpoint: Endpoint, text: str, **more: Any) -> dict[str, Any]:
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": text}]}
    body.update(more)
    return body


def choice_of(answer: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The answer's message and why it ended."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
    except (KeyError, IndexError, TypeError):
        raise ProbeError(f"an answer without a message: {excerpt(json.dumps(answer))}", "log") from None
    if not isinstance(message, dict):
        raise ProbeError(f"an answer without a message: {excerpt(json.dumps(answer))}", "log")
    return message, choice.get("finish_reason")


def reasoning_of(message: dict[str, Any]) -> str:
    """Engines name the field differently."""
    return str(message.get("reasoning_content") or message.get("reasoning") or "")


def probe_completion(endpoint: Endpoint) -> str:
    started = time.monotonic()
    answer = ask(endpoint, "POST", "/v1/chat/completions", question(endpoint, "Say hello.", max_tokens=64))
    seconds = time.monotonic() - started
    message, finish = choice_of(answer)
    text = str(message.get("content") or "") or reasoning_of(message)
    usage = answer.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if not text.strip():
        raise ProbeError(f"no text (finish_reason {finish}, {tokens} tokens)", "output")
    return f"{tokens} tokens in {seconds:.1f} s: {excerpt(text, 60)}"


def probe_stream(endpoint: Endpoint) -> str:
    path = "/v1/chat/completions"
    body = question(endpoint, "Count from 1 to 40.", max_tokens=128, stream=True)
    started = time.monotonic()
    try:
        connection, response = request(endpoint, "POST", path, body)
        try:
            kind = response.headers.get("Content-Type", "")
            if response.status != 200 or "text/event-stream" not in kind:
                text = response.read().decode("utf-8", "replace")
                if response.status != 200:
                    raise ProbeError(
                        f"POST {path}: status {response.status}: {excerpt(text)}",
                        refused(response.status, text),
                    )
                raise ProbeError(f"the whole answer at once, as {kind or 'nothing'}", "no stream")
            return read_stream(response, started)
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        raise unanswered(endpoint, f"POST {path}", error) from None


def read_stream(response: Any, started: float) -> str:
    """Count events with text in them, until [DONE]."""
    events, first, text, finish = 0, 0.0, "", None
    for raw in response:
        line = raw.decode("utf-8", "replace").strip()
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            break
        try:
            event = json.loads(data)
        except ValueError:
            raise ProbeError(f"an event that is not JSON: {excerpt(data)}", "log") from None
        if not isinstance(event, dict) or "error" in event:
            raise ProbeError(f"an error in the stream: {excerpt(data)}", "log")
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            piece = str(delta.get("content") or "") + reasoning_of(delta)
            if piece:
                events += 1
                first = first or time.monotonic() - started
                text += piece
            finish = choice.get("finish_reason") or finish
    else:
        raise ProbeError(f"{events} events, then the end without [DONE]", "cut")
    if events < 2 or finish is None:
        raise ProbeError(f"{events} event(s) with text, finish_reason {finish}: {excerpt(text)}", "output")
    return f"{events} events, the first after {first:.2f} s: {excerpt(text, 60)}"


def require_clean(text: str) -> None:
    """Raw Harmony tokens in an answer mean that its channels were not taken apart."""
    for marker in MARKERS:
        if marker in text:
            raise ProbeError(f"raw Harmony token {marker} in the answer: {excerpt(text)}", "output")


def probe_reasoning(endpoint: Endpoint) -> str:
    body = question(
        endpoint, "What is 17 times 23? Answer with the number alone.", max_tokens=2048, reasoning_effort="low"
    )
    message, finish = choice_of(ask(endpoint, "POST", "/v1/chat/completions", body))
    content, reasoning = str(message.get("content") or ""), reasoning_of(message)
    require_clean(content + reasoning)
    if not reasoning.strip():
        raise ProbeError(f"no reasoning; content {excerpt(content)!r}", "output")
    if "391" not in content:
        raise ProbeError(f"content {excerpt(content)!r} (finish_reason {finish})", "output")
    return f"{excerpt(content, 40)}, after {len(reasoning)} characters of reasoning"


def probe_tool_call(endpoint: Endpoint) -> str:
    text = "How warm is it in Paris now? Use the tool."
    # TensorRT-LLM takes "none" for a choice that was not made.
    common = {"tools": [WEATHER_TOOL], "tool_choice": "auto", "max_tokens": 2048, "reasoning_effort": "low"}
    body = question(endpoint, text, **common)
    message, finish = choice_of(ask(endpoint, "POST", "/v1/chat/completions", body))
    calls = message.get("tool_calls") or []
    content = str(message.get("content") or "")
    require_clean(content)
    if not calls:
        raise ProbeError(f"no tool call (finish_reason {finish}): {excerpt(content)}", "output")
    call = calls[0]
    function = call.get("function") or {}
    name, arguments = function.get("name"), function.get("arguments")
    try:
        city = json.loads(str(arguments))["city"]
    except (TypeError, ValueError, KeyError):
        city = None
    if name != "get_temperature" or "paris" not in str(city).lower():
        raise ProbeError(f"a call of {name} with {excerpt(arguments)}", "output")
    answer = {"role": "assistant", "content": message.get("content"), "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call.get("id"), "content": json.dumps({"celsius": 17})}
    body["messages"] = [{"role": "user", "content": text}, answer, result]
    message, finish = choice_of(ask(endpoint, "POST", "/v1/chat/completions", body))
    content = str(message.get("content") or "")
    require_clean(content)
    if "17" not in content:
        raise ProbeError(f"after the call: {excerpt(content)!r} (finish_reason {finish})", "output")
    return f"get_temperature({city}), then: {excerpt(content, 60)}"


# -- a short run -------------------------------------------------------------------------------------------------


class Traffic(NamedTuple):
    """A short run for each endpoint: prompts of about `input_tokens`, answers of at most `output_tokens`."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    requests: int


def measure(endpoints: list[Endpoint], traffic: Traffic) -> dict[str, Any]:
    """Send the run to every endpoint at the same time; requests, failures, output tokens a second and the median time
    to the first token, over all of them together."""
    jobs = [endpoint for _ in range(traffic.requests) for endpoint in endpoints]
    started = time.monotonic()
    with ThreadPoolExecutor(max_workers=traffic.concurrency * len(endpoints)) as pool:
        answers = list(pool.map(lambda endpoint: _one_request(endpoint, traffic), jobs))
    seconds = time.monotonic() - started
    done = [answer for answer in answers if answer is not None]
    firsts = sorted(first for _, first in done)
    return {
        "requests": len(jobs),
        "failed_requests": len(jobs) - len(done),
        "output_tokens_per_second": round(sum(tokens for tokens, _ in done) / seconds, 1),
        "time_to_first_token_ms": round(1000 * firsts[len(firsts) // 2], 1) if firsts else None,
        "seconds": round(seconds, 2),
    }


def _one_request(endpoint: Endpoint, traffic: Traffic) -> tuple[int, float] | None:
    """Tokens of one streamed answer and the seconds to its first; None where it failed."""
    text = "Go on with this list of numbers, and never stop: " + "one two three " * (traffic.input_tokens // 3)
    body = question(
        endpoint, text, max_tokens=traffic.output_tokens, stream=True, stream_options={"include_usage": True}
    )
    started = time.monotonic()
    tokens, first = 0, None
    try:
        connection, response = request(endpoint, "POST", "/v1/chat/completions", body)
        try:
            if response.status != 200:
                return None
            for raw in response:
                line = raw.decode("utf-8", "replace").strip()
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                event = json.loads(line[len("data:") :])
                if event.get("choices") and first is None:
                    first = time.monotonic() - started
                tokens = (event.get("usage") or {}).get("completion_tokens") or tokens
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError):
        return None
    return (tokens, first) if tokens and first is not None else None


# -- waiting -----------------------------------------------------------------------------------------------------


class Wait:
    """The wait for one server, over one or several calls: what it has seen so far is `state`."""

    def __init__(self, endpoint: Endpoint, state: dict[str, Any] | None = None) -> None:
        self.endpoint = endpoint
        self.waited = float((state or {}).get("waited", 0.0))  # before this call
        self.unhealthy = float((state or {}).get("unhealthy", 0.0))  # seconds that it has answered 503 by now
        self.last = Health(None, "not asked")
        self.started = time.monotonic()
        self.asked: float | None = None
        self.listed = True

    @property
    def elapsed(self) -> float:
        return self.waited + time.monotonic() - self.started

    def look(self) -> dict[str, Any] | None:
        """The health check, once it can be judged: ready, or given up."""
        now = time.monotonic()
        self.last = self._look()
        if self.last.status == 200 and self.listed:
            return ready_check(self.endpoint, self.elapsed if self.elapsed > POLL_SECONDS else None)
        if self.last.status == 503:
            self.unhealthy += now - self.asked if self.asked is not None else 0.0
        else:
            self.unhealthy = 0.0
        self.asked = now
        given_up = self.unhealthy >= min(UNHEALTHY_SECONDS, self.endpoint.ready_within_seconds)
        if given_up and not self.endpoint.behind_frontend:
            seen = f"{self.last.seen} for {self.unhealthy:.0f} s"
            return not_ready_check(self.endpoint, seen, not_ready_remedy(self.last))
        if self.elapsed >= self.endpoint.ready_within_seconds:
            seen = f"{self.last.seen} after {self.elapsed:.0f} s"
            return not_ready_check(self.endpoint, seen, not_ready_remedy(self.last))
        return None

    def _look(self) -> Health:
        """One look; behind a frontend, at its list of models too, as its health says nothing of them."""
        found = health(self.endpoint)
        if found.status == 200 and self.endpoint.behind_frontend:
            try:
                names = models(self.endpoint._replace(answer_seconds=10))
            except ProbeError as error:
                self.listed = False
                return found._replace(seen=error.seen)
            self.listed = self.endpoint.model in names
            if not self.listed:
                return found._replace(seen=f"status 200, models listed: {', '.join(names) or 'none'}")
        return found

    def state(self) -> dict[str, Any]:
        return {"waited": self.elapsed, "unhealthy": self.unhealthy, "seen": self.last.seen}


def report(ok: bool, checks: list[dict[str, Any]]) -> str:
    """Everything in one line, short enough to be kept whole."""
    kept = ("id", "ok", "seen", "remedy")
    short = [{key: excerpt(check[key], REPORTED) if key == "seen" else check[key] for key in kept} for check in checks]
    first = next((check for check in checks if check["ok"] is False), None)
    message = f"{first['title']}: no: {first['seen']}" if first else "every probe was answered as it should be"
    return json.dumps({"program": "probe_endpoint", "ok": ok, "message": excerpt(message, REPORTED), "checks": short})


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask an OpenAI-compatible endpoint whether it answers as it should.")
    parser.add_argument("--url", required=True, help="such as http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="the id that /v1/models must list")
    parser.add_argument("--name", default="0", help="of the process or graph, for the checks' ids")
    parser.add_argument("--health-path", default="/health")
    parser.add_argument("--wait", type=float, default=2400, help="seconds to wait until it is ready")
    parser.add_argument("--answer-timeout", type=float, default=300, help="seconds that one answer may take")
    parser.add_argument("--progress", type=float, default=15, help="seconds between two lines of progress")
    parser.add_argument("--probes", default=",".join(PROBES[:4]), help="comma-separated: " + ",".join(PROBES))
    parser.add_argument("--place", choices=sorted(REMEDIES), default="host", help="where the endpoint runs")
    parser.add_argument(
        "--report", choices=("text", "line"), default="text", help="the result for people, or in a line"
    )
    given = parser.parse_args()
    probes = [word for word in given.probes.split(",") if word]
    for word in probes:
        if word not in PROBES:
            parser.error("--probes: {} is not a probe; allowed: {}".format(word, ", ".join(PROBES)))
    # As process 1 of a container nothing ends this but what it asks for.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    endpoint = Endpoint(
        name=given.name,
        url=given.url.rstrip("/"),
        model=given.model,
        health_path=given.health_path,
        ready_within_seconds=given.wait,
        answer_seconds=given.answer_timeout,
        api_key=os.environ.get("OPENAI_API_KEY", ""),
        place=given.place,
    )
    wait, told = Wait(endpoint), time.monotonic()
    first = wait.look()
    while first is None:
        if time.monotonic() - told >= given.progress:
            told = time.monotonic()
            sys.stderr.write(f"{wait.elapsed:.0f} of {given.wait:g} s: {wait.last.seen}\n")
            sys.stderr.flush()
        time.sleep(POLL_SECONDS)
        first = wait.look()
    ready = first["ok"] is True
    checks = [first] + (run_probes(endpoint, probes) if ready else skipped(endpoint, probes, "not asked: not ready"))
    ok = not any(entry["ok"] is False for entry in checks)
    if given.report == "line":
        for entry in checks:
            mark = {True: "ok", False: "no", None: "--"}[entry["ok"]]
            print(f"{mark}  {entry['title']}: {entry['seen']}", flush=True)
        print(report(ok, checks), flush=True)
    else:
        print(json.dumps({"ok": ok, "checks": checks}, indent=2))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
