"""One vLLM server over HTTP: token ids in, token ids and log-probabilities out, weights by files.

Everything here was tried on vLLM 0.32.0. What a server may answer is never trusted: an answer that
is cut, malformed or from other weights is an error.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.policy.engine import EngineError
from components.policy.vllm_weights import Weights
from components.rollout.types import FinishReason, SampleRequest, SampleResult

if TYPE_CHECKING:
    import httpx

_SHOWN = 300
_PASSING = (408, 425, 429)
"""Statuses below 500 that may be others when asked again."""

MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to it, but for 0."""


class Unavailable(EngineError):
    """No answer, or none of use; another attempt may get one."""


class NoAnswer(Unavailable):
    """The server cannot be reached, or hung up."""


class NotServed(Unavailable):
    """The server does not have our weights, e.g. because it was started anew."""


class Refused(EngineError):
    """The server refuses the request, and would again."""

    def __init__(self, text: str, *, status: int) -> None:
        super().__init__(text)
        self.status = status


class VLLMServer:
    """One server.

    Args:
        address: ``http://host:port``.
        client: of the event loop that this object is used in.

    Attributes:
        base_model: the server's name of the model that it was started with.
        label: of the weights that it has been proved to serve; empty before.
        proved: whether the weights that were last loaded into it are.
        num_rollouts: that are placed on it.
        failing: whether its last answer was none.
        renewing: held while weights are loaded into it.
    """

    def __init__(self, address: str, *, client: httpx.AsyncClient) -> None:
        self.address = address
        self.base_model = ""
        self.label = ""
        self.proved = False
        self.num_rollouts = 0
        self.failing = False
        self.renewing = asyncio.Lock()
        self._client = client
        self._adapter = ""

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """One request; the answer's JSON, or its text.

        Raises:
            NoAnswer: it cannot be reached.
            Unavailable: a status that may pass, or half an answer.
            Refused: any other status but 200.
        """
        import httpx

        where = f"{self.address}{path}"
        try:
            answer = await self._client.request(method, where, json=body)
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise NoAnswer(f"{where}: {reason}") from error
        if answer.status_code >= 500 or answer.status_code in _PASSING:
            raise Unavailable(f"{where}: status {answer.status_code}: {answer.text[:_SHOWN]}")
        if answer.status_code != 200:
            text = f"{where}: status {answer.status_code}: {answer.text[:_SHOWN]}"
            raise Refused(text, status=answer.status_code)
        if "json" not in answer.headers.get("content-type", ""):
            return answer.text
        try:
            return answer.json()
        except ValueError as error:
            raise Unavailable(f"{where}: not JSON: {answer.text[:_SHOWN]!r}") from error

    async def load(self, directory: Path, weights: Weights, label: str) -> None:
        """Load weights, name them, and drop what was computed with others. May be repeated."""
        previous, self.label = self._adapter, ""
        if weights == "adapter":
            # In place, so that a repeated attempt does not meet its own first one.
            body = {"lora_name": label, "lora_path": str(directory), "load_inplace": True}
            await self.call("POST", "/v1/load_lora_adapter", body)
            self._adapter = label
            if previous not in ("", label):
                await self._unload(previous)
        else:
            kwargs = {"weights_path": str(directory)}
            body = {"method": "reload_weights", "kwargs": kwargs}
            await self.call("POST", "/collective_rpc", body)
        # Running requests, which would keep it from that, are none of ours any more.
        answer = await self.call("POST", "/reset_prefix_cache?reset_running_requests=true")
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise Unavailable(f"{self.address}: its prefix cache was not reset: {answer}")
        # Last: what carries the name has seen nothing of other weights.
        await self.call("POST", "/update_weight_version", {"new_version": label})

    def adopt(self, weights: Weights, label: str) -> None:
        """Take over what another process has loaded and proved."""
        self.label, self.proved = label, True
        self._adapter = label if weights == "adapter" else ""

    async def _unload(self, adapter: str) -> None:
        try:
            await self.call("POST", "/v1/unload_lora_adapter", {"lora_name": adapter})
        except Refused as error:
            if error.status != 404:  # gone with a restart: as it should be
                raise

    async def weight_version(self) -> str:
        """The label of the weights that it has, as it says."""
        answer = await self.call("GET", "/weight_info")
        if not (isinstance(answer, dict) and isinstance(answer.get("weight_version"), str)):
            raise Unavailable(f"{self.address}: malformed /weight_info: {answer}")
        return answer["weight_version"]

    async def probe(
        self, sequences: Sequence[tuple[int, ...]], *, label: str
    ) -> tuple[list[list[float]], float]:
        """Its log-probabilities of each sequence, and how much they vary by themselves.

        One request at a time, so that only the weights can make them differ from those before.
        """
        served = [await self.logprobs(ids, label=label) for ids in sequences]
        again = [await self.logprobs(ids, label=label) for ids in sequences]
        differences = (
            abs(x - y)
            for first, second in zip(served, again, strict=True)
            for x, y in zip(first, second, strict=True)
        )
        return served, max(differences)

    async def logprobs(self, ids: tuple[int, ...], *, label: str) -> list[float]:
        """Log-probability of each id but the first, untempered.

        Args:
            ids: of one sequence.
            label: of the weights that must have computed them.
        """
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "logprobs": 0}
        answer, choice = await self._generate(ids, params)
        self._check_versions(choice, 1, label)
        try:
            entries = answer["prompt_logprobs"][1 : len(ids)]
            pairs = zip(ids[1:], entries, strict=True)
            return [float(entry[str(token)]["logprob"]) for token, entry in pairs]
        except (KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"{self.address}: malformed prompt_logprobs: {error!r}") from error

    async def sample(
        self, request: SampleRequest, *, max_new_tokens: int, label: str, policy_version: int
    ) -> SampleResult:
        """Sample one turn.

        Args:
            request: what to sample.
            max_new_tokens: the request's limit, or what is left of the context.
            label: of the weights that must have sampled it.
            policy_version: of these weights.

        Raises:
            NotServed: another version answered.
            Unavailable: no answer, or a malformed one.
            Refused: the server does not take the request.
        """
        params = {
            "max_tokens": max_new_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "logprobs": 0,  # those of the sampled tokens
            "stop_token_ids": sorted(request.stop_ids),
            "ignore_eos": True,  # the renderer's stop ids alone end a turn
            # Whatever generation_config.json says: only temperature shapes the distribution.
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "detokenize": False,
        }
        _, choice = await self._generate(request.context, params)
        try:
            ids = tuple(int(token) for token in choice["token_ids"])
            entries = choice["logprobs"]["content"]
            logprobs = tuple(min(float(entry["logprob"]), 0.0) for entry in entries)
            named = tuple(entry["token_id"] for entry in entries)
            reason = choice["finish_reason"]
        except (KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"{self.address}: malformed answer: {error!r}") from error
        self._check_versions(choice, len(ids), label)
        finish: FinishReason = "stop" if ids and ids[-1] in request.stop_ids else "length"
        if finish == "length" and len(ids) != max_new_tokens:
            raise Unavailable(
                f"{self.address}: a turn ended by {reason!r} after {len(ids)} of {max_new_tokens} "
                "tokens, without a stop id"
            )
        if named != ids or len(ids) > max_new_tokens or request.stop_ids.intersection(ids[:-1]):
            raise Unavailable(f"{self.address}: ids and log-probabilities do not fit together")
        if not all(math.isfinite(logprob) for logprob in logprobs):
            raise Unavailable(f"{self.address}: log-probabilities that are not finite")
        return SampleResult(
            ids=ids, logprobs=logprobs, finish_reason=finish, policy_version=policy_version
        )

    async def _generate(self, ids: tuple[int, ...], params: dict[str, Any]) -> tuple[Any, Any]:
        """The answer and its one choice."""
        body = {
            "model": self._adapter or self.base_model,
            "token_ids": list(ids),
            "sampling_params": params,
            "stream": False,
        }
        try:
            answer = await self.call("POST", "/inference/v1/generate", body)
        except Refused as error:
            if error.status == 404 and self._adapter:
                raise NotServed(f"{self.address} has lost its adapter: {error}") from error
            raise
        try:
            (choice,) = answer["choices"]
        except (KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"{self.address}: malformed answer: {error!r}") from error
        return answer, choice

    def _check_versions(self, choice: Any, num_tokens: int, label: str) -> None:
        """All tokens come from the weights of the label."""
        try:
            spans = [(s["version"], s["start"], s["end"]) for s in choice["weight_versions"]]
        except (KeyError, TypeError) as error:
            raise EngineError(
                f"{self.address}: no weight_versions in an answer; is it older than vLLM 0.32?"
            ) from error
        if spans != [(label, 0, num_tokens)]:
            raise NotServed(f"{self.address} answered with weights {spans}, not {label!r}")
