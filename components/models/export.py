"""A model for others, taken now and written later."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from torch import Tensor

from components.models.decoder import PolicyModel
from components.models.peft_export import check_adapter_export, save_adapter
from components.models.weights import save_hf


class Exporter:
    """Writes a model as a directory of transformers, or its adapters alone as one of PEFT."""

    def __init__(self, model: PolicyModel, source_dir: Path, *, what: str) -> None:
        """Check that it can be done.

        Args:
            model: not sharded.
            source_dir: the Hugging Face directory the model came from.
            what: ``full``: the whole model, adapters merged; ``adapter``: the adapters alone.

        Raises:
            ValueError: for ``adapter``, if there is more to write, or nothing.
        """
        self._model, self._source_dir, self._what = model, source_dir, what
        if what == "adapter":
            check_adapter_export(model)

    def take(self, *, changing: Collection[str]) -> Callable[[Path], None]:
        """What writes the model as it is now.

        Args:
            changing: names of parameters that may change before it is written: these are copied to
                host memory.
        """
        state: dict[str, Tensor] = dict(self._model.state_dict())
        for name in changing:
            state[name] = state[name].detach().to("cpu", copy=True)

        def write(path: Path) -> None:
            save = save_adapter if self._what == "adapter" else save_hf
            save(self._model, path, self._source_dir, state=state)

        return write
