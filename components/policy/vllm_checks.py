"""What a vLLM server must offer, asked before anything is computed, and what it is not sent.

Every error of a server names the option of ``vllm serve`` that was missing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

from components.policy.checks import check_requests
from components.policy.engine import EngineError
from components.policy.vllm_server import MIN_TEMPERATURE, Refused, Unavailable, VLLMServer
from components.rollout.types import SampleRequest

_DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1 in its environment (vLLM 0.32 or newer)"
_RUNTIME_LORA = "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"


def check_addresses(addresses: Sequence[str], *, sync_dir: str | None) -> list[str]:
    """The addresses of the servers, without a slash or ``/v1`` at their end.

    Raises:
        ValueError: no address, one that is none, the same twice, or servers on other machines
            without a folder that they share with this one.
    """
    if isinstance(addresses, str) or not addresses:
        raise ValueError(
            f"engine.addresses = {addresses!r}: must be a list of one or more addresses, "
            "e.g. [http://127.0.0.1:8000]"
        )
    found = [address.rstrip("/").removesuffix("/v1") for address in addresses]
    for address in found:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"engine.addresses: {address!r} must be like http://127.0.0.1:8000")
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        if sync_dir is None and not local:
            raise ValueError(
                f"engine.addresses: {address} is another machine, so engine.sync_dir must name a "
                "folder that both see under the same path: weights go there as files"
            )
    if len(set(found)) != len(found):
        raise ValueError(f"engine.addresses: one of {', '.join(found)} is named twice")
    return found


async def check_server(
    server: VLLMServer, *, max_tokens: int, vocab_size: int, lora_rank: int | None
) -> None:
    """Ask a server for everything that the engine needs.

    Args:
        server: its ``base_model`` is set.
        max_tokens: longest context.
        vocab_size: of the trainer's model.
        lora_rank: of the adapters that it will be sent; None: full weights.

    Raises:
        EngineError: naming the address and what is missing.
    """
    limit = await _base_model(server)
    if limit < max_tokens:
        raise EngineError(
            f"rollout.max_tokens = {max_tokens}: the context of {server.address} is {limit} "
            f"tokens; start it with --max-model-len {max_tokens} or more"
        )
    await _reach(server, "/weight_info", _DEV_MODE)
    for path in ("/collective_rpc", "/update_weight_version", "/reset_prefix_cache"):
        await _reach(server, path, _DEV_MODE)
    await _generates(server, vocab_size)
    await _config(server, max_tokens, lora_rank)
    if lora_rank is not None:
        await _reach(server, "/v1/load_lora_adapter", _RUNTIME_LORA)


async def _base_model(server: VLLMServer) -> int:
    """Learn the server's name of its model; its longest context."""
    try:
        answer = await server.call("GET", "/v1/models")
        card = next(card for card in answer["data"] if not card.get("parent"))
        server.base_model, limit = str(card["id"]), int(card["max_model_len"])
    except Unavailable as error:
        raise EngineError(f"engine.addresses: no vLLM server answers there: {error}") from error
    except Refused as error:
        key = "; engine.api_key_env names the variable with its key" if error.status == 401 else ""
        raise EngineError(f"engine.addresses: {error}{key}") from error
    except (KeyError, StopIteration, TypeError, ValueError) as error:
        raise EngineError(
            f"engine.addresses: {server.address} does not list its models as vLLM does ({error!r})"
        ) from error
    return limit


async def _reach(server: VLLMServer, path: str, remedy: str) -> None:
    """The server has an endpoint: anything but 404, e.g. 405 where it wants a POST."""
    try:
        await server.call("GET", path)
    except Refused as error:
        if error.status == 404:
            raise EngineError(f"{server.address} has no endpoint {path}: {remedy}") from error
        if error.status != 405:
            raise


async def _generates(server: VLLMServer, vocab_size: int) -> None:
    """It takes token ids, all of the model's."""
    params = {"max_tokens": 1, "temperature": 0.0}
    body = {"model": server.base_model, "sampling_params": params, "stream": False}
    try:
        await server.call("POST", "/inference/v1/generate", body | {"token_ids": [0]})
    except Refused as error:
        if error.status in (403, 404):
            raise EngineError(
                f"{server.address} takes no token ids (/inference/v1/generate): start it with "
                f"--enable-scale-out (vLLM 0.32 or newer); it said: {error}"
            ) from error
        raise
    try:
        await server.call("POST", "/inference/v1/generate", body | {"token_ids": [vocab_size - 1]})
    except Refused as error:
        raise EngineError(
            f"{server.address} serves another model ({server.base_model}) than model_dir: it does "
            f"not know the last of {vocab_size} token ids: {error}"
        ) from error


async def _config(server: VLLMServer, max_tokens: int, lora_rank: int | None) -> None:
    """How it was started."""
    await _reach(server, "/server_info", _DEV_MODE)
    answer = await server.call("GET", "/server_info?config_format=json")
    try:
        config = answer["vllm_config"]
        mode = config["model_config"]["logprobs_mode"]
        scheduler, device = config["scheduler_config"], config["device_config"]["device"]
        chunked = scheduler["enable_chunked_prefill"]
        batched = scheduler["max_num_batched_tokens"]
        lora = config["lora_config"]
        max_lora_rank = None if lora is None else int(lora["max_lora_rank"])
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"{server.address}: /server_info does not say how it was started ({error!r}); "
            "this engine knows vLLM 0.32"
        ) from error
    if mode != "processed_logprobs":
        raise EngineError(
            f"{server.address} gives {mode}, which are not those of the tempered distribution that "
            "it samples from: start it with --logprobs-mode processed_logprobs"
        )
    if device == "cpu" and chunked and batched < max_tokens:
        raise EngineError(
            f"{server.address} cuts prompts above {batched} tokens into chunks, and on a CPU a "
            "seeded request that is cut ends the whole server (vLLM 0.32): start it with "
            "--no-enable-chunked-prefill"
        )
    if lora_rank is None:
        return
    if max_lora_rank is None:
        raise EngineError(
            f"{server.address} takes no adapters: start it with --enable-lora "
            f"--max-lora-rank {lora_rank}"
        )
    if max_lora_rank < lora_rank:
        raise EngineError(
            f"{server.address} takes adapters of rank {max_lora_rank} at most, the model's have "
            f"{lora_rank}: start it with --max-lora-rank {lora_rank} or the next that it allows"
        )


def check_turns(
    requests: Sequence[SampleRequest],
    *,
    max_tokens: int,
    vocab_size: int,
    pending: Collection[str],
) -> None:
    """Check requests that enter a call.

    Args:
        requests: they enter together.
        max_tokens: longest context, sampled tokens included.
        vocab_size: ids are below it.
        pending: rollouts with a turn in the call that has not ended.

    Raises:
        ValueError: naming the rollout, the setting and what is allowed.
    """
    check_requests(requests, {}, max_tokens=max_tokens, vocab_size=vocab_size, pending=pending)
    for request in requests:
        if 0 < request.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"rollout {request.rollout_id}: temperature = {request.temperature}: vLLM "
                f"samples at {MIN_TEMPERATURE} or more, or at 0"
            )
