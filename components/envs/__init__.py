"""Environments behind one Gymnasium interface."""

DOMAINS = ("retail", "airline", "telecom", "mock")
"""Domains of tau2-bench."""


def register() -> tuple[str, ...]:
    """Register the environments with Gymnasium, as importing :mod:`components.envs.ids` does.

        components.envs.register()
        env = gymnasium.make("sinkflex/tau2-retail-v0")

    Keyword arguments of ``make`` go to :class:`components.envs.tau2.Tau2Env`. Calling it again
    changes nothing.

    Returns:
        The ids.
    """
    from components.envs.ids import SETTINGS

    return tuple(SETTINGS)
