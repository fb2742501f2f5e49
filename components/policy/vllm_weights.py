"""The trainer's weights as files that a vLLM server loads: adapters alone, or everything."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Literal

from components.models.decoder import PolicyModel
from components.models.lora import adapters

Weights = Literal["adapter", "full"]

HINTS: dict[Weights, str] = {
    "adapter": "An adapter is added to the server's own base model: start it with model_dir, and "
    "anew if another run has sent it full weights",
    "full": "",
}
"""What may be the matter where a server has loaded them and serves others."""


def what_to_send(model: PolicyModel, weights: str) -> Weights:
    """What is sent to the servers after each step.

    Args:
        model: the trainer's.
        weights: ``auto``, ``adapter`` or ``full``; ``auto`` is ``adapter`` for a model that has
            adapters.

    Raises:
        ValueError: another word, or adapters that cannot be sent alone.
    """
    if weights not in ("auto", "adapter", "full"):
        raise ValueError(f"engine.weights = {weights!r}: must be auto, adapter or full")
    if weights == "full" or (weights == "auto" and not adapters(model)):
        return "full"
    from components.models.peft_export import check_adapter_export

    try:
        check_adapter_export(model)
    except ValueError as error:
        reason = str(error).removeprefix("checkpoints.export: adapter: ")
        raise ValueError(f"engine.weights = {weights}: {reason}") from None
    return "adapter"


class WeightFiles:
    """A folder of this process with the weights of one version at a time; gone when it ends.

    Args:
        model: whose weights are written.
        sync_dir: a folder that the servers see under the same path; None makes one in the system's
            folder for temporary files, for servers on this machine.
        weights: what is written.
        name: of this process among those that write to ``sync_dir``.
    """

    def __init__(
        self, model: PolicyModel, *, sync_dir: str | None, weights: Weights, name: str
    ) -> None:
        self.weights: Weights = weights
        self._model = model
        try:
            if sync_dir is not None:
                Path(sync_dir).mkdir(parents=True, exist_ok=True)
            self._root = Path(tempfile.mkdtemp(prefix=f"sinkflex-{name}-", dir=sync_dir)).absolute()
        except OSError as error:
            raise ValueError(
                f"engine.sync_dir = {sync_dir}: must be a folder that can be written to: {error}"
            ) from error
        self._root.chmod(0o755)  # servers may run as somebody else
        self._written: Path | None = None
        weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)

    def write(self, label: str) -> Path:
        """The directory of a label, written once; those of others are deleted.

        Args:
            label: of the weights that the model has now: a new one after each change.
        """
        directory = self._root / label
        if self._written == directory:
            return directory
        for old in self._root.iterdir():
            shutil.rmtree(old)
        if self.weights == "adapter":
            from components.models.peft_export import save_adapter

            save_adapter(self._model, directory, Path("base"))
        else:
            from safetensors.torch import save_file

            from components.models.weights import hf_state

            directory.mkdir()
            file = directory / "model.safetensors"
            save_file(hf_state(self._model), file, metadata={"format": "pt"})
        directory.chmod(0o755)
        for file in directory.iterdir():
            file.chmod(0o644)
        self._written = directory
        return directory
