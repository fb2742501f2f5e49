"""tau2's own user simulator, played by a language model behind an OpenAI-compatible endpoint.

A config names it as the user of the environment::

    env:
      user:
        _component_: components.envs.users_llm.LLMUser
        base_url: http://127.0.0.1:8000/v1
        model: Qwen/Qwen3-8B
        temperature: 0.0
        timeout_s: 60
        retries: 3
        api_key_env: OPENAI_API_KEY

Prompts, roles and tools are those of tau2's ``UserSimulator``
(``tau2/user/user_simulator.py``), and litellm talks to the endpoint. Retries and deadlines are
ours: litellm, its OpenAI client and tau2 each retry by themselves, which multiplies, and none of
the three keeps a deadline for the turn.
"""

from __future__ import annotations

import functools
import math
import os
import re
import time
from collections.abc import Callable
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from components.envs.base import UserError
from components.envs.refusals import ToolTimeout, time_limit

__all__ = ["LLMUser"]

FIRST_WAIT_S = 0.25
MAX_WAIT_S = 8.0
NO_KEY = "EMPTY"
"""Sent where no key is set: the client insists on one, and vLLM's documentation uses this word."""


class LLMUser:
    """Makes the user of each episode; the ``user`` setting of ``Tau2Env``."""

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        temperature: float | None = 0.0,
        timeout_s: float = 60.0,
        retries: int = 3,
        api_key_env: str | None = None,
    ) -> None:
        """Check the settings; nothing is sent before an episode.

        Args:
            base_url: of the endpoint, e.g. ``http://127.0.0.1:8000/v1``.
            model: the endpoint's name of the model, without litellm's prefix of a provider.
            temperature: of the sampling; None leaves it to the endpoint (some models refuse it).
                The seed of the episode is sent too; whether the endpoint keeps to it is its affair.
            timeout_s: most seconds for one turn of the user, its retries and waits included. As
                with tools, an answer that trickles is cut in the main thread only; elsewhere this
                bounds the time between two pieces of it.
            retries: how often a turn is asked for again after a 5xx, a lost connection or an answer
                that cannot be used. A 429 with Retry-After is waited for and takes none of them.
            api_key_env: name of the environment variable that holds the key, in the processes that
                play episodes too; None for an endpoint that asks for none.

        Raises:
            ValueError: for a setting out of range, or a variable that is not set.
        """
        url = urlsplit(base_url) if isinstance(base_url, str) else urlsplit("")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"base_url: {base_url!r} is not http(s)://host[:port]/path")
        if url.username or url.password or url.query:
            # The value is not repeated: it may hold the secret.
            raise ValueError("base_url: no user, password or query; name the key in api_key_env")
        if not isinstance(model, str) or not model.strip():
            raise ValueError(f"model: {model!r} must be the endpoint's name of a model")
        if temperature is not None and not (_is_number(temperature) and temperature >= 0):
            raise ValueError(f"temperature: {temperature!r} must be null or a finite number from 0")
        if not (_is_number(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s: {timeout_s!r} must be a finite number above 0")
        if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
            raise ValueError(f"retries: {retries!r} must be a whole number from 0")
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.temperature = temperature
        self.timeout_s = float(timeout_s)
        self.retries = retries
        self.api_key_env = api_key_env
        self.key()

    def key(self) -> str:
        """The key, read anew each time: it is in no attribute, hence in no pickle.

        Raises:
            ValueError: for a variable that is not set, or not a variable's name.
        """
        name = self.api_key_env
        if name is None:
            return NO_KEY
        if not isinstance(name, str) or not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
            # The value is not repeated: a key put here by mistake would end up in the log.
            raise ValueError(
                "api_key_env: must be the name of an environment variable in capitals, "
                "e.g. OPENAI_API_KEY, and not the key itself"
            )
        value = os.environ.get(name, "").strip()
        if not value:
            raise ValueError(f"api_key_env: the environment variable {name} is not set, or empty")
        return value

    def make_user(self, task: Any, environment: Any) -> Any:
        """The user of one episode, as the benchmark builds it.

        Args:
            task: the tau2 task; only its ``user_scenario`` is read.
            environment: the episode's tau2 environment; its user's tools (telecom) are described
                to the model. The Orchestrator executes them.

        Returns:
            A tau2 ``UserSimulator``. Its ``generate_next_message`` raises :class:`UserError`.
        """
        return _user_class()(
            self,
            tools=None if environment.user_tools is None else environment.get_user_tools(),
            instructions=str(task.user_scenario),
        )

    def turn(self, ask: Callable[[float], Any]) -> Any:
        """Ask for a turn until there is a usable answer.

        Args:
            ask: takes the seconds that are left, gives the answer.

        Raises:
            UserError: the endpoint refused, or retries or time were used up. The text names the
                setting concerned and never holds the key.
        """
        try:
            with time_limit(self.timeout_s):
                return self._ask(ask)
        except ToolTimeout:
            raise UserError(self._late("no full answer")) from None

    def _ask(self, ask: Callable[[float], Any]) -> Any:
        end = time.monotonic() + self.timeout_s
        failures = 0
        while True:
            try:
                return ask(max(end - time.monotonic(), 1e-3))
            except Exception as error:  # litellm's, httpx's, json's, pydantic's: many families
                reason = f"{type(error).__name__}: {error}".replace(self.key(), "***")[:300]
                status = getattr(error, "status_code", None)
                asked_wait_s = _retry_after_s(error)
                if status is None:
                    reason = f"an answer that cannot be used: {reason}"
            if status in (401, 403):
                raise UserError(self._refused_key(status)) from None
            if status is not None and 400 <= status < 500 and status not in (408, 409, 429):
                raise UserError(
                    f"base_url {self.base_url} refused the request for model {self.model!r} "
                    f"with status {status}: {reason}"
                ) from None
            if status != 429 or asked_wait_s is None:
                failures += 1
            if failures > self.retries:
                raise UserError(
                    f"base_url {self.base_url} failed {failures} times "
                    f"(retries={self.retries}), at last with {reason}"
                ) from None
            wait_s = min(FIRST_WAIT_S * 2 ** max(failures - 1, 0), MAX_WAIT_S)
            wait_s = max(wait_s, asked_wait_s or 0.0)
            if time.monotonic() + wait_s >= end:
                raise UserError(self._late(reason)) from None
            time.sleep(wait_s)

    def _late(self, reason: str) -> str:
        return f"base_url {self.base_url} took longer than timeout_s={self.timeout_s:g}: {reason}"

    def _refused_key(self, status: int) -> str:
        sent = "no key was sent" if self.api_key_env is None else f"it came from {self.api_key_env}"
        return f"api_key_env: base_url {self.base_url} refused the key with {status} ({sent})"


@functools.cache
def _user_class() -> type:
    from tau2.user.user_simulator import UserSimulator

    class EndpointUser(UserSimulator):
        """tau2's user with our deadline and retries."""

        def __init__(self, settings: LLMUser, *, tools: Any, instructions: str) -> None:
            # The prefix, which is not sent, stands for any endpoint of that protocol. Under
            # "openai/" litellm goes by the model's name: it drops the temperature of "gpt-5" and
            # sends "gpt-5.4" to another API.
            super().__init__(
                tools=tools,
                instructions=instructions,  # type: ignore[arg-type]  # as tau2's own runner does
                llm=f"custom_openai/{settings.model}",
                llm_args={"num_retries": 0, "max_retries": 0},
            )
            if settings.temperature is not None:
                self.llm_args["temperature"] = settings.temperature
            self.settings = settings

        def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
            num_before = len(state.messages)

            def ask(left_s: float) -> tuple[Any, Any]:
                del state.messages[num_before:]  # what an attempt that failed has put there
                self.llm_args["timeout"] = left_s
                turn, new_state = self._generate_next_message(message, state)
                _check_whole(turn)
                return turn, new_state

            # The client holds the key, so that it is not among the arguments that litellm logs. It
            # is kept by the process: litellm's own are kept too, one for each value of timeout.
            self.llm_args["client"] = _client(self.settings.base_url, self.settings.key())
            try:
                return self.settings.turn(ask)
            finally:
                del self.llm_args["client"]

    return EndpointUser


@functools.lru_cache(maxsize=8)
def _client(base_url: str, key: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=base_url, api_key=key, max_retries=0)


def _check_whole(turn: Any) -> None:
    """Refuse what tau2 would put into the conversation: nothing, or half a sentence.

    Raises:
        ValueError: for either.
    """
    if not turn.has_text_content() and not turn.tool_calls:
        raise ValueError("the answer has neither text nor calls")
    if (turn.raw_data or {}).get("finish_reason") == "length":
        raise ValueError("the answer was cut at the endpoint's limit of tokens")


def _retry_after_s(error: Exception) -> float | None:
    """Seconds of a Retry-After header, given as a number or as a date (RFC 9110, 10.2.3)."""
    # Where litellm is given a client, the response that it attaches to its error has no headers.
    headers = getattr(error, "litellm_response_headers", None)
    headers = headers or getattr(getattr(error, "response", None), "headers", None) or {}
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            moment = parsedate_to_datetime(value)
        except ValueError:
            return None
        moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        seconds = (moment - datetime.now(timezone.utc)).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
