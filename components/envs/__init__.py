"""Environments behind one Gymnasium interface."""

DOMAINS = ("retail", "airline", "telecom", "mock")
"""Domains of tau2-bench that :func:`register` gives an id."""


def register() -> tuple[str, ...]:
    """Register the environments with Gymnasium.

        components.envs.register()
        env = gymnasium.make("sinkflex/tau2-retail-v0")

    Keyword arguments of ``make`` go to :class:`components.envs.tau2.Tau2Env`. Calling it again
    changes nothing.

    Returns:
        The ids.
    """
    import gymnasium

    ids = tuple(f"sinkflex/tau2-{domain}-v0" for domain in DOMAINS)
    for domain, name in zip(DOMAINS, ids, strict=True):
        if name not in gymnasium.registry:
            gymnasium.register(
                id=name, entry_point="components.envs.tau2:Tau2Env", kwargs={"domain": domain}
            )
    return ids
