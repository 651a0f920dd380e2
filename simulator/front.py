"""The engine's own endpoints, in front of Dynamo's: what it answers, what it refuses, how it goes away."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from simulator.dynamo import Dynamo
from simulator.engine import Engine
from simulator.loading import HARMONY_ERROR
from simulator.settings import Settings

GENERATION = ("/v1/chat/completions", "/v1/completions")
LARGEST_REQUEST = 256 * 1024 * 1024
_WATCH_EVERY = 0.25


class Front:
    """One server: it counts its requests, watches its workers, and ends the way the engine ends."""

    def __init__(self, engine: Engine, dynamo: Dynamo, settings: Settings, encodings: bool) -> None:
        self.engine = engine
        self.dynamo = dynamo
        self.settings = settings
        self.encodings = encodings
        self.lost = False  # the engine behind is gone; what that means depends on the engine
        self.unnoticed = False  # … or it is gone and nobody knows
        self.leaving = False
        self.running = 0
        self.finished = 0
        self.statistics: deque[dict[str, Any]] = deque(maxlen=1000)
        self.idle = asyncio.Event()
        self.idle.set()
        self.end = asyncio.Event()
        self.session: aiohttp.ClientSession | None = None

    # --- What every engine has ---

    def application(self) -> web.Application:
        app = web.Application(client_max_size=LARGEST_REQUEST, middlewares=[self._guard])
        for path in GENERATION:
            app.router.add_post(path, self.generate)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_get("/version", self.version)
        if self.engine.kind == "tensorrt_llm":
            app.router.add_get("/health_generate", self.health_generate)
            app.router.add_get("/metrics", self.iteration_statistics)
            if self.engine.request_metrics:
                app.router.add_get("/prometheus/metrics", self.prometheus)
        else:
            app.router.add_route("*", "/ping", self.health)
            app.router.add_get("/load", self.load)
            app.router.add_get("/metrics", self.prometheus)
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if self.engine.api_keys and request.path.startswith("/v1"):
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not any(secrets.compare_digest(given.encode(), key.encode()) for key in self.engine.api_keys):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self.lost else 200)

    async def version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": self.engine.release})

    async def models(self, _request: web.Request) -> web.Response:
        owner = "tensorrt_llm" if self.engine.kind == "tensorrt_llm" else "vllm"
        entries: list[dict[str, Any]] = []
        for name in self.engine.served_names:
            entry: dict[str, Any] = {"id": name, "object": "model", "created": int(time.time()), "owned_by": owner}
            if self.engine.kind == "vllm":
                entry |= {"root": self.engine.model, "parent": None, "max_model_len": self.engine.max_seq_len or 131072}
            entries.append(entry)
        return web.json_response({"object": "list", "data": entries})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Pass a request on, and its answer back as it comes."""
        body = await request.read()
        try:
            asked = json.loads(body)
            if not isinstance(asked, dict):
                raise ValueError("the body is not an object")
        except ValueError as error:
            return self._error(400, f"[{{'type': 'json_invalid', 'msg': 'JSON decode error: {error}'}}]", "Bad Request")
        if request.path == "/v1/chat/completions" and not self.encodings and self.engine.kind == "tensorrt_llm":
            self.engine.log(f"Error in harmony chat completion: {HARMONY_ERROR}")
            return self._error(400, HARMONY_ERROR, "BadRequestError")
        if self.leaving or self.lost:
            return self._error(503, "The engine is shutting down" if self.leaving else "The engine is dead", "Error")
        name = asked.get("model") or self.engine.served_names[0]
        if name not in self.engine.served_names:
            return self._error(404, f"The model `{name}` does not exist.", "NotFoundError")
        asked["model"] = self.engine.served_names[0]
        started = time.monotonic()
        self.running += 1
        self.idle.clear()
        try:
            if self.unnoticed:
                await asyncio.Event().wait()  # nobody answers; the client gives up, or does not
            stream = bool(asked.get("stream")) and self.settings.fail != "no_stream"
            if not stream:
                asked.pop("stream", None)
                asked.pop("stream_options", None)
            return await self._forward(request, asked)
        finally:
            self.running -= 1
            self.finished += 1
            self.statistics.append(
                {
                    "iter": self.finished,
                    "iterLatencyMS": round((time.monotonic() - started) * 1000, 3),
                    "numActiveRequests": self.running,
                }
            )
            if not self.running:
                self.idle.set()

    async def _forward(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        assert self.session is not None
        try:
            async with self.session.post(self.dynamo.url + request.path, json=asked) as answer:
                if answer.status == 404:  # the name was right: see generate()
                    self.engine.log("Dynamo no longer knows its mocker, which was starved for too long")
                    self.dynamo.mocker.kill()
                    return self._error(500, "The engine died", "InternalServerError")
                if answer.status != 200:
                    return self._error(answer.status, *_dynamo_error(await answer.text()))
                response = web.StreamResponse(status=200, headers={"Content-Type": answer.headers["Content-Type"]})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response
        except aiohttp.ClientError as error:
            return self._error(500, f"Internal server error: {error}", "InternalServerError")

    def _error(self, status: int, message: str, kind: str) -> web.Response:
        error = {"message": message, "type": kind, "param": None, "code": status}
        if self.engine.kind == "vllm":
            return web.json_response({"error": error}, status=status)
        return web.json_response({"object": "error", **error}, status=status)

    # --- TensorRT-LLM ---

    async def health_generate(self, _request: web.Request) -> web.Response:
        """One token, for real."""
        if self.unnoticed:
            await asyncio.Event().wait()
        asked = {"model": self.engine.served_names[0], "prompt": "hi", "max_tokens": 1}
        assert self.session is not None
        try:
            async with self.session.post(f"{self.dynamo.url}/v1/completions", json=asked) as answer:
                return web.Response(status=200 if answer.status == 200 and not self.lost else 500)
        except aiohttp.ClientError:
            return web.Response(status=500)

    async def iteration_statistics(self, _request: web.Request) -> web.Response:
        """Reading takes: a second reader gets nothing."""
        entries = list(self.statistics) if self.engine.iteration_statistics else []
        self.statistics.clear()
        return web.json_response(entries)

    # --- vLLM ---

    async def load(self, _request: web.Request) -> web.Response:
        return web.json_response({"server_load": self.running})

    async def prometheus(self, _request: web.Request) -> web.Response:
        """The engine's best-known series, then Dynamo's."""
        prefix = "vllm:" if self.engine.kind == "vllm" else "trtllm_"
        label = f'{{model_name="{self.engine.served_names[0]}"}}'
        lines = [
            f"# TYPE {prefix}num_requests_running gauge",
            f"{prefix}num_requests_running{label} {self.running}",
            f"# TYPE {prefix}request_success_total counter",
            f"{prefix}request_success_total{label} {self.finished}",
        ]
        assert self.session is not None
        async with self.session.get(f"{self.dynamo.url}/metrics") as answer:
            text = "\n".join(lines) + "\n" + await answer.text()
        return web.Response(text=text, content_type="text/plain")

    # --- Life and death ---

    async def _watch(self) -> None:
        """Notice what happens to the workers, and do what was asked to happen to them."""
        ready_at = time.monotonic()
        fault = self.settings.fail
        while not self.lost:
            await asyncio.sleep(_WATCH_EVERY)
            if time.monotonic() - ready_at < self.settings.fail_after_seconds:
                pass
            elif fault == "rank_crash" and self.dynamo.running():
                self.engine.log("A rank died (simulated)")
                self.dynamo.mocker.kill()
            elif fault == "worker_lost" and not self.unnoticed:
                self.engine.log("A worker was lost, and nobody notices (simulated)")
                self.unnoticed = True
            if not self.dynamo.running() and not self.unnoticed:
                self.lost = True
                self.engine.log("The engine is dead: a worker process ended")
                if self.engine.kind == "vllm":
                    self.end.set()  # vLLM notices, and its server ends with status 0

    async def serve(self, listener: socket.socket) -> signal.Signals | None:
        """Answer until a signal says to leave, or the engine does. Returns the signal."""
        received: list[signal.Signals] = []
        loop = asyncio.get_running_loop()

        def leave(number: signal.Signals) -> None:
            received.append(number)
            self.end.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, leave, number)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self.session:
            runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.SockSite(runner, listener, backlog=2048)
            await site.start()
            self.engine.log("Application startup complete.")
            self.engine.log(f"Uvicorn running on http://{self.engine.host}:{self.engine.port} (Press CTRL+C to quit)")
            watch = asyncio.create_task(self._watch())
            await self.end.wait()
            self.leaving = True
            await site.stop()
            if self.running:
                self.engine.log(f"Shutting down: {self.running} request(s) in flight")
            try:
                async with asyncio.timeout(0 if self.lost else self.engine.drain_seconds):
                    await self.idle.wait()
            except TimeoutError:
                self.engine.log(f"Shutting down: {self.running} request(s) aborted")
            watch.cancel()
            await runner.cleanup()
        return received[0] if received else None


def _dynamo_error(text: str) -> tuple[str, str]:
    try:
        error = json.loads(text)
        return str(error["message"]), str(error["type"])
    except (ValueError, KeyError, TypeError):
        return text, "InternalServerError"
