"""A model in whose forward pass Ctrl-C arrives."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from components.models.decoder import PolicyModel
from components.models.smollm2 import smollm2


def stopping_smollm2(
    model_dir: str | Path, *, dtype: torch.dtype, checkpoint_activations: bool = False
) -> PolicyModel:
    """``smollm2`` that sends SIGINT to its process in a forward pass with a gradient.

    Which one says the variable ``SIGINT_AT_FORWARD``, from 1; with ``SIGINT_ON_RANK`` the signal
    comes to that rank alone. Without the first it is ``smollm2``, so the settings of a run that is
    stopped and of its resumption are the same.
    """
    model = smollm2(model_dir, dtype=dtype, checkpoint_activations=checkpoint_activations)
    at = int(os.environ.get("SIGINT_AT_FORWARD", "0"))
    here = os.environ.get("SIGINT_ON_RANK") in (None, os.environ.get("RANK"))
    num_forwards = 0

    def stop(*_: object) -> None:
        nonlocal num_forwards
        num_forwards += torch.is_grad_enabled()
        if here and torch.is_grad_enabled() and num_forwards == at:
            os.kill(os.getpid(), signal.SIGINT)

    model.register_forward_pre_hook(stop)
    return model
