"""Registers the environments with Gymnasium when it is imported, and does nothing else.

    import components.envs.ids
    env = gymnasium.make("sinkflex/tau2-retail-v0")

or in one line ``gymnasium.make("components.envs.ids:sinkflex/tau2-retail-v0")``. Gymnasium 1.x has
no plugins: something of a package must be imported before it knows its ids. tau2 itself is imported
when an environment is made.
"""

from __future__ import annotations

import gymnasium

SETTINGS: dict[str, dict[str, object]] = {
    "sinkflex/tau2-retail-v0": {"domain": "retail"},
    "sinkflex/tau2-airline-v0": {"domain": "airline"},
    "sinkflex/tau2-telecom-v0": {"domain": "telecom"},
    "sinkflex/tau2-mock-v0": {"domain": "mock"},
    "sinkflex/tau2-telecom-solo-v0": {"domain": "telecom", "solo": True},
    "sinkflex/tau2-mock-solo-v0": {"domain": "mock", "solo": True},
}
"""What each id gives :class:`components.envs.tau2.Tau2Env`; ``make`` takes its other arguments."""

for _name, _settings in SETTINGS.items():
    if _name not in gymnasium.registry:
        gymnasium.register(
            id=_name, entry_point="components.envs.tau2:Tau2Env", kwargs=dict(_settings)
        )
